//! Metrics of the endpoint picker. Its requests count in those of the data plane too.

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// What a gateway was told about a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PickedOutcome {
    /// The endpoints that it may go to.
    Picked,
    /// The answer itself: a refusal, or the list of models.
    Answered,
    /// Nothing: it left before.
    Left,
    /// That it spoke out of turn, or not in time.
    Broken,
    /// That as many streams are open as there may be.
    Refused,
}

/// Which endpoint has answered, as a gateway tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ServedBy {
    /// The first that it was told.
    First,
    /// A further one that it was told.
    Further,
    /// One that it was not told.
    Other,
    /// It does not tell.
    Untold,
}

impl PickedOutcome {
    const ALL: [Self; 5] = [
        Self::Picked,
        Self::Answered,
        Self::Left,
        Self::Broken,
        Self::Refused,
    ];
}

impl ServedBy {
    const ALL: [Self; 4] = [Self::First, Self::Further, Self::Other, Self::Untold];
}

impl EncodeLabelValue for PickedOutcome {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> std::fmt::Result {
        let label = match self {
            Self::Picked => "picked",
            Self::Answered => "answered",
            Self::Left => "left",
            Self::Broken => "broken",
            Self::Refused => "refused",
        };
        label.encode(encoder)
    }
}

impl EncodeLabelValue for ServedBy {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> std::fmt::Result {
        let label = match self {
            Self::First => "first",
            Self::Further => "further",
            Self::Other => "other",
            Self::Untold => "untold",
        };
        label.encode(encoder)
    }
}

/// Labels of the counter of picks.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct PickLabels {
    outcome: PickedOutcome,
}

/// Labels of the counter of answers.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct ServedLabels {
    by: ServedBy,
}

/// Metrics of one picker. Clones share their values.
#[derive(Debug, Clone, Default)]
pub struct PickerMetrics {
    picks: Family<PickLabels, Counter>,
    served: Family<ServedLabels, Counter>,
    /// Streams of gateways that are open, one per request.
    pub streams: Gauge,
    /// Connections of gateways that are open.
    pub connections: Gauge,
}

impl PickerMetrics {
    /// Adds the metrics to `registry` as `quorate_picker_...`.
    pub fn register(&self, registry: &mut Registry) {
        for outcome in PickedOutcome::ALL {
            drop(self.picks.get_or_create(&PickLabels { outcome }));
        }
        for by in ServedBy::ALL {
            drop(self.served.get_or_create(&ServedLabels { by }));
        }
        let registry = registry.sub_registry_with_prefix("quorate_picker");
        registry.register(
            "requests",
            "Requests that gateways asked about, by outcome",
            self.picks.clone(),
        );
        registry.register(
            "served",
            "Answers, by which of the picked endpoints served them",
            self.served.clone(),
        );
        registry.register(
            "streams",
            "Open streams of gateways, one per request",
            self.streams.clone(),
        );
        registry.register(
            "connections",
            "Open connections of gateways",
            self.connections.clone(),
        );
    }

    /// Counts what a gateway was told.
    pub(super) fn told(&self, outcome: PickedOutcome) {
        self.picks.get_or_create(&PickLabels { outcome }).inc();
    }

    /// Counts who has answered.
    pub(super) fn served(&self, by: ServedBy) {
        self.served.get_or_create(&ServedLabels { by }).inc();
    }

    /// Requests of which gateways were told this.
    #[must_use]
    pub fn requests(&self, outcome: PickedOutcome) -> u64 {
        self.picks.get_or_create(&PickLabels { outcome }).get()
    }

    /// Answers that came from there.
    #[must_use]
    pub fn answers(&self, by: ServedBy) -> u64 {
        self.served.get_or_create(&ServedLabels { by }).get()
    }
}
