//! Faults in which members join and leave under load.

use anyhow::Context as _;
use http::Method;
use serde_json::json;

use super::{FaultContext, says, until};

const MEMBERS: &str = "/admin/v1/cluster/members";

/// Lets a replica join at a free place, where it serves requests as a learner and is promoted. Then
/// removes another replica, perhaps the leader.
pub(super) async fn join_and_remove(stage: &mut FaultContext) -> anyhow::Result<()> {
    let up = stage.cluster.up();
    let mut places = 0..stage.cluster.replicas();
    let place = places.find(|number| !up.contains(number));
    let place = place.context("no place for another replica")?;
    let goes = stage.any();
    stage.cluster.renumber(place)?;
    join(stage, place).await?;
    stage.served_by(&[place]).await?;
    promote(stage, place).await?;
    stage.leave(goes).await?;
    remove(stage, goes).await?;
    stage.cluster.wipe(goes)
}

/// Replaces a member whose store was set aside: removes it, and lets it join with a new id.
pub(super) async fn replace(stage: &mut FaultContext, number: usize) -> anyhow::Result<()> {
    remove(stage, number).await?;
    stage.cluster.renumber(number)?;
    join(stage, number).await?;
    promote(stage, number).await
}

async fn join(stage: &mut FaultContext, number: usize) -> anyhow::Result<()> {
    let member = json!({
        "id": stage.cluster.id(number),
        "address": stage.cluster.peer_name(number),
    });
    stage.cluster.start_replica(number)?;
    let others = stage.others(number);
    let what = format!("replica {} is let in", number + 1);
    let last = std::cell::RefCell::new(None);
    let added = until(&what, async || {
        let told = stage
            .cluster
            .send(others[0], Method::POST, MEMBERS, Some(&member));
        let Err(refused) = told.await else {
            return Ok(true);
        };
        // The replica asks to join by itself and may be first.
        let is_in = says(&refused, "is already a member");
        last.replace(Some(refused));
        Ok(is_in)
    });
    added.await.with_context(|| format!("{:?}", last.take()))?;
    stage.cluster.wait_ready(number).await?;
    stage.cluster.targets().set_up(number, true);
    Ok(())
}

async fn promote(stage: &mut FaultContext, number: usize) -> anyhow::Result<()> {
    let path = format!("{MEMBERS}/{}/promote", stage.cluster.id(number));
    stage.operate(Method::POST, &path, None).await?;
    Ok(())
}

async fn remove(stage: &mut FaultContext, number: usize) -> anyhow::Result<()> {
    let path = format!("{MEMBERS}/{}", stage.cluster.id(number));
    stage.operate(Method::DELETE, &path, None).await?;
    Ok(())
}
