//! The error of a request that is not admitted. The data plane answers it, and `explain` shows it.

use state::quotas::{LimitKind, LimitRejection};
use xxhash_rust::xxh3::xxh3_64;

use super::client_request::{ClientRequest, RequestReader};
use super::models::{context_tokens_max, shown_model};
use crate::admission::AdmissionRejection;
use crate::error::ProxyError;
use crate::routing::RoutingRejection;

/// Minimum `retry-after` time for rejected clients before jitter, in milliseconds.
const RETRY_AFTER_MS_LEAST: u64 = 1000;
/// Maximum `retry-after` time for rejected clients before jitter, in milliseconds.
const RETRY_AFTER_MS_MAX: u64 = 60_000;

impl RequestReader {
    /// Converts the reason why a request with this id was not admitted into the client's error.
    #[must_use]
    pub fn refusal(
        &self,
        why: AdmissionRejection,
        request: &ClientRequest,
        request_id: &[u8],
    ) -> ProxyError {
        let jittered = |wait_ms| jittered(wait_ms, request_id);
        match why {
            AdmissionRejection::NoBackend(why) => self.no_backend(why, request),
            AdmissionRejection::OverLimit(over) => over_limit(over),
            AdmissionRejection::QueueFull { retry_after_ms } => ProxyError::QueueFull {
                retry_after_ms: jittered(retry_after_ms),
            },
            AdmissionRejection::TooLate {
                wait_ms,
                wait_ms_max,
            } => ProxyError::TooLate {
                wait_ms,
                wait_ms_max,
                retry_after_ms: jittered(wait_ms),
            },
            AdmissionRejection::WaitedTooLong { retry_after_ms } => ProxyError::WaitedTooLong {
                retry_after_ms: jittered(retry_after_ms),
            },
            AdmissionRejection::Leaving => ProxyError::Leaving,
        }
    }

    /// Converts the reason why no backend can take a request into the client's error.
    fn no_backend(&self, why: RoutingRejection, request: &ClientRequest) -> ProxyError {
        match why {
            RoutingRejection::UnknownModel => ProxyError::UnknownModel {
                model: shown_model(&request.parsed.model),
            },
            RoutingRejection::NoneHealthy => ProxyError::NoneHealthy,
            RoutingRejection::NoneOffered => ProxyError::NoneOffered,
            RoutingRejection::NoneSelected => ProxyError::NoneSelected,
            RoutingRejection::NoneIsolating => ProxyError::NoneIsolating,
            RoutingRejection::NotSeparable => ProxyError::NotSeparable,
            RoutingRejection::NoPrefill => ProxyError::NoPrefill,
            RoutingRejection::AllTried => ProxyError::Unreachable,
            RoutingRejection::TooLarge => self.too_long(request),
            RoutingRejection::AtLimit => ProxyError::Overloaded,
        }
    }

    /// Returns the error for a prompt that is too long for every engine of its model.
    fn too_long(&self, request: &ClientRequest) -> ProxyError {
        let identity = &request.identity;
        let (model, per_block) = (&request.parsed.model, identity.tail.tokens_per_block);
        let registry = self.view.registry();
        let longest = context_tokens_max(&registry, &self.decider.backends, model, per_block);
        ProxyError::ContextTooLong {
            tokens: u64::from(identity.tokens),
            // The engines that were too small may be gone by now.
            tokens_max: longest.unwrap_or(0),
        }
    }
}

/// Returns the error for a user who has reached a limit or used up a budget.
fn over_limit(over: LimitRejection) -> ProxyError {
    let retry_after_ms = over.retry_after_ms;
    let limit = match over.limit {
        LimitKind::Requests => "requests per window",
        LimitKind::Tokens => "tokens per window",
        LimitKind::Concurrent => "requests at once",
        LimitKind::ConcurrentPerTree => "requests at once of this session's tree",
        LimitKind::TokensPerTree => "tokens of this session's tree",
        LimitKind::DayBudget => return over_budget("day", retry_after_ms),
        LimitKind::MonthBudget => return over_budget("month", retry_after_ms),
    };
    ProxyError::OverLimit {
        limit,
        retry_after_ms,
    }
}

fn over_budget(period: &'static str, retry_after_ms: u64) -> ProxyError {
    ProxyError::OverBudget {
        period,
        retry_after_ms,
    }
}

/// Returns the `retry-after` time: `wait_ms` plus up to half of it. The addition depends on the
/// request id, so that clients rejected together do not return together.
fn jittered(wait_ms: u64, request_id: &[u8]) -> u64 {
    let wait_ms = wait_ms.clamp(RETRY_AFTER_MS_LEAST, RETRY_AFTER_MS_MAX);
    wait_ms + xxh3_64(request_id) % (wait_ms / 2)
}
