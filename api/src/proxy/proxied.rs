//! The request that the data plane forwards, and how admission and routing see it.

use std::time::Duration;

use bytes::Bytes;
use http::HeaderValue;
use state::ids::Slot;

use super::deadline;
use crate::admission::AdmissionRequest;
use crate::prompt::{ParsedBody, PromptIdentity};
use crate::routing::{RoutingPreferences, RoutingRequest, UserName};

/// A request whose body is read and whose user is known.
pub(super) struct ProxiedRequest {
    pub(super) head: http::request::Parts,
    pub(super) body: Bytes,
    pub(super) parsed: ParsedBody,
    pub(super) identity: PromptIdentity,
    pub(super) user: UserName,
    pub(super) preferences: RoutingPreferences,
    pub(super) request_id: HeaderValue,
    /// The client's address.
    pub(super) peer: HeaderValue,
    /// Among requests that wait.
    pub(super) priority: i16,
    /// How long its client waits, as it tells.
    pub(super) deadline: Option<Duration>,
}

impl AdmissionRequest for ProxiedRequest {
    fn ask<'a>(&'a self, excluded: &'a [Slot]) -> RoutingRequest<'a> {
        RoutingRequest {
            model: &self.parsed.model,
            identity: &self.identity,
            request_id: self.request_id.to_str().unwrap_or_default(),
            user: &self.user,
            headers: Some(&self.head.headers),
            policy: self.preferences.policy.as_deref(),
            labels: &self.preferences.labels,
            excluded,
        }
    }

    fn priority(&self) -> i16 {
        self.priority
    }

    fn tokens_max(&self) -> Option<u32> {
        self.parsed.max_tokens
    }

    fn is_selective(&self) -> bool {
        !self.preferences.labels.is_empty()
    }

    fn wait_max(&self, service: Duration) -> Option<Duration> {
        let deadline = self.deadline?;
        Some(deadline::wait_max(deadline, service, self.parsed.stream))
    }
}
