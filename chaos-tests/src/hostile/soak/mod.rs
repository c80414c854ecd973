//! A cluster of real processes far beyond its capacity, with all kinds of clients at once: users
//! who wait, give up, leave, read slowly or cheat, strangers without a key, and probes of the other
//! ports. Afterwards everything must be as if there had been only honest users.
//!
//! First the honest users run alone, as the baseline for their share in the storm. The test harness
//! provides the engines, which record for whom they computed what.

mod browser;
mod checks;
mod kinds;
pub mod overload;
mod peers;
mod strangers;
mod tally;
mod users;

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tempfile::TempDir;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::hostile::engine::{EngineSpeed, HostileEngine, MODEL};
use crate::hostile::record::EngineRecord;
use crate::processes::access::ClientAccess;
use crate::processes::figures::ProcessFigures;
use crate::processes::{ClusterOptions, ProcessCluster};
pub use checks::SoakCheck;
pub use kinds::ClientKind;
pub use tally::KindCounts;
use users::SoakUser;

/// Number of engines in the cluster.
const ENGINES: usize = 2;
/// Concurrency and speed of an engine.
const SPEED: EngineSpeed = EngineSpeed {
    places: 4,
    prefill: Duration::from_millis(50),
    decode: Duration::from_millis(20),
};
/// Maximum number of file descriptors of a replica.
const DESCRIPTORS: u32 = 1024;
/// Divisor of the storm's duration for that of honest users alone, clamped to these bounds.
const ALONE: (u32, Duration, Duration) = (6, Duration::from_secs(10), Duration::from_secs(60));
/// Duration at the start of each phase in which engines fill and nothing is counted.
const WARM_UP: Duration = Duration::from_secs(3);

/// Plan of a phase: kinds of clients, load and duration.
#[derive(Debug, Clone, Copy)]
struct PhasePlan<'a> {
    kinds: &'a [ClientKind],
    /// Requested load, as a multiple of the capacity.
    factor: f64,
    /// Duration without counting. `length` is the duration with counting.
    warm_up: Duration,
    length: Duration,
}

/// Options of a soak.
#[derive(Debug, Clone, PartialEq)]
pub struct SoakOptions {
    /// Duration of the storm.
    pub storm: Duration,
    /// Requested load, as a multiple of the capacity.
    pub factor: f64,
    /// Seed of all random choices.
    pub seed: u64,
    /// Kinds of clients to run besides honest users; all kinds if empty.
    pub only: Vec<ClientKind>,
    /// Whether the cluster uses TLS everywhere, and operators have a token.
    pub is_secure: bool,
}

/// Result of a soak.
#[derive(Debug, Clone, serde::Serialize)]
pub struct SoakReport {
    /// Capacity of the engines, in responses per second.
    pub capacity: f64,
    /// Number of responses to honest users per second, alone and in the storm.
    pub honest: [f64; 2],
    /// Counts of each kind of client in the storm.
    pub kinds: BTreeMap<ClientKind, KindCounts>,
    /// Results of all checks.
    pub checks: Vec<SoakCheck>,
}

/// State that all clients of a phase share.
#[derive(Debug)]
struct SoakContext {
    data: Vec<SocketAddr>,
    admin: Vec<SocketAddr>,
    peer: Vec<SocketAddr>,
    access: ClientAccess,
    /// Access of a stranger, whose certificate of the cluster's authority names no replica.
    stranger: ClientAccess,
    seed: u64,
    over: CancellationToken,
    /// Counts of each kind of client since the phase began.
    tallies: BTreeMap<ClientKind, Mutex<KindCounts>>,
    ledger: Arc<EngineRecord>,
    /// Requests that were cut short for their client, each with the time when the client knew.
    not_whole: Mutex<HashMap<String, Instant>>,
    requests: Arc<AtomicU64>,
}

impl SoakContext {
    fn book(&self, kind: ClientKind) -> MutexGuard<'_, KindCounts> {
        let tally = self
            .tallies
            .get(&kind)
            .expect("there is one for every kind");
        tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the id of a new request: its user and a number.
    fn next_id(&self, user: &str) -> String {
        format!("{user}.{}", self.requests.fetch_add(1, Ordering::Relaxed))
    }

    fn not_whole(&self, id: String, at: Instant) {
        let mut all = self
            .not_whole
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        all.insert(id, at);
    }

    /// Awaits a future, but returns `None` if the phase ends first.
    async fn unless_over<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        self.over.run_until_cancelled(future).await
    }
}

/// Returns the API key of a user.
fn key(user: &str) -> String {
    format!("sk-soak-{user}")
}

/// Returns the capacity of the engines, in responses per second.
fn capacity() -> f64 {
    let tokens = u32::try_from(kinds::TOKENS).expect("an answer is short");
    let each = SPEED.prefill + SPEED.decode * tokens;
    (ENGINES * SPEED.places) as f64 / each.as_secs_f64()
}

/// Runs a soak and checks the cluster afterwards. Passes progress messages to `say`.
///
/// # Errors
/// If the cluster cannot be started. Failed checks are in the report.
pub async fn run(options: &SoakOptions, say: impl Fn(&str)) -> anyhow::Result<SoakReport> {
    raise_descriptors();
    let stage = SoakDriver::start(options.seed, options.is_secure).await?;
    let cluster = &stage.cluster;

    let alone_for = (options.storm / ALONE.0).clamp(ALONE.1, ALONE.2);
    say(&format!("honest users alone for {} s", alone_for.as_secs()));
    let mut plan = PhasePlan {
        kinds: &[ClientKind::Honest],
        factor: options.factor,
        warm_up: WARM_UP,
        length: alone_for,
    };
    let alone = stage.phase(plan).await?;
    let before = ProcessFigures::of(cluster).await?;
    say(&format!("everybody for {} s", options.storm.as_secs()));
    let kinds = kinds(options);
    (plan.kinds, plan.length) = (&kinds, options.storm);
    let storm = stage.phase(plan).await?;
    say("nobody; looking at what is left");
    let phases = checks::JudgedPhases {
        alone,
        storm,
        before,
        capacity: capacity(),
    };
    let report = phases.judge(cluster).await;
    if SoakCheck::all_hold(&report.checks) {
        stage.cluster.stop();
    }
    Ok(report)
}

fn kinds(options: &SoakOptions) -> Vec<ClientKind> {
    let asked = |kind: &ClientKind| {
        *kind == ClientKind::Honest || options.only.is_empty() || options.only.contains(kind)
    };
    ClientKind::ALL.iter().copied().filter(asked).collect()
}

/// Record of a phase that is over.
#[derive(Debug)]
struct SoakPhase {
    scene: Arc<SoakContext>,
    /// Duration of the part of the phase that was counted.
    counted: Duration,
}

struct SoakDriver {
    cluster: ProcessCluster,
    seed: u64,
    ledger: Arc<EngineRecord>,
    requests: Arc<AtomicU64>,
    _engines: Vec<HostileEngine>,
    _folder: TempDir,
}

impl SoakDriver {
    /// Starts engines and a cluster of replicas.
    async fn start(seed: u64, is_secure: bool) -> anyhow::Result<Self> {
        let ledger = Arc::new(EngineRecord::of_work());
        let mut engines = Vec::new();
        for _ in 0..ENGINES {
            let engine = HostileEngine::start(SPEED, ledger.clone()).await;
            engines.push(engine.context("start an engine")?);
        }
        let folder = tempfile::Builder::new().prefix("quorate-soak-").tempdir()?;
        let keys = folder.path().join("keys");
        fs::write(&keys, key_file()).context("write the keys")?;
        let options = ClusterOptions {
            is_secure,
            ..cluster_options(&engines, &keys.display().to_string())
        };
        Ok(Self {
            cluster: ProcessCluster::start(options).await?,
            seed,
            ledger,
            requests: Arc::new(AtomicU64::new(0)),
            _engines: engines,
            _folder: folder,
        })
    }

    /// Runs the clients of one phase, and waits until all have ended.
    async fn phase(&self, plan: PhasePlan<'_>) -> anyhow::Result<SoakPhase> {
        let PhasePlan { kinds, length, .. } = plan;
        let numbers = 0..self.cluster.replicas();
        let scene = Arc::new(SoakContext {
            data: numbers
                .clone()
                .map(|it| self.cluster.data_addr(it))
                .collect(),
            admin: numbers
                .clone()
                .map(|it| self.cluster.admin_addr(it))
                .collect(),
            peer: numbers.map(|it| self.cluster.peer_addr(it)).collect(),
            access: self.cluster.access(),
            stranger: self.cluster.stranger()?,
            seed: self.seed,
            over: CancellationToken::new(),
            tallies: ClientKind::ALL
                .iter()
                .map(|kind| (*kind, Mutex::default()))
                .collect(),
            ledger: self.ledger.clone(),
            not_whole: Mutex::default(),
            requests: self.requests.clone(),
        });
        let mut everybody = JoinSet::new();
        for kind in kinds {
            enter(&scene, *kind, plan.factor, &mut everybody);
        }
        sleep(plan.warm_up).await;
        for kind in kinds {
            scene.book(*kind).begin();
        }
        let began = Instant::now();
        sleep(length).await;
        for kind in kinds {
            scene.book(*kind).end();
        }
        let counted = began.elapsed();
        scene.over.cancel();
        everybody.join_all().await;
        Ok(SoakPhase { scene, counted })
    }
}

/// Starts the clients of one kind as tasks in `everybody`.
fn enter(scene: &Arc<SoakContext>, kind: ClientKind, factor: f64, everybody: &mut JoinSet<()>) {
    if let Some(manner) = kind.manner() {
        let users = kind.users();
        let factor = if kind == ClientKind::Honest {
            1.0
        } else {
            factor
        };
        let rate = kind.share() * capacity() * factor / users.len() as f64;
        let place = ClientKind::ALL.iter().position(|it| *it == kind);
        let third = u8::try_from(place.unwrap_or(0) + 1).expect("there are few kinds");
        for (number, name) in (1..).zip(users) {
            let from = Ipv4Addr::new(127, 0, third, number);
            let user = SoakUser {
                kind,
                manner,
                name,
                from,
                rate,
            };
            everybody.spawn(user.run(scene.clone()));
        }
        return;
    }
    let scene = scene.clone();
    match kind {
        ClientKind::Idle => drop(everybody.spawn(strangers::idle(scene))),
        ClientKind::Bodies => drop(everybody.spawn(strangers::bodies(scene))),
        ClientKind::Keyless => drop(everybody.spawn(strangers::keyless(scene))),
        ClientKind::Garbage => drop(everybody.spawn(strangers::garbage(scene))),
        ClientKind::Peers => drop(everybody.spawn(peers::run(scene))),
        ClientKind::Browser => drop(everybody.spawn(browser::run(scene))),
        ClientKind::Honest
        | ClientKind::Patient
        | ClientKind::Impatient
        | ClientKind::Leaving
        | ClientKind::Unstreamed
        | ClientKind::Slow
        | ClientKind::Logprobs
        | ClientKind::Names
        | ClientKind::Poison
        | ClientKind::Failing => {
            unreachable!("{} has a manner", kind.name())
        }
    }
}

fn key_file() -> String {
    let mut text = String::new();
    for user in ClientKind::ALL.iter().flat_map(|kind| kind.users()) {
        let _ = writeln!(text, "{} {user}", key(&user));
    }
    text
}

/// Builds the options of the cluster. They are leaked, because a program runs only one soak.
fn cluster_options(engines: &[HostileEngine], keys: &str) -> ClusterOptions {
    let engines: Vec<SocketAddr> = engines.iter().map(|engine| engine.at).collect();
    let config = format!(
        "[admission]\nconcurrency = {}\n\n[drain]\ndns_ttl = \"500ms\"\n",
        SPEED.places
    );
    // Limits per client address also apply to loopback clients.
    let users = format!("api_keys_file = {keys:?}\ntrusted_proxies = [\"::1\"]");
    ClusterOptions {
        engines: 0,
        outside_engines: engines.leak(),
        backend_config: format!("models = [{MODEL:?}]").leak(),
        cluster_config: "snapshot_every = 2000",
        users_config: users.leak(),
        config: config.leak(),
        descriptors: Some(DESCRIPTORS),
        ..ClusterOptions::default()
    }
}

/// Raises the descriptor limit of this process, which holds the other end of all connections.
fn raise_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    // If it is not allowed, clients fail and report it.
    let _ = setrlimit(Resource::Nofile, raised);
}
