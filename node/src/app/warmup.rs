//! The time between the start and the first request. Connections wait in the listener's backlog
//! until the replica has a state to serve from, instead of getting an error.

use std::time::Duration;

use api::engines::backends::Backends;
use api::ports::Cluster;
use api::routing::Router;
use state::StateView;

/// Maximum time to wait. After it, a replica without a quorum or healthy engines serves what it
/// can, and a replica without a cluster asks clients to come back.
const PATIENCE: Duration = Duration::from_secs(3);
/// Interval at which readiness is checked.
const INTERVAL: Duration = Duration::from_millis(20);

/// Waits until this replica has caught up and every registered backend has been probed.
pub(super) async fn warm_up(cluster: &dyn Cluster, router: &Router, backends: &Backends) {
    let view = router.view();
    let warm = async {
        let mut looks = tokio::time::interval(INTERVAL);
        while !(cluster.status().caught_up && is_probed(view, backends)) {
            looks.tick().await;
        }
    };
    match tokio::time::timeout(PATIENCE, warm).await {
        Ok(()) => {
            router.dispatcher().caught_up();
            tracing::info!("accepting requests");
        }
        Err(_) if !view.registry().initialised => {
            tracing::warn!("not in a cluster yet: every request gets a 503");
        }
        Err(_) => tracing::warn!("accepting requests without a quorum or without probed backends"),
    }
}

fn is_probed(view: &StateView, backends: &Backends) -> bool {
    let registry = view.registry();
    let mut registered = registry.backends.iter().map(|backend| backend.handle.slot);
    let is_probed = |slot| {
        backends
            .record(slot)
            .is_some_and(|record| record.probes_total > 0)
    };
    !registry.backends.is_empty() && registered.all(is_probed)
}
