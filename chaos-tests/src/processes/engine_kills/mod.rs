//! Kills engines that have streams under way, and compares what the clients receive with what
//! undisturbed engines stream.
//!
//! All engines have one seed, so a request has one output whoever computes it. Each engine is
//! killed with SIGKILL while it streams, and starts again at its address. The next one is killed
//! once the requests of that time have ended, because a request that breaks two engines is refused
//! by design, and once all replicas see all engines healthy.
//!
//! Or it kills replicas in the same way ([`Victims::Replicas`]), and the clients go on with their
//! streams at other replicas. One that has no event yet sends its request again, which is another
//! answer.
//!
//! A client must notice nothing: its stream is byte for byte the undisturbed one, with one head,
//! one finish reason and the usage of one engine. Users pay for one answer each.

mod received;
mod requests;
mod resuming;
mod streams;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context as _;
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::checks::check_usage;
use super::load::charged;
use super::waiting::PATIENCE;
use super::{ClusterOptions, ProcessCluster, until_within};
pub use received::StreamDifference;
use streams::{StreamClients, UnderWay};

/// Speed of the engines: a token takes about two milliseconds.
const ENGINE_SPEED: f64 = 10.0;
/// Maximum number of events of a stream before its engine is killed.
const EVENTS_MAX: usize = 150;
/// Maximum time until the last charges are applied.
const SETTLED: Duration = Duration::from_secs(10);
/// Maximum number of differences of a kind that are described.
const DESCRIBED_MAX: usize = 3;

/// Config of replicas that are killed.
const RESUMABLE: &str = "[streams]\nresumable = true\n";
/// Keys of `[users]` of replicas that are killed. A replica that dies otherwise loses what it has not
/// flushed of streams that have just ended, and counters could not be exact.
const DURABLE: &str = "charges = \"durable\"\n";

/// What is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Victims {
    /// Engines, whose streams go on at other engines.
    Engines,
    /// Replicas, whose clients go on at other replicas.
    Replicas,
}

/// Options of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineKillsOptions {
    /// What is killed.
    pub victims: Victims,
    /// Number of kills.
    pub kills: u32,
    /// Number of clients, each with one stream at a time.
    pub clients: u32,
    /// Number of engines, at least 2.
    pub engines: u8,
    /// Seed of the requests, and of the times of the kills.
    pub seed: u64,
    /// Whether the cluster uses TLS and keys.
    pub is_secure: bool,
}

/// Number of differences of a kind, and descriptions of the first ones.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DifferenceTally {
    /// Number of responses.
    pub count: u64,
    /// Descriptions of the first ones, each with its request.
    pub first: Vec<String>,
}

/// Result of a run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EngineKillsReport {
    /// Number of killed engines or replicas.
    pub kills: u32,
    /// Number of requests for chats.
    pub chats: u64,
    /// Number of requests for text completions.
    pub texts: u64,
    /// Number of streams of which some text had arrived when their engine or replica was killed.
    pub hit: u64,
    /// Number of requests that were decided more than once, or whose clients went on elsewhere.
    pub moved: u64,
    /// Number of requests that clients sent again, because they had no event yet.
    pub begun_again: u64,
    /// Longest time between two pieces of a stream whose engine or replica was killed.
    pub longest_pause: Duration,
    /// Differences of responses.
    pub differences: BTreeMap<StreamDifference, DifferenceTally>,
    /// Differences of the cluster once it rests: of counters, digests, or requests in flight.
    pub at_rest: Vec<String>,
}

impl EngineKillsReport {
    /// Returns whether nothing differs.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.differences.is_empty() && self.at_rest.is_empty()
    }

    fn add(&mut self, what: StreamDifference, how: impl FnOnce() -> String) {
        let tally = self.differences.entry(what).or_default();
        tally.count += 1;
        if tally.first.len() < DESCRIBED_MAX {
            tally.first.push(how());
        }
    }
}

/// Starts a cluster, streams and kills, and compares. Calls `told` after each kill with the number
/// of kills.
///
/// # Errors
/// If the cluster does not start, no stream comes under way, or an engine does not recover.
pub async fn run(
    options: EngineKillsOptions,
    told: impl Fn(u32),
) -> anyhow::Result<EngineKillsReport> {
    let (config, users_config) = match options.victims {
        Victims::Engines => ("", ""),
        Victims::Replicas => (RESUMABLE, DURABLE),
    };
    let mut cluster = ProcessCluster::start(ClusterOptions {
        engines: options.engines,
        engine_speed: ENGINE_SPEED,
        is_secure: options.is_secure,
        config,
        users_config,
        ..ClusterOptions::default()
    })
    .await?;
    let clients = StreamClients::start(&cluster, options.seed, options.victims).await?;
    let mut running = JoinSet::new();
    for _ in 0..options.clients {
        running.spawn(clients.clone().run());
    }
    let mut random = SmallRng::seed_from_u64(options.seed);
    for kill in 1..=options.kills {
        kill_one(&mut cluster, &clients, options.victims, &mut random).await?;
        told(kill);
    }
    clients.stop();
    while let Some(client) = running.join_next().await {
        client.context("a client panicked")??;
    }
    clients.read_records().await?;
    let mut report = clients.report();
    report.kills = options.kills;
    report.at_rest = at_rest(&cluster, &clients).await;
    match report.is_clean() {
        true => cluster.stop(),
        // The ends of the logs are printed.
        false => drop(cluster),
    }
    Ok(report)
}

/// Kills the engine or replica of a stream of which a client has received some events, and starts it
/// again. Waits until the requests of that time have ended and all are healthy.
async fn kill_one(
    cluster: &mut ProcessCluster,
    clients: &StreamClients,
    victims: Victims,
    random: &mut SmallRng,
) -> anyhow::Result<()> {
    let events = random.random_range(1..=EVENTS_MAX);
    let mut under_way = clients.watch();
    let victim = {
        let found = under_way.wait_for(|streams| streaming(streams, events, victims).is_some());
        let streams = timeout(PATIENCE, found).await;
        let streams = streams.context("no stream comes under way")??;
        streaming(&streams, events, victims).context("a stream is under way")?
    };
    let disturbed = match victims {
        Victims::Engines => {
            cluster.kill_engine(victim)?;
            let disturbed = clients.note_kill(victim);
            cluster.start_engine(victim)?;
            disturbed
        }
        Victims::Replicas => {
            cluster.kill(victim)?;
            let disturbed = clients.note_kill(victim);
            cluster.start_replica(victim)?;
            disturbed
        }
    };
    let have_ended = under_way.wait_for(|streams| {
        let mut all = disturbed.iter();
        all.all(|number| !streams.contains_key(number))
    });
    let ended = timeout(2 * PATIENCE, have_ended).await;
    ended.context("the disturbed streams do not end")??;
    clients.read_records().await?;
    for number in cluster.up() {
        cluster.wait_ready(number).await?;
    }
    Ok(())
}

/// Returns the victim that carries a stream of which at least `events` events have arrived.
fn streaming(streams: &BTreeMap<u64, UnderWay>, events: usize, victims: Victims) -> Option<usize> {
    let mut streams = streams.values().filter(|it| it.events >= events);
    streams.find_map(|stream| stream.carrier(victims))
}

/// Returns what differs from an undisturbed cluster once no request is in flight.
async fn at_rest(cluster: &ProcessCluster, clients: &StreamClients) -> Vec<String> {
    let mut differences = Vec::new();
    for checked in [cluster.wait_idle().await, cluster.check_digests().await] {
        differences.extend(checked.err().map(|error| format!("{error:#}")));
    }
    for number in cluster.up() {
        let differs = async || {
            let charged = charged(cluster, number).await?;
            anyhow::Ok(clients.compare_charges(&charged))
        };
        let equal = until_within(SETTLED, "the users pay for one answer each", async || {
            Ok(differs().await?.is_empty())
        });
        if let Err(error) = equal.await {
            let how = differs().await.unwrap_or_default().join("; ");
            differences.push(format!("replica {}: {error:#}: {how}", number + 1));
        }
    }
    let usage = check_usage(cluster).await;
    differences.extend(usage.err().map(|error| format!("{error:#}")));
    differences
}
