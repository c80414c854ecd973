//! Faults that kill replicas, which restart with their disks.

use super::{FaultContext, until};

/// Maximum number of log entries that a leader keeps from before its snapshot: a quarter of
/// `snapshot_every`.
const KEPT_ENTRIES: u64 = 100;

pub(super) async fn kill_one(stage: &mut FaultContext) -> anyhow::Result<()> {
    let victim = stage.any();
    stage.kill(victim)?;
    let others = stage.cluster.up();
    stage.served_by(&others).await?;
    // Without load, the restarted replica has nothing to propose, but its open leases must still be
    // closed.
    stage.load.rest().await?;
    stage.cluster.restart(&[victim]).await
}

pub(super) async fn kill_leader(stage: &mut FaultContext) -> anyhow::Result<()> {
    let victim = stage.cluster.leader().await?;
    stage.kill(victim)?;
    let others = stage.cluster.up();
    stage.leader_among(&others).await?;
    stage.served_by(&others).await?;
    stage.cluster.restart(&[victim]).await
}

/// Kills two of three replicas. Without a quorum, the remaining one serves with what it knows and
/// keeps what it learns.
pub(super) async fn kill_majority(stage: &mut FaultContext) -> anyhow::Result<()> {
    let left = stage.any();
    let victims = stage.others(left);
    for victim in &victims {
        stage.kill(*victim)?;
    }
    stage.served_by(&[left]).await?;
    stage.cluster.restart(&victims).await
}

pub(super) async fn kill_all(stage: &mut FaultContext) -> anyhow::Result<()> {
    let all = stage.cluster.up();
    for victim in &all {
        stage.kill(*victim)?;
    }
    stage.cluster.restart(&all).await
}

pub(super) async fn away_for_snapshot(stage: &mut FaultContext) -> anyhow::Result<()> {
    let victim = stage.any();
    let status = stage.status(victim).await?;
    let had = status["applied_index"].as_u64().unwrap_or(0);
    stage.kill(victim)?;
    let others = stage.cluster.up();
    until("the others keep no entry that it lacks", async || {
        let mut are_past = true;
        for other in &others {
            let status = stage.status(*other).await?;
            let snapshot = status["snapshot_index"].as_u64().unwrap_or(0);
            are_past &= snapshot > had + 2 * KEPT_ENTRIES;
        }
        Ok(are_past)
    })
    .await?;
    stage.cluster.restart(&[victim]).await?;
    let status = stage.status(victim).await?;
    let snapshot = status["snapshot_index"].as_u64().unwrap_or(0);
    anyhow::ensure!(
        snapshot > had,
        "replica {} is back at {status} without a snapshot past {had}",
        victim + 1
    );
    Ok(())
}
