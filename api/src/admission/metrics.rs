//! Metrics of admission.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// Upper bounds of the wait time buckets, in seconds.
const BUCKETS_S: [f64; 12] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 60.0,
];

/// Reason why a request was not admitted or left the queue without a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LeaveReason {
    /// The user exceeds a limit (status 429).
    OverLimit,
    /// The queue is full (status 503).
    QueueFull,
    /// The predicted wait is too long (status 503).
    TooLate,
    /// The maximum wait has passed (status 503).
    WaitedTooLong,
    /// The client's deadline has passed (status 503).
    Deadline,
    /// The wait reached the target while the queue was in overload (status 503).
    Overload,
    /// The replica is leaving the cluster (status 503).
    Leaving,
    /// No backend can take the request any more. The status depends on the reason.
    NoBackend,
    /// The client disconnected.
    ClientGone,
}

impl LeaveReason {
    fn label(self) -> &'static str {
        match self {
            Self::OverLimit => "over-limit",
            Self::QueueFull => "queue-full",
            Self::TooLate => "too-late",
            Self::WaitedTooLong => "waited-too-long",
            Self::Deadline => "deadline",
            Self::Overload => "overload",
            Self::Leaving => "leaving",
            Self::NoBackend => "no-backend",
            Self::ClientGone => "client-left",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

/// Counters and gauges of admission. Clones are cheap and share their values.
#[derive(Debug, Clone)]
pub struct AdmissionMetrics {
    pub(super) waiting: Gauge,
    pub(super) waiting_users: Gauge,
    waits: Histogram,
    left: Family<ReasonLabels, Counter>,
    pub(super) overloaded: Gauge,
    pub(super) predicted_wait: Gauge<f64, AtomicU64>,
    pub(super) wait_max: Gauge<f64, AtomicU64>,
    pub(super) gate_closed: Counter,
    pub(super) unconfirmed_permits: Counter,
    pub(super) slack_tokens: Gauge,
    pub(super) bound_tokens: Gauge,
    pub(super) gap_tokens: Gauge,
}

impl Default for AdmissionMetrics {
    fn default() -> Self {
        Self {
            waiting: Gauge::default(),
            waiting_users: Gauge::default(),
            waits: Histogram::new(BUCKETS_S),
            left: Family::default(),
            overloaded: Gauge::default(),
            predicted_wait: Gauge::default(),
            wait_max: Gauge::default(),
            gate_closed: Counter::default(),
            unconfirmed_permits: Counter::default(),
            slack_tokens: Gauge::default(),
            bound_tokens: Gauge::default(),
            gap_tokens: Gauge::default(),
        }
    }
}

impl AdmissionMetrics {
    /// Registers all metrics of admission in `registry`, which `/metrics` shows.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "quorate_admission_waiting",
            "Requests waiting here for a backend",
            self.waiting.clone(),
        );
        registry.register(
            "quorate_admission_waiting_users_here",
            "Users with requests waiting here that have not had a backend yet, summed over models",
            self.waiting_users.clone(),
        );
        registry.register(
            "quorate_admission_wait_seconds",
            "Queueing time of requests that were dispatched",
            self.waits.clone(),
        );
        registry.register(
            "quorate_admission_overloaded",
            "Models in overload",
            self.overloaded.clone(),
        );
        registry.register(
            "quorate_admission_predicted_wait_seconds",
            "Predicted time to drain the longest queue; 0 if nothing waits",
            self.predicted_wait.clone(),
        );
        registry.register(
            "quorate_admission_wait_max_seconds",
            "Longest wait worth queueing for, learned from clients and load, of the model with the \
             shortest; 0 if nothing waits",
            self.wait_max.clone(),
        );
        registry.register(
            "quorate_admission_refused",
            "Requests refused admission, by reason",
            self.left.clone(),
        );
        registry.register(
            "quorate_admission_gate_closed",
            "Times that a backend had room but the gate held back every waiting user",
            self.gate_closed.clone(),
        );
        registry.register(
            "quorate_admission_unconfirmed_permits",
            "Requests of users with a limit on concurrent requests that were judged by the replicated \
             counts, because the user's issuer did not answer in time",
            self.unconfirmed_permits.clone(),
        );
        registry.register(
            "quorate_admission_slack_tokens",
            "Gate slack G: how far above the least waiting user's counter a user may still be served",
            self.slack_tokens.clone(),
        );
        registry.register(
            "quorate_admission_bound_tokens",
            "Fairness bound 2(U + X + G): largest possible difference in service between two \
             backlogged users, in priced tokens, since something began to wait",
            self.bound_tokens.clone(),
        );
        registry.register(
            "quorate_admission_gap_tokens",
            "Largest difference seen between the counters of waiting users, in priced tokens, since \
             something began to wait",
            self.gap_tokens.clone(),
        );
    }

    pub(super) fn waited(&self, seconds: f64) {
        self.waits.observe(seconds);
    }

    pub(super) fn left(&self, why: LeaveReason) {
        let reason = why.label();
        self.left.get_or_create(&ReasonLabels { reason }).inc();
    }
}
