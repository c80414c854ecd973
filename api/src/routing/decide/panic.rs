//! Tracks which models are in panic mode, for the log and the metrics. [`crate::engines::backends`] defines
//! panic mode and detects it.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use state::Registry;

use crate::routing::metrics::RoutingMetrics;

/// Names of the models that were in panic mode when last observed.
#[derive(Default)]
pub(in crate::routing) struct PanicModes {
    models: Mutex<BTreeSet<String>>,
    /// Number of models in `models`. Decisions skip the lock while it is 0.
    count: AtomicUsize,
    metrics: RoutingMetrics,
}

impl PanicModes {
    /// Creates a tracker without models in panic mode that reports changes to `metrics`.
    pub(in crate::routing) fn new(metrics: RoutingMetrics) -> Self {
        Self {
            metrics,
            ..Self::default()
        }
    }

    /// Records whether `model` is in panic mode, as found by a decision. Ignores models that no
    /// backend in `registry` names.
    pub(in crate::routing) fn note(&self, registry: &Registry, model: &str, is_panic: bool) {
        if !is_panic && self.count.load(Relaxed) == 0 {
            return;
        }
        if registry.names_model(model) {
            self.tell(model, is_panic);
        }
    }

    /// Replaces the set of models in panic mode, which includes models without requests.
    pub(super) fn note_all(&self, panicking: &BTreeSet<String>) {
        let over: Vec<_> = self.lock().difference(panicking).cloned().collect();
        for model in over {
            self.tell(&model, false);
        }
        for model in panicking {
            self.tell(model, true);
        }
    }

    /// Records whether `model` is in panic mode. Logs a change and updates the metric.
    fn tell(&self, model: &str, is_panic: bool) {
        let mut models = self.lock();
        if models.contains(model) == is_panic {
            return;
        }
        if is_panic {
            models.insert(model.to_owned());
            tracing::warn!(model, "panic mode: probes fail while requests succeed");
        } else {
            models.remove(model);
            tracing::info!(model, "panic mode is over: probes are trusted again");
        }
        self.count.store(models.len(), Relaxed);
        self.metrics.shows_panic(model, is_panic);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.models.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
