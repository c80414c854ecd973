//! Metrics of requests per model, for a bounded number of models.
//!
//! A model gets its own series with its first request if a registered backend serves it, so names
//! that clients invent never become labels. All other requests count under `other`.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::outcome::RequestOutcome;
use crate::model_names::OTHER_MODEL;

/// Maximum number of models with their own series.
const MODELS_MAX: usize = 100;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestedModel {
    model: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ModelEnd {
    model: String,
    outcome: &'static str,
}

type HistogramOf = Family<RequestedModel, Histogram, fn() -> Histogram>;

/// Metrics of all models. Clones share their values.
#[derive(Debug, Clone)]
pub(in crate::proxy) struct ModelMetrics {
    requests: Family<ModelEnd, Counter>,
    fallbacks: Family<RequestedModel, Counter>,
    ttft: HistogramOf,
    duration: HistogramOf,
    meters: Arc<RwLock<BTreeMap<String, Arc<ModelMeter>>>>,
}

/// Metrics of one model, looked up once per request.
#[derive(Debug)]
pub(in crate::proxy) struct ModelMeter {
    pub(super) ttft: Histogram,
    duration: Histogram,
    /// Counters in the order of [`RequestOutcome::ALL`].
    ended: [Counter; RequestOutcome::ALL.len()],
}

impl ModelMetrics {
    /// Creates metrics with histograms that `histogram` creates.
    pub(in crate::proxy) fn new(histogram: fn() -> Histogram) -> Self {
        let requests = Family::default();
        let (ttft, duration) = (
            HistogramOf::new_with_constructor(histogram),
            HistogramOf::new_with_constructor(histogram),
        );
        let meters = Arc::default();
        Self {
            requests,
            fallbacks: Family::default(),
            ttft,
            duration,
            meters,
        }
    }

    /// Adds the metrics to `registry`.
    pub(in crate::proxy) fn register(&self, registry: &mut Registry) {
        registry.register(
            "model_requests",
            "Requests by model and outcome",
            self.requests.clone(),
        );
        registry.register(
            "model_fallbacks",
            "Requests for a model that none of its engines could serve, sent to a fallback, by the model \
             that was meant",
            self.fallbacks.clone(),
        );
        registry.register(
            "model_ttft_seconds",
            "Time from a request's last byte to the first output of a stream, by model",
            self.ttft.clone(),
        );
        registry.register(
            "model_duration_seconds",
            "Time from a request's head to the end of its response, by model",
            self.duration.clone(),
        );
    }

    /// Counts a request of `model`, a name from the config, that a fallback serves.
    pub(in crate::proxy) fn falls_back(&self, model: &str) {
        let model = model.to_owned();
        self.fallbacks
            .get_or_create_owned(&RequestedModel { model })
            .inc();
    }

    /// Returns the metrics of `model`, or those of all other models. Calls `is_served` only for a
    /// model without its own series.
    pub(in crate::proxy) fn meter(
        &self,
        model: &str,
        is_served: impl FnOnce() -> bool,
    ) -> Arc<ModelMeter> {
        // Entries are complete or absent.
        let meters = self.meters.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(meter) = meters.get(model) {
            return Arc::clone(meter);
        }
        drop(meters);
        let is_served = is_served();
        let mut meters = self.meters.write().unwrap_or_else(PoisonError::into_inner);
        let name = match is_served && meters.len() < MODELS_MAX {
            true => model,
            false => OTHER_MODEL,
        };
        let meter = meters.entry(name.to_owned());
        Arc::clone(meter.or_insert_with(|| Arc::new(self.of(name))))
    }

    fn of(&self, model: &str) -> ModelMeter {
        let labels = RequestedModel {
            model: model.to_owned(),
        };
        let ended = |outcome: RequestOutcome| {
            let (model, outcome) = (model.to_owned(), outcome.label());
            self.requests
                .get_or_create_owned(&ModelEnd { model, outcome })
        };
        ModelMeter {
            ttft: self.ttft.get_or_create_owned(&labels),
            duration: self.duration.get_or_create_owned(&labels),
            ended: RequestOutcome::ALL.map(ended),
        }
    }
}

impl ModelMeter {
    /// Counts a request that ended.
    pub(in crate::proxy) fn ends(&self, outcome: RequestOutcome, duration: Duration) {
        self.duration.observe(duration.as_secs_f64());
        let nth = RequestOutcome::ALL.iter().position(|it| *it == outcome);
        if let Some(counter) = nth.and_then(|nth| self.ended.get(nth)) {
            counter.inc();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_series_are_bounded_to_served_models() {
        let metrics = ModelMetrics::new(|| Histogram::new([1.0]));
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let finishes = |model: &str, is_served: bool| {
            let meter = metrics.meter(model, || is_served);
            meter.ends(RequestOutcome::Finished, Duration::from_secs(2));
        };
        finishes("made-up", false);
        for number in 0..2 * MODELS_MAX {
            finishes(&format!("model-{number}"), true);
            finishes(&format!("model-{number}"), true);
        }
        let mut page = String::new();
        prometheus_client::encoding::text::encode(&mut page, &registry).unwrap();
        let finished = |model: &str| {
            let sample = format!("requests_total{{model=\"{model}\",outcome=\"finished\"}} ");
            let line = page
                .lines()
                .find_map(|line| line.strip_prefix(&format!("model_{sample}")));
            line.map(|value| value.parse::<usize>().unwrap())
        };
        assert_eq!(finished("model-0"), Some(2));
        assert_eq!(finished("made-up"), None);
        let models = page
            .lines()
            .filter(|line| line.starts_with("model_duration_seconds_count"));
        assert_eq!(models.count(), MODELS_MAX);
        // `other` occupies one place.
        assert_eq!(finished(OTHER_MODEL), Some(1 + 2 * (MODELS_MAX + 1)));
    }
}
