//! Observation of a cluster of processes from outside, and waits for its conditions.

use anyhow::{Context as _, ensure};
use futures_util::future::join_all;
use http::Method;
use serde_json::Value;

use super::{ProcessCluster, until};

impl ProcessCluster {
    /// Returns the leader, as seen from a running replica. Waits until a running replica leads with
    /// a quorum.
    ///
    /// # Errors
    /// If no leader is elected in time.
    pub async fn leader(&self) -> anyhow::Result<usize> {
        let found = std::cell::Cell::new(0);
        until("a live replica leads", async || {
            for number in self.up() {
                let cluster = self.get(number, "/admin/v1/cluster").await?;
                if cluster["role"] == "leader" && cluster["has_quorum"] == true {
                    found.set(number);
                    return Ok(true);
                }
            }
            Ok(false)
        })
        .await?;
        Ok(found.get())
    }

    /// Waits until no running replica counts a request in flight: no open lease and no load.
    ///
    /// # Errors
    /// If a request stays in flight.
    pub async fn wait_idle(&self) -> anyhow::Result<()> {
        for number in self.up() {
            let what = format!("replica {} counts nothing in flight", number + 1);
            until(&what, async || {
                let ownership = self.get(number, "/admin/v1/ownership").await?;
                let backends = self.get(number, "/admin/v1/backends").await?;
                let users = self.get(number, "/admin/v1/users").await?;
                let rests = |list: &Value, is_at_rest: fn(&Value) -> bool| {
                    list.as_array()
                        .is_some_and(|list| list.iter().all(is_at_rest))
                };
                Ok(ownership["leases"] == 0
                    && rests(&backends["backends"], |backend| {
                        backend["in_flight"]["here"] == 0 && backend["in_flight"]["cluster"] == 0
                    })
                    && rests(&users["users"], |user| user["in_flight"] == 0))
            })
            .await?;
        }
        Ok(())
    }

    /// Waits until all running replicas report their digest at one log index, and checks that the
    /// digests are equal. Alternates between the current index, which suffices while the log does
    /// not grow, and indices up to 64 ahead.
    ///
    /// # Errors
    /// If digests differ, or the replicas never meet at one index.
    pub async fn check_digests(&self) -> anyhow::Result<()> {
        let met = std::cell::RefCell::new(Vec::new());
        let tries = std::cell::Cell::new(0_u64);
        until("all replicas tell the digest at one index", async || {
            let mut index = 0;
            for number in self.up() {
                let cluster = self.get(number, "/admin/v1/cluster").await?;
                index = index.max(cluster["applied_index"].as_u64().unwrap_or(0));
            }
            let tried = tries.replace(tries.get() + 1);
            if tried % 2 == 1 {
                index += 1 << (tried / 2 % 7);
            }
            let path = format!("/admin/v1/digest?index={index}");
            let up = self.up().into_iter();
            let asked = up.map(async |number| (number, self.get(number, &path).await));
            let mut digests = Vec::new();
            for (number, answer) in join_all(asked).await {
                match answer?["digest"].as_str() {
                    Some(digest) => digests.push((number, index, digest.to_owned())),
                    None => return Ok(false), // Past that index already, or not there yet.
                }
            }
            met.replace(digests);
            Ok(true)
        })
        .await?;
        let digests = met.into_inner();
        ensure!(
            digests.iter().all(|(_, _, digest)| *digest == digests[0].2),
            "digests differ: {digests:?}"
        );
        Ok(())
    }

    /// Returns the replicas that are up and reachable.
    #[must_use]
    pub fn up(&self) -> Vec<usize> {
        let is_up = |number: &usize| {
            let replica = &self.replicas[*number];
            replica.child.is_some() && !replica.is_silent
        };
        (0..self.replicas.len()).filter(is_up).collect()
    }

    /// Returns the JSON response of a replica's admin API to a `GET` request.
    ///
    /// # Errors
    /// If the replica does not respond with JSON.
    pub async fn get(&self, number: usize, path: &str) -> anyhow::Result<Value> {
        let url = self.admin_url(number, path);
        let answer = self.client.send(Method::GET, &url, None).await?;
        answer.json().with_context(|| format!("GET {url}"))
    }

    /// Sends a request to a replica's admin API, and returns the response.
    ///
    /// # Errors
    /// If the replica rejects the request or does not respond.
    pub async fn send(
        &self,
        number: usize,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<Value> {
        let url = self.admin_url(number, path);
        self.client.call(method, &url, body).await
    }

    /// Waits until a replica is ready and sees that every engine is healthy.
    ///
    /// # Errors
    /// If that does not happen in time.
    pub async fn wait_ready(&self, number: usize) -> anyhow::Result<()> {
        let engines = self.layout.engines.len() + self.options.outside_engines.len();
        let what = format!("replica {} is ready and sees {engines} engines", number + 1);
        until(&what, async || {
            let Ok(ready) = self.get(number, "/readyz").await else {
                return Ok(false); // Its listener may not be bound yet.
            };
            if ready["status"] != "ready" {
                return Ok(false);
            }
            let backends = self.get(number, "/admin/v1/backends").await?;
            let is_healthy = |backend: &&Value| backend["state"]["is_healthy"] == true;
            // Backends of a source come and go.
            if self.options.config.contains("[[discovery]]") {
                return Ok(true);
            }
            let healthy = backends["backends"].as_array();
            Ok(healthy.is_some_and(|list| list.iter().filter(is_healthy).count() == engines))
        })
        .await
    }
}
