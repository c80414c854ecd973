//! Metrics of requests on two backends: the duration of each stage, and results of the first.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PrefillEnd {
    outcome: &'static str,
}

/// Metrics of requests on two backends. Clones share their values.
#[derive(Debug, Clone)]
pub(in crate::proxy) struct StageMetrics {
    prefills: Family<PrefillEnd, Counter>,
    prefill: Histogram,
    decode: Histogram,
}

impl StageMetrics {
    /// Creates empty metrics with histograms that `histogram` creates.
    pub(in crate::proxy) fn new(histogram: fn() -> Histogram) -> Self {
        Self {
            prefills: Family::default(),
            prefill: histogram(),
            decode: histogram(),
        }
    }

    pub(in crate::proxy) fn register(&self, registry: &mut Registry) {
        registry.register(
            "prefills",
            "Prompts sent to a backend that computes them for another, by outcome",
            self.prefills.clone(),
        );
        registry.register(
            "prefill_stage_seconds",
            "Time from a prompt's dispatch to its prefill backend until the response",
            self.prefill.clone(),
        );
        registry.register(
            "decode_stage_seconds",
            "Time from a request's dispatch to the backend that fetches its prompt's blocks until the response begins",
            self.decode.clone(),
        );
    }

    /// Records the end of a request's prefill stage.
    pub(in crate::proxy) fn prefilled(&self, outcome: &'static str, took: Duration) {
        let ends = &self.prefills;
        ends.get_or_create(&PrefillEnd { outcome }).inc();
        self.prefill.observe(took.as_secs_f64());
    }

    /// Records the beginning of the response after a prefill on another backend.
    pub(in crate::proxy) fn decoded(&self, took: Duration) {
        self.decode.observe(took.as_secs_f64());
    }
}
