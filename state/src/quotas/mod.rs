//! Rate limits of users: bounds per window, kept across the cluster.
//!
//! Requests and tokens are bounded by a token bucket each: it holds one window's worth and refills
//! evenly. What was used is counted in the replicated state, as charges are applied, and may exceed
//! the bucket: replicas admit on what they knew some milliseconds ago, and tokens are known only once
//! they are made. The bucket is then in *debt*, and nothing is admitted until that is refilled; so the
//! long-run rate is the limit exactly, whatever the lag, and over any interval of `t` windows at most
//! `limit * (1 + t)` is admitted, plus what all replicas admit within their lag. It is a leaky
//! bucket as a meter (ITU-T I.371's generic cell rate algorithm is the same in another form).
//!
//! A replica checks a request against the published state and what it has admitted itself and not
//! seen applied, at the replicated time and what has passed since by its monotonic clock: no clock that is
//! set forth or back refills a bucket, or keeps it from being refilled.

mod bucket;
#[cfg(test)]
mod tests;

use serde::Serialize;

pub(crate) use bucket::Consumed;

pub use crate::settings::{TOKENS_MAX, UserLimits, WINDOW_MS_DEFAULT, WINDOW_MS_MAX};

/// When to ask again when requests in flight are the limit: nobody knows when one ends.
pub const CONCURRENT_RETRY_MS: u64 = 1000;

/// Which bound a request would break.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LimitKind {
    /// Requests per window.
    Requests,
    /// Tokens per window.
    Tokens,
    /// Requests in flight at once.
    Concurrent,
}

/// A request that its user's limits do not allow at present.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LimitRejection {
    /// The bound it would break.
    pub limit: LimitKind,
    /// When it may be allowed, if nothing else is admitted until then. At least 1.
    pub retry_after_ms: u64,
}

/// What is left of a user's limits; `None`: unbounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct RemainingLimits {
    /// Requests that would be admitted at once.
    pub requests: Option<u64>,
    /// Tokens before requests are refused; 0 also in debt.
    pub tokens: Option<u64>,
    /// Requests that could begin beside those in flight.
    pub concurrent: Option<u64>,
}

/// A user's limits and what was used of them, as of one applied index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Quota {
    /// The user's own limits, or those of users without any.
    pub limits: UserLimits,
    pub(crate) consumed: Consumed,
    /// Requests in flight, all replicas.
    pub(crate) in_flight: u64,
    /// Requests that wait, all replicas: admitted, and not counted in `spent` before they begin.
    pub(crate) waiting: u64,
}

impl Quota {
    /// Whether one more request is allowed at `now_ms`, the replicated time, when `pending` is
    /// what the caller admitted and the state does not show yet.
    ///
    /// # Errors
    /// With the bound it would break; of several the one that lasts longest.
    pub fn check(&self, now_ms: u64, pending: &PendingUse) -> Result<(), LimitRejection> {
        if self.limits.is_unbounded() {
            return Ok(());
        }
        let since = pending.requests.saturating_add(self.waiting);
        let admitted = since.saturating_sub(pending.dequeued);
        let waits = self
            .consumed
            .waits_ms(&self.limits, now_ms, admitted, pending.tokens);
        // What is over here gives its place back at once, not when the log has it: a client that
        // asks again right after an answer is within its limit.
        let open = admitted
            .saturating_add(self.in_flight)
            .saturating_sub(pending.ended);
        let is_full = |most: u32| open >= u64::from(most);
        let concurrent = match self.limits.concurrent {
            Some(most) if is_full(most) => CONCURRENT_RETRY_MS,
            Some(_) | None => 0,
        };
        let longest = [
            (waits.requests, LimitKind::Requests),
            (waits.tokens, LimitKind::Tokens),
            (concurrent, LimitKind::Concurrent),
        ]
        .into_iter()
        .max()
        .filter(|(wait_ms, _)| *wait_ms > 0);
        match longest {
            None => Ok(()),
            Some((retry_after_ms, limit)) => Err(LimitRejection {
                limit,
                retry_after_ms,
            }),
        }
    }

    /// What is left at `now_ms`.
    #[must_use]
    pub fn left(&self, now_ms: u64) -> RemainingLimits {
        let left = self.consumed.left(&self.limits, now_ms);
        let open = self.open();
        RemainingLimits {
            requests: left.requests.map(|it| it.saturating_sub(self.waiting)),
            concurrent: self
                .limits
                .concurrent
                .map(|most| u64::from(most).saturating_sub(open)),
            ..left
        }
    }

    fn open(&self) -> u64 {
        self.in_flight.saturating_add(self.waiting)
    }
}

/// What a user used that the published state does not show yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PendingUse {
    /// Requests that began, and requests that were queued: one that waited and was then dispatched
    /// stands here twice, and once in `dequeued`.
    pub requests: u64,
    /// Requests that wait no more. They may be of those whom the published state shows waiting.
    pub dequeued: u64,
    /// Requests that are over. They may be of those whom the published state shows in flight.
    pub ended: u64,
    /// Tokens, cached ones not counted.
    pub tokens: u64,
}
