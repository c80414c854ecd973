//! Which decisions somebody wants to see.

use std::time::Duration;

use super::request_record::{DecidedAttempt, RequestEnd, RequestRecord};

/// Conditions that a request's record must meet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DecisionFilter {
    /// Name of the user; `None` for any.
    pub user: Option<String>,
    /// Backend that an attempt went to; `None` for any.
    pub backend: Option<String>,
    /// Requested model; `None` for any.
    pub model: Option<String>,
    /// Whether only requests that failed are wanted.
    pub is_failed: bool,
    /// Status sent to the client; `None` for any.
    pub status: Option<u16>,
    /// Only requests that took longer, or already take longer; `None` for all.
    pub slower_than: Option<Duration>,
}

impl DecisionFilter {
    /// Whether `record` meets all conditions.
    #[must_use]
    pub fn admits(&self, record: &RequestRecord) -> bool {
        let is = |wanted: &Option<String>, found: &str| {
            wanted.as_deref().is_none_or(|wanted| wanted == found)
        };
        let went_to = |backend: &String| {
            let names = |it: &DecidedAttempt| {
                let prefill = it.decision.prefill_name();
                *it.decision.name == **backend || prefill.is_some_and(|it| **it == **backend)
            };
            record.attempts().iter().any(names)
        };
        let end = record.end();
        let has_status = |status| end.is_some_and(|end| end.status == status);
        is(&self.user, record.user.as_str())
            && is(&self.model, &record.model)
            && self.status.is_none_or(has_status)
            && (!self.is_failed || end.is_some_and(RequestEnd::is_failure))
            && self.slower_than.is_none_or(|limit| record.took() > limit)
            && self.backend.as_ref().is_none_or(went_to)
    }
}
