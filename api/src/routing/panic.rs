//! Which models were last seen in panic mode, for the log and the metrics. What panic mode is and
//! who is in it, [`crate::backends`] knows.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use state::Registry;

use super::metrics::RoutingMetrics;

/// Models in panic mode as they were last seen.
#[derive(Default)]
pub(super) struct PanicModes {
    models: Mutex<BTreeSet<String>>,
    /// Their number, so that a decision looks no further while there are none.
    count: AtomicUsize,
    metrics: RoutingMetrics,
}

impl PanicModes {
    /// None yet; changes show in `metrics`.
    pub(super) fn new(metrics: RoutingMetrics) -> Self {
        Self {
            metrics,
            ..Self::default()
        }
    }

    /// Notes whether a named model is in panic mode, as a decision has found.
    pub(super) fn note(&self, registry: &Registry, model: &str, is_panic: bool) {
        if !is_panic && self.count.load(Relaxed) == 0 {
            return;
        }
        if registry.names_model(model) {
            self.tell(model, is_panic);
        }
    }

    /// Notes all models in panic mode, also those that no request asks for.
    pub(super) fn note_all(&self, panicking: &BTreeSet<String>) {
        let over: Vec<_> = self.lock().difference(panicking).cloned().collect();
        for model in over {
            self.tell(&model, false);
        }
        for model in panicking {
            self.tell(model, true);
        }
    }

    /// Logs changes only.
    fn tell(&self, model: &str, is_panic: bool) {
        let mut models = self.lock();
        if models.contains(model) == is_panic {
            return;
        }
        if is_panic {
            models.insert(model.to_owned());
            tracing::warn!(model, "panic mode: probes fail while requests are answered");
        } else {
            models.remove(model);
            tracing::info!(model, "panic mode is over: probes are believed");
        }
        self.count.store(models.len(), Relaxed);
        self.metrics.shows_panic(model, is_panic);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.models.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
