//! A rolling upgrade under load: replaces three replicas of one build by another build, one at a
//! time, the leader last, as docs/guide/upgrades.md describes.
//!
//! After each step, the checks after a fault must hold: no failed request, equal digests over both
//! builds, counters that equal the engines' reports, and replicas that know what the last requests
//! put into the caches. Optionally the upgrade is reverted in the same way.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use rand::SeedableRng as _;
use rand::rngs::SmallRng;
use serde::Serialize;

use super::client_ledger::ClientLedger;
use super::faults::FaultContext;
use super::load::{LoadOptions, RunningLoad};
use super::{ClusterOptions, ProcessCluster, binary, checks};

/// Maximum time until a replica refuses the contents of its disk.
const REFUSAL_PATIENCE: Duration = Duration::from_secs(3);

/// Programs and settings of an upgrade.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpgradeOptions {
    /// Program with which the cluster starts.
    pub from: PathBuf,
    /// Program with which the cluster ends; `None` for that of this workspace.
    pub to: Option<PathBuf>,
    /// Whether the upgrade is reverted afterwards.
    pub is_there_and_back: bool,
    /// Minimum number of requests to answer before the first step and after each step, spread evenly
    /// over the replicas.
    pub requests: u64,
    /// Whether the cluster uses TLS everywhere, a token and API keys.
    pub is_secure: bool,
}

/// Result of a step: the replacement of one replica, and the load until the next step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct UpgradeStep {
    /// Description of the step.
    pub what: String,
    /// Number of replicas of the earlier and of the later build after the step.
    pub replicas: [usize; 2],
    /// Number of answered requests.
    pub answered: u64,
    /// Number of failed requests.
    pub failed: u64,
    /// Percentage of prompt tokens that engines found in their caches.
    pub hit_percent: f64,
    /// Longest time without a response from a running replica, in milliseconds.
    pub stall_ms: u64,
}

/// An upgrade in progress.
struct Rollout<'a> {
    stage: FaultContext,
    options: &'a UpgradeOptions,
    later: PathBuf,
    is_later: Vec<bool>,
    steps: Vec<UpgradeStep>,
}

/// Upgrades a cluster of three replicas and returns the result of each step.
///
/// # Errors
/// Describes the first check that fails, and the step.
pub async fn run(options: &UpgradeOptions) -> anyhow::Result<Vec<UpgradeStep>> {
    let to = options.to.clone().map_or_else(binary::quorate, Ok)?;
    let cluster_options = ClusterOptions {
        config: "[drain]\ndns_ttl = \"500ms\"\n",
        // Both builds write snapshots and read those of the other.
        cluster_config: "snapshot_every = 400",
        is_secure: options.is_secure,
        ..ClusterOptions::default()
    };
    let cluster = ProcessCluster::start_from(options.from.clone(), cluster_options).await?;
    let load = RunningLoad::start(&cluster, LoadOptions::default());
    // The first call starts the collection of figures.
    load.ledger().take_figures();
    let mut rollout = Rollout {
        is_later: vec![false; cluster.replicas()],
        stage: FaultContext {
            cluster,
            load,
            random: SmallRng::seed_from_u64(1),
        },
        options,
        later: to.clone(),
        steps: Vec::new(),
    };
    rollout.serve("start".to_owned()).await?;
    rollout.replace_all(&to, true).await?;
    if options.is_there_and_back {
        rollout.replace_all(&options.from, false).await?;
    }
    let Rollout { stage, steps, .. } = rollout;
    stage.load.stop().await?;
    stage.cluster.stop();
    Ok(steps)
}

impl Rollout<'_> {
    /// Replaces all replicas by another program: the followers first, then the leader.
    async fn replace_all(&mut self, program: &Path, is_later: bool) -> anyhow::Result<()> {
        self.stage.cluster.set_program(program.to_owned());
        let leader = self.stage.cluster.leader().await?;
        let mut order = self.stage.others(leader);
        order.push(leader);
        for replica in order {
            let word = if is_later { "upgrade" } else { "downgrade" };
            let role = if replica == leader {
                ", the leader"
            } else {
                ""
            };
            let what = format!("{word} replica {}{role}", replica + 1);
            let replaced = self.replace(replica, is_later).await;
            let refused = replaced.with_context(|| what.clone())?;
            let is_refused = refused.is_some();
            self.serve(refused.map_or(what.clone(), |why| format!("{what}: {why}")))
                .await?;
            if is_refused {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Stops a replica as an orchestrator does, and starts the current program in its place. If an
    /// earlier build refuses the data of the later one, restarts the later one and returns a note.
    async fn replace(&mut self, replica: usize, is_later: bool) -> anyhow::Result<Option<String>> {
        let Self { stage, later, .. } = self;
        stage.leave(replica).await?;
        if is_later {
            stage.cluster.restart(&[replica]).await?;
        } else if let Some(why) = stage.cluster.restart_or_refused(replica).await? {
            ensure!(why.contains("format version"), "{why}");
            stage.cluster.set_program(later.clone());
            stage.cluster.restart(&[replica]).await?;
            return Ok(Some("refused, and the later build goes on".to_owned()));
        }
        self.is_later[replica] = is_later;
        Ok(None)
    }

    /// Lets the cluster serve requests, checks it as after a fault, and records the step `what`.
    async fn serve(&mut self, what: String) -> anyhow::Result<()> {
        let Self { stage, .. } = self;
        let all: Vec<usize> = (0..self.is_later.len()).collect();
        let each = self.options.requests.div_ceil(all.len() as u64);
        stage.load.after_by_each(&all, each).await?;
        let checked = checks::check(&stage.cluster, &stage.load).await;
        checked.with_context(|| format!("after this step: {what}"))?;
        let later = self.is_later.iter().filter(|is_later| **is_later).count();
        let mut book = stage.load.ledger();
        let before = self.steps.iter().map(|step| step.answered).sum();
        let step = step(&mut book, what, before);
        drop(book);
        self.steps.push(UpgradeStep {
            replicas: [all.len() - later, later],
            ..step
        });
        Ok(())
    }
}

impl ProcessCluster {
    /// Starts a replica that may refuse the contents of its disk, as an older program may. If it
    /// refuses, leaves it down and returns the reason.
    ///
    /// # Errors
    /// If the replica neither ends nor becomes ready.
    async fn restart_or_refused(&mut self, number: usize) -> anyhow::Result<Option<String>> {
        self.start_replica(number)?;
        let child = self.replicas[number].child.as_mut();
        let child = child.context("it was just started")?;
        // It reads the disk first.
        if child.ended(REFUSAL_PATIENCE).await.is_err() {
            self.wait_ready(number).await?;
            self.targets.set_up(number, true);
            return Ok(None);
        }
        self.replicas[number].child = None;
        let said = self.log(number)?;
        let last = said.lines().rev().find(|line| line.starts_with("error: "));
        Ok(Some(last.unwrap_or("it ended").to_owned()))
    }
}

/// Returns the results of the load since the last step, and starts the next measurement.
fn step(book: &mut ClientLedger, what: String, answered_before: u64) -> UpgradeStep {
    let stall = book.stall.gap;
    let figures = book.take_figures();
    book.measure();
    UpgradeStep {
        what,
        replicas: [0; 2],
        answered: book.answered - answered_before,
        failed: book.failed,
        hit_percent: figures.hit_percent(),
        stall_ms: u64::try_from(stall.as_millis()).unwrap_or(u64::MAX),
    }
}
