//! Faults that pause processes by SIGSTOP, like a suspended machine or heavy swapping.

use std::time::Duration;

use rustix::process::Signal;

use super::{FaultContext, last};

/// Duration of a short pause, which is less than the shortest election timeout.
const SHORT: Duration = Duration::from_millis(100);
/// Duration of a long pause: several election timeouts.
const LONG: Duration = Duration::from_millis(1500);
/// Duration of a pause that exceeds the time for which a leader keeps the session of an unreachable
/// replica (10 s).
const PAST_SESSION: Duration = Duration::from_secs(12);

/// Pauses the leader five times, each for less than an election timeout. No request may fail, not
/// even at the paused replica.
pub(super) async fn briefly(stage: &mut FaultContext) -> anyhow::Result<()> {
    for _ in 0..5 {
        let leader = stage.cluster.leader().await?;
        stage.cluster.signal(leader, Signal::STOP)?;
        last(SHORT).await;
        stage.cluster.signal(leader, Signal::CONT)?;
        stage.load.wait_for_requests(20).await?;
    }
    Ok(())
}

/// Pauses the leader until another one leads. When it resumes, it believes that it still leads.
pub(super) async fn leader(stage: &mut FaultContext) -> anyhow::Result<()> {
    let victim = stage.cluster.leader().await?;
    pause(stage, victim, LONG).await
}

/// Pauses a replica for so long that the others release its leases and close its requests.
pub(super) async fn past_its_session(stage: &mut FaultContext) -> anyhow::Result<()> {
    let victim = stage.any();
    pause(stage, victim, PAST_SESSION).await
}

async fn pause(stage: &mut FaultContext, victim: usize, length: Duration) -> anyhow::Result<()> {
    stage.cluster.set_silent(victim, true).await?;
    stage.cluster.signal(victim, Signal::STOP)?;
    let others = stage.cluster.up();
    stage.leader_among(&others).await?;
    stage.served_by(&others).await?;
    last(length).await;
    stage.cluster.signal(victim, Signal::CONT)?;
    stage.cluster.set_silent(victim, false).await
}
