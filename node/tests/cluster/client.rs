//! A client for tests, for clients' and operators' requests.

use std::cell::Cell;
use std::net::SocketAddr;

use futures_util::future::join_all;

use super::*;

/// A client of both listeners of all replicas.
pub(super) struct Http(pub(super) JsonClient);

impl Http {
    pub(super) fn new() -> Self {
        Self(JsonClient::new(PATIENCE))
    }

    pub(super) async fn send(
        &self,
        method: Method,
        url: &str,
        body: &Value,
    ) -> (StatusCode, HeaderMap, Value) {
        let answer = self.0.send(method, url, Some(body)).await.unwrap();
        let json = answer.json().unwrap_or(Value::Null);
        (answer.status, answer.headers, json)
    }

    pub(super) async fn text(&self, url: &str) -> String {
        let answer = self.0.send(Method::GET, url, None).await.unwrap();
        String::from_utf8(answer.body.to_vec()).unwrap()
    }

    pub(super) async fn get(&self, url: &str) -> (StatusCode, Value) {
        let answer = self.0.send(Method::GET, url, None).await.unwrap();
        (answer.status, answer.json().unwrap_or(Value::Null))
    }

    /// Returns the status and answer of `GET /admin/v1/` with `path`.
    pub(super) async fn admin(&self, at: SocketAddr, path: &str) -> (StatusCode, Value) {
        self.get(&format!("http://{at}/admin/v1/{path}")).await
    }

    /// Returns the metrics of the replica whose admin listener is `at`.
    pub(super) async fn metrics(&self, at: SocketAddr) -> String {
        self.text(&format!("http://{at}/metrics")).await
    }

    /// Sends one question of a conversation and returns the headers.
    pub(super) async fn chat(&self, at: &Addresses, user: &str, question: &str) -> HeaderMap {
        let messages = json!([
            { "role": "system", "content": format!("{SYSTEM} You talk to {user}.") },
            { "role": "user", "content": question },
        ]);
        let body =
            json!({ "model": "emulated", "messages": messages, "max_tokens": 4, "user": user });
        let url = format!("http://{}/v1/chat/completions", at.data);
        let (status, headers, answer) = self.send(Method::POST, &url, &body).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        headers
    }

    pub(super) async fn digest(&self, at: &Addresses) -> Value {
        let (status, digest) = self.admin(at.admin, "digest").await;
        assert_eq!(status, StatusCode::OK, "{digest}");
        digest
    }

    /// Waits until every replica is ready.
    pub(super) async fn ready(&self, replicas: &[Addresses]) {
        for at in replicas {
            let url = format!("http://{}/readyz", at.admin);
            let is_ready = async || {
                let (status, answer) = self.get(&url).await;
                status == StatusCode::OK && answer["status"] == "ready"
            };
            until(&format!("{url} says ready"), is_ready).await;
        }
    }

    /// Waits until all replicas have reported their digests at one index, and checks that they are
    /// equal. If the log moves on meanwhile, asks for a future index, further ahead each time, and
    /// then for the newest again: a log that has come to rest reaches no future index.
    pub(super) async fn agree(&self, replicas: &[Addresses]) {
        let ahead = Cell::new(0);
        let same_index = async || {
            let now = join_all(replicas.iter().map(|at| self.digest(at))).await;
            let newest = now.iter().map(|digest| digest["index"].as_u64().unwrap());
            let index = newest.max().unwrap() + ahead.get();
            ahead.set((ahead.get() * 2 + 1) % 63);
            let urls = replicas.iter().map(|at| {
                let admin = at.admin;
                format!("http://{admin}/admin/v1/digest?index={index}")
            });
            let digests = join_all(urls.map(async |url| self.get(&url).await)).await;
            let is_told = digests.iter().all(|(status, _)| *status == StatusCode::OK);
            if is_told {
                assert!(
                    digests.iter().all(|digest| *digest == digests[0]),
                    "{digests:?}"
                );
            }
            is_told
        };
        until("all replicas tell the digest at one index", same_index).await;
    }

    /// Waits until `at` has applied what its requests did, and no request is in flight, according to
    /// the replicated state and to what `at` has heard from the other replicas.
    pub(super) async fn quiet(&self, at: &Addresses) {
        // A request that is not in the log yet is not in flight there either.
        let is_applied = async || {
            let metrics = self.metrics(at.admin).await;
            metrics.contains("\nquorate_state_outbox_items 0\n")
        };
        until("the log has applied the outbox", is_applied).await;
        let url = format!("http://{}/admin/v1/users", at.admin);
        let is_quiet = async || {
            let (_, answer) = self.get(&url).await;
            let users = answer["users"].as_array().unwrap();
            !users.is_empty() && users.iter().all(|user| user["in_flight"] == 0)
        };
        until("no request is in flight", is_quiet).await;
        // Also according to what replicas have reported to each other.
        let url = format!("http://{}/admin/v1/backends", at.admin);
        let are_idle = async || {
            let (_, answer) = self.get(&url).await;
            let backends = answer["backends"].as_array().unwrap();
            let is_idle = |backend: &Value| backend["in_flight"]["cluster"] == 0;
            backends.iter().all(is_idle)
        };
        until("no backend has a request", are_idle).await;
    }
}
