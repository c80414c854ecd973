//! The user table with its orders: who is backlogged, who can be forgotten.

use std::collections::BTreeSet;

use bincode::{Decode, Encode};
use xxhash_rust::xxh3::xxh3_128;

use super::lately::Rounds;
use super::{
    CHARGE_TOKENS_MAX, FairnessSettings, Lately, User, UserUsage, UserView, WINDOW_BUCKET_MS,
    WINDOW_BUCKETS,
};
use crate::command::{Charge, USERS_MAX};
use crate::cow::{CowMap, ShardKey};
use crate::ids::{ReplicaId, UserKey};
use crate::policy::VtcBasicSettings;
use crate::{Broken, codec};

impl ShardKey for UserKey {
    const BRANCHES: usize = 1024;

    // By the highest bits, so that shard order is key order; keys are hashes, hence uniform.
    fn shard(&self) -> usize {
        (self.0 >> 48) as usize
    }
}

/// Charges of users that are gone, and what is kept beside the users.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
pub(crate) struct UsersTotals {
    /// Priced tokens ever charged.
    charged: u128,
    /// Of these, charged to users who were forgotten.
    forgotten: u128,
    /// Counter at which the last user with requests in flight fell idle.
    last_idle_counter: u64,
}

/// Users by key.
pub(super) type UserMap = CowMap<UserKey, User>;

/// All users.
pub(crate) struct Users {
    map: UserMap,
    totals: UsersTotals,
    /// `(counter, key)` of everyone with requests in flight.
    backlogged: BTreeSet<(u64, UserKey)>,
    /// `(counter, key)` of everyone who can be forgotten.
    forgettable: BTreeSet<(u64, UserKey)>,
    /// Wrapping sum over the users' hashes.
    digest: u128,
    users_max: usize,
    /// Length of a window's bucket; follows from the live policy.
    bucket_ms: u64,
    /// Kept while somebody asks for [`Users::lately`].
    rounds: Option<Rounds>,
    /// For hashing.
    scratch: Vec<u8>,
}

/// A frozen copy.
pub(crate) struct UsersImage {
    map: UserMap,
    totals: UsersTotals,
}

impl Users {
    pub(crate) fn new() -> Self {
        Self::with_max(USERS_MAX)
    }

    /// For tests of the bound.
    pub(super) fn with_max(users_max: usize) -> Self {
        Self {
            map: CowMap::new(),
            totals: UsersTotals::default(),
            backlogged: BTreeSet::new(),
            forgettable: BTreeSet::new(),
            digest: 0,
            users_max,
            bucket_ms: WINDOW_BUCKET_MS,
            rounds: None,
            scratch: Vec::new(),
        }
    }

    /// Sets how long usage stays in the users' windows.
    pub(crate) fn set_window_ms(&mut self, window_ms: u64) {
        self.bucket_ms = (window_ms / WINDOW_BUCKETS as u64).max(1);
    }

    /// What users used within their windows, for readers on other threads. Meant to be asked for
    /// after every command; [`Users::forget_lately`] ends it.
    pub(crate) fn lately(&mut self, now_ms: u64, settings: &VtcBasicSettings) -> Lately {
        let mut lately = Lately::of(self.map.clone(), now_ms, self.bucket_ms, settings);
        let rounds = self.rounds.get_or_insert_with(|| Rounds::over(&self.map));
        rounds.go_on(&lately);
        rounds.tell(&mut lately);
        lately
    }

    /// Nobody asks for it any more.
    pub(crate) fn forget_lately(&mut self) {
        self.rounds = None;
    }

    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    /// How many users have requests in flight.
    pub(crate) fn backlogged_len(&self) -> usize {
        self.backlogged.len()
    }

    /// Least counter among users with requests in flight, else the last one's that had any.
    pub(crate) fn virtual_time(&self) -> u64 {
        self.backlogged
            .first()
            .map_or(self.totals.last_idle_counter, |(counter, _)| *counter)
    }

    pub(crate) fn get(&self, key: UserKey, now_ms: u64) -> Option<UserView> {
        self.map
            .get(&key)
            .map(|user| user.view(key, now_ms, self.bucket_ms))
    }

    /// Users with keys after `after`, ascending by key.
    pub(crate) fn views(
        &self,
        after: Option<UserKey>,
        now_ms: u64,
    ) -> impl Iterator<Item = UserView> {
        let from = after.unwrap_or_default();
        self.map
            .iter_from(from)
            .filter(move |(key, _)| after.is_none_or(|after| **key > after))
            .map(move |(key, user)| user.view(*key, now_ms, self.bucket_ms))
    }

    /// Settles a charge. Answers whether it was: not when the table is full and nobody can be
    /// forgotten.
    pub(crate) fn charge(
        &mut self,
        replica: ReplicaId,
        charge: &Charge,
        prices: &FairnessSettings,
        now_ms: u64,
    ) -> bool {
        let usage = UserUsage {
            input_uncached: charge.input_uncached.min(CHARGE_TOKENS_MAX),
            input_cached: charge.input_cached.min(CHARGE_TOKENS_MAX),
            output: charge.output.min(CHARGE_TOKENS_MAX),
            requests: u64::from(charge.started),
        };
        // Both factors are bounded, so the sum stays far below 64 bits.
        let priced = usage.input_uncached * u64::from(prices.input_price)
            + usage.output * u64::from(prices.output_price);
        let virtual_time = self.virtual_time();
        let bucket_ms = self.bucket_ms;
        let is_settled = self.change(charge.user, |user| {
            if user.is_idle() && charge.started > 0 {
                user.lift_to(virtual_time);
            }
            user.begin(replica, charge.started);
            user.charged = user.charged.saturating_add(priced);
            user.charged_ever = user.charged_ever.wrapping_add(u128::from(priced));
            user.total.add(&usage);
            user.window.add(now_ms, bucket_ms, &usage);
            user.last_charge_ms = now_ms;
            user.end(replica, charge.ended);
            // A user who came and went within one charge was backlogged in between.
            charge.started > 0
        });
        if is_settled {
            if let Some(rounds) = &mut self.rounds {
                rounds.charged(charge.user);
            }
            self.totals.charged = self.totals.charged.wrapping_add(u128::from(priced));
        }
        is_settled
    }

    /// Gives a user a name. Answers whether there was room.
    pub(crate) fn define(&mut self, key: UserKey, name: &str) -> bool {
        if self.map.get(&key).is_some_and(|user| &*user.name == name) {
            return true;
        }
        self.change(key, |user| {
            user.name = name.into();
            false
        })
    }

    /// Sets a user's weight. Answers whether there was room.
    pub(crate) fn configure(&mut self, key: UserKey, name: &str, weight_milli: u32) -> bool {
        self.change(key, |user| {
            user.name = name.into();
            user.set_weight(weight_milli);
            false
        })
    }

    /// Ends every request a replica has in flight.
    pub(crate) fn close_replica(&mut self, replica: ReplicaId) {
        let backlogged: Vec<UserKey> = self.backlogged.iter().map(|(_, key)| *key).collect();
        for key in backlogged {
            let has_any = self
                .map
                .get(&key)
                .is_some_and(|user| user.in_flight.iter().any(|(other, _)| *other == replica));
            if has_any {
                self.change(key, |user| {
                    user.end(replica, u32::MAX);
                    false
                });
            }
        }
    }

    /// Wrapping sum over the users' hashes, and the hash of the rest.
    pub(crate) fn digest(&self) -> [u128; 2] {
        [self.digest, xxh3_128(&codec::to_bytes(&self.totals))]
    }

    pub(crate) fn freeze(&self) -> UsersImage {
        UsersImage {
            map: self.map.clone(),
            totals: self.totals,
        }
    }

    /// The one way a user changes: orders and digest follow. `change` answers whether the user had
    /// requests in flight meanwhile. Answers whether there was room for a new user.
    fn change(&mut self, key: UserKey, change: impl FnOnce(&mut User) -> bool) -> bool {
        if self.map.get(&key).is_none() && !self.admit(key) {
            return false;
        }
        let user = self
            .map
            .get_mut(&key)
            .expect("the user was there or has just been admitted");
        let digest_before = hash(&mut self.scratch, key, user);
        let counter_before = user.counter();
        let was_backlogged = !user.is_idle();
        let was_forgettable = is_forgettable(user);
        let was_active = change(user) || was_backlogged;
        let counter = user.counter();
        self.digest = self.digest.wrapping_sub(digest_before).wrapping_add(hash(
            &mut self.scratch,
            key,
            user,
        ));
        if was_backlogged {
            self.backlogged.remove(&(counter_before, key));
        }
        if was_forgettable {
            self.forgettable.remove(&(counter_before, key));
        }
        if !user.is_idle() {
            self.backlogged.insert((counter, key));
        } else if was_active {
            self.totals.last_idle_counter = counter;
        }
        if is_forgettable(user) {
            self.forgettable.insert((counter, key));
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
        let user = self
            .map
            .remove(&key)
            .expect("who can be forgotten is known");
        self.digest = self
            .digest
            .wrapping_sub(hash(&mut self.scratch, key, &user));
        self.totals.forgotten = self.totals.forgotten.wrapping_add(user.charged_ever);
        true
    }

    /// Takes a user into digest and orders.
    fn index(&mut self, key: UserKey, user: &User) {
        self.digest = self.digest.wrapping_add(hash(&mut self.scratch, key, user));
        if !user.is_idle() {
            self.backlogged.insert((user.counter(), key));
        }
        if is_forgettable(user) {
            self.forgettable.insert((user.counter(), key));
        }
    }

    /// Every replica that has requests of a user in flight; some more than once.
    pub(crate) fn replicas_in_flight(&self) -> impl Iterator<Item = ReplicaId> {
        self.map
            .iter()
            .flat_map(|(_, user)| user.in_flight.iter().map(|(replica, _)| *replica))
    }

    /// I4, I7 and the table's part of I8.
    pub(crate) fn check(&self) -> Result<(), Broken> {
        let broken = |number, detail| Err(Broken { number, detail });
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
        if rebuilt.backlogged != self.backlogged || rebuilt.forgettable != self.forgettable {
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

fn is_forgettable(user: &User) -> bool {
    user.is_idle() && !user.is_configured
}

/// `scratch` spares an allocation.
fn hash(scratch: &mut Vec<u8>, key: UserKey, user: &User) -> u128 {
    scratch.clear();
    codec::append_bytes(&(key, user), scratch);
    xxh3_128(scratch)
}

impl UsersImage {
    /// What is kept beside the users, encoded.
    pub(crate) fn totals(&self) -> Vec<u8> {
        codec::to_bytes(&self.totals)
    }

    /// All users, encoded one after the other, in pieces of a bounded number of users.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Vec<u8>> {
        const USERS_PER_PIECE: usize = 4096;
        let mut users = self.map.iter().peekable();
        std::iter::from_fn(move || {
            users.peek()?;
            let piece: Vec<(&UserKey, &User)> = users.by_ref().take(USERS_PER_PIECE).collect();
            Some(codec::to_bytes(&piece))
        })
    }
}

impl Users {
    /// Takes the users of one piece; answers what is wrong with it.
    pub(crate) fn restore_piece(&mut self, bytes: &[u8]) -> Result<(), String> {
        type Piece = Vec<(UserKey, User)>;
        for (key, user) in codec::from_bytes::<Piece, { codec::SECTION_BYTES_MAX }>(bytes)? {
            let in_flight = &user.in_flight;
            let is_valid = user.weight_milli > 0
                && in_flight.is_sorted_by(|a, b| a.0 < b.0)
                && in_flight.iter().all(|(_, requests)| *requests > 0);
            if !is_valid || self.map.len() >= self.users_max {
                return Err(format!("user {key} is out of bounds"));
            }
            self.index(key, &user);
            if !self.map.insert_new(key, user) {
                return Err(format!("user {key} stands twice"));
            }
        }
        Ok(())
    }

    pub(crate) fn restore_totals(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.totals = codec::from_bytes::<_, { codec::SECTION_BYTES_MAX }>(bytes)?;
        Ok(())
    }
}
