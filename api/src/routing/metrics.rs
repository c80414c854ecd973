//! Metrics of routing, prefix predictions, shares and the outbox.

use std::collections::BTreeSet;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::learnt::LearntFrom;
use super::outbox::OutboxStatus;
use super::outbox::driver::DriverMetrics;
use super::verdict::{FilterCounts, FilterVerdict};
use super::{AttemptEnd, RoutingRejection};
use crate::prompt::TokenizingMetrics;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BackendLabels {
    backend: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PredictedLabels {
    backend: String,
    learnt: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EndLabels {
    backend: String,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DecisionLabels {
    policy: &'static str,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ModelLabels {
    model: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FilterLabels {
    filter: &'static str,
}

/// Counters of the backends excluded by each filter, cached to avoid lookups.
#[derive(Debug, Clone)]
struct FilterCounters {
    family: Family<FilterLabels, Counter>,
    /// Counters in the order of [`FilterVerdict::FILTERS`].
    counters: [Counter; FilterVerdict::FILTERS.len()],
}

impl Default for FilterCounters {
    fn default() -> Self {
        let family = Family::<FilterLabels, Counter>::default();
        let counter = |(_, filter)| family.get_or_create_owned(&FilterLabels { filter });
        let counters = FilterVerdict::FILTERS.map(counter);
        Self { family, counters }
    }
}

/// Counters and gauges of routing, the prefix predictions and the outbox. Clones are cheap and
/// share their values.
#[derive(Debug, Clone, Default)]
pub struct RoutingMetrics {
    decisions: Family<DecisionLabels, Counter>,
    filtered: FilterCounters,
    panics: Family<ModelLabels, Gauge>,
    ended: Family<EndLabels, Counter>,
    prompt_tokens: Family<BackendLabels, Counter>,
    predicted_tokens: Family<PredictedLabels, Counter>,
    cached_tokens: Family<BackendLabels, Counter>,
    totals: Arc<PrefixTotals>,
    /// Ids of the backends that have series. Locked while series are added or removed.
    shown: Arc<Mutex<BTreeSet<String>>>,
    /// Names of sessions that were ignored because they were out of bounds.
    pub(crate) refused_session_names: Counter,
    outbox_items: Gauge,
    outbox_bytes: Gauge,
    outbox_age_s: Gauge<f64, AtomicU64>,
    outbox_dropped: Counter,
    pub(super) driver: DriverMetrics,
    pub(super) shares: ShareMetrics,
    pub(super) tokenizing: TokenizingMetrics,
}

/// Prompt tokens, over all backends, of requests whose engine reported cached tokens.
#[derive(Debug, Default)]
struct PrefixTotals {
    prompt: AtomicU64,
    predicted: AtomicU64,
    /// Part of `predicted` that this replica did not know from its own requests.
    shared: AtomicU64,
    cached: AtomicU64,
}

/// Metrics of this replica's shares of limits. Clones are cheap and share their values.
#[derive(Debug, Clone, Default)]
pub(super) struct ShareMetrics {
    pub(super) held: Gauge,
    pub(super) over: Gauge,
    pub(super) handed_over: Counter,
}

impl ShareMetrics {
    fn register(&self, registry: &mut Registry) {
        registry.register(
            "quorate_route_places",
            "Requests that this replica may have running at limited backends",
            self.held.clone(),
        );
        registry.register(
            "quorate_route_places_exceeded",
            "Requests running beyond quorate_route_places, because a limit fell or replicas came and went",
            self.over.clone(),
        );
        registry.register(
            "quorate_route_places_handed_over",
            "Places handed to other replicas",
            self.handed_over.clone(),
        );
    }
}

/// All ends of attempts, in the order of the counters in [`BackendMeter`].
const ENDS: [AttemptEnd; 6] = [
    AttemptEnd::Finished,
    AttemptEnd::Broken,
    AttemptEnd::ClientLeft,
    AttemptEnd::NotRun,
    AttemptEnd::Failed,
    AttemptEnd::Moved,
];

/// Metrics of one backend, cached to avoid lookups.
#[derive(Debug)]
pub(super) struct BackendMeter {
    prompt_tokens: Counter,
    /// Counters in the order of [`LearntFrom::ALL`].
    predicted_tokens: [Counter; LearntFrom::ALL.len()],
    cached_tokens: Counter,
    totals: Arc<PrefixTotals>,
    ended: [Counter; 6],
}

impl RoutingMetrics {
    /// Registers all metrics in `registry`, which `/metrics` shows.
    pub fn register(&self, registry: &mut Registry) {
        self.tokenizing.register(registry);
        self.shares.register(registry);
        let mut add = |name: &str, help: &str, metric: &dyn Register| {
            metric.register(registry, name, help);
        };
        add(
            "quorate_route_decisions",
            "Routing decisions by policy and outcome",
            &self.decisions,
        );
        add(
            "quorate_route_filtered",
            "Backends excluded from a decision, by filter",
            &self.filtered.family,
        );
        add(
            "quorate_route_panic",
            "1 while the model's probes are ignored, because most fail while requests succeed",
            &self.panics,
        );
        add(
            "quorate_route_attempts",
            "Attempts by backend and outcome",
            &self.ended,
        );
        add(
            "quorate_prefix_prompt_tokens",
            "All prompt tokens of requests whose engine reported cached tokens",
            &self.prompt_tokens,
        );
        add(
            "quorate_prefix_predicted_tokens",
            "Prompt tokens predicted to be cached, of requests whose engine reported cached tokens, by whence they were known",
            &self.predicted_tokens,
        );
        add(
            "quorate_prefix_cached_tokens",
            "Prompt tokens that the engine had cached, of requests whose engine reported it",
            &self.cached_tokens,
        );
        add(
            "quorate_route_session_names_refused",
            "Names of sessions that were ignored: too long, not UTF-8, or with control characters",
            &self.refused_session_names,
        );
        self.register_outbox(registry);
    }

    fn register_outbox(&self, registry: &mut Registry) {
        let mut add = |name: &str, help: &str, metric: &dyn Register| {
            metric.register(registry, name, help);
        };
        add(
            "quorate_state_outbox_items",
            "Items not yet applied by the log",
            &self.outbox_items,
        );
        add(
            "quorate_state_outbox_bytes",
            "Encoded size of items not yet applied by the log",
            &self.outbox_bytes,
        );
        add(
            "quorate_state_outbox_age_seconds",
            "Age of the batch that is being proposed",
            &self.outbox_age_s,
        );
        add(
            "quorate_state_outbox_dropped",
            "Items dropped: the outbox was full, the state rejected them, or they were too large",
            &self.outbox_dropped,
        );
        add(
            "quorate_state_outbox_flushes",
            "Batches applied",
            &self.driver.flushes,
        );
        add(
            "quorate_state_outbox_retries",
            "Batches proposed again",
            &self.driver.retries,
        );
    }

    /// Returns the numbers of prompt tokens of requests whose engine reported cached tokens: all of
    /// them, those predicted to be cached, the part of these that this replica did not know from its
    /// own requests, and those that were cached.
    #[must_use]
    pub fn prefix_totals(&self) -> [u64; 4] {
        let PrefixTotals {
            prompt,
            predicted,
            shared,
            cached,
        } = &*self.totals;
        [prompt, predicted, shared, cached].map(|it| it.load(Relaxed))
    }

    pub(super) fn meter(&self, backend: &str) -> Arc<BackendMeter> {
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        shown.insert(backend.to_owned());
        let labels = BackendLabels {
            backend: backend.to_owned(),
        };
        let ended = |end: AttemptEnd| {
            let labels = EndLabels {
                backend: backend.to_owned(),
                outcome: end.label(),
            };
            self.ended.get_or_create_owned(&labels)
        };
        let predicted = |learnt: LearntFrom| {
            let labels = PredictedLabels {
                backend: backend.to_owned(),
                learnt: learnt.label(),
            };
            self.predicted_tokens.get_or_create_owned(&labels)
        };
        Arc::new(BackendMeter {
            prompt_tokens: self.prompt_tokens.get_or_create_owned(&labels),
            predicted_tokens: LearntFrom::ALL.map(predicted),
            cached_tokens: self.cached_tokens.get_or_create_owned(&labels),
            totals: Arc::clone(&self.totals),
            ended: ENDS.map(ended),
        })
    }

    /// Removes the series of backends that are no longer registered. Requests that still run at
    /// them update detached series.
    pub(super) fn forget_removed(&self, registered: impl FnOnce() -> Arc<state::Registry>) {
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        // Read under the lock: a backend that is registered again keeps its new series.
        let registry = registered();
        shown.retain(|backend| {
            let is_registered = registry.backends.iter().any(|it| it.spec.id == *backend);
            if !is_registered {
                self.remove(backend);
            }
            is_registered
        });
    }

    fn remove(&self, backend: &str) {
        let labels = BackendLabels {
            backend: backend.to_owned(),
        };
        for family in [&self.prompt_tokens, &self.cached_tokens] {
            family.remove(&labels);
        }
        for learnt in LearntFrom::ALL {
            self.predicted_tokens.remove(&PredictedLabels {
                backend: backend.to_owned(),
                learnt: learnt.label(),
            });
        }
        for end in ENDS {
            self.ended.remove(&EndLabels {
                backend: backend.to_owned(),
                outcome: end.label(),
            });
        }
    }

    pub(super) fn decided(&self, policy: &'static str, refusal: Option<RoutingRejection>) {
        let outcome = refusal.map_or("chosen", RoutingRejection::label);
        self.decisions
            .get_or_create(&DecisionLabels { policy, outcome })
            .inc();
    }

    /// Counts the backends that the filters of a decision excluded.
    pub(super) fn filtered(&self, tally: &FilterCounts) {
        for (counter, &count) in self.filtered.counters.iter().zip(tally.counts()) {
            if count > 0 {
                counter.inc_by(u64::from(count));
            }
        }
    }

    /// Sets whether the metric shows `model` to be in panic mode.
    pub(super) fn shows_panic(&self, model: &str, is_panic: bool) {
        let labels = ModelLabels {
            model: model.to_owned(),
        };
        if is_panic {
            self.panics.get_or_create(&labels).set(1);
        } else {
            self.panics.remove(&labels);
        }
    }

    /// Updates the outbox metrics from `status`. Call this before a scrape.
    pub(super) fn show_outbox(&self, status: &OutboxStatus) {
        let whole = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        self.outbox_items.set(whole(status.queued_items as u64));
        self.outbox_bytes.set(whole(status.queued_bytes as u64));
        let oldest = Duration::from_millis(status.oldest_ms);
        self.outbox_age_s.set(oldest.as_secs_f64());
        self.outbox_dropped.inner().store(status.dropped, Relaxed);
    }
}

impl BackendMeter {
    pub(super) fn count_end(&self, end: AttemptEnd) {
        let at = match end {
            AttemptEnd::Finished => 0,
            AttemptEnd::Broken => 1,
            AttemptEnd::ClientLeft => 2,
            AttemptEnd::NotRun => 3,
            AttemptEnd::Failed => 4,
            AttemptEnd::Moved => 5,
        };
        self.ended[at].inc();
    }

    /// Adds the prompt tokens of a request: all, those predicted to be cached in the order of
    /// [`LearntFrom::ALL`], and those cached.
    pub(super) fn count_prefix(&self, prompt: u64, predicted: [u64; 3], cached: u64) {
        self.prompt_tokens.inc_by(prompt);
        for (counter, tokens) in self.predicted_tokens.iter().zip(predicted) {
            counter.inc_by(tokens);
        }
        self.cached_tokens.inc_by(cached);
        self.totals.prompt.fetch_add(prompt, Relaxed);
        let [here, ..] = predicted;
        let predicted: u64 = predicted.iter().sum();
        self.totals.predicted.fetch_add(predicted, Relaxed);
        self.totals.shared.fetch_add(predicted - here, Relaxed);
        self.totals.cached.fetch_add(cached, Relaxed);
    }
}

/// A metric of any type that [`RoutingMetrics::register`] can register from a list.
trait Register {
    fn register(&self, registry: &mut Registry, name: &str, help: &str);
}

impl<M: prometheus_client::registry::Metric + Clone> Register for M {
    fn register(&self, registry: &mut Registry, name: &str, help: &str) {
        registry.register(name, help, self.clone());
    }
}
