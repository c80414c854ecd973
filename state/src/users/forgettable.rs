//! Users that can be forgotten when the table is full, and the order in which they go.
//!
//! Users that were never charged go first: they have nothing to bill, and a client that makes up
//! names creates mostly such users. Among the others, the one with the lowest counter goes first.

use std::collections::BTreeSet;

use super::user::User;
use crate::ids::UserKey;

/// Users that can be forgotten, in the order in which they go.
pub(super) type Forgettable = BTreeSet<(ForgettingRank, UserKey)>;

/// A user's position in the order of forgetting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ForgettingRank {
    is_charged: bool,
    counter: u64,
}

impl ForgettingRank {
    /// Returns the user's rank; `None` if the user cannot be forgotten.
    pub(super) fn of(user: &User) -> Option<Self> {
        // The usage of limits is forgotten with the user, who restarts with full buckets.
        (user.is_idle() && !user.is_waiting() && user.own.is_none()).then(|| Self {
            is_charged: user.charged_ever > 0,
            counter: user.counter(),
        })
    }
}
