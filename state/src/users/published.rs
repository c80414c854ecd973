//! [`UsersView`]: the users as requests read them, from any thread.

use std::sync::Arc;

use super::UserDefaults;
use super::map::UserMap;
use super::user::User;
use crate::admission::{Counters, UserFigures};
use crate::budgets::BudgetStatus;
use crate::caches::CacheScope;
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
    pub(super) defaults: Arc<UserDefaults>,
    /// Number of users with their own cache scope.
    pub(super) scoped: usize,
}

impl UsersView {
    /// Returns a user's figures for the queue orders. An unknown user has the figures of a new one.
    #[must_use]
    pub fn figures(&self, user: UserKey) -> UserFigures {
        let unknown = || UserFigures {
            weight_milli: self.defaults.weight_milli,
            ..UserFigures::default()
        };
        let user = self.map.get(&user);
        user.map_or_else(unknown, |it| self.figures_of(it))
    }

    fn figures_of(&self, user: &User) -> UserFigures {
        let few = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
        let charged = u64::try_from(user.charged_ever).unwrap_or(u64::MAX);
        let waiting = user.waiting();
        let weight_milli = user.weight_milli(&self.defaults);
        let requests = user
            .window
            .requests_within(self.now_ms, self.bucket_ms, MINUTE_MS);
        UserFigures {
            counter_milli: user.counter(),
            served_milli: milli_tokens(charged, weight_milli),
            weight_milli,
            in_flight: few(user.in_flight()),
            waiting: few(waiting),
            requests_last_minute: few(requests),
            is_lifted: waiting > 0,
        }
    }

    /// Returns the name of a user; `None` if the user is not known.
    #[must_use]
    pub fn name(&self, user: UserKey) -> Option<&str> {
        self.map.get(&user).map(|user| &*user.name)
    }

    /// Returns a user's limits and budget, and their usage. An unknown user has the default ones.
    #[must_use]
    pub fn quota(&self, user: UserKey) -> Quota {
        let unknown = || Quota {
            limits: self.defaults.limits,
            budget: BudgetStatus {
                budget: self.defaults.budget,
                ..BudgetStatus::default()
            },
            ..Quota::default()
        };
        let user = self.map.get(&user);
        user.map_or_else(unknown, |user| user.quota(&self.defaults))
    }

    /// Returns the number of users whose next request would exceed their limits at `now_ms`, in
    /// replicated time, or their budgets at `unix_ms`. Visits every user.
    #[must_use]
    pub fn over_limits(&self, now_ms: u64, unix_ms: u64) -> usize {
        let pending = PendingUse::default();
        let is_over = |user: &User| {
            let quota = user.quota(&self.defaults);
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

    /// Returns the cache scope of `user`: its own, or the default.
    #[must_use]
    pub fn scope(&self, user: UserKey) -> &CacheScope {
        let own = self.map.get(&user).and_then(User::own_scope);
        own.unwrap_or(&self.defaults.cache)
    }

    /// Whether all users share cached blocks with all others.
    #[must_use]
    pub fn all_share(&self) -> bool {
        self.defaults.cache == CacheScope::Shared && self.scoped == 0
    }

    /// Returns the number of users with their own cache scope.
    #[must_use]
    pub fn scoped(&self) -> usize {
        self.scoped
    }
}

impl Counters for UsersView {
    fn figures(&self, user: UserKey) -> UserFigures {
        self.figures(user)
    }
}
