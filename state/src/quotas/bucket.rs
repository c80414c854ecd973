//! A user's two token buckets, in exact integers that drain over time.
//!
//! Usage is counted in units times window length and drains by the limit per millisecond. Both are
//! integers, so no rounding occurs.

use bincode::{Decode, Encode};

use super::{RemainingLimits, UserLimits};

/// Maximum debt, in windows. Without it, one absurd report could lock a user out for years.
const DEBT_WINDOWS_MAX: u128 = 600;

/// Usage of a user that has not drained yet; all 0 when both buckets are full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
pub(crate) struct Consumed {
    /// Number of requests times `window_ms`.
    requests: u128,
    /// Number of tokens times `window_ms`.
    tokens: u128,
    /// Length of the window when the usage was counted, in milliseconds.
    window_ms: u32,
    /// Replicated time up to which usage has drained, in milliseconds.
    at_ms: u64,
}

/// Time until a request is allowed, in milliseconds, by limit; 0 if it is allowed now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RetryAfter {
    pub(super) requests: u64,
    pub(super) tokens: u64,
}

impl Consumed {
    /// Returns the usage that remains at `now_ms` in the window of `limits`. Unlimited usage counts
    /// as 0.
    fn drained(&self, limits: &UserLimits, now_ms: u64) -> Self {
        let window_ms = limits.window_ms();
        let elapsed_ms = u128::from(now_ms.saturating_sub(self.at_ms));
        let drain = |used: u128, limit: Option<u64>| {
            let limit = u128::from(limit?);
            let used = if self.window_ms == window_ms {
                used
            } else {
                used * u128::from(window_ms) / u128::from(self.window_ms.max(1))
            };
            Some(used.saturating_sub(elapsed_ms.saturating_mul(limit)))
        };
        Self {
            requests: drain(self.requests, limits.requests.map(u64::from)).unwrap_or_default(),
            tokens: drain(self.tokens, limits.tokens).unwrap_or_default(),
            window_ms,
            at_ms: now_ms.max(self.at_ms),
        }
    }

    /// Adds the usage of `requests` and `tokens` at `now_ms`.
    pub(crate) fn spend(&mut self, limits: &UserLimits, now_ms: u64, requests: u64, tokens: u64) {
        let mut spent = self.drained(limits, now_ms);
        let window_ms = u128::from(spent.window_ms);
        let add = |used: u128, more: u64, limit: Option<u64>| {
            let capacity = u128::from(limit?) * window_ms;
            let most = capacity.saturating_mul(DEBT_WINDOWS_MAX + 1);
            Some((used + u128::from(more) * window_ms).min(most))
        };
        spent.requests =
            add(spent.requests, requests, limits.requests.map(u64::from)).unwrap_or_default();
        spent.tokens = add(spent.tokens, tokens, limits.tokens).unwrap_or_default();
        *self = if (spent.requests, spent.tokens) == (0, 0) {
            Self::default()
        } else {
            spent
        };
    }

    /// Whether a restored value is one that this code could have counted.
    pub(crate) fn is_valid(&self) -> bool {
        *self == Self::default()
            || (self.requests, self.tokens) != (0, 0)
                && (1..=super::WINDOW_MS_MAX).contains(&self.window_ms)
                // At most the maximum debt at the highest limit. Even multiplied by another
                // window's length, it stays far below 128 bits.
                && self.requests.max(self.tokens) < 1 << 92
    }

    /// Returns how long one more request has to wait, given `requests` and `tokens` that the
    /// buckets do not contain yet.
    pub(super) fn waits_ms(
        &self,
        limits: &UserLimits,
        now_ms: u64,
        requests: u64,
        tokens: u64,
    ) -> RetryAfter {
        let spent = self.drained(limits, now_ms);
        let window_ms = u128::from(spent.window_ms);
        let wait = |needed: u128, limit: Option<u64>| {
            let limit = u128::from(limit?);
            let over = needed.saturating_sub(limit * window_ms);
            Some(u64::try_from(over.div_ceil(limit.max(1))).unwrap_or(u64::MAX))
        };
        // A request needs one request and at least one token.
        let requests = spent.requests + (u128::from(requests) + 1) * window_ms;
        let tokens = spent.tokens + u128::from(tokens) * window_ms + 1;
        RetryAfter {
            requests: wait(requests, limits.requests.map(u64::from)).unwrap_or_default(),
            tokens: wait(tokens, limits.tokens).unwrap_or_default(),
        }
    }

    /// Returns the times until the limits on requests and on tokens are fully available again, in
    /// milliseconds, if nothing is used in the meantime.
    pub(super) fn resets_ms(&self, limits: &UserLimits, now_ms: u64) -> [u64; 2] {
        let spent = self.drained(limits, now_ms);
        let reset = |used: u128, limit: Option<u64>| {
            let wait = used.div_ceil(u128::from(limit?.max(1)));
            Some(u64::try_from(wait).unwrap_or(u64::MAX))
        };
        [
            reset(spent.requests, limits.requests.map(u64::from)).unwrap_or_default(),
            reset(spent.tokens, limits.tokens).unwrap_or_default(),
        ]
    }

    /// Returns the whole requests and tokens that remain at `now_ms`.
    pub(super) fn left(&self, limits: &UserLimits, now_ms: u64) -> RemainingLimits {
        let spent = self.drained(limits, now_ms);
        let window_ms = u128::from(spent.window_ms);
        let left = |used: u128, limit: u64| {
            let left = (u128::from(limit) * window_ms).saturating_sub(used) / window_ms.max(1);
            u64::try_from(left).unwrap_or(u64::MAX)
        };
        RemainingLimits {
            requests: limits
                .requests
                .map(|limit| left(spent.requests, u64::from(limit))),
            tokens: limits.tokens.map(|limit| left(spent.tokens, limit)),
            concurrent: None,
        }
    }
}
