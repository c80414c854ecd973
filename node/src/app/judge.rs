//! Whether this replica's own state is the wrong one, by what its peers say of theirs.
//!
//! Replicas that applied the same log must hold the same state. One that differs from most members
//! has lost that, to a fault of memory or of the program, and cannot tell where: it must not lead,
//! lest others take its snapshots, and it says that it is not ready until it is rebuilt.

use std::sync::Arc;
use std::time::Duration;

use api::admin::Digests;
use raft::Replica;
use state::ids::ReplicaId;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::running::hand_over;

/// Time between two looks.
const INTERVAL: Duration = Duration::from_secs(1);

/// Looks until `stop`, or until it is found out: that is said once and holds until the end.
pub(super) async fn watch(replica: Replica, digests: Arc<Digests>, stop: CancellationToken) {
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = ticks.tick() => {}
        }
        let status = replica.status();
        let members: Vec<ReplicaId> = status.members.keys().copied().map(ReplicaId).collect();
        let Some(minority) = digests.judge(&members) else {
            continue;
        };
        tracing::error!(
            log_index = minority.index,
            ours = api::admin::digests::hex(minority.ours),
            theirs = api::admin::digests::hex(minority.theirs),
            replicas = minority.replicas,
            "this replica's state differs from the majority's and cannot be trusted: stop it, run \
             `quorate recover` and let it join anew"
        );
        hand_over(&replica).await;
        return;
    }
}
