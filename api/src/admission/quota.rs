//! Checks a user's rate limits before a request is routed or queued.
//!
//! The replicated state counts what was used, all replicas together; what this replica has let in
//! since is added. Nothing is reserved between the check and the charge that follows at once: what
//! requests on other threads slip in between is debt, as is what other replicas let in meanwhile.

use state::admission::PendingCharges;
use state::ids::UserKey;
use state::quotas::{LimitRejection, PendingUse, Quota};

use super::Admission;
use crate::routing::UserName;

/// What is left of a user's limits per window; `None`: there is no such limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LimitsLeft {
    pub(crate) requests: Option<LimitLeft>,
    /// Tokens, cached ones not counted.
    pub(crate) tokens: Option<LimitLeft>,
}

/// What is left of one limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LimitLeft {
    /// Its size.
    pub(crate) limit: u64,
    pub(crate) left: u64,
    /// Time until all of it is there again, in milliseconds, if nothing is used meanwhile.
    pub(crate) reset_ms: u64,
}

impl Admission {
    /// Returns what is left of a user's limits per window, less what was admitted here and is not
    /// applied yet; `None` for a user without any.
    pub(crate) fn limits_left(&self, user: UserKey) -> Option<LimitsLeft> {
        let limits = self.view.quota(user).limits;
        if limits.requests.is_none() && limits.tokens.is_none() {
            return None;
        }
        let (quota, pending) = self.usage(user);
        let now_ms = self.log_time.present_ms(self.view.now_ms());
        let left = quota.left(now_ms);
        let [requests_ms, tokens_ms] = quota.resets_ms(now_ms);
        let of = |limit: Option<u64>, left: Option<u64>, used: u64, reset_ms| {
            Some(LimitLeft {
                limit: limit?,
                left: left?.saturating_sub(used),
                reset_ms,
            })
        };
        let requests = pending.requests.saturating_sub(pending.dequeued);
        let size = quota.limits.requests.map(u64::from);
        Some(LimitsLeft {
            requests: of(size, left.requests, requests, requests_ms),
            tokens: of(quota.limits.tokens, left.tokens, pending.tokens, tokens_ms),
        })
    }

    /// Looks at how far replicated time is: what passes from here on is added to it. To be called
    /// often.
    pub fn pass_time(&self) {
        self.log_time.present_ms(self.view.now_ms());
    }

    /// Whether `user` may have one more request.
    ///
    /// # Errors
    /// With the limit it would break.
    pub(super) fn check_quota(&self, user: &UserName) -> Result<(), LimitRejection> {
        let user = user.key(self.view.registry().hash_seed);
        if self.view.quota(user).limits.is_unbounded() {
            return Ok(());
        }
        let (quota, pending) = self.usage(user);
        let now_ms = self.log_time.present_ms(self.view.now_ms());
        quota.check(now_ms, &pending)
    }

    /// What the state has of a user's limits, and what it does not know yet.
    fn usage(&self, user: UserKey) -> (Quota, PendingUse) {
        // In this order: what is applied in between counts twice for a moment, never not at all. (Of
        // requests that ended this lets in as many too many; limits at once hold up to the lag.)
        let unapplied = self.dispatcher.unapplied(user);
        let quota = self.view.quota(user);
        let (_, pricing) = self.rules();
        let mut pending = PendingCharges::default();
        pending.add(&unapplied, &pricing);
        (quota, pending.used(user))
    }
}
