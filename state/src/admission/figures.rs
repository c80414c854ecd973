//! The figures of a user for admission, including charges that the log has not applied yet.
//!
//! Replicas read the users' figures from the published state. A replica keeps what it has charged
//! but not seen applied in its [`PendingCharges`] and adds it on top, so that its own latest
//! dispatches count at once.

use std::collections::BTreeMap;

use crate::charge::Charge;
use crate::ids::UserKey;
use crate::pricing::{Pricing, WEIGHT_MILLI_DEFAULT, milli_tokens};
use crate::quotas::PendingUse;

/// Figures of one user that determine the user's place in the queue orders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UserFigures {
    /// Virtual token counter, in thousandths of a priced token at weight 1.
    pub counter_milli: u64,
    /// All charges so far over the current weight, in thousandths: the counter without any lift.
    pub served_milli: u64,
    /// Share of service relative to other users, in thousandths.
    pub weight_milli: u32,
    /// Number of requests dispatched and not ended, at all replicas.
    pub in_flight: u32,
    /// Number of waiting requests at all replicas.
    pub waiting: u32,
    /// Number of requests started within the last minute, at all replicas.
    pub requests_last_minute: u32,
    /// Whether the replicated state knows that the user waits and so has lifted the counter.
    pub is_lifted: bool,
}

impl Default for UserFigures {
    /// Returns the figures of an unknown user.
    fn default() -> Self {
        Self {
            counter_milli: 0,
            served_milli: 0,
            weight_milli: WEIGHT_MILLI_DEFAULT,
            in_flight: 0,
            waiting: 0,
            requests_last_minute: 0,
            is_lifted: false,
        }
    }
}

impl UserFigures {
    /// Converts priced tokens into thousandths at this user's weight, the unit of the counter.
    #[must_use]
    pub fn milli_of(&self, tokens: u64) -> u64 {
        milli_tokens(tokens, self.weight_milli)
    }
}

/// Source of the users' figures for the queue.
pub trait Counters {
    /// Returns the user's figures as this replica knows them, including its own charges.
    fn figures(&self, user: UserKey) -> UserFigures;
}

impl<F: Fn(UserKey) -> UserFigures> Counters for F {
    fn figures(&self, user: UserKey) -> UserFigures {
        self(user)
    }
}

/// Charges of a replica that it has not seen applied yet, summed per user.
#[derive(Debug, Clone, Default)]
pub struct PendingCharges {
    users: BTreeMap<UserKey, PendingCharge>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct PendingCharge {
    priced: u64,
    tokens: u64,
    billed_tokens: u64,
    started: u64,
    ended: u64,
    queued: u64,
    dequeued: u64,
}

impl PendingCharge {
    fn of(charge: &Charge, pricing: &Pricing) -> Self {
        Self {
            priced: pricing.due(charge),
            tokens: charge.input_uncached.saturating_add(charge.output),
            billed_tokens: charge
                .input_uncached
                .saturating_add(charge.input_cached)
                .saturating_add(charge.output),
            started: u64::from(charge.started),
            ended: u64::from(charge.ended),
            queued: u64::from(charge.queued),
            dequeued: u64::from(charge.dequeued),
        }
    }

    fn zip(&mut self, other: &Self, with: impl Fn(u64, u64) -> u64) {
        self.priced = with(self.priced, other.priced);
        self.tokens = with(self.tokens, other.tokens);
        self.billed_tokens = with(self.billed_tokens, other.billed_tokens);
        self.started = with(self.started, other.started);
        self.ended = with(self.ended, other.ended);
        self.queued = with(self.queued, other.queued);
        self.dequeued = with(self.dequeued, other.dequeued);
    }
}

impl PendingCharges {
    /// Adds a charge that the replica puts into its outbox.
    pub fn add(&mut self, charge: &Charge, pricing: &Pricing) {
        let owed = self.users.entry(charge.user).or_default();
        owed.zip(&PendingCharge::of(charge, pricing), u64::saturating_add);
    }

    /// Removes a charge that has been applied here. Charges may be removed in other portions than
    /// they were added in, but under the same `pricing`.
    pub fn settle(&mut self, charge: &Charge, pricing: &Pricing) {
        let Some(owed) = self.users.get_mut(&charge.user) else {
            return;
        };
        owed.zip(&PendingCharge::of(charge, pricing), u64::saturating_sub);
        if *owed == PendingCharge::default() {
            self.users.remove(&charge.user);
        }
    }

    /// Whether no charge is pending.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.users.is_empty()
    }

    /// Returns the published figures of `user` plus the user's pending charges.
    #[must_use]
    pub fn on_top(&self, user: UserKey, published: UserFigures) -> UserFigures {
        let Some(owed) = self.users.get(&user) else {
            return published;
        };
        let milli = published.milli_of(owed.priced);
        let moved = |count: u32, more: u64, less: u64| {
            let sum = u64::from(count).saturating_add(more).saturating_sub(less);
            u32::try_from(sum).unwrap_or(u32::MAX)
        };
        UserFigures {
            counter_milli: published.counter_milli.saturating_add(milli),
            served_milli: published.served_milli.saturating_add(milli),
            in_flight: moved(published.in_flight, owed.started, owed.ended),
            waiting: moved(published.waiting, owed.queued, owed.dequeued),
            requests_last_minute: moved(published.requests_last_minute, owed.started, 0),
            ..published
        }
    }

    /// Returns the usage of `user` that is not applied yet, for a quota check.
    #[must_use]
    pub fn used(&self, user: UserKey) -> PendingUse {
        let Some(owed) = self.users.get(&user) else {
            return PendingUse::default();
        };
        PendingUse {
            requests: owed.started.saturating_add(owed.queued),
            dequeued: owed.dequeued,
            ended: owed.ended,
            tokens: owed.tokens,
            billed_tokens: owed.billed_tokens,
        }
    }
}
