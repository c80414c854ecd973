//! Faults of links that lose packets, and of names that resolve to old addresses. Unless stated
//! otherwise, they affect only traffic between peers: a replica that is cut off from its peers
//! keeps serving its clients with its own knowledge.

use std::time::Duration;

use super::{FaultContext, last};
use crate::netns::{HostPair, PacketLoss};

/// Duration of a network fault: many election timeouts.
const LENGTH: Duration = Duration::from_secs(2);
const LOSS: PacketLoss = PacketLoss::Percent(20);

pub(super) async fn isolate_one(stage: &mut FaultContext) -> anyhow::Result<()> {
    let leader = stage.cluster.leader().await?;
    let victim = stage.any_but(leader);
    isolate(stage, victim).await
}

pub(super) async fn isolate_leader(stage: &mut FaultContext) -> anyhow::Result<()> {
    let victim = stage.cluster.leader().await?;
    isolate(stage, victim).await
}

async fn isolate(stage: &mut FaultContext, victim: usize) -> anyhow::Result<()> {
    let others = stage.others(victim);
    let ways: Vec<HostPair> = others
        .iter()
        .flat_map(|other| [way(victim, *other), way(*other, victim)])
        .collect();
    cut(stage, PacketLoss::All, &ways, &others).await
}

pub(super) async fn split_all(stage: &mut FaultContext) -> anyhow::Result<()> {
    cut(stage, PacketLoss::All, &all_ways(stage), &[]).await
}

pub(super) async fn deaf_leader(stage: &mut FaultContext) -> anyhow::Result<()> {
    let victim = stage.cluster.leader().await?;
    let others = stage.others(victim);
    let ways: Vec<HostPair> = others.iter().map(|other| way(*other, victim)).collect();
    cut(stage, PacketLoss::All, &ways, &others).await
}

pub(super) async fn mute_leader(stage: &mut FaultContext) -> anyhow::Result<()> {
    let victim = stage.cluster.leader().await?;
    let others = stage.others(victim);
    let ways: Vec<HostPair> = others.iter().map(|other| way(victim, *other)).collect();
    cut(stage, PacketLoss::All, &ways, &others).await
}

pub(super) async fn lose_packets(stage: &mut FaultContext) -> anyhow::Result<()> {
    cut(stage, LOSS, &all_ways(stage), &[]).await
}

/// Drops packets, checks that all replicas serve and one of `majority` leads, and heals.
async fn cut(
    stage: &mut FaultContext,
    loss: PacketLoss,
    ways: &[HostPair],
    majority: &[usize],
) -> anyhow::Result<()> {
    stage.cluster.network()?.lose(loss, ways)?;
    if !majority.is_empty() {
        stage.leader_among(majority).await?;
    }
    let all = stage.cluster.up();
    stage.served_by(&all).await?;
    last(LENGTH).await;
    stage.served_by(&all).await?;
    stage.cluster.network()?.heal()?;
    stage.cluster.leader().await?;
    Ok(())
}

fn all_ways(stage: &FaultContext) -> Vec<HostPair> {
    let up = stage.cluster.up();
    let others = |from: usize| up.iter().filter(move |to| **to != from);
    up.iter()
        .flat_map(|from| others(*from).map(|to| way(*from, *to)))
        .collect()
}

fn way(from: usize, to: usize) -> HostPair {
    HostPair { from, to }
}

/// Takes a replica's link down, which also cuts it off from clients and engines. Its requests in
/// flight may fail.
pub(super) async fn link_down(stage: &mut FaultContext) -> anyhow::Result<()> {
    let victim = stage.any();
    stage.cluster.set_silent(victim, true).await?;
    stage.cluster.network()?.set_link(victim, false)?;
    let others = stage.cluster.up();
    stage.leader_among(&others).await?;
    stage.served_by(&others).await?;
    last(LENGTH).await;
    stage.cluster.network()?.set_link(victim, true)?;
    stage.cluster.set_silent(victim, false).await
}

/// Restarts a replica at another address. The others look for it at the old one until names change.
/// Meanwhile it reaches them and may even lead them.
pub(super) async fn stale_dns(stage: &mut FaultContext) -> anyhow::Result<()> {
    let victim = stage.any();
    stage.kill(victim)?;
    stage.cluster.move_replica(victim)?;
    stage.cluster.write_hosts(victim)?;
    stage.cluster.start_replica(victim)?;
    let others = stage.others(victim);
    stage.served_by(&others).await?;
    last(LENGTH).await;
    stage.served_by(&others).await?;
    // Includes the place of a replica that will join.
    for place in 0..stage.cluster.replicas() {
        stage.cluster.write_hosts(place)?;
    }
    stage.cluster.wait_ready(victim).await?;
    stage.cluster.targets().set_up(victim, true);
    Ok(())
}
