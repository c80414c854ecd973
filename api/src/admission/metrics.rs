//! What admission counts.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// Upper bounds of the wait's buckets, in seconds.
const BUCKETS_S: [f64; 12] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 60.0,
];

/// Why a request was not admitted, or left before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Left {
    /// The user is over a limit: 429.
    OverLimit,
    /// Too many wait: 503.
    QueueFull,
    /// It would not have gone in time: 503.
    TooLate,
    /// It waited too long: 503.
    WaitedTooLong,
    /// It waited as long as its client does: 503.
    Deadline,
    /// It waited for the target while the queue was in overload: 503.
    Overload,
    /// The replica leaves: 503.
    Leaving,
    /// No backend could take it any more, as its answer says.
    NoBackend,
    /// The client left.
    ClientGone,
}

impl Left {
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
struct Reason {
    reason: &'static str,
}

/// Counters and gauges of admission. Cheap to clone; clones count together.
#[derive(Debug, Clone)]
pub struct AdmissionMetrics {
    pub(super) waiting: Gauge,
    pub(super) waiting_users: Gauge,
    waits: Histogram,
    left: Family<Reason, Counter>,
    pub(super) overloaded: Gauge,
    pub(super) predicted_wait: Gauge<f64, AtomicU64>,
    pub(super) wait_max: Gauge<f64, AtomicU64>,
    pub(super) gate_closed: Counter,
    pub(super) grants: Counter,
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
            grants: Counter::default(),
            slack_tokens: Gauge::default(),
            bound_tokens: Gauge::default(),
            gap_tokens: Gauge::default(),
        }
    }
}

impl AdmissionMetrics {
    /// Adds everything to the registry that `/metrics` shows.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "quorate_admission_waiting",
            "Requests that wait here for a backend below its limit",
            self.waiting.clone(),
        );
        registry.register(
            "quorate_admission_waiting_users",
            "Users whose requests wait here, by model added up",
            self.waiting_users.clone(),
        );
        registry.register(
            "quorate_admission_wait_seconds",
            "Time that requests waited which then went to a backend",
            self.waits.clone(),
        );
        registry.register(
            "quorate_admission_overloaded",
            "Models for which more requests come than can be served",
            self.overloaded.clone(),
        );
        registry.register(
            "quorate_admission_predicted_wait_seconds",
            "Time until all that waits here has gone, of the model with most; 0: nothing waits",
            self.predicted_wait.clone(),
        );
        registry.register(
            "quorate_admission_wait_max_seconds",
            "Longest wait that is of use as learnt from clients and load, of the model with least; \
             0: nothing waits",
            self.wait_max.clone(),
        );
        registry.register(
            "quorate_admission_refused",
            "Requests that were not admitted, by reason",
            self.left.clone(),
        );
        registry.register(
            "quorate_admission_gate_closed",
            "Looks at the queue that found room and nobody whom the gate lets go",
            self.gate_closed.clone(),
        );
        registry.register(
            "quorate_admission_grants",
            "Requests of this replica that the log granted",
            self.grants.clone(),
        );
        registry.register(
            "quorate_admission_slack_tokens",
            "How far above the least waiting user's counter a user may be served, G",
            self.slack_tokens.clone(),
        );
        registry.register(
            "quorate_admission_bound_tokens",
            "Largest difference in service between two users who wait all the time, 2(U + X + G), in \
             priced tokens, since something began to wait",
            self.bound_tokens.clone(),
        );
        registry.register(
            "quorate_admission_gap_tokens",
            "Largest difference seen here between the counters of users who wait, in priced tokens, \
             since something began to wait",
            self.gap_tokens.clone(),
        );
    }

    pub(super) fn waited(&self, seconds: f64) {
        self.waits.observe(seconds);
    }

    pub(super) fn left(&self, why: Left) {
        let reason = why.label();
        self.left.get_or_create(&Reason { reason }).inc();
    }
}
