//! Faults of machines, networks, disks and operators in a cluster under load.
//!
//! Each fault runs on a [`FaultContext`] and restores it: every replica up, every link healed. The
//! checks afterwards are the same for all faults ([`super::checks`]). Each fault itself checks the
//! conditions that must hold during it, such as that other replicas keep responding.

mod crash;
mod damage;
mod disk;
mod handover;
mod members;
mod network;
mod pause;
mod restore;

use std::time::Duration;

use anyhow::{Context as _, ensure};
use http::Method;
use rand::Rng;
use rand::rngs::SmallRng;
use serde_json::Value;
use tokio::time::{Instant, sleep};

use super::load::RunningLoad;
use super::{ClusterOptions, ProcessCluster, Site, checks, until};
use crate::kinds::kinds;
use crate::{command, netns};

/// Time before a replica is killed in which its responses may be unknown to the others: many flush
/// intervals.
const DOUBT: Duration = Duration::from_secs(2);
/// Number of requests that a replica must answer during a fault to count as serving.
const SERVED_MIN: u64 = 10;

/// Size of the small disk in MB, which has room for a log of a few segments and a snapshot.
const SMALL_DISK_MB: u32 = 96;

/// Environment that a fault needs besides processes on loopback.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultRequirement {
    /// The fault needs nothing else.
    Nothing,
    /// The fault needs hosts in network namespaces.
    Hosts,
    /// The fault needs I/O limits by cgroup.
    SlowDisk,
}

kinds! {
    /// Kind of fault.
    pub enum FaultKind;
    KillOne "kill-one" "SIGKILL of a replica, which is started again";
    KillLeader "kill-leader" "SIGKILL of the leader";
    KillMajority "kill-majority" "SIGKILL of two of three; the third serves alone";
    KillAll "kill-all" "SIGKILL of all replicas at once";
    PauseShort "pause-short" "SIGSTOP of the leader for less than an election timeout";
    PauseLeader "pause-leader" "SIGSTOP of the leader for several election timeouts";
    PauseLong "pause-long" "SIGSTOP of a replica for longer than its session is kept (10 s)";
    TransferLeader "transfer-leader" "leadership handed over three times";
    RollingRestart "rolling-restart" "SIGTERM and restart of every replica in turn";
    AwayForSnapshot "away-for-snapshot" "a replica is down until only a snapshot brings it back";
    JoinAndRemove "join-and-remove" "a replica joins and is promoted, another is removed";
    CorruptLog "corrupt-log" "bytes of a stopped replica's log change";
    TruncateLog "truncate-log" "a stopped replica's log loses its end";
    CorruptSnapshot "corrupt-snapshot" "a byte of a stopped replica's snapshot changes";
    TruncateSnapshot "truncate-snapshot" "a stopped replica's snapshot loses its end";
    Restore "restore" "backup, loss of every disk, a cluster founded anew, restore";
    IsolateOne "isolate-one" "a follower cut off from its peers, not from clients";
    IsolateLeader "isolate-leader" "the leader cut off from its peers, not from clients";
    SplitAll "split-all" "every replica cut off from every other";
    DeafLeader "deaf-leader" "packets to the leader are lost, those from it arrive";
    MuteLeader "mute-leader" "packets from the leader are lost, those to it arrive";
    PacketLoss "packet-loss" "one in five packets between peers is lost";
    LinkDown "link-down" "a replica's only link goes down, for clients too";
    StaleDns "stale-dns" "a replica moves; its name leads to the old address for a while";
    FullDisk "full-disk" "a replica's disk is full, later freed";
    SlowDisk "slow-disk" "a replica's disk takes ten writes a second";
}

/// Faults that need hosts in network namespaces.
const OF_HOSTS: [FaultKind; 9] = [
    FaultKind::IsolateOne,
    FaultKind::IsolateLeader,
    FaultKind::SplitAll,
    FaultKind::DeafLeader,
    FaultKind::MuteLeader,
    FaultKind::PacketLoss,
    FaultKind::LinkDown,
    FaultKind::StaleDns,
    FaultKind::FullDisk,
];

impl FaultKind {
    /// Returns the environment that the fault needs.
    #[must_use]
    pub fn need(self) -> FaultRequirement {
        match self {
            Self::SlowDisk => FaultRequirement::SlowDisk,
            kind if OF_HOSTS.contains(&kind) => FaultRequirement::Hosts,
            _ => FaultRequirement::Nothing,
        }
    }
}

impl FaultRequirement {
    /// Returns the reason why the environment is not available here, or `None` if it is.
    #[must_use]
    pub fn why_not(self) -> Option<String> {
        match self {
            Self::Nothing => None,
            Self::Hosts => netns::why_not(),
            Self::SlowDisk => disk::why_not_slow(),
        }
    }
}

/// Context of faults: a cluster under load, and a random generator.
#[derive(Debug)]
pub struct FaultContext {
    /// Cluster in which faults are injected.
    pub cluster: ProcessCluster,
    /// Load on the cluster.
    pub load: RunningLoad,
    /// Generator that chooses the targets of faults.
    pub random: SmallRng,
}

/// Returns the options of a cluster for faults, on hosts in namespaces if possible.
#[must_use]
pub fn cluster_options() -> ClusterOptions {
    let has_hosts = FaultRequirement::Hosts.why_not().is_none();
    cluster_options_for(if has_hosts {
        Site::Namespaces
    } else {
        Site::Loopback
    })
}

/// Returns the options of a cluster for faults at this site.
#[must_use]
pub fn cluster_options_for(site: Site) -> ClusterOptions {
    ClusterOptions {
        site,
        spares: 1,
        small_disk_mb: (site == Site::Namespaces).then_some(SMALL_DISK_MB),
        config: "[drain]\ndns_ttl = \"500ms\"\n",
        cluster_config: "snapshot_every = 400",
        ..ClusterOptions::default()
    }
}

impl FaultContext {
    /// Injects a fault and then checks the cluster.
    ///
    /// # Errors
    /// Describes the first check that fails. The context is unusable afterwards.
    pub async fn run(&mut self, kind: FaultKind) -> anyhow::Result<()> {
        self.inflict(kind).await?;
        let Self { cluster, load, .. } = self;
        let checked = checks::check(cluster, load).await;
        checked.context("after the fault")
    }

    async fn inflict(&mut self, kind: FaultKind) -> anyhow::Result<()> {
        match kind {
            FaultKind::KillOne => crash::kill_one(self).await,
            FaultKind::KillLeader => crash::kill_leader(self).await,
            FaultKind::KillMajority => crash::kill_majority(self).await,
            FaultKind::KillAll => crash::kill_all(self).await,
            FaultKind::AwayForSnapshot => crash::away_for_snapshot(self).await,
            FaultKind::PauseShort => pause::briefly(self).await,
            FaultKind::PauseLeader => pause::leader(self).await,
            FaultKind::PauseLong => pause::past_its_session(self).await,
            FaultKind::TransferLeader => handover::transfer(self).await,
            FaultKind::RollingRestart => handover::rolling_restart(self).await,
            FaultKind::JoinAndRemove => members::join_and_remove(self).await,
            FaultKind::CorruptLog => damage::corrupt_log(self).await,
            FaultKind::TruncateLog => damage::truncate_log(self).await,
            FaultKind::CorruptSnapshot => damage::corrupt_snapshot(self).await,
            FaultKind::TruncateSnapshot => damage::truncate_snapshot(self).await,
            FaultKind::Restore => restore::from_backup(self).await,
            FaultKind::IsolateOne => network::isolate_one(self).await,
            FaultKind::IsolateLeader => network::isolate_leader(self).await,
            FaultKind::SplitAll => network::split_all(self).await,
            FaultKind::DeafLeader => network::deaf_leader(self).await,
            FaultKind::MuteLeader => network::mute_leader(self).await,
            FaultKind::PacketLoss => network::lose_packets(self).await,
            FaultKind::LinkDown => network::link_down(self).await,
            FaultKind::StaleDns => network::stale_dns(self).await,
            FaultKind::FullDisk => disk::full(self).await,
            FaultKind::SlowDisk => disk::slow(self).await,
        }
    }

    /// Returns a random running replica.
    pub(super) fn any(&mut self) -> usize {
        let up = self.cluster.up();
        up[self.random.random_range(0..up.len())]
    }

    /// Returns a random running replica other than `other`.
    fn any_but(&mut self, other: usize) -> usize {
        let mut up = self.cluster.up();
        up.retain(|number| *number != other);
        up[self.random.random_range(0..up.len())]
    }

    /// Returns the running replicas other than `one`.
    pub(super) fn others(&self, one: usize) -> Vec<usize> {
        let mut up = self.cluster.up();
        up.retain(|number| *number != one);
        up
    }

    /// Kills a replica. Marks its last responses as possibly unknown to the others.
    pub(super) fn kill(&mut self, number: usize) -> anyhow::Result<()> {
        let before = Instant::now().checked_sub(DOUBT);
        let since = before.context("the clock has just begun")?;
        let killed = self.cluster.kill(number);
        self.load.ledger().doubt(number, since, Instant::now());
        killed
    }

    /// Stops a replica by SIGTERM, as an orchestrator does. Requests that reach it before it
    /// reports that it is not ready must be answered.
    pub(super) async fn leave(&mut self, number: usize) -> anyhow::Result<()> {
        self.cluster.signal(number, rustix::process::Signal::TERM)?;
        let what = format!("replica {} says that it is leaving", number + 1);
        until(&what, async || {
            let ready = self.cluster.get(number, "/readyz").await;
            Ok(ready.is_err() || ready.is_ok_and(|ready| ready["status"] == "not-ready"))
        })
        .await?;
        self.load.set_closing(number, true);
        let status = self.cluster.ended(number).await?;
        self.load.set_closing(number, false);
        ensure!(
            status.success(),
            "replica {} ended with {status}",
            number + 1
        );
        Ok(())
    }

    /// Waits until one of these replicas leads with a quorum, and returns its number.
    async fn leader_among(&self, numbers: &[usize]) -> anyhow::Result<usize> {
        let found = std::cell::Cell::new(None);
        until("one of the others leads", async || {
            for number in numbers {
                let cluster = self.cluster.get(*number, "/admin/v1/cluster").await?;
                if cluster["role"] == "leader" && cluster["has_quorum"] == true {
                    found.set(Some(*number));
                }
            }
            Ok(found.get().is_some())
        })
        .await?;
        found.get().context("nobody leads")
    }

    /// Waits until each of these replicas has served clients during a fault, and checks that no
    /// request failed.
    async fn served_by(&self, numbers: &[usize]) -> anyhow::Result<()> {
        let served = self.load.after_by_each(numbers, SERVED_MIN).await;
        served?;
        checks::check_failures(&self.load)
    }

    async fn status(&self, number: usize) -> anyhow::Result<Value> {
        self.cluster.get(number, "/admin/v1/cluster").await
    }

    /// Sends an administrative request through any running replica. Retries as an operator would,
    /// because a replica may reject the request while leadership changes.
    async fn operate(
        &mut self,
        method: Method,
        path: &str,
        body: Option<Value>,
    ) -> anyhow::Result<Value> {
        let answer = std::cell::RefCell::new(None);
        let last = std::cell::RefCell::new(None);
        let up = self.cluster.up();
        let turn = std::cell::Cell::new(self.random.random_range(0..up.len()));
        let what = format!("{method} {path} is done");
        let done = until(&what, async || {
            let number = up[turn.get() % up.len()];
            turn.set(turn.get() + 1);
            let told = self
                .cluster
                .send(number, method.clone(), path, body.as_ref());
            match told.await {
                Ok(value) => {
                    answer.replace(Some(value));
                    Ok(true)
                }
                // It was committed before the leader was lost, together with its response.
                Err(error) if is_done(&method, &error) => {
                    answer.replace(Some(Value::Null));
                    Ok(true)
                }
                Err(error) => {
                    last.replace(Some(error));
                    Ok(false)
                }
            }
        });
        if let Err(error) = done.await {
            return Err(error.context(format!("{:?}", last.take())));
        }
        answer.take().context("no answer")
    }
}

/// Returns whether an error means that the request is already done: the member is gone, or votes.
fn is_done(method: &Method, error: &anyhow::Error) -> bool {
    let is_gone = method == Method::DELETE && says(error, "is not a member");
    is_gone || says(error, "is already a voter")
}

/// Returns whether the text of an error or its causes contains `words`.
fn says(error: &anyhow::Error, words: &str) -> bool {
    format!("{error:#}").contains(words)
}

/// Waits for the duration of a fault that nothing else ends.
async fn last(duration: Duration) {
    sleep(duration).await;
}

/// Runs a command of the system without input.
fn system(words: &[&str]) -> anyhow::Result<()> {
    command::run(words)
}
