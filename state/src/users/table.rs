//! The user table and its orders: backlogged, waiting and forgettable users. It charges users and
//! lifts the counters of arriving ones; [`super`] explains the lift.

use std::collections::BTreeSet;

use bincode::{Decode, Encode};
use xxhash_rust::xxh3::xxh3_128;

use super::forgettable::{Forgettable, ForgettingRank};
use super::map::UserMap;
use super::recent_usage::UsageScan;
use super::{
    AdmissionAccount, CHARGE_TOKENS_MAX, DefaultPlan, RecentUsage, User, UserUsage, UserView,
    UsersView, WINDOW_BUCKET_MS, WINDOW_BUCKETS, add, take,
};
use crate::bounds::USERS_MAX;
use crate::budgets::BudgetUse;
use crate::charge::Charge;
use crate::cow::CowMap;
use crate::encoding;
use crate::error::InvariantError;
use crate::ids::{ReplicaId, UserKey};
use crate::policy::VtcBasicSettings;
use crate::pricing::Pricing;
use crate::quotas::Consumed;
use crate::settings::UserLimits;

/// Prefix of a plan in the hash input of its user.
const PLAN_MARK: u64 = 0x6e61_6c70;
/// Mark in the hash input of a configured user who follows the default weight.
const UNWEIGHTED_MARK: u64 = 0x7468_6777;

/// Totals over all users, which outlast forgotten ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
pub(crate) struct UsersTotals {
    /// Number of priced tokens ever charged.
    charged: u128,
    /// Number of tokens in `charged` that belong to forgotten users.
    forgotten: u128,
    /// Counter at which the last user with requests in flight became idle.
    last_idle_counter: u64,
}

/// Prices and limits that apply to charges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct ChargeTerms {
    /// Prices of tokens.
    pub(crate) pricing: Pricing,
    /// Limits of users without limits of their own.
    pub(crate) limits: UserLimits,
    /// Unix time of the charge by the cluster's clock, in milliseconds. Used for budgets.
    pub(crate) calendar_ms: u64,
}

/// Table of all users.
pub(crate) struct Users {
    pub(super) map: UserMap,
    pub(super) totals: UsersTotals,
    /// `(counter, key)` of all users with requests in flight.
    backlogged: BTreeSet<(u64, UserKey)>,
    /// `(counter, key)` of all users with waiting requests.
    waiting: BTreeSet<(u64, UserKey)>,
    /// Counter of the user who last stopped waiting or, since then, was dispatched while none
    /// waited. `None` if no user ever stopped waiting.
    pub(super) last_left: Option<u64>,
    forgettable: Forgettable,
    /// Number of users with a plan.
    pub(super) planned: usize,
    /// Defaults for users without their own. `None` if never set.
    pub(super) defaults: Option<DefaultPlan>,
    /// Wrapping sum of the hashes of all users.
    digest: u128,
    pub(super) users_max: usize,
    /// Length of a window bucket in milliseconds; follows from the live policy.
    bucket_ms: u64,
    /// Whether a user changed since the last [`Users::publish`].
    pub(super) is_changed: bool,
    /// Scan for [`Users::recent_usage`], kept while in use.
    usage_scan: Option<UsageScan>,
    /// Buffer for hashing.
    scratch: Vec<u8>,
}

/// Frozen copy of the user table, from which snapshots are written.
pub(crate) struct UsersImage {
    pub(super) map: UserMap,
    pub(super) totals: UsersTotals,
    pub(super) defaults: Option<DefaultPlan>,
}

impl Users {
    pub(crate) fn new() -> Self {
        Self::with_max(USERS_MAX)
    }

    /// Creates a table of at most `users_max` users, for tests.
    pub(super) fn with_max(users_max: usize) -> Self {
        Self {
            map: CowMap::new(),
            totals: UsersTotals::default(),
            backlogged: BTreeSet::new(),
            waiting: BTreeSet::new(),
            last_left: None,
            forgettable: Forgettable::default(),
            planned: 0,
            defaults: None,
            digest: 0,
            users_max,
            bucket_ms: WINDOW_BUCKET_MS,
            is_changed: true,
            usage_scan: None,
            scratch: Vec::new(),
        }
    }

    /// Sets the length of the usage windows.
    pub(crate) fn set_window_ms(&mut self, window_ms: u64) {
        self.bucket_ms = (window_ms / WINDOW_BUCKETS as u64).max(1);
    }

    /// Returns the users' usage within their windows, for readers on other threads. Call it after
    /// every command until [`Users::forget_lately`].
    pub(crate) fn recent_usage(&mut self, now_ms: u64, settings: &VtcBasicSettings) -> RecentUsage {
        let mut recent_usage = RecentUsage::of(self.map.clone(), now_ms, self.bucket_ms, settings);
        let usage_scan = self
            .usage_scan
            .get_or_insert_with(|| UsageScan::over(&self.map));
        usage_scan.go_on(&recent_usage);
        usage_scan.tell(&mut recent_usage);
        recent_usage
    }

    /// Stops tracking recent usage.
    pub(crate) fn forget_lately(&mut self) {
        self.usage_scan = None;
    }

    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    /// Returns the number of users with requests in flight.
    pub(crate) fn backlogged_len(&self) -> usize {
        self.backlogged.len()
    }

    /// Returns the number of users with waiting requests.
    pub(crate) fn waiting_len(&self) -> usize {
        self.waiting.len()
    }

    /// Returns the number of priced tokens ever charged, saturating.
    pub(crate) fn charged(&self) -> u64 {
        u64::try_from(self.totals.charged).unwrap_or(u64::MAX)
    }

    /// Returns the counter that an arriving user is lifted to; see the module documentation.
    pub(crate) fn virtual_time(&self) -> u64 {
        let least = |users: &BTreeSet<(u64, UserKey)>| users.first().map(|(counter, _)| *counter);
        least(&self.waiting)
            .or(self.last_left)
            .or_else(|| least(&self.backlogged))
            .unwrap_or(self.totals.last_idle_counter)
    }

    /// Whether any user ever waited.
    fn has_queued(&self) -> bool {
        self.last_left.is_some() || !self.waiting.is_empty()
    }

    pub(crate) fn get(&self, key: UserKey, now_ms: u64, limits: &UserLimits) -> Option<UserView> {
        let of_all = self.fallbacks(*limits);
        let user = self.map.get(&key);
        user.map(|user| user.view(key, now_ms, self.bucket_ms, &of_all))
    }

    /// Returns the current users for readers on other threads, or `None` if nothing changed since
    /// the last call. `is_anew` forces a new view because the limits may have changed.
    pub(crate) fn publish(
        &mut self,
        now_ms: u64,
        limits: UserLimits,
        is_anew: bool,
    ) -> Option<UsersView> {
        let is_changed = std::mem::take(&mut self.is_changed);
        (is_changed || is_anew).then(|| UsersView {
            map: self.map.clone(),
            now_ms,
            bucket_ms: self.bucket_ms,
            fallbacks: self.fallbacks(limits),
        })
    }

    /// Iterates over users with keys above `after`, ascending by key.
    pub(crate) fn views(
        &self,
        after: Option<UserKey>,
        now_ms: u64,
        limits: UserLimits,
    ) -> impl Iterator<Item = UserView> {
        let from = after.unwrap_or_default();
        let of_all = self.fallbacks(limits);
        self.map
            .iter_from(from)
            .filter(move |(key, _)| after.is_none_or(|after| **key > after))
            .map(move |(key, user)| user.view(*key, now_ms, self.bucket_ms, &of_all))
    }

    /// Applies a charge of `replica`. Returns `false` if the user is unknown, the table is full and
    /// no user can be forgotten.
    pub(crate) fn charge(
        &mut self,
        replica: ReplicaId,
        charge: &Charge,
        terms: &ChargeTerms,
        now_ms: u64,
    ) -> bool {
        let usage = UserUsage {
            input_uncached: charge.input_uncached.min(CHARGE_TOKENS_MAX),
            input_cached: charge.input_cached.min(CHARGE_TOKENS_MAX),
            output: charge.output.min(CHARGE_TOKENS_MAX),
            requests: u64::from(charge.started),
        };
        let priced = terms.pricing.due(charge);
        let virtual_time = self.virtual_time();
        let has_queued = self.has_queued();
        let (bucket_ms, default) = (self.bucket_ms, self.default_plan());
        let is_settled = self.change(charge.user, |user| {
            // VTC lifts an arriving user who has nothing waiting. Before any user has waited, it
            // lifts one who returns from idle.
            user.settle_weight(&default);
            let comes = charge.started > 0 || charge.queued > 0;
            let is_lifted = !user.is_waiting() && (has_queued || user.is_idle());
            if comes && is_lifted {
                user.lift_to(virtual_time);
            }
            add(&mut user.in_flight, replica, charge.started);
            user.charged = user.charged.saturating_add(priced);
            user.charged_ever = user.charged_ever.wrapping_add(u128::from(priced));
            user.total.add(&usage);
            user.window.add(now_ms, bucket_ms, &usage);
            user.last_charge_ms = now_ms;
            take(&mut user.in_flight, replica, charge.ended);
            user.apply_charge(replica, charge, &usage, &terms.limits, now_ms);
            user.spend(terms.calendar_ms, usage.tokens(), &default);
            // A user whose requests started and ended within one charge was backlogged in between.
            charge.started > 0
        });
        if is_settled {
            if let Some(usage_scan) = &mut self.usage_scan {
                usage_scan.charged(charge.user);
            }
            self.totals.charged = self.totals.charged.wrapping_add(u128::from(priced));
            self.follow_last_left(charge);
        }
        is_settled
    }

    /// Updates `last_left` after `charge`. A user who waited only within this charge has stopped
    /// waiting. One who was dispatched while none waits passed an empty queue.
    fn follow_last_left(&mut self, charge: &Charge) {
        let passed = charge.started > 0 && self.waiting.is_empty() && self.last_left.is_some();
        let user = self.map.get(&charge.user);
        let left = user.filter(|user| !user.is_waiting() && (passed || charge.queued > 0));
        if let Some(user) = left {
            self.last_left = Some(user.counter());
        }
    }

    /// Sets a user's own limits, or removes them if `limits` is `None`. Returns whether the table
    /// had room.
    pub(crate) fn limit(&mut self, key: UserKey, name: &str, limits: Option<UserLimits>) -> bool {
        if limits.is_none() && self.map.get(&key).is_none() {
            return true;
        }
        self.change(key, |user| {
            user.name = name.into();
            user.update_account(|account| account.limits = limits);
            false
        })
    }

    /// Resets a user's usage of limits and budget. Returns whether the user is known.
    pub(crate) fn forgive(&mut self, key: UserKey) -> bool {
        let is_known = self.map.get(&key).is_some();
        is_known
            && self.change(key, |user| {
                user.update_account(|account| account.consumed = Consumed::default());
                user.replan(|plan| plan.used = BudgetUse::default());
                false
            })
    }

    /// Deletes a user without open requests. Returns whether it did; `None` if the user is unknown.
    pub(crate) fn remove(&mut self, key: UserKey) -> Option<bool> {
        let user = self.map.get(&key)?;
        if !user.is_idle() || user.is_waiting() {
            return Some(false);
        }
        if let Some(rank) = ForgettingRank::of(user) {
            self.forgettable.remove(&(rank, key));
        }
        self.drop_user(key);
        self.is_changed = true;
        Some(true)
    }

    /// Sets a user's name, adding the user if unknown. Returns whether the table had room.
    pub(crate) fn define(&mut self, key: UserKey, name: &str) -> bool {
        if self.map.get(&key).is_some_and(|user| &*user.name == name) {
            return true;
        }
        self.change(key, |user| {
            user.name = name.into();
            false
        })
    }

    /// Sets a user's name and weight, adding it if unknown. Returns whether the table had room.
    pub(crate) fn configure(&mut self, key: UserKey, name: &str, weight_milli: u32) -> bool {
        self.change(key, |user| {
            user.name = name.into();
            user.set_weight(weight_milli);
            false
        })
    }

    /// Sets a user's name and keeps the user from being forgotten, with its current weight. Once
    /// defaults were set, a user without its own weight continues to follow the default. Returns
    /// whether the table had room.
    pub(crate) fn keep(&mut self, key: UserKey, name: &str) -> bool {
        let is_default_set = self.defaults.is_some();
        self.change(key, |user| {
            user.name = name.into();
            user.is_unweighted |= is_default_set && !user.is_configured;
            user.is_configured = true;
            false
        })
    }

    /// Whether a user is known and configured, and so is never forgotten automatically.
    pub(crate) fn keeps(&self, key: UserKey) -> bool {
        self.map.get(&key).is_some_and(|user| user.is_configured)
    }

    /// Ends all requests that `replica` has in flight or waiting.
    pub(crate) fn close_replica(&mut self, replica: ReplicaId) {
        let open = self.backlogged.iter().chain(&self.waiting);
        let users: BTreeSet<UserKey> = open.map(|(_, key)| *key).collect();
        let is_its = |(other, _): &(ReplicaId, u32)| *other == replica;
        for key in users {
            let Some(user) = self.map.get(&key) else {
                continue;
            };
            let waits = |account: &AdmissionAccount| account.waiting.iter().any(is_its);
            let waits = user.admission_account.as_deref().is_some_and(waits);
            if !waits && !user.in_flight.iter().any(is_its) {
                continue;
            }
            self.change(key, |user| {
                take(&mut user.in_flight, replica, u32::MAX);
                if waits {
                    user.update_account(|account| take(&mut account.waiting, replica, u32::MAX));
                }
                false
            });
        }
    }

    /// Returns the wrapping sum of the users' hashes, and the hash of the totals.
    pub(crate) fn digest(&self) -> [u128; 2] {
        [self.digest, xxh3_128(&encoding::to_bytes(&self.totals))]
    }

    pub(crate) fn freeze(&self) -> UsersImage {
        UsersImage {
            map: self.map.clone(),
            totals: self.totals,
            defaults: self.defaults,
        }
    }

    /// Applies `change` to a user, adding it if unknown, and updates orders and digest. All changes
    /// go through here. `change` returns whether the user had requests in flight in between.
    /// Returns whether the table had room for a new user.
    pub(super) fn change(&mut self, key: UserKey, change: impl FnOnce(&mut User) -> bool) -> bool {
        if self.map.get(&key).is_none() && !self.admit(key) {
            return false;
        }
        self.is_changed = true;
        let user = self
            .map
            .get_mut(&key)
            .expect("the user was there or has just been admitted");
        let digest_before = hash(&mut self.scratch, key, user);
        let counter_before = user.counter();
        let was_backlogged = !user.is_idle();
        let was_waiting = user.is_waiting();
        let rank_before = ForgettingRank::of(user);
        let was_planned = user.plan.is_some();
        let was_active = change(user) || was_backlogged;
        self.planned = self.planned - usize::from(was_planned) + usize::from(user.plan.is_some());
        let counter = user.counter();
        self.digest = self.digest.wrapping_sub(digest_before).wrapping_add(hash(
            &mut self.scratch,
            key,
            user,
        ));
        if was_backlogged {
            self.backlogged.remove(&(counter_before, key));
        }
        if let Some(rank) = rank_before {
            self.forgettable.remove(&(rank, key));
        }
        if !user.is_idle() {
            self.backlogged.insert((counter, key));
        } else if was_active {
            self.totals.last_idle_counter = counter;
        }
        if was_waiting {
            self.waiting.remove(&(counter_before, key));
        }
        if user.is_waiting() {
            self.waiting.insert((counter, key));
        } else if was_waiting {
            self.last_left = Some(counter);
        }
        if let Some(rank) = ForgettingRank::of(user) {
            self.forgettable.insert((rank, key));
        }
        true
    }

    fn admit(&mut self, key: UserKey) -> bool {
        if self.map.len() >= self.users_max && !self.forget_one() {
            return false;
        }
        let user = User::new();
        self.index(key, &user);
        self.map.insert_new(key, user)
    }

    fn forget_one(&mut self) -> bool {
        let Some((_, key)) = self.forgettable.pop_first() else {
            return false;
        };
        self.drop_user(key);
        true
    }

    /// Removes a user that is no longer in any of the orders.
    fn drop_user(&mut self, key: UserKey) {
        let user = self
            .map
            .remove(&key)
            .expect("only a user who is known is removed");
        self.digest = self
            .digest
            .wrapping_sub(hash(&mut self.scratch, key, &user));
        self.planned -= usize::from(user.plan.is_some());
        self.totals.forgotten = self.totals.forgotten.wrapping_add(user.charged_ever);
    }

    /// Adds a user to the digest and the orders.
    pub(super) fn index(&mut self, key: UserKey, user: &User) {
        self.planned += usize::from(user.plan.is_some());
        self.digest = self.digest.wrapping_add(hash(&mut self.scratch, key, user));
        if !user.is_idle() {
            self.backlogged.insert((user.counter(), key));
        }
        if user.is_waiting() {
            self.waiting.insert((user.counter(), key));
        }
        if let Some(rank) = ForgettingRank::of(user) {
            self.forgettable.insert((rank, key));
        }
    }

    /// Iterates over the replicas with requests in flight or waiting. A replica may appear more
    /// than once.
    pub(crate) fn replicas_open(&self) -> impl Iterator<Item = ReplicaId> {
        self.map.iter().flat_map(|(_, user)| {
            let waiting = user.admission_account.iter().flat_map(|it| &it.waiting);
            let open = user.in_flight.iter().chain(waiting);
            open.map(|(replica, _)| *replica)
        })
    }

    /// Whether `view` shows the current users.
    pub(crate) fn are(&self, view: &UsersView) -> bool {
        self.map.iter().eq(view.map.iter())
    }

    /// Checks the invariants I4, I7, I105 and I108, and the table's part of I8.
    pub(crate) fn check(&self) -> Result<(), InvariantError> {
        let broken = |number, detail| Err(InvariantError { number, detail });
        let mut rebuilt = Self::with_max(self.users_max);
        let mut charged = self.totals.forgotten;
        let mut users = 0;
        for (key, user) in self.map.iter() {
            users += 1;
            rebuilt.index(*key, user);
            charged = charged.wrapping_add(user.charged_ever);
            let is_ordered = user.in_flight.is_sorted_by(|a, b| a.0 < b.0);
            if !is_ordered || user.in_flight.iter().any(|(_, requests)| *requests == 0) {
                return broken(
                    "I7",
                    format!("user {key} has in flight {:?}", user.in_flight),
                );
            }
            if user
                .admission_account
                .as_deref()
                .is_some_and(|it| !it.is_valid())
            {
                return broken(
                    "I7",
                    format!("user {key} stands {:?}", user.admission_account),
                );
            }
            if user.plan.as_deref().is_some_and(|it| !it.is_valid()) {
                return broken("I105", format!("user {key} has the plan {:?}", user.plan));
            }
            if !self.is_plausible(user) {
                let detail = format!("user {key} follows defaults that are not set: {user:?}");
                return broken("I108", detail);
            }
            if user.weight_milli == 0 {
                return broken("I4", format!("user {key} has no weight"));
            }
        }
        if charged != self.totals.charged {
            let all = self.totals.charged;
            return broken(
                "I4",
                format!("users were charged {charged}, charges add up to {all}"),
            );
        }
        if users != self.map.len() || users > self.users_max {
            return broken(
                "I4",
                format!("{users} users, counted as {}", self.map.len()),
            );
        }
        let is_ordered = rebuilt.backlogged == self.backlogged
            && rebuilt.waiting == self.waiting
            && rebuilt.forgettable == self.forgettable
            && rebuilt.planned == self.planned;
        if !is_ordered {
            return broken("I7", "the orders of users differ from the users".to_owned());
        }
        if rebuilt.digest != self.digest {
            return broken(
                "I8",
                "the digest of users differs from the users".to_owned(),
            );
        }
        Ok(())
    }
}

/// Returns the hash of a user. `scratch` is a buffer that saves an allocation.
fn hash(scratch: &mut Vec<u8>, key: UserKey, user: &User) -> u128 {
    scratch.clear();
    encoding::append_bytes(&(key, user), scratch);
    if let Some(account) = user.admission_account.as_deref() {
        encoding::append_bytes(account, scratch);
    }
    if let Some(plan) = user.plan.as_deref() {
        // The mark distinguishes the plan from the admission account.
        encoding::append_bytes(&(PLAN_MARK, plan), scratch);
    }
    if user.is_unweighted {
        encoding::append_bytes(&UNWEIGHTED_MARK, scratch);
    }
    xxh3_128(scratch)
}
