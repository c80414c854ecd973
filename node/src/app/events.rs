//! Writes what happens in the cluster to the log, as the admin API streams it.

use api::admin::Events;
use tokio::sync::broadcast::error::RecvError;
use tokio_util::sync::CancellationToken;

/// Logs every event until `stop`.
pub(super) async fn log(events: Events, stop: CancellationToken) {
    let mut events = events.subscribe();
    loop {
        let event = tokio::select! {
            () = stop.cancelled() => return,
            event = events.recv() => event,
        };
        match event {
            Ok(numbered) => {
                let detail = serde_json::to_string(&numbered.event).unwrap_or_default();
                tracing::info!(event = numbered.event.name(), detail, "cluster event");
            }
            Err(RecvError::Lagged(events)) => tracing::warn!(events, "cluster events passed over"),
            Err(RecvError::Closed) => return,
        }
    }
}
