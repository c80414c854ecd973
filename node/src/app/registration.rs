//! Puts the config's backends into the replicated registry: those whose id it does not know yet.
//! Later changes go through the admin API and are not undone here.

use std::sync::Arc;
use std::time::Duration;

use api::ports::Cluster;
use state::View;
use state::command::{BackendSpec, Command, Reply};
use tokio_util::sync::CancellationToken;

/// Pause before the registry is looked at again, and after a failed try.
const PAUSE: Duration = Duration::from_millis(100);

/// Registers what is missing, then ends; also ends at `stop`.
pub(super) async fn register(
    cluster: Arc<dyn Cluster>,
    view: Arc<View>,
    backends: Vec<BackendSpec>,
    stop: CancellationToken,
) {
    let work = async {
        // Before the cluster's log is applied here, a known backend would look unknown.
        while !(view.registry().initialised && cluster.status().caught_up) {
            tokio::time::sleep(PAUSE).await;
        }
        for spec in backends {
            put(&*cluster, &view, spec).await;
        }
    };
    tokio::select! {
        () = stop.cancelled() => {}
        () = work => {}
    }
}

async fn put(cluster: &dyn Cluster, view: &View, spec: BackendSpec) {
    let is_known = || {
        view.registry()
            .backends
            .iter()
            .any(|backend| backend.spec.id == spec.id)
    };
    while !is_known() {
        match cluster.submit(Command::PutBackend(spec.clone())).await {
            Ok(committed) => {
                if let Reply::Rejected(reject) = committed.reply {
                    tracing::error!(backend = spec.id, %reject, "backend of the config refused");
                }
                return;
            }
            Err(failure) => {
                tracing::debug!(backend = spec.id, %failure, "backend not registered yet");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}
