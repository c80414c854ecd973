//! Writes cluster events to the program's log unless they are logged elsewhere: changes of the
//! registry, the policy and the quorum. Roles, members and health are logged where they are
//! detected.

use api::events::{ClusterEvent, EventBus};
use tokio::sync::broadcast::error::RecvError;
use tokio_util::sync::CancellationToken;

/// Logs every event until `stop`.
pub(super) async fn log(events: EventBus, stop: CancellationToken) {
    let mut events = events.subscribe();
    loop {
        let event = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            event = events.recv() => event,
        };
        match event {
            Ok(numbered) if is_told_here(&numbered.event) => {
                let detail = serde_json::to_string(&numbered.event).unwrap_or_default();
                tracing::info!(event = numbered.event.name(), detail, "cluster changed");
            }
            Ok(_) => {}
            Err(RecvError::Lagged(events)) => tracing::warn!(events, "dropped cluster events"),
            Err(RecvError::Closed) => return,
        }
    }
}

fn is_told_here(event: &ClusterEvent) -> bool {
    match event {
        ClusterEvent::Backend { .. }
        | ClusterEvent::Ownership { .. }
        | ClusterEvent::BackendAccuracy { .. }
        | ClusterEvent::Policy { .. }
        | ClusterEvent::Routing { .. }
        | ClusterEvent::Quorum { .. } => true,
        ClusterEvent::Leader { .. }
        | ClusterEvent::Role { .. }
        | ClusterEvent::Member { .. }
        | ClusterEvent::Snapshot { .. }
        | ClusterEvent::Fault { .. }
        | ClusterEvent::BackendHealth { .. }
        | ClusterEvent::BackendCircuit { .. }
        | ClusterEvent::DigestMismatch { .. } => false,
    }
}
