//! Accounting of a request while its stream is open.

use http::{HeaderMap, HeaderValue};
use state::ids::UserKey;

use crate::proxy::record::metrics::RequestMetricsGuard;
use crate::proxy::request::dialect::Dialect;
use crate::proxy::request::headers::request_id;

/// Accounting of a request while its stream is open.
pub(super) struct StreamAccounting {
    /// Guard of the metrics; `None` before the request's head, and once the response has begun.
    pub(super) request_metrics: Option<RequestMetricsGuard>,
    pub(super) user: Option<UserKey>,
    pub(super) dialect: Dialect,
    /// Id of the request; `None` before its head.
    pub(super) id: Option<HeaderValue>,
    /// List of the request headers without effect, if any.
    pub(super) ignored: Option<HeaderValue>,
}

impl StreamAccounting {
    /// Creates the accounting of a stream whose first message is still to come.
    pub(super) fn new() -> Self {
        Self {
            request_metrics: None,
            user: None,
            dialect: Dialect::OpenAi,
            id: None,
            ignored: None,
        }
    }

    /// Returns the id of the request, or a new one if its head could not be read.
    pub(super) fn id(&self) -> HeaderValue {
        let id = self.id.clone();
        id.unwrap_or_else(|| request_id(&HeaderMap::new()))
    }

    pub(super) fn request_metrics(&mut self) -> &mut RequestMetricsGuard {
        let request_metrics = self.request_metrics.as_mut();
        request_metrics.expect("it is handed over when the answer begins, and asked for before")
    }
}
