//! Streams whose engine failed in the middle of its output, as metrics show them.

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

/// Why a stream has to go on at another engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StreamBreak {
    /// The connection broke, or ended too early.
    Broke,
    /// The engine sent an error in its stream.
    Error,
    /// The engine sent nothing for too long.
    Stalled,
    /// The backend drains, and its streams move.
    Moved,
}

impl StreamBreak {
    const ALL: [Self; 4] = [Self::Broke, Self::Error, Self::Stalled, Self::Moved];

    /// Creates the counters of streams that go on, so that their rates are known from the start.
    pub(super) fn begin(counted: &Family<BreakLabels, Counter>) {
        let result = BreakResult::CONTINUED;
        for cause in Self::ALL {
            drop(counted.get_or_create(&BreakLabels { cause, result }));
        }
    }
}

impl EncodeLabelValue for StreamBreak {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> std::fmt::Result {
        match self {
            Self::Broke => "broke",
            Self::Error => "error",
            Self::Stalled => "stalled",
            Self::Moved => "moved",
        }
        .encode(encoder)
    }
}

/// Labels of the counter of streams whose engine failed.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct BreakLabels {
    /// What the engine did.
    pub cause: StreamBreak,
    /// `continued`, `completed` if only the end was missing, or the obstacle.
    pub result: BreakResult,
}

/// What became of a stream whose engine failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BreakResult(pub(in crate::proxy) &'static str);

impl BreakResult {
    pub(in crate::proxy) const CONTINUED: Self = Self("continued");
    pub(in crate::proxy) const COMPLETED: Self = Self("completed");
}

impl EncodeLabelValue for BreakResult {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> std::fmt::Result {
        self.0.encode(encoder)
    }
}
