//! A rolling update under load: replaces a fleet of engines found by DNS, a few at a time. See
//! docs/guide/discovery.md.
//!
//! The name server is dnsmasq. As when an orchestrator updates a fleet, new engines start and are
//! added to the name. Old ones are removed from it, drain, and stop once the cluster has removed
//! them. No request may fail, and replicas must keep their knowledge about engines that stay.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use lab::engine::{EmulatedEngine, EngineHandle, EngineOptions};
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use tokio::net::TcpStream;
use tokio::time::Instant;

use chaos_tests::processes::load::{LoadOptions, RunningLoad};
use chaos_tests::processes::{ClusterOptions, ProcessCluster, checks, until};

/// DNS name that resolves to all engines.
const NAME: &str = "engines.test";
/// DNS name of the service record of all engines.
const SERVICE: &str = "_engine._tcp.engines.test";
/// Speed of the engines, as a multiple of a small GPU.
const SPEED: f64 = 50.0;
/// Number of answered prompts that are queried again after a step.
const RECALLED: usize = 40;

/// Kind of DNS records by which the engines are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum RollRecords {
    /// Address records: each engine has its own address, and all have one port.
    A,
    /// Service records: each engine has its own port, and every second one an IPv6 address.
    Srv,
}

/// Size and settings of the rolls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RollOptions {
    /// Number of engines.
    pub(crate) engines: u8,
    /// Number of engines replaced at a time.
    pub(crate) at_once: u8,
    /// Number of times that all engines are replaced.
    pub(crate) rolls: u8,
    /// Number of requests answered between two steps.
    pub(crate) requests: u64,
    /// Whether the leader is killed in the middle of the last roll.
    pub(crate) is_leader_killed: bool,
    /// Kind of DNS records by which the cluster finds the engines.
    pub(crate) records: RollRecords,
}

/// Result of one roll.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct RollReport {
    /// Number of the roll, counted from 1.
    pub(crate) roll: u8,
    /// Number of answered requests.
    pub(crate) answered: u64,
    /// Number of failed requests.
    pub(crate) failed: u64,
    /// Number of requests that were in flight at a killed replica.
    pub(crate) lost: u64,
    /// Percentage of prompt tokens that engines found in their caches.
    pub(crate) hit_percent: f64,
    /// Number of prompts whose engine stayed during a step, and which all replicas knew afterwards.
    pub(crate) recalled: u64,
    /// Duration of the roll, in seconds.
    pub(crate) took_s: f64,
}

/// The name server, which is killed on drop.
#[derive(Debug)]
struct NameServer {
    process: Child,
    hosts: PathBuf,
    port: u16,
    records: RollRecords,
}

impl NameServer {
    async fn start(
        folder: &Path,
        (port, records): (u16, RollRecords),
        engines: &[FoundEngine],
    ) -> anyhow::Result<Self> {
        let hosts = folder.join("engines.hosts");
        write(&hosts, engines)?;
        let process = Self::spawn(&hosts, (port, records), engines)?;
        let server = Self {
            process,
            hosts,
            port,
            records,
        };
        server.listens().await?;
        Ok(server)
    }

    fn spawn(
        hosts: &Path,
        (port, records): (u16, RollRecords),
        engines: &[FoundEngine],
    ) -> anyhow::Result<Child> {
        let mut command = Command::new("dnsmasq");
        if records == RollRecords::Srv {
            let service = |it: &FoundEngine| {
                let port = it.address.port();
                format!("--srv-host={SERVICE},{},{port}", it.host())
            };
            command.args(engines.iter().map(service));
        }
        command
            .args([
                "--keep-in-foreground",
                "--conf-file=/dev/null",
                "--no-resolv",
            ])
            .args([
                "--no-hosts",
                "--bind-interfaces",
                "--listen-address=127.0.0.1",
            ])
            .args(["--local-ttl=1", "--pid-file=", "--user=", "--local=/test/"])
            .arg(format!("--port={port}"))
            .arg(format!("--addn-hosts={}", hosts.display()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .context("start dnsmasq (Debian: dnsmasq-base)")
    }

    /// Waits until dnsmasq listens. A signal before that would end it.
    async fn listens(&self) -> anyhow::Result<()> {
        until("dnsmasq listens", async || {
            Ok(TcpStream::connect(("127.0.0.1", self.port)).await.is_ok())
        })
        .await
    }

    /// Makes the names resolve to exactly these engines.
    async fn lead_to(&mut self, engines: &[FoundEngine]) -> anyhow::Result<()> {
        // dnsmasq rereads the file only on a signal.
        write(&self.hosts, engines)?;
        if self.records == RollRecords::Srv {
            // It reads service records only at startup. A short outage changes nothing.
            self.process.kill()?;
            self.process.wait()?;
            self.process = Self::spawn(&self.hosts, (self.port, self.records), engines)?;
            return self.listens().await;
        }
        let pid = i32::try_from(self.process.id())
            .ok()
            .and_then(Pid::from_raw);
        kill_process(pid.context("no process id")?, Signal::HUP)?;
        Ok(())
    }
}

fn write(hosts: &Path, engines: &[FoundEngine]) -> anyhow::Result<()> {
    let mut text = String::new();
    for engine in engines {
        let (address, host) = (engine.address.ip(), engine.host());
        let _ = writeln!(text, "{address} {NAME} {host}");
    }
    fs::write(hosts, text).with_context(|| format!("write {}", hosts.display()))
}

impl Drop for NameServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A running engine with its number and address.
struct FoundEngine {
    number: u32,
    address: SocketAddr,
    handle: EngineHandle,
}

impl FoundEngine {
    /// Starts the engine with this number, at its own address or port.
    async fn start(number: u32, port: u16, records: RollRecords) -> anyhow::Result<Self> {
        let [_, _, high, low] = number.to_be_bytes();
        let address = match records {
            RollRecords::A => SocketAddr::from((Ipv4Addr::new(127, 1, high, low), port)),
            RollRecords::Srv if number.is_multiple_of(2) => {
                let listener = TcpListener::bind((Ipv6Addr::LOCALHOST, 0))?;
                listener.local_addr()?
            }
            RollRecords::Srv => SocketAddr::from((Ipv4Addr::new(127, 1, high, low), free_port()?)),
        };
        let options = EngineOptions {
            listen: address,
            speed: SPEED,
            seed: u64::from(number),
            ..EngineOptions::default()
        };
        let handle = EmulatedEngine::start(options).await;
        let handle = handle.with_context(|| format!("start an engine at {address}"))?;
        Ok(Self {
            number,
            address,
            handle,
        })
    }

    /// Returns the engine's own DNS name.
    fn host(&self) -> String {
        format!("e{}.{NAME}", self.number)
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

/// Rolls a fleet of engines and returns a report per roll.
///
/// # Errors
/// If the options are invalid, a check fails, or a process does not start.
pub(crate) async fn run(options: RollOptions) -> anyhow::Result<Vec<RollReport>> {
    ensure!(
        (1..=options.engines).contains(&options.at_once) && options.engines <= 200,
        "expected 1 to 200 engines, and at most as many at once"
    );
    let (engine_port, name_port) = (free_port()?, free_port()?);
    let folder = tempfile::tempdir()?;
    let mut fleet = Vec::new();
    for number in 1..=u32::from(options.engines) {
        fleet.push(FoundEngine::start(number, engine_port, options.records).await?);
    }
    let at = (name_port, options.records);
    let names = NameServer::start(folder.path(), at, &fleet).await?;
    let name = match options.records {
        RollRecords::A => format!("{NAME}:{engine_port}"),
        RollRecords::Srv => SERVICE.to_owned(),
    };
    let config = format!(
        "[admin]\nbackends_allow = [\"127.1.0.0/16\", \"::1/128\"]\n[drain]\ndns_ttl = \"500ms\"\n\
         [[discovery]]\nkind = \"dns\"\nid = \"fleet\"\nname = \"{name}\"\n\
         resolver = \"127.0.0.1:{name_port}\"\nremove_after = \"3s\"\n"
    );
    let cluster = ProcessCluster::start(ClusterOptions {
        engines: 0,
        is_secure: false,
        // Options are constants everywhere else, so this value is leaked.
        config: String::leak(config),
        ..ClusterOptions::default()
    })
    .await?;
    let mut roll = Roll {
        next: u32::from(options.engines) + 1,
        options,
        engine_port,
        names,
        fleet,
        cluster,
    };
    roll.wait_registered().await?;
    let load = RunningLoad::start(&roll.cluster, LoadOptions::default());
    load.ledger().take_figures();
    load.wait_for_requests(options.requests).await?;
    let mut reports = Vec::new();
    for number in 1..=options.rolls {
        reports.push(roll.run(&load, number).await?);
    }
    load.stop().await?;
    roll.cluster.stop();
    Ok(reports)
}

struct Roll {
    options: RollOptions,
    engine_port: u16,
    names: NameServer,
    fleet: Vec<FoundEngine>,
    cluster: ProcessCluster,
    /// Number of the next engine to start.
    next: u32,
}

impl Roll {
    /// Replaces every engine once, and reports the results as roll `number`.
    async fn run(&mut self, load: &RunningLoad, number: u8) -> anyhow::Result<RollReport> {
        let begin = Instant::now();
        let before = {
            let mut book = load.ledger();
            book.take_figures();
            (book.answered, book.lost)
        };
        let (mut recalled, mut is_killed) = (0, None);
        let steps = self.options.engines.div_ceil(self.options.at_once);
        for step in 0..steps {
            let is_middle = step == steps / 2 && number == self.options.rolls;
            if is_middle && self.options.is_leader_killed {
                let leader = self.cluster.leader().await?;
                let since = Instant::now();
                self.cluster.kill(leader)?;
                load.ledger()
                    .doubt(leader, since - Duration::from_secs(2), Instant::now());
                is_killed = Some(leader);
            }
            recalled += self
                .step(load)
                .await
                .with_context(|| format!("roll {number}, step {}", step + 1))?;
            if let Some(leader) = is_killed.take() {
                self.cluster.restart(&[leader]).await?;
            }
        }
        load.rest().await?;
        self.cluster.wait_idle().await?;
        self.cluster.check_digests().await?;
        checks::check_failures(load)?;
        load.go_on();
        let mut book = load.ledger();
        Ok(RollReport {
            roll: number,
            answered: book.answered - before.0,
            failed: book.failed,
            lost: book.lost - before.1,
            hit_percent: book.take_figures().hit_percent(),
            recalled,
            took_s: begin.elapsed().as_secs_f64(),
        })
    }

    /// Replaces the oldest engines. Returns the number of prompts of the other engines that every
    /// replica still knew.
    async fn step(&mut self, load: &RunningLoad) -> anyhow::Result<u64> {
        let at_once = usize::from(self.options.at_once).min(self.fleet.len());
        let answered = load.recent(RECALLED);
        let old: Vec<FoundEngine> = self.fleet.drain(..at_once).collect();
        for _ in 0..at_once {
            let (port, records) = (self.engine_port, self.options.records);
            let engine = FoundEngine::start(self.next, port, records).await?;
            self.next += 1;
            self.fleet.push(engine);
        }
        self.names.lead_to(&self.fleet).await?;
        self.wait_registered().await?;
        // They get no more requests and stop, like pods after their grace period.
        for engine in old {
            engine.handle.stop().await;
        }
        load.wait_for_requests(self.options.requests).await?;
        checks::check_failures(load)?;
        let stay = self.registered(self.cluster.up()[0]).await?;
        let of_stayers: Vec<_> = answered
            .into_iter()
            .filter(|it| {
                it.answer
                    .backend
                    .as_ref()
                    .is_some_and(|id| stay.iter().any(|(_, it)| it == id))
            })
            .collect();
        checks::check_recalled(&self.cluster, &of_stayers).await?;
        Ok(of_stayers.len() as u64)
    }

    /// Waits until every replica has registered exactly the current fleet.
    async fn wait_registered(&self) -> anyhow::Result<()> {
        let urls: BTreeSet<String> = self.fleet.iter().map(FoundEngine::url).collect();
        until(
            "the cluster has the engines that the name leads to",
            async || {
                for number in self.cluster.up() {
                    let registered = self.registered(number).await?;
                    let found: BTreeSet<String> =
                        registered.into_iter().map(|(url, _)| url).collect();
                    if found != urls {
                        return Ok(false);
                    }
                }
                Ok(true)
            },
        )
        .await
    }

    /// Returns the URL and the id of each backend that a replica has registered.
    async fn registered(&self, number: usize) -> anyhow::Result<Vec<(String, String)>> {
        let backends = self.cluster.get(number, "/admin/v1/backends").await?;
        let backends = backends["backends"].as_array().context("no backends")?;
        let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        Ok(backends
            .iter()
            .map(|it| (text(&it["url"]), text(&it["id"])))
            .collect())
    }
}

fn free_port() -> anyhow::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}
