//! Rate limits of users: bounds per window, enforced across the cluster.
//!
//! Requests and tokens each have a token bucket, which holds one window's worth and refills evenly.
//! The replicated state counts usage as charges are applied. Usage may exceed the bucket, because
//! replicas admit by slightly old data, and tokens are known only after they are generated. The
//! bucket is then in *debt*, and nothing is admitted until the debt has drained. The long-run rate
//! therefore equals the limit exactly, whatever the lag. Over any interval of `t` windows, at most
//! `limit * (1 + t)` is admitted, plus what all replicas admit within their lag. This is a leaky
//! bucket as a meter, equivalent to the generic cell rate algorithm of ITU-T I.371.
//!
//! A replica checks a request against the published state plus what it has itself admitted but not
//! yet seen applied. It uses replicated time plus the time passed since then on its monotonic
//! clock. A clock that is set forward or back thus neither refills a bucket nor stops it from
//! refilling.

mod bucket;
#[cfg(test)]
mod tests;

use schemars::JsonSchema;
use serde::Serialize;

use crate::budgets::{BudgetPeriod, BudgetStatus};
use crate::trees::{SESSION_IDLE_MS, SessionTree};

pub(crate) use bucket::Consumed;

pub use crate::settings::{TOKENS_MAX, UserLimits, WINDOW_MS_DEFAULT, WINDOW_MS_MAX};

/// Time after which to retry a request that exceeds the limit on requests in flight, in
/// milliseconds. An estimate: the time at which a request ends is unknown.
pub const CONCURRENT_RETRY_MS: u64 = 1000;

/// Kind of limit or budget that a request would exceed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LimitKind {
    /// Number of requests per window.
    Requests,
    /// Number of tokens per window.
    Tokens,
    /// Number of requests in flight at once.
    Concurrent,
    /// Number of requests in flight at once of one tree of sessions.
    ConcurrentPerTree,
    /// Number of tokens of one tree of sessions.
    TokensPerTree,
    /// Number of tokens per day.
    DayBudget,
    /// Number of tokens per month.
    MonthBudget,
}

impl From<BudgetPeriod> for LimitKind {
    fn from(period: BudgetPeriod) -> Self {
        match period {
            BudgetPeriod::Day => Self::DayBudget,
            BudgetPeriod::Month => Self::MonthBudget,
        }
    }
}

/// Rejection of a request that exceeds its user's limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LimitRejection {
    /// Limit or budget that the request would exceed.
    pub limit: LimitKind,
    /// Time until the request may be allowed, in milliseconds, if nothing else is admitted before.
    /// At least 1.
    pub retry_after_ms: u64,
}

/// Remainder of a user's limits. `null`: unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, JsonSchema)]
pub struct RemainingLimits {
    /// Requests that would be admitted right now.
    pub requests: Option<u64>,
    /// Tokens left before requests are rejected; 0 also while in debt.
    pub tokens: Option<u64>,
    /// Requests that could start in addition to those in flight.
    pub concurrent: Option<u64>,
}

/// A user's limits and their usage as of one applied index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Quota {
    /// The user's own limits, or the default ones.
    pub limits: UserLimits,
    pub(crate) consumed: Consumed,
    /// Number of the user's requests in flight at all replicas.
    pub(crate) in_flight: u64,
    /// Number of the user's requests waiting at all replicas: admitted, but not in `consumed` until
    /// they start.
    pub(crate) waiting: u64,
    /// Budgets per day and month, and their usage.
    pub budget: BudgetStatus,
}

impl Quota {
    /// Whether there is neither a limit nor a budget.
    #[must_use]
    pub fn is_unbounded(&self) -> bool {
        self.limits.is_unbounded() && self.budget.budget.is_unbounded()
    }

    /// Checks whether the budgets allow one more request at the Unix time `unix_ms`, by the
    /// cluster's clock. `pending` is the usage that the caller charged and the state does not show
    /// yet.
    ///
    /// # Errors
    /// The exhausted budget; if both are, the one that ends last.
    pub fn check_budget(&self, unix_ms: u64, pending: &PendingUse) -> Result<(), LimitRejection> {
        match self.budget.exhausted(unix_ms, pending.billed_tokens) {
            None => Ok(()),
            Some((period, left)) => Err(LimitRejection {
                limit: period.into(),
                retry_after_ms: left.resets_at_ms.saturating_sub(unix_ms).max(1),
            }),
        }
    }

    /// Checks whether the limit on tokens per tree allows one more request of `tree`; `None` without
    /// a session, or for one that begins.
    ///
    /// # Errors
    /// The limit, if it is used up. It is free again when the tree's last session has ended.
    pub fn check_tree(&self, tree: Option<&SessionTree>) -> Result<(), LimitRejection> {
        let used = tree.map_or(0, |tree| tree.usage.tokens());
        match self.limits.tokens_per_tree {
            Some(most) if used >= most => Err(LimitRejection {
                limit: LimitKind::TokensPerTree,
                retry_after_ms: SESSION_IDLE_MS,
            }),
            Some(_) | None => Ok(()),
        }
    }

    /// Checks whether the limits allow one more request at `now_ms`, in replicated time. `pending`
    /// is the usage that the caller admitted and the state does not show yet.
    ///
    /// # Errors
    /// The limit that the request would exceed; if several, the one with the longest wait.
    pub fn check(&self, now_ms: u64, pending: &PendingUse) -> Result<(), LimitRejection> {
        if self.limits.is_unbounded() {
            return Ok(());
        }
        let since = pending.requests.saturating_add(self.waiting);
        let admitted = since.saturating_sub(pending.dequeued);
        let waits = self
            .consumed
            .waits_ms(&self.limits, now_ms, admitted, pending.tokens);
        // A request that ended here frees its place before the log shows it: a client that sends
        // the next request right after a response stays within its limit.
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

    /// Returns the remainder of the limits at `now_ms`, in replicated time.
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

    /// Returns the times until the limits per window on requests and on tokens are fully available
    /// again, in milliseconds, if nothing is used in the meantime.
    #[must_use]
    pub fn resets_ms(&self, now_ms: u64) -> [u64; 2] {
        self.consumed.resets_ms(&self.limits, now_ms)
    }

    fn open(&self) -> u64 {
        self.in_flight.saturating_add(self.waiting)
    }
}

/// Usage of a user that the published state does not show yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PendingUse {
    /// Number of requests that started plus requests that were queued. A request that waited and
    /// was then dispatched counts twice in it and once in `dequeued`.
    pub requests: u64,
    /// Number of requests that stopped waiting. The published state may still show them as waiting.
    pub dequeued: u64,
    /// Number of requests that ended. The published state may still show them in flight.
    pub ended: u64,
    /// Number of tokens, not counting cached ones.
    pub tokens: u64,
    /// Number of tokens including cached ones, as budgets count them.
    pub billed_tokens: u64,
}
