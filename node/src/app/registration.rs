//! Registers the config's settings for a new cluster: the backends with unknown ids, and the
//! admission and routing settings unless they have been set. Later changes go through the admin API
//! and are not undone here.

use std::sync::Arc;
use std::time::Duration;

use api::ports::Cluster;
use state::StateView;
use state::admission::AdmissionSettings;
use state::command::{BackendSpec, Command, Reply};
use state::policy::RoutingSettings;
use tokio_util::sync::CancellationToken;

/// Pause before the registry is checked again, and after a failed attempt.
const PAUSE: Duration = Duration::from_millis(100);

/// Initial settings of a new cluster.
pub(super) struct FoundingSettings {
    pub(super) backends: Vec<BackendSpec>,
    pub(super) admission: AdmissionSettings,
    pub(super) routing: RoutingSettings,
}

/// Registers what is missing, then ends; also ends at `stop`.
pub(super) async fn register(
    cluster: Arc<dyn Cluster>,
    view: Arc<StateView>,
    first: FoundingSettings,
    stop: CancellationToken,
) {
    let work = async {
        // Before the cluster's log is applied here, a known backend would look unknown.
        while !(view.registry().initialised && cluster.status().caught_up) {
            tokio::time::sleep(PAUSE).await;
        }
        if view.registry().hash_secret.is_none() {
            tracing::warn!(
                "blocks are hashed without a secret, as an earlier build founded the cluster: a client can \
                 make prompts that look cached; restore a backup into a new cluster (docs/guide/backups.md)"
            );
        }
        // The defaults need no entry: they apply until something is set.
        if first.admission != AdmissionSettings::default() {
            let command = Command::PutAdmission(first.admission);
            put_setting(&*cluster, command, || view.registry().admission.is_some()).await;
        }
        if first.routing != RoutingSettings::default() {
            let command = Command::PutRouting(first.routing);
            put_setting(&*cluster, command, || view.registry().routing.is_some()).await;
        }
        for spec in first.backends {
            put(&*cluster, &view, spec).await;
        }
    };
    tokio::select! {
        biased;
        () = stop.cancelled() => {}
        () = work => {}
    }
}

/// Submits a setting unless it has been set already.
async fn put_setting(cluster: &dyn Cluster, command: Command, is_set: impl Fn() -> bool) {
    while !is_set() {
        match cluster.submit(command.clone()).await {
            Ok(committed) => {
                if let Reply::Rejected(reject) = committed.reply {
                    tracing::error!(%reject, "settings from the config were rejected");
                }
                return;
            }
            Err(failure) => {
                tracing::debug!(%failure, "could not register settings yet");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

async fn put(cluster: &dyn Cluster, view: &StateView, spec: BackendSpec) {
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
                    tracing::error!(backend = spec.id, %reject, "backend from the config was rejected");
                }
                return;
            }
            Err(failure) => {
                tracing::debug!(backend = spec.id, %failure, "could not register backend yet");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}
