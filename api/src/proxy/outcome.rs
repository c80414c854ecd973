//! How requests end, as shown in metrics, records and the access log.

use prometheus_client::encoding::{EncodeLabelValue, LabelValueEncoder};

/// How a request ended, as `quorate_proxy_requests_total` tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RequestOutcome {
    /// An engine's answer reached the client to its end.
    Finished,
    /// Answered here, without an engine: the model list.
    Local,
    /// Refused here with a 4xx.
    Refused,
    /// No engine could take it: a 5xx made here.
    Failed,
    /// An engine's own error was passed on.
    EngineError,
    /// The engine broke off in the middle of its answer.
    BrokenOff,
    /// The client left before the end.
    ClientLeft,
}

impl RequestOutcome {
    /// All of them, in the order in which they are declared.
    pub(super) const ALL: [Self; 7] = [
        Self::Finished,
        Self::Local,
        Self::Refused,
        Self::Failed,
        Self::EngineError,
        Self::BrokenOff,
        Self::ClientLeft,
    ];

    /// Whether its client got no whole answer, through no fault of its own.
    pub(super) fn is_failure(self) -> bool {
        match self {
            Self::Failed | Self::EngineError | Self::BrokenOff => true,
            Self::Finished | Self::Local | Self::Refused | Self::ClientLeft => false,
        }
    }

    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Local => "local",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::EngineError => "engine-error",
            Self::BrokenOff => "broken-off",
            Self::ClientLeft => "client-left",
        }
    }
}

impl EncodeLabelValue for RequestOutcome {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> std::fmt::Result {
        self.label().encode(encoder)
    }
}
