//! [`UsersView`]: the users as admission reads them, from any thread.

use super::User;
use super::fallbacks::{DefaultPlan, Fallbacks};
use super::map::UserMap;
use crate::admission::{Counters, UserFigures};
use crate::ids::UserKey;
use crate::pricing::milli_tokens;
use crate::quotas::{PendingUse, Quota};

/// Period over which the `rpm` queue order counts requests, in milliseconds.
const MINUTE_MS: u64 = 60_000;

/// Frozen image of all users as of one applied index.
pub struct UsersView {
    pub(super) map: UserMap,
    pub(super) now_ms: u64,
    pub(super) bucket_ms: u64,
    /// Values for users without their own.
    pub(super) fallbacks: Fallbacks,
}

impl UsersView {
    /// Returns a user's figures for the queue orders. An unknown user has the figures of a new one.
    #[must_use]
    pub fn figures(&self, user: UserKey) -> UserFigures {
        let plan = &self.fallbacks.plan;
        let unknown = || UserFigures {
            weight_milli: plan.weight_milli,
            ..UserFigures::default()
        };
        let user = self.map.get(&user);
        user.map_or_else(unknown, |it| it.figures(self.now_ms, self.bucket_ms, plan))
    }

    /// Returns a user's limits and their usage. An unknown user has the default limits.
    #[must_use]
    pub fn quota(&self, user: UserKey) -> Quota {
        let user = self.map.get(&user);
        user.map_or_else(
            || self.fallbacks.quota(),
            |user| user.quota(&self.fallbacks),
        )
    }
}

impl UsersView {
    /// Returns the number of users whose next request would exceed their limits at `now_ms`, in
    /// replicated time, or their budgets at `unix_ms`. Visits every user.
    #[must_use]
    pub fn over_limits(&self, now_ms: u64, unix_ms: u64) -> usize {
        let pending = PendingUse::default();
        let is_over = |user: &User| {
            let quota = user.quota(&self.fallbacks);
            quota.check(now_ms, &pending).is_err() || quota.check_budget(unix_ms, &pending).is_err()
        };
        let users = self.map.iter();
        users.filter(|(_, user)| is_over(user)).count()
    }

    /// Whether a user may use `model`.
    #[must_use]
    pub fn allows_model(&self, user: UserKey, model: &str) -> bool {
        let user = self.map.get(&user);
        user.is_none_or(|user| user.allows_model(model))
    }

    /// Returns the models that a user may use; empty if all.
    #[must_use]
    pub fn models(&self, user: UserKey) -> Vec<String> {
        let user = self.map.get(&user);
        user.map_or_else(Vec::new, |user| user.models().to_vec())
    }
}

impl Counters for UsersView {
    fn figures(&self, user: UserKey) -> UserFigures {
        self.figures(user)
    }
}

impl User {
    fn figures(&self, now_ms: u64, bucket_ms: u64, default: &DefaultPlan) -> UserFigures {
        let few = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
        let charged = u64::try_from(self.charged_ever).unwrap_or(u64::MAX);
        let waiting = self.waiting();
        let weight_milli = self.weight_in_force(default);
        UserFigures {
            counter_milli: self.counter(),
            served_milli: milli_tokens(charged, weight_milli),
            weight_milli,
            in_flight: few(self.in_flight()),
            waiting: few(waiting),
            requests_last_minute: few(self.window.requests_within(now_ms, bucket_ms, MINUTE_MS)),
            is_lifted: waiting > 0,
        }
    }
}
