//! The request that the data plane forwards, and how admission and routing see it.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::HeaderValue;
use state::ids::Slot;

use super::deadline;
use super::decisions::RequestRecord;
use super::reading::ClientRequest;
use crate::admission::AdmissionRequest;
use crate::routing::RoutingRequest;

/// A request whose body is read and whose user is known.
pub(super) struct ProxiedRequest {
    pub(super) head: http::request::Parts,
    pub(super) body: Bytes,
    pub(super) read: ClientRequest,
    pub(super) request_id: HeaderValue,
    /// The client's address.
    pub(super) peer: HeaderValue,
    /// Where its decisions are noted.
    pub(super) record: Option<Arc<RequestRecord>>,
}

impl Deref for ProxiedRequest {
    type Target = ClientRequest;

    fn deref(&self) -> &ClientRequest {
        &self.read
    }
}

impl AdmissionRequest for ProxiedRequest {
    fn ask<'a>(&'a self, excluded: &'a [Slot]) -> RoutingRequest<'a> {
        let request_id = self.request_id.to_str().unwrap_or_default();
        self.read.ask(&self.head.headers, request_id, excluded)
    }

    fn priority(&self) -> i16 {
        self.priority
    }

    fn tokens_max(&self) -> Option<u32> {
        self.parsed.max_tokens
    }

    fn is_selective(&self) -> bool {
        !self.preferences.labels.is_empty() || self.identity.isolation.is_salted()
    }

    fn wait_max(&self, service: Duration) -> Option<Duration> {
        let deadline = self.deadline?;
        Some(deadline::wait_max(deadline, service, self.parsed.stream))
    }
}
