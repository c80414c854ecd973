//! Applies a config to a running cluster: registers backends that the cluster does not know, and
//! logs which other settings differ from the cluster's. Also tells the router when the log is
//! applied.
//!
//! The command that founds the cluster contains the settings themselves. Later changes go through
//! the admin API. This module undoes neither those nor, as far back as the audit reaches, the
//! removal of a backend.

use std::sync::Arc;
use std::time::Duration;

use api::ports::Cluster;
use api::routing::Router;
use api::settings::FileSettings;
use state::command::{BackendSpec, Command, Reply};
use state::ids::LogIndex;
use state::{AuditAction, StateView};
use tokio_util::sync::CancellationToken;

/// Pause before the registry is checked again, also after a failed attempt.
const PAUSE: Duration = Duration::from_millis(100);

/// Registers missing backends, logs the differences, and ends. Also ends at `stop`.
pub(super) async fn register(
    cluster: Arc<dyn Cluster>,
    router: Arc<Router>,
    backends: Vec<BackendSpec>,
    file: FileSettings,
    stop: CancellationToken,
) {
    let work = async {
        let view = router.view();
        // Before the cluster's log is applied here, a known backend would look unknown.
        while !(view.registry().initialised && cluster.status().caught_up) {
            tokio::time::sleep(PAUSE).await;
        }
        // The log may be applied only after the replica has begun to serve without a quorum.
        router.dispatcher().caught_up();
        for spec in backends {
            put(&*cluster, view, spec).await;
        }
        tell_differences(&file, view);
    };
    tokio::select! {
        biased;
        () = stop.cancelled() => {}
        () = work => {}
    }
}

/// Logs all differences between the config and the cluster as one warning.
fn tell_differences(file: &FileSettings, view: &StateView) {
    let differences = file.differences(&view.registry());
    if differences.is_empty() {
        return;
    }
    let shown: Vec<_> = differences.iter().map(ToString::to_string).collect();
    tracing::warn!(
        differences = shown.join("; "),
        "the cluster's values differ from this config and take precedence: `quorate config diff` \
         shows them, `quorate config apply` changes them"
    );
}

async fn put(cluster: &dyn Cluster, view: &StateView, spec: BackendSpec) {
    let is_known = || {
        let registry = view.registry();
        registry.backends.iter().any(|it| it.spec.id == spec.id)
    };
    while !is_known() {
        if let Some(index) = removed_at(cluster, &spec.id) {
            let backend = spec.id;
            tracing::warn!(
                backend,
                log_index = index.0,
                "backend in the config was removed through the admin API and is not registered again"
            );
            return;
        }
        match cluster.submit(Command::PutBackend(spec.clone())).await {
            Ok(committed) => {
                // Wait for the apply: an entry that is not applied here yet would count as a
                // difference.
                while view.applied() < committed.index {
                    tokio::time::sleep(PAUSE).await;
                }
                match committed.reply {
                    Reply::Rejected(reject) => {
                        tracing::error!(backend = spec.id, %reject, "backend from the config was rejected");
                    }
                    Reply::Applied | Reply::Batch(_) | Reply::Repeated(_) => {
                        tracing::info!(backend = spec.id, "backend from the config is registered");
                    }
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

/// Returns the log index at which a backend was removed, if the audit reaches back that far and it
/// was not registered again since.
fn removed_at(cluster: &dyn Cluster, id: &str) -> Option<LogIndex> {
    let mut removed = None;
    cluster.with_state(&mut |state| {
        let is_its =
            |action| matches!(action, AuditAction::PutBackend | AuditAction::DeleteBackend);
        let mut audit = state.audit();
        let last = audit.find(|entry| entry.subject == id && is_its(entry.action));
        removed = last
            .filter(|entry| entry.action == AuditAction::DeleteBackend)
            .map(|entry| entry.index);
    });
    removed
}
