//! The head of a response that the gateway made itself.

use http::StatusCode;

use super::ext_proc::HttpHeaders;
use super::heads;

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
    pub(super) fn of(told: &HttpHeaders, details: Option<String>) -> Self {
        Self {
            status: heads::status(told),
            is_over: told.end_of_stream,
            details,
        }
    }
}
