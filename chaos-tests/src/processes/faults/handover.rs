//! Faults that are planned operations, which clients must not notice.

use anyhow::ensure;
use http::Method;
use serde_json::json;

use super::{FaultContext, checks};

pub(super) async fn transfer(stage: &mut FaultContext) -> anyhow::Result<()> {
    for _ in 0..3 {
        let leader = stage.cluster.leader().await?;
        let to = stage.any_but(leader);
        let body = json!({ "to": stage.cluster.id(to) });
        let path = "/admin/v1/cluster/transfer-leader";
        stage.operate(Method::POST, path, Some(body)).await?;
        let all = stage.cluster.up();
        stage.served_by(&all).await?;
    }
    Ok(())
}

/// Stops and restarts every replica in turn. No request may be lost, neither on the remaining
/// replicas nor on the one that leaves.
pub(super) async fn rolling_restart(stage: &mut FaultContext) -> anyhow::Result<()> {
    let lost_before = stage.load.ledger().lost;
    for number in stage.cluster.up() {
        stage.leave(number).await?;
        let others = stage.cluster.up();
        stage.served_by(&others).await?;
        stage.cluster.restart(&[number]).await?;
    }
    let lost = stage.load.ledger().lost - lost_before;
    ensure!(lost == 0, "{lost} requests were lost in a rolling restart");
    checks::check_failures(&stage.load)
}
