//! A cluster of real processes: replicas and engines on loopback, each with its own folder and log.
//!
//! Ports are chosen once and kept, for a replica that is started again must be found where it was.
//! Everything a cluster started ends with it. One that is dropped without [`Cluster::stop`] belonged to
//! a test that failed: the ends of its logs are printed.

mod admin;
mod binary;
mod child;
mod ports;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use node::replay::targets::Targets;
use serde_json::Value;
use tempfile::TempDir;

pub use admin::{Admin, until};
use child::Child;

/// Lines of a log that are printed when a test fails.
const LOG_LINES_SHOWN: usize = 25;

/// Replicas and engines.
#[derive(Debug)]
pub struct Cluster {
    dir: TempDir,
    binary: PathBuf,
    replicas: Vec<Replica>,
    engines: Vec<Child>,
    /// Where load goes: the replicas in order.
    targets: Arc<Targets>,
    admin: Admin,
    /// Set by [`Cluster::stop`]: what ends otherwise has failed.
    has_passed: bool,
}

#[derive(Debug)]
struct Replica {
    admin: SocketAddr,
    config: PathBuf,
    /// `None` while it is down.
    child: Option<Child>,
}

/// How many of each, and how the engines behave.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClusterOptions {
    /// Replicas, all of them voters.
    pub replicas: u8,
    /// Engines.
    pub engines: u8,
    /// How many times faster than its timing an engine's model runs.
    pub engine_speed: f64,
}

impl Default for ClusterOptions {
    fn default() -> Self {
        Self {
            replicas: 3,
            engines: 4,
            engine_speed: 50.0,
        }
    }
}

impl Cluster {
    /// Starts everything and waits until every replica is ready and sees every engine healthy.
    ///
    /// # Errors
    /// When something does not start, or not in time.
    pub async fn start(options: ClusterOptions) -> anyhow::Result<Self> {
        let binary = binary::quorate()?;
        let dir = tempfile::Builder::new()
            .prefix("quorate-chaos-")
            .tempdir()?;
        let (replicas, engines) = (usize::from(options.replicas), usize::from(options.engines));
        let ports = ports::free(3 * replicas + engines)?;
        let (replica_ports, engine_ports) = ports.split_at(3 * replicas);
        let mut cluster = Self {
            targets: Arc::new(Targets::new(&data_urls(replica_ports))?),
            dir,
            binary,
            replicas: Vec::new(),
            engines: Vec::new(),
            admin: Admin::new(),
            has_passed: false,
        };
        for (number, port) in engine_ports.iter().enumerate() {
            cluster.start_engine(number, *port, options.engine_speed)?;
        }
        for number in 0..replicas {
            let replica = cluster.configure(number, replica_ports, engine_ports)?;
            cluster.replicas.push(replica);
            cluster.start_replica(number)?;
        }
        for number in 0..replicas {
            cluster.wait_ready(number, engines).await?;
        }
        Ok(cluster)
    }

    /// Where load goes: the replicas, those that are down passed over.
    #[must_use]
    pub fn targets(&self) -> Arc<Targets> {
        self.targets.clone()
    }

    /// Replicas, up or down.
    #[must_use]
    pub fn replicas(&self) -> usize {
        self.replicas.len()
    }

    /// Kills a replica with SIGKILL. What is under way there counts as lost, not as failed.
    ///
    /// # Errors
    /// When it is down already.
    pub fn kill(&mut self, number: usize) -> anyhow::Result<()> {
        let child = self.replicas[number].child.take();
        let child = child.with_context(|| format!("replica {} is down", number + 1))?;
        self.targets.set_up(number, false);
        child.kill()
    }

    /// Deletes what a replica that was killed had on disk.
    ///
    /// # Errors
    /// When it is up, or its folder cannot be deleted.
    pub fn wipe(&self, number: usize) -> anyhow::Result<()> {
        ensure!(
            self.replicas[number].child.is_none(),
            "replica {} is up",
            number + 1
        );
        let data_dir = self.data_dir(number);
        fs::remove_dir_all(&data_dir).with_context(|| format!("delete {}", data_dir.display()))
    }

    /// Starts replicas that were killed; each takes load again once it is ready.
    ///
    /// # Errors
    /// When one does not start, or does not get ready.
    pub async fn restart(&mut self, numbers: &[usize]) -> anyhow::Result<()> {
        for number in numbers {
            self.start_replica(*number)?;
        }
        for number in numbers {
            self.wait_ready(*number, self.engines.len()).await?;
            self.targets.set_up(*number, true);
        }
        Ok(())
    }

    /// The replica that leads, as seen from one that is up; waits until there is one that is up
    /// and followed.
    ///
    /// # Errors
    /// When none is elected.
    pub async fn leader(&self) -> anyhow::Result<usize> {
        let found = std::cell::Cell::new(0);
        until("a live replica leads", async || {
            for number in self.up() {
                let cluster = self.ask(number, "/admin/v1/cluster").await?;
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

    /// Waits until nothing is in flight anywhere: no lease is open, no load is counted.
    ///
    /// # Errors
    /// When something stays.
    pub async fn wait_idle(&self) -> anyhow::Result<()> {
        for number in self.up() {
            let what = format!("replica {} counts nothing in flight", number + 1);
            until(&what, async || {
                let ownership = self.ask(number, "/admin/v1/ownership").await?;
                let backends = self.ask(number, "/admin/v1/backends").await?;
                let users = self.ask(number, "/admin/v1/users").await?;
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

    /// Waits until the live replicas told their digest at one log index, and checks that it is one.
    ///
    /// # Errors
    /// When they differ, or never meet.
    pub async fn check_digests(&self) -> anyhow::Result<()> {
        let met = std::cell::RefCell::new(Vec::new());
        until("all replicas tell the digest at one index", async || {
            let mut index = 0;
            for number in self.up() {
                let cluster = self.ask(number, "/admin/v1/cluster").await?;
                index = index.max(cluster["applied_index"].as_u64().unwrap_or(0));
            }
            let mut digests = Vec::new();
            for number in self.up() {
                let path = format!("/admin/v1/digest?index={index}");
                let answer = self.ask(number, &path).await?;
                match answer["digest"].as_str() {
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

    /// Blocks owned by engine, as the replicas agreed.
    ///
    /// # Errors
    /// When a replica does not answer.
    pub async fn owned_blocks(&self) -> anyhow::Result<BTreeMap<String, u64>> {
        let number = *self.up().first().context("no replica is up")?;
        let ownership = self.ask(number, "/admin/v1/ownership").await?;
        let backends = ownership["backends"]
            .as_array()
            .context("no list of backends")?;
        let owned = |backend: &Value| {
            let name = backend["backend"].as_str().unwrap_or_default().to_owned();
            (name, backend["owned_blocks"].as_u64().unwrap_or(0))
        };
        Ok(backends.iter().map(owned).collect())
    }

    /// Ends everything: the test is passed.
    pub fn stop(mut self) {
        self.has_passed = true;
    }

    fn up(&self) -> Vec<usize> {
        (0..self.replicas.len())
            .filter(|number| self.replicas[*number].child.is_some())
            .collect()
    }

    async fn ask(&self, number: usize, path: &str) -> anyhow::Result<Value> {
        self.admin.get(self.replicas[number].admin, path).await
    }

    async fn wait_ready(&self, number: usize, engines: usize) -> anyhow::Result<()> {
        let what = format!("replica {} is ready and sees {engines} engines", number + 1);
        until(&what, async || {
            let Ok(ready) = self.ask(number, "/readyz").await else {
                return Ok(false); // Its listener may not be bound yet.
            };
            if ready["status"] != "ready" {
                return Ok(false);
            }
            let backends = self.ask(number, "/admin/v1/backends").await?;
            let is_healthy = |backend: &&Value| backend["state"]["is_healthy"] == true;
            let healthy = backends["backends"].as_array();
            Ok(healthy.is_some_and(|list| list.iter().filter(is_healthy).count() == engines))
        })
        .await
    }

    fn start_engine(&mut self, number: usize, port: u16, speed: f64) -> anyhow::Result<()> {
        let listen = format!("127.0.0.1:{port}");
        let speed = speed.to_string();
        let args = ["engine", "--listen", &listen, "--speed", &speed];
        let log = self.dir.path().join(format!("engine-{}.log", number + 1));
        self.engines.push(Child::spawn(&self.binary, &args, &log)?);
        Ok(())
    }

    fn start_replica(&mut self, number: usize) -> anyhow::Result<()> {
        let log = self.dir.path().join(format!("replica-{}.log", number + 1));
        let replica = &mut self.replicas[number];
        ensure!(replica.child.is_none(), "replica {} is up", number + 1);
        let config = replica.config.display().to_string();
        let args = ["serve", "--config", &config];
        replica.child = Some(Child::spawn(&self.binary, &args, &log)?);
        Ok(())
    }

    fn data_dir(&self, number: usize) -> PathBuf {
        self.dir.path().join(format!("replica-{}", number + 1))
    }

    /// Writes a replica's config file.
    fn configure(
        &self,
        number: usize,
        replica_ports: &[u16],
        engine_ports: &[u16],
    ) -> anyhow::Result<Replica> {
        let [data, admin, peer] = ports_of(replica_ports, number);
        let peers: Vec<String> = (0..replica_ports.len() / 3)
            .map(|other| format!("\"127.0.0.1:{}\"", ports_of(replica_ports, other)[2]))
            .collect();
        let data_dir = self.data_dir(number);
        let mut text = format!(
            "[node]\nid = {}\ndata_dir = {:?}\n\n\
             [listen]\ndata = \"127.0.0.1:{data}\"\nadmin = \"127.0.0.1:{admin}\"\n\
             peer = \"127.0.0.1:{peer}\"\n\n\
             [cluster]\npeers = [{}]\nbootstrap_expect = {}\n\n",
            number + 1,
            data_dir.display().to_string(),
            peers.join(", "),
            peers.len(),
        );
        for (engine, port) in engine_ports.iter().enumerate() {
            let _ = write!(
                text,
                "[[backends]]\nid = \"engine-{}\"\nurl = \"http://127.0.0.1:{port}\"\n\n",
                engine + 1
            );
        }
        let config = self.dir.path().join(format!("replica-{}.toml", number + 1));
        fs::write(&config, text).with_context(|| format!("write {}", config.display()))?;
        Ok(Replica {
            admin: SocketAddr::from(([127, 0, 0, 1], admin)),
            config,
            child: None,
        })
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if self.has_passed {
            return;
        }
        let Ok(files) = fs::read_dir(self.dir.path()) else {
            return;
        };
        for path in files.flatten().map(|file| file.path()) {
            if path.extension().is_some_and(|extension| extension == "log") {
                let text = fs::read_to_string(&path).unwrap_or_default();
                let lines: Vec<&str> = text.lines().collect();
                let end = &lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..];
                eprintln!("--- {} ---\n{}", path.display(), end.join("\n"));
            }
        }
    }
}

/// Data, admin and peer port of a replica.
fn ports_of(replica_ports: &[u16], number: usize) -> [u16; 3] {
    [
        replica_ports[3 * number],
        replica_ports[3 * number + 1],
        replica_ports[3 * number + 2],
    ]
}

fn data_urls(replica_ports: &[u16]) -> Vec<String> {
    (0..replica_ports.len() / 3)
        .map(|number| format!("http://127.0.0.1:{}", ports_of(replica_ports, number)[0]))
        .collect()
}
