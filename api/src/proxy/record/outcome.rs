//! Outcomes of requests, as shown in metrics, records and the access log.

use prometheus_client::encoding::{EncodeLabelValue, LabelValueEncoder};

/// Outcome of a request, as counted by `quorate_proxy_requests_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RequestOutcome {
    /// A backend's response reached the client completely.
    Finished,
    /// The router responded without a backend, for example with the model list.
    Local,
    /// The router refused the request with a 4xx.
    Refused,
    /// No backend could serve the request, so the router, or the gateway that asked it, responded
    /// with a 5xx.
    Failed,
    /// A backend's own error was relayed.
    EngineError,
    /// The backend broke off in the middle of its response.
    BrokenOff,
    /// The gateway that asked for endpoints responded itself, and no backend is at fault.
    GatewayReply,
    /// The client left before the end of the response.
    ClientLeft,
}

impl RequestOutcome {
    /// All outcomes in the order of their declaration.
    pub(in crate::proxy) const ALL: [Self; 8] = [
        Self::Finished,
        Self::Local,
        Self::Refused,
        Self::Failed,
        Self::EngineError,
        Self::BrokenOff,
        Self::GatewayReply,
        Self::ClientLeft,
    ];

    /// Whether the request failed, other than by a refusal of the router, by the gateway's own
    /// decision, or because the client left.
    pub(in crate::proxy) fn is_failure(self) -> bool {
        match self {
            Self::Failed | Self::EngineError | Self::BrokenOff => true,
            Self::Finished
            | Self::Local
            | Self::Refused
            | Self::GatewayReply
            | Self::ClientLeft => false,
        }
    }

    pub(in crate::proxy) fn label(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Local => "local",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::EngineError => "engine-error",
            Self::BrokenOff => "broken-off",
            Self::GatewayReply => "gateway-reply",
            Self::ClientLeft => "client-left",
        }
    }
}

impl EncodeLabelValue for RequestOutcome {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> std::fmt::Result {
        self.label().encode(encoder)
    }
}
