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
    /// The replica that relayed the stream failed, or the client lost its connection to it.
    Router,
}

impl StreamBreak {
    const ALL: [Self; 5] = [
        Self::Broke,
        Self::Error,
        Self::Stalled,
        Self::Moved,
        Self::Router,
    ];

    /// Creates the counters of streams that go on, and of those that are lost, so that their rates
    /// are known from the first one.
    pub(super) fn begin(counted: &Family<BreakLabels, Counter>) {
        for cause in Self::ALL {
            let results = match cause {
                Self::Broke | Self::Error => BreakResult::ALL,
                // Such a stream may stay where it is, or its client has asked to resume it.
                Self::Stalled | Self::Moved | Self::Router => &[BreakResult::CONTINUED],
            };
            for result in results.iter().copied() {
                drop(counted.get_or_create(&BreakLabels { cause, result }));
            }
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
            Self::Router => "router",
        }
        .encode(encoder)
    }
}

/// Labels of the counter of streams whose engine failed.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct BreakLabels {
    /// What the engine did, or that the router failed.
    pub cause: StreamBreak,
    /// `continued`, `completed` if only the end was missing, or the obstacle.
    pub result: BreakResult,
}

/// What became of a broken stream, for its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StreamFate {
    /// It went on, or was completed.
    Continued,
    /// It ended there.
    Lost,
}

impl BreakLabels {
    /// Returns what became of the stream; `None` if it stayed where it was.
    pub(super) fn fate(&self) -> Option<StreamFate> {
        match (self.cause, self.result) {
            (_, BreakResult::CONTINUED | BreakResult::COMPLETED) => Some(StreamFate::Continued),
            (StreamBreak::Stalled | StreamBreak::Moved, _) => None,
            (StreamBreak::Broke | StreamBreak::Error | StreamBreak::Router, _) => {
                Some(StreamFate::Lost)
            }
        }
    }
}

/// What became of a stream whose engine failed, as the counter shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BreakResult(&'static str);

/// Defines the results, each with its label.
macro_rules! results {
    ($($result:ident $label:literal,)*) => {
        impl BreakResult {
            $(pub(in crate::proxy) const $result: Self = Self($label);)*
            const ALL: &[Self] = &[$(Self::$result,)*];
        }
    };
}

results! {
    CONTINUED "continued",
    COMPLETED "completed",
    FIELD "field",
    TOKEN_PROMPT "token-prompt",
    OTHER_OUTPUT "other-output",
    TOO_LONG "too-long",
    TEMPLATE "template",
    NO_USAGE "no-usage",
    AT_LIMIT "at-limit",
    INCOMPLETE_EVENT "incomplete-event",
    BREAKS_BACKENDS "breaks-backends",
    NO_ATTEMPTS "no-attempts",
    TOO_MANY_MOVES "too-many-moves",
    NO_BACKEND "no-backend",
    REFUSED "refused",
    NOT_CONTINUED "not-continued",
}

impl EncodeLabelValue for BreakResult {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> std::fmt::Result {
        self.0.encode(encoder)
    }
}
