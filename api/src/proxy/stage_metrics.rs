//! Metrics of requests on two backends: how long each stage takes, and what comes of the first.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use super::metrics::{ProxyMetrics, Seconds};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PrefillEnd {
    outcome: &'static str,
}

/// Metrics of requests on two backends. Clones share their values.
#[derive(Debug, Clone, Default)]
pub(super) struct StageMetrics {
    prefills: Family<PrefillEnd, Counter>,
    prefill: Seconds,
    decode: Seconds,
}

impl StageMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "prefills",
            "Prompts sent to a backend that computes them for another, by outcome",
            self.prefills.clone(),
        );
        registry.register(
            "prefill_stage_seconds",
            "Time from a prompt's dispatch to its prefill backend until that has answered",
            self.prefill.0.clone(),
        );
        registry.register(
            "decode_stage_seconds",
            "Time from a request's dispatch to the backend that fetches its prompt's blocks until the answer begins",
            self.decode.0.clone(),
        );
    }
}

impl ProxyMetrics {
    /// The prefill stage of a request is over.
    pub(super) fn prefilled(&self, outcome: &'static str, took: Duration) {
        let stages = &self.stages;
        stages.prefills.get_or_create(&PrefillEnd { outcome }).inc();
        stages.prefill.observe(took);
    }

    /// The answer to a request whose prompt another backend computed has begun.
    pub(super) fn decoded(&self, took: Duration) {
        self.stages.decode.observe(took);
    }
}
