//! The faults: what machines, networks, disks and operators do to a cluster under load.
//!
//! Each runs on a [`FaultContext`] and leaves it whole again: every replica up, every link healed.
//! What must hold afterwards is the same for all ([`super::checks`]); what must hold in the middle
//! (others answer on, a damaged store is refused) stands with the fault.

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

/// How long before its death a replica may have answered something that nobody else has heard of:
/// many times the interval at which it tells.
const DOUBT: Duration = Duration::from_secs(2);
/// Requests that a replica must answer in the middle of a fault to count as serving.
const SERVED_MIN: u64 = 10;

/// Room for a log of some segments and a snapshot.
const SMALL_DISK_MB: u32 = 96;

/// What is needed beside processes on loopback.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultRequirement {
    /// Nothing.
    Nothing,
    /// Hosts in network namespaces.
    Hosts,
    /// Limits for input and output by cgroup.
    SlowDisk,
}

kinds! {
    /// A kind of fault.
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

/// Faults of hosts and of what is between them.
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
    /// What it needs.
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
    /// Why it cannot be had here; `None` when it can.
    #[must_use]
    pub fn why_not(self) -> Option<String> {
        match self {
            Self::Nothing => None,
            Self::Hosts => netns::why_not(),
            Self::SlowDisk => disk::why_not_slow(),
        }
    }
}

/// A cluster under load, and chance.
#[derive(Debug)]
pub struct FaultContext {
    /// The cluster.
    pub cluster: ProcessCluster,
    /// Its load.
    pub load: RunningLoad,
    /// Decides whom a fault meets.
    pub random: SmallRng,
}

/// How a cluster for faults is set up: in namespaces if they can be had.
#[must_use]
pub fn cluster_options() -> ClusterOptions {
    let has_hosts = FaultRequirement::Hosts.why_not().is_none();
    cluster_options_for(if has_hosts {
        Site::Namespaces
    } else {
        Site::Loopback
    })
}

/// How a cluster for faults is set up there.
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
    /// Does a fault to the cluster and checks what must hold afterwards.
    ///
    /// # Errors
    /// What does not hold. The stage is of no more use then.
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

    /// Any replica that is up.
    pub(super) fn any(&mut self) -> usize {
        let up = self.cluster.up();
        up[self.random.random_range(0..up.len())]
    }

    /// Any replica that is up, but for one.
    fn any_but(&mut self, other: usize) -> usize {
        let mut up = self.cluster.up();
        up.retain(|number| *number != other);
        up[self.random.random_range(0..up.len())]
    }

    /// The replicas that are up, but for one.
    pub(super) fn others(&self, one: usize) -> Vec<usize> {
        let mut up = self.cluster.up();
        up.retain(|number| *number != one);
        up
    }

    /// Kills a replica. What it answered last may be known to nobody else.
    pub(super) fn kill(&mut self, number: usize) -> anyhow::Result<()> {
        let before = Instant::now().checked_sub(DOUBT);
        let since = before.context("the clock has just begun")?;
        let killed = self.cluster.kill(number);
        self.load.book().doubt(number, since, Instant::now());
        killed
    }

    /// Stops a replica by SIGTERM, as an orchestrator does: what goes on to it until it says that
    /// it is not ready must be answered.
    pub(super) async fn leave(&mut self, number: usize) -> anyhow::Result<()> {
        self.cluster.signal(number, rustix::process::Signal::TERM)?;
        let what = format!("replica {} says that it is leaving", number + 1);
        until(&what, async || {
            let ready = self.cluster.ask(number, "/readyz").await;
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

    /// Waits until one of these replicas leads and has its quorum; answers which.
    async fn leader_among(&self, numbers: &[usize]) -> anyhow::Result<usize> {
        let found = std::cell::Cell::new(None);
        until("one of the others leads", async || {
            for number in numbers {
                let cluster = self.cluster.ask(*number, "/admin/v1/cluster").await?;
                if cluster["role"] == "leader" && cluster["has_quorum"] == true {
                    found.set(Some(*number));
                }
            }
            Ok(found.get().is_some())
        })
        .await?;
        found.get().context("nobody leads")
    }

    /// Waits until these replicas each serve clients in the middle of a fault.
    async fn served_by(&self, numbers: &[usize]) -> anyhow::Result<()> {
        let served = self.load.after_by_each(numbers, SERVED_MIN).await;
        served?;
        checks::check_failures(&self.load)
    }

    async fn status(&self, number: usize) -> anyhow::Result<Value> {
        self.cluster.ask(number, "/admin/v1/cluster").await
    }

    /// Changes something of the cluster, through any replica that is up. While leaders change this
    /// may be refused; an operator tries again.
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
                .tell(number, method.clone(), path, body.as_ref());
            match told.await {
                Ok(value) => {
                    answer.replace(Some(value));
                    Ok(true)
                }
                // It went into the log before a leader was lost, and the answer with it.
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

/// Whether what was to be removed is no member any more, or what was to be promoted votes already.
fn is_done(method: &Method, error: &anyhow::Error) -> bool {
    let is_gone = method == Method::DELETE && says(error, "is no member");
    is_gone || says(error, "is a voter already")
}

/// Whether an answer has these words: they stand behind what was asked, among the causes.
fn says(error: &anyhow::Error, words: &str) -> bool {
    format!("{error:#}").contains(words)
}

/// How long a fault lasts, where nothing tells its end.
async fn last(duration: Duration) {
    sleep(duration).await;
}

/// A command of the system.
fn system(words: &[&str]) -> anyhow::Result<()> {
    command::run(words)
}
