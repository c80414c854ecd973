//! Tracks which models are in panic mode, for the log and the metrics. [`crate::backends`] defines
//! panic mode and detects it.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use state::Registry;

use super::metrics::RoutingMetrics;

/// Models in panic mode as last observed.
#[derive(Default)]
pub(super) struct PanicModes {
    models: Mutex<BTreeSet<String>>,
    /// Number of models, so that decisions skip the lock while it is 0.
    count: AtomicUsize,
    metrics: RoutingMetrics,
}

impl PanicModes {
    /// Starts empty; changes show in `metrics`.
    pub(super) fn new(metrics: RoutingMetrics) -> Self {
        Self {
            metrics,
            ..Self::default()
        }
    }

    /// Records whether a named model is in panic mode, as a decision found.
    pub(super) fn note(&self, registry: &Registry, model: &str, is_panic: bool) {
        if !is_panic && self.count.load(Relaxed) == 0 {
            return;
        }
        if registry.names_model(model) {
            self.tell(model, is_panic);
        }
    }

    /// Records all models in panic mode, including those without requests.
    pub(super) fn note_all(&self, panicking: &BTreeSet<String>) {
        let over: Vec<_> = self.lock().difference(panicking).cloned().collect();
        for model in over {
            self.tell(&model, false);
        }
        for model in panicking {
            self.tell(model, true);
        }
    }

    /// Records the state of one model and logs changes.
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
