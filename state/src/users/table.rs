//! The user table and its orders: backlogged, waiting and forgettable users. It charges users and
//! lifts the counters of arriving ones; [`super`] explains the lift.

use std::collections::BTreeSet;
use std::sync::Arc;

use bincode::{Decode, Encode};
use xxhash_rust::xxh3::xxh3_128;

use super::forgettable::{Forgettable, ForgettingRank};
use super::map::UserMap;
use super::recent_usage::UsageScan;
use super::user::{User, add, take};
use super::{
    RecentUsage, UserDefaults, UserSettings, UserUsage, UserView, UsersView, WINDOW_BUCKET_MS,
    WINDOW_BUCKETS,
};
use crate::bounds::USERS_MAX;
use crate::budgets::BudgetUse;
use crate::charge::Charge;
use crate::encoding;
use crate::error::InvariantError;
use crate::ids::{ReplicaId, UserKey};
use crate::policy::VtcBasicSettings;
use crate::pricing::Pricing;
use crate::quotas::Consumed;

/// What is kept in addition to the users.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub(super) struct UsersTotals {
    /// Defaults for users without their own settings.
    pub(super) defaults: Arc<UserDefaults>,
    /// Number of priced tokens ever charged.
    charged: u128,
    /// Number of tokens in `charged` that belong to forgotten users.
    forgotten: u128,
    /// Counter at which the last user with requests in flight became idle.
    last_idle_counter: u64,
    /// Counter of the user who last stopped waiting or, since then, was dispatched while none
    /// waited. `None` if no user ever stopped waiting.
    last_left: Option<u64>,
}

/// Prices and time that apply to charges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct ChargeTerms {
    /// Prices of tokens.
    pub(crate) pricing: Pricing,
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
    forgettable: Forgettable,
    /// Number of users with their own cache scope.
    scoped: usize,
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

impl Users {
    pub(crate) fn new() -> Self {
        Self::with_max(USERS_MAX)
    }

    /// Creates a table of at most `users_max` users, for tests.
    pub(super) fn with_max(users_max: usize) -> Self {
        Self {
            map: UserMap::new(),
            totals: UsersTotals::default(),
            backlogged: BTreeSet::new(),
            waiting: BTreeSet::new(),
            forgettable: Forgettable::default(),
            scoped: 0,
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
        let bucket_ms = (window_ms / WINDOW_BUCKETS as u64).max(1);
        self.is_changed |= bucket_ms != self.bucket_ms;
        self.bucket_ms = bucket_ms;
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
            .or(self.totals.last_left)
            .or_else(|| least(&self.backlogged))
            .unwrap_or(self.totals.last_idle_counter)
    }

    /// Whether any user ever waited.
    fn has_queued(&self) -> bool {
        self.totals.last_left.is_some() || !self.waiting.is_empty()
    }

    pub(crate) fn get(&self, key: UserKey, now_ms: u64) -> Option<UserView> {
        let (times, defaults) = ((now_ms, self.bucket_ms), &self.totals.defaults);
        let user = self.map.get(&key);
        user.map(|user| user.view(key, times, defaults))
    }

    /// Returns the current users for readers on other threads.
    pub(crate) fn published(&self, now_ms: u64) -> UsersView {
        UsersView {
            map: self.map.clone(),
            now_ms,
            bucket_ms: self.bucket_ms,
            defaults: Arc::clone(&self.totals.defaults),
            scoped: self.scoped,
        }
    }

    /// Returns the current users for readers on other threads, or `None` if nothing changed since
    /// the last call.
    pub(crate) fn publish(&mut self, now_ms: u64) -> Option<UsersView> {
        std::mem::take(&mut self.is_changed).then(|| self.published(now_ms))
    }

    /// Marks the users as changed, so that the next command publishes them.
    pub(crate) fn replaced(&mut self) {
        self.is_changed = true;
    }

    /// Iterates over users with keys above `after`, ascending by key.
    pub(crate) fn views(
        &self,
        after: Option<UserKey>,
        now_ms: u64,
    ) -> impl Iterator<Item = UserView> {
        let from = after.unwrap_or_default();
        let (times, defaults) = ((now_ms, self.bucket_ms), &self.totals.defaults);
        self.map
            .iter_from(from)
            .filter(move |(key, _)| after.is_none_or(|after| **key > after))
            .map(move |(key, user)| user.view(*key, times, defaults))
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
        let usage = UserUsage::of(charge);
        let priced = terms.pricing.due(charge);
        let virtual_time = self.virtual_time();
        let has_queued = self.has_queued();
        let (bucket_ms, defaults) = (self.bucket_ms, Arc::clone(&self.totals.defaults));
        let is_settled = self.change(charge.user, |user| {
            // VTC lifts an arriving user who has nothing waiting. Before any user has waited, it
            // lifts one who returns from idle.
            user.settle_weight(user.weight_milli(&defaults));
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
            add(&mut user.waiting, replica, charge.queued);
            take(&mut user.waiting, replica, charge.dequeued);
            user.spend(charge, &usage, &defaults, (now_ms, terms.calendar_ms));
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
        let passed =
            charge.started > 0 && self.waiting.is_empty() && self.totals.last_left.is_some();
        let user = self.map.get(&charge.user);
        let left = user.filter(|user| !user.is_waiting() && (passed || charge.queued > 0));
        if let Some(user) = left {
            self.totals.last_left = Some(user.counter());
        }
    }

    /// Replaces what is set for a user, adding the user if anything is set. A budget that is set
    /// where none applied starts with nothing used. Returns whether the table had room.
    pub(crate) fn configure(&mut self, key: UserKey, name: &str, settings: UserSettings) -> bool {
        let own = settings.normalised();
        if own.is_none() && self.map.get(&key).is_none() {
            return true;
        }
        let defaults = Arc::clone(&self.totals.defaults);
        self.change(key, |user| {
            user.name = name.into();
            user.own = own;
            if user.budget(&defaults).budget.is_unbounded() {
                user.budget_used = BudgetUse::default();
            }
            false
        })
    }

    /// Replaces the defaults for users without their own settings. Takes the same time for any
    /// number of users: a user that follows the default weight switches to it with the next charge,
    /// which is equivalent, because switching does not change a counter.
    pub(crate) fn set_defaults(&mut self, defaults: UserDefaults) {
        self.totals.defaults = Arc::new(defaults);
        self.is_changed = true;
    }

    /// Returns the defaults for users without their own settings.
    pub(crate) fn defaults(&self) -> &UserDefaults {
        &self.totals.defaults
    }

    /// Resets a user's usage of limits and budget. Returns whether the user is known.
    pub(crate) fn forgive(&mut self, key: UserKey) -> bool {
        let is_known = self.map.get(&key).is_some();
        is_known
            && self.change(key, |user| {
                user.consumed = Consumed::default();
                user.budget_used = BudgetUse::default();
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

    /// Ends all requests that `replica` has in flight or waiting.
    pub(crate) fn close_replica(&mut self, replica: ReplicaId) {
        let open = self.backlogged.iter().chain(&self.waiting);
        let users: BTreeSet<UserKey> = open.map(|(_, key)| *key).collect();
        for key in users {
            if !self.map.get(&key).is_some_and(|it| it.is_open_at(replica)) {
                continue;
            }
            self.change(key, |user| {
                take(&mut user.in_flight, replica, u32::MAX);
                take(&mut user.waiting, replica, u32::MAX);
                false
            });
        }
    }

    /// Returns the wrapping sum of the users' hashes, and the hash of the totals.
    pub(crate) fn digest(&self) -> [u128; 2] {
        [self.digest, xxh3_128(&encoding::to_bytes(&self.totals))]
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
        let was_scoped = user.own_scope().is_some();
        let was_active = change(user) || was_backlogged;
        self.scoped =
            self.scoped - usize::from(was_scoped) + usize::from(user.own_scope().is_some());
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
            self.totals.last_left = Some(counter);
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
        let user = User::default();
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
        self.scoped -= usize::from(user.own_scope().is_some());
        self.totals.forgotten = self.totals.forgotten.wrapping_add(user.charged_ever);
    }

    /// Adds a user to the digest and the orders.
    pub(super) fn index(&mut self, key: UserKey, user: &User) {
        self.scoped += usize::from(user.own_scope().is_some());
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
            let open = user.in_flight.iter().chain(&user.waiting);
            open.map(|(replica, _)| *replica)
        })
    }

    /// Whether `view` shows the current users.
    pub(crate) fn are(&self, view: &UsersView) -> bool {
        self.map.iter().eq(view.map.iter())
    }

    /// Checks the invariants I4, I7 and I105, and the table's part of I8.
    pub(crate) fn check(&self) -> Result<(), InvariantError> {
        let broken = |number, detail| Err(InvariantError { number, detail });
        let mut rebuilt = Self::with_max(self.users_max);
        let mut charged = self.totals.forgotten;
        let mut users = 0;
        for (key, user) in self.map.iter() {
            users += 1;
            rebuilt.index(*key, user);
            charged = charged.wrapping_add(user.charged_ever);
            if !user.is_valid() {
                return broken("I105", format!("user {key} is out of bounds: {user:?}"));
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
            && rebuilt.scoped == self.scoped;
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
    xxh3_128(scratch)
}
