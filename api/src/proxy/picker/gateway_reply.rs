//! The head of a response that the gateway made itself.

use http::StatusCode;

use super::gateway_message::ToldHead;
use super::heads;
use crate::proxy::record::metrics::{RequestMetricsGuard, RequestOutcome};

/// A response that the gateway made before any endpoint was sent to it, or in place of an engine's.
#[derive(Debug)]
pub(super) struct GatewayReply {
    /// Status; `None` if the head has none.
    pub(super) status: Option<StatusCode>,
    /// Whether no body follows.
    pub(super) is_over: bool,
    /// The gateway's reason; `None` if it sends none.
    pub(super) details: Option<String>,
}

impl GatewayReply {
    pub(super) fn of(told: &ToldHead, details: Option<String>) -> Self {
        Self {
            status: heads::status(told),
            is_over: told.end_of_stream,
            details,
        }
    }

    /// Ends the accounting of a request that got this response.
    pub(super) fn account(&self, mut request_metrics: RequestMetricsGuard, how: RequestOutcome) {
        let why = self.details.as_deref().unwrap_or("no reason was sent");
        request_metrics.fails_because(format!("the gateway's own response: {why}"));
        if let Some(status) = self.status {
            request_metrics.answered(status);
        }
        request_metrics.ends(how);
    }
}
