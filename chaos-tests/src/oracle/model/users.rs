//! The model's users: totals and virtual token counters, by linear search.

use std::collections::BTreeMap;

use state::admission::ChargeInput;
use state::budgets::Budget;
use state::command::{Charge, Rejection, UserDefaults, UserSettings};
use state::ids::{ReplicaId, UserKey};
use state::prefix::user_key;
use state::users::{FairnessSettings, UserUsage};

use crate::oracle::register;

/// Maximum of each count in one charge. A greater count is reduced to this.
pub(super) const TOKENS_MAX: u64 = 1 << 40;
const DAY_MS: u64 = 24 * 3600 * 1000;

/// All known users, with the defaults and the state of the fair order.
#[derive(Debug, Clone, Default)]
pub struct ModelUsers {
    /// Users by key.
    pub users: BTreeMap<UserKey, ModelUser>,
    hash_seed: u64,
    /// Weight and budget of users without their own.
    defaults: UserDefaults,
    /// Stamp of the last command in milliseconds, which determines the day of budgets.
    pub stamp_ms: u64,
    /// Counter of the user who stopped waiting last, or who was dispatched since while none waited.
    last_left: Option<u64>,
    /// Counter at which the last user with requests in flight became idle.
    last_idle: u64,
}

/// Usage, counter and budget of one user.
#[derive(Debug, Clone)]
pub struct ModelUser {
    /// Weight set for the user, in thousandths; `None` for the default.
    own_milli: Option<u32>,
    /// Weight at the last charge, in thousandths.
    charged_milli: u32,
    /// Total number of tokens and requests.
    pub total: UserUsage,
    /// Number of requests in flight, by replica.
    pub in_flight: BTreeMap<ReplicaId, u64>,
    /// Number of waiting requests, by replica.
    pub waiting: BTreeMap<ReplicaId, u64>,
    /// Budget of the user in tokens; `None` for the default.
    pub(super) own_budget: Option<Budget>,
    /// Day that is counted, since 1970, and the number of tokens used on it.
    day: (u64, u64),
    /// Sum of lifts and of charges under earlier weights, in milli-tokens.
    base: u64,
    /// Number of priced tokens charged under the current weight.
    charged: u128,
}

impl Default for ModelUser {
    fn default() -> Self {
        Self {
            own_milli: None,
            charged_milli: 1000,
            own_budget: None,
            day: (0, 0),
            total: UserUsage::default(),
            in_flight: BTreeMap::new(),
            waiting: BTreeMap::new(),
            base: 0,
            charged: 0,
        }
    }
}

/// Returns the price of a charge, in priced tokens.
pub(super) fn price(prices: &FairnessSettings, input: ChargeInput, charge: &Charge) -> u64 {
    let (uncached, cached) = (
        charge.input_uncached.min(TOKENS_MAX),
        charge.input_cached.min(TOKENS_MAX),
    );
    let per_token = u64::from(prices.input_price);
    let input = match input {
        ChargeInput::Uncached => uncached * per_token,
        ChargeInput::Full => (uncached + cached) * per_token,
        ChargeInput::Discounted => uncached * per_token + cached * per_token / 10,
    };
    let output = charge.output.min(TOKENS_MAX) * u64::from(prices.output_price);
    let real = (input + output).saturating_sub(charge.settled);
    charge.advance.min(TOKENS_MAX) + real
}

impl ModelUser {
    /// Returns the virtual token counter, in milli-tokens.
    #[must_use]
    pub fn counter(&self) -> u64 {
        let charged = self.charged * 1_000_000 / u128::from(self.charged_milli);
        self.base + u64::try_from(charged).unwrap_or(u64::MAX)
    }

    /// Returns the day of a stamp and the number of tokens used on it. A stamp up to an hour before
    /// the counted day counts for that day.
    fn of_day(&self, stamp_ms: u64) -> (u64, u64) {
        let (day, used) = self.day;
        let stamped = stamp_ms / DAY_MS;
        let is_slightly_back = stamped < day && stamp_ms + DAY_MS / 24 >= day * DAY_MS;
        match stamped == day || is_slightly_back {
            true => (day, used),
            false => (stamped, 0),
        }
    }

    fn spend(&mut self, stamp_ms: u64, charge: &Charge) {
        let parts = [charge.input_uncached, charge.input_cached, charge.output];
        let tokens: u64 = parts.iter().map(|part| (*part).min(TOKENS_MAX)).sum();
        if tokens > 0 {
            let (day, used) = self.of_day(stamp_ms);
            self.day = (day, used + tokens);
        }
    }

    /// Counts by this weight from now on.
    fn weigh(&mut self, weight_milli: u32) {
        if self.charged_milli != weight_milli {
            self.base = self.counter();
            self.charged = 0;
            self.charged_milli = weight_milli;
        }
    }

    fn is_idle(&self) -> bool {
        self.in_flight.values().all(|requests| *requests == 0)
    }

    fn waits(&self) -> bool {
        self.waiting.values().any(|requests| *requests > 0)
    }
}

impl ModelUsers {
    pub(super) fn begin(&mut self, hash_seed: u64) {
        self.hash_seed = hash_seed;
    }

    pub(super) fn know(&mut self, user: UserKey) {
        self.user(user);
    }

    /// Returns the user with this key. Adds the user if it is unknown.
    fn user(&mut self, user: UserKey) -> &mut ModelUser {
        self.users.entry(user).or_default()
    }

    /// Replaces the settings of a user. The user becomes known if anything is set.
    pub(super) fn configure(&mut self, name: &str, settings: &UserSettings) {
        let is_counted = !self.defaults.budget.is_unbounded();
        let key = self.key(name);
        if register::user(settings).is_none() && !self.users.contains_key(&key) {
            return;
        }
        let user = self.user(key);
        user.own_milli = settings.weight_milli;
        user.own_budget = settings.budget.filter(|budget| !budget.is_unbounded());
        if user.own_budget.is_none() && !is_counted {
            user.day = (0, 0);
        }
    }

    /// Replaces the defaults of users.
    pub(super) fn set_defaults(&mut self, defaults: &UserDefaults) {
        self.defaults = defaults.clone();
    }

    /// Returns the weight that applies to a user, in thousandths.
    #[must_use]
    pub fn weight_milli(&self, user: &ModelUser) -> u32 {
        user.own_milli.unwrap_or(self.defaults.weight_milli)
    }

    pub(super) fn check_forgive(&self, name: &str) -> Result<(), Rejection> {
        match self.users.contains_key(&self.key(name)) {
            true => Ok(()),
            false => Err(Rejection::Invalid {
                field: "name".to_owned(),
                expected: "a user who is known".to_owned(),
            }),
        }
    }

    pub(super) fn forgive(&mut self, name: &str) {
        let key = self.key(name);
        if let Some(user) = self.users.get_mut(&key) {
            user.day = (0, 0);
        }
    }

    /// Returns the number of tokens that a user has used today, and the limit; `None` without a
    /// daily budget.
    #[must_use]
    pub fn today(&self, user: &ModelUser) -> Option<(u64, u64)> {
        let limit = user.own_budget.unwrap_or(self.defaults.budget).day?;
        Some((user.of_day(self.stamp_ms).1, limit))
    }

    /// Returns the key of the user with this name.
    #[must_use]
    pub fn key(&self, name: &str) -> UserKey {
        user_key(self.hash_seed, name)
    }

    pub(super) fn check_delete(&self, name: &str) -> Result<(), Rejection> {
        let name = name.to_owned();
        match self.users.get(&self.key(&name)) {
            None => Err(Rejection::UnknownUser { name }),
            Some(user) if !user.is_idle() || user.waits() => Err(Rejection::UserBusy { name }),
            Some(_) => Ok(()),
        }
    }

    pub(super) fn delete(&mut self, name: &str) {
        self.users.remove(&self.key(name));
    }

    /// Returns the virtual time: the counter to which an arriving user is lifted.
    #[must_use]
    pub fn virtual_time(&self) -> u64 {
        let least = |is_among: fn(&ModelUser) -> bool| {
            let users = self.users.values().filter(|user| is_among(user));
            users.map(ModelUser::counter).min()
        };
        least(ModelUser::waits)
            .or(self.last_left)
            .or_else(|| least(|user| !user.is_idle()))
            .unwrap_or(self.last_idle)
    }

    fn anybody_waits(&self) -> bool {
        self.users.values().any(ModelUser::waits)
    }

    pub(super) fn charge(&mut self, replica: ReplicaId, charge: &Charge, due: u64) {
        let virtual_time = self.virtual_time();
        let has_queued = self.last_left.is_some() || self.anybody_waits();
        let (stamp_ms, default) = (self.stamp_ms, self.defaults.budget);
        let default_milli = self.defaults.weight_milli;
        let user = self.user(charge.user);
        user.weigh(user.own_milli.unwrap_or(default_milli));
        if !user.own_budget.unwrap_or(default).is_unbounded() {
            user.spend(stamp_ms, charge);
        }
        let (was_waiting, was_idle) = (user.waits(), user.is_idle());
        let comes = charge.started > 0 || charge.queued > 0;
        if comes && !was_waiting && (has_queued || was_idle) {
            user.base += virtual_time.saturating_sub(user.counter());
        }
        user.charged += u128::from(due);
        user.total.input_uncached += charge.input_uncached.min(TOKENS_MAX);
        user.total.input_cached += charge.input_cached.min(TOKENS_MAX);
        user.total.output += charge.output.min(TOKENS_MAX);
        user.total.requests += u64::from(charge.started);
        meet(&mut user.in_flight, replica, charge.started, charge.ended);
        meet(&mut user.waiting, replica, charge.queued, charge.dequeued);
        let (counter, waits, is_idle) = (user.counter(), user.waits(), user.is_idle());
        if is_idle && (!was_idle || charge.started > 0) {
            self.last_idle = counter;
        }
        let has_left = was_waiting && !waits;
        let passed =
            charge.started > 0 && (self.last_left.is_some() || has_left) && !self.anybody_waits();
        if has_left || !waits && (passed || charge.queued > 0) {
            self.last_left = Some(counter);
        }
    }

    pub(super) fn close(&mut self, replica: ReplicaId) {
        for user in self.users.values_mut() {
            let (was_idle, was_waiting) = (user.is_idle(), user.waits());
            user.in_flight.remove(&replica);
            user.waiting.remove(&replica);
            if !was_idle && user.is_idle() {
                self.last_idle = user.counter();
            }
            if was_waiting && !user.waits() {
                self.last_left = Some(user.counter());
            }
        }
    }
}

/// Adds `more` to the count of a replica, then subtracts `less`, but not below 0.
fn meet(counts: &mut BTreeMap<ReplicaId, u64>, replica: ReplicaId, more: u32, less: u32) {
    let count = counts.entry(replica).or_default();
    *count = (*count + u64::from(more)).saturating_sub(u64::from(less));
}
