//! Measures the cost of losing the leader or the quorum for the remaining replicas.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use tokio::time::{Instant, interval, sleep, timeout};

use super::client_ledger::LongestStall;
use super::faults::FaultContext;
use super::{checks, waiting};

/// Interval at which the remaining replicas are queried for a leader.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// Duration of the load before a fault, for comparison with the time after it.
const QUIET: Duration = Duration::from_secs(1);
/// Duration of the load after a failover, to measure stalls.
const AFTER: Duration = Duration::from_secs(1);

/// Result of killing the leader once.
#[derive(Debug, Clone, Copy)]
pub struct Failover {
    /// Time from the kill until another replica leads and has a quorum.
    pub new_leader: Duration,
    /// Longest stalls in the second before the kill.
    pub quiet: LongestStall,
    /// Longest stalls from the kill on.
    pub stall: LongestStall,
    /// Number of requests that the other replicas answered meanwhile.
    pub answered: u64,
}

/// Result of losing two of three replicas for a while.
#[derive(Debug, Clone, Copy)]
pub struct QuorumLoss {
    /// Number of requests that the remaining replica answered.
    pub answered: u64,
    /// Minimum number of answered requests in any second.
    pub answered_per_s_min: u64,
    /// Longest stalls while the quorum was lost.
    pub stall: LongestStall,
    /// Time from starting the killed replicas until everything was settled and checked.
    pub healed: Duration,
}

/// Kills the leader under load, measures the failover, and restarts the replica.
///
/// # Errors
/// Describes the first check that fails.
pub async fn kill_leader(stage: &mut FaultContext) -> anyhow::Result<Failover> {
    let leader = stage.cluster.leader().await?;
    stage.load.ledger().measure();
    sleep(QUIET).await;
    let quiet = stage.load.ledger().stall;

    let others = stage.others(leader);
    let before: u64 = answered(stage, &others);
    stage.load.ledger().measure();
    let killed = Instant::now();
    stage.kill(leader)?;
    wait_for_leader(stage, &others).await?;
    let new_leader = killed.elapsed();
    sleep(AFTER).await;
    let stall = stage.load.ledger().stall;
    let answered = answered(stage, &others) - before;
    ensure!(answered > 0, "the others answered nothing");

    stage.cluster.restart(&[leader]).await?;
    checks::check(&stage.cluster, &stage.load).await?;
    Ok(Failover {
        new_leader,
        quiet,
        stall,
        answered,
    })
}

fn answered(stage: &FaultContext, replicas: &[usize]) -> u64 {
    let book = stage.load.ledger();
    replicas
        .iter()
        .map(|replica| book.answered_by(*replica))
        .sum()
}

async fn wait_for_leader(stage: &FaultContext, others: &[usize]) -> anyhow::Result<()> {
    let elected = async {
        let mut looks = interval(LOOK_EVERY);
        loop {
            for number in others {
                let status = stage.cluster.get(*number, "/admin/v1/cluster").await?;
                if status["role"] == "leader" && status["has_quorum"] == true {
                    return anyhow::Ok(());
                }
            }
            looks.tick().await;
        }
    };
    timeout(waiting::PATIENCE, elected)
        .await
        .context("nobody leads")
        .flatten()
}

/// Kills two of three replicas, lets the third serve alone for `length`, and restarts the others.
///
/// # Errors
/// Describes the first check that fails.
pub async fn lose_quorum(stage: &mut FaultContext, length: Duration) -> anyhow::Result<QuorumLoss> {
    let left = stage.any();
    let victims = stage.others(left);
    for victim in &victims {
        stage.kill(*victim)?;
    }
    stage.load.ledger().measure();
    let first = stage.load.ledger().answered_by(left);
    let mut answered_per_s_min = u64::MAX;
    let until = Instant::now() + length;
    while Instant::now() < until {
        let before = stage.load.ledger().answered_by(left);
        sleep(Duration::from_secs(1)).await;
        let in_second = stage.load.ledger().answered_by(left) - before;
        answered_per_s_min = answered_per_s_min.min(in_second);
    }
    let ready = stage.cluster.get(left, "/readyz").await?;
    ensure!(
        ready["status"] == "degraded",
        "a replica without its quorum says {ready}"
    );
    let stall = stage.load.ledger().stall;
    let answered = stage.load.ledger().answered_by(left) - first;
    let healing = Instant::now();
    stage.cluster.restart(&victims).await?;
    checks::check(&stage.cluster, &stage.load).await?;
    Ok(QuorumLoss {
        answered,
        answered_per_s_min,
        stall,
        healed: healing.elapsed(),
    })
}
