//! Metrics of the endpoint picker. Its requests also count in those of the data plane.

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// The picker's reply to a gateway about a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PickedOutcome {
    /// The picker named the endpoints for the request.
    Picked,
    /// The picker sent the response itself: a refusal, or the list of models.
    Answered,
    /// The gateway responded before the picker did. The picker let that response pass.
    Passed,
    /// The picker sent nothing, because the gateway left earlier.
    Left,
    /// The picker sent an error, because the gateway sent an unexpected message or was too slow.
    Broken,
    /// The picker refused the stream, because the maximum number of streams was open.
    Refused,
}

/// Endpoint that responded, as reported by the gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ServedBy {
    /// The first picked endpoint.
    First,
    /// Another picked endpoint.
    Further,
    /// An endpoint that was not picked.
    Other,
    /// The gateway itself responded.
    Gateway,
    /// The gateway does not report it.
    Untold,
}

impl PickedOutcome {
    const ALL: [Self; 6] = [
        Self::Picked,
        Self::Answered,
        Self::Passed,
        Self::Left,
        Self::Broken,
        Self::Refused,
    ];
}

impl ServedBy {
    const ALL: [Self; 5] = [
        Self::First,
        Self::Further,
        Self::Other,
        Self::Gateway,
        Self::Untold,
    ];
}

impl EncodeLabelValue for PickedOutcome {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> std::fmt::Result {
        let label = match self {
            Self::Picked => "picked",
            Self::Answered => "answered",
            Self::Passed => "passed",
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
            Self::Gateway => "gateway",
            Self::Untold => "untold",
        };
        label.encode(encoder)
    }
}

/// Labels of the counter of requests.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct PickLabels {
    outcome: PickedOutcome,
}

/// Labels of the counter of responses.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct ServedLabels {
    by: ServedBy,
}

/// Metrics of one picker. Clones share their values.
#[derive(Debug, Clone, Default)]
pub struct PickerMetrics {
    picks: Family<PickLabels, Counter>,
    served: Family<ServedLabels, Counter>,
    /// Open streams of gateways, one per request.
    pub streams: Gauge,
    /// Open connections of gateways.
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

    /// Counts a reply to a gateway.
    pub(super) fn told(&self, outcome: PickedOutcome) {
        self.picks.get_or_create(&PickLabels { outcome }).inc();
    }

    /// Counts a response by its endpoint.
    pub(super) fn served(&self, by: ServedBy) {
        self.served.get_or_create(&ServedLabels { by }).inc();
    }

    /// Returns the number of requests with this outcome.
    #[must_use]
    pub fn requests(&self, outcome: PickedOutcome) -> u64 {
        self.picks.get_or_create(&PickLabels { outcome }).get()
    }

    /// Returns the number of responses from endpoints of the kind `by`.
    #[must_use]
    pub fn answers(&self, by: ServedBy) -> u64 {
        self.served.get_or_create(&ServedLabels { by }).get()
    }
}
