//! Users that can be forgotten when the table is full, and the order in which they go.
//!
//! From log format 4 on, users that were never charged go first: they have nothing to bill, and a
//! client that makes up names creates mostly such users. Among the rest, and in all older logs, the
//! user with the lowest counter goes first.

use std::collections::BTreeSet;

use super::User;
use super::admission_account::AdmissionAccount;
use crate::ids::UserKey;

/// Set of users ordered by `(counter, key)`.
type ForgettingOrder = BTreeSet<(u64, UserKey)>;

/// Users that can be forgotten, in order; see the module documentation.
#[derive(Debug, Default)]
pub(super) struct Forgettable {
    never_charged: ForgettingOrder,
    charged: ForgettingOrder,
    /// Whether users that were never charged go first, as they do from log format 4 on.
    is_never_charged_first: bool,
}

/// A user's position in the order of forgetting.
#[derive(Debug, Clone, Copy)]
pub(super) struct ForgettingRank {
    is_charged: bool,
    counter: u64,
}

impl ForgettingRank {
    /// Returns the user's rank; `None` if the user cannot be forgotten.
    pub(super) fn of(user: &User) -> Option<Self> {
        // The usage of limits is forgotten with the user, who restarts with full buckets.
        let is_needed =
            |account: &AdmissionAccount| !account.waiting.is_empty() || account.limits.is_some();
        let is_kept = user.is_configured
            || user.admission_account.as_deref().is_some_and(is_needed)
            || user.plan.as_ref().is_some_and(|plan| plan.is_given());
        (user.is_idle() && !is_kept).then(|| Self {
            is_charged: user.charged_ever > 0,
            counter: user.counter(),
        })
    }
}

impl Forgettable {
    fn order(&mut self, rank: ForgettingRank) -> &mut ForgettingOrder {
        match rank.is_charged {
            true => &mut self.charged,
            false => &mut self.never_charged,
        }
    }

    pub(super) fn insert(&mut self, key: UserKey, rank: ForgettingRank) {
        self.order(rank).insert((rank.counter, key));
    }

    pub(super) fn remove(&mut self, key: UserKey, rank: ForgettingRank) {
        self.order(rank).remove(&(rank.counter, key));
    }

    /// Removes and returns the user to forget next, if there is one.
    pub(super) fn pop(&mut self) -> Option<UserKey> {
        let least = [self.never_charged.first(), self.charged.first()];
        let is_charged = match least {
            [Some(never_charged), Some(charged)] => {
                !self.is_never_charged_first && charged < never_charged
            }
            [never_charged, _] => never_charged.is_none(),
        };
        let order = match is_charged {
            true => &mut self.charged,
            false => &mut self.never_charged,
        };
        order.pop_first().map(|(_, key)| key)
    }

    /// Sets whether users that were never charged go first.
    pub(super) fn set_never_charged_first(&mut self, spares: bool) {
        self.is_never_charged_first = spares;
    }

    pub(super) fn spares_charged(&self) -> bool {
        self.is_never_charged_first
    }

    /// Whether `other` contains the same users in the same order.
    pub(super) fn is_as(&self, other: &Self) -> bool {
        (&self.never_charged, &self.charged) == (&other.never_charged, &other.charged)
    }
}
