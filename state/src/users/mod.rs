//! Users and their usage: virtual token counters as in VTC.
//!
//! Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024 (VTC), Algorithm 2
//! for the lift. A user's counter rises by `(input_price * uncached input tokens + output_price *
//! output tokens) / weight`. A user who arrives with nothing waiting is lifted to the lowest
//! counter among users waiting for admission or, if none waits, to the counter of the user who last
//! stopped waiting or was dispatched. Idling therefore earns no credit. Before any user has waited,
//! and in all logs of format version 1, the lift takes the lowest counter among users with requests
//! in flight or, if there are none, the counter at which the last user became idle.
//!
//! Charges report who waits (`queued`, `dequeued`), so users waiting at one replica count at all of
//! them. docs/internals/fairness.md explains why waiting counts and being in flight does not.
//!
//! # Fixed point
//! A counter counts thousandths of a priced token at weight 1, in a `u64`. It never accumulates
//! rounded steps. A user keeps the exact number of priced tokens charged since a `base`, and the
//! counter is `base + floor(charged * 1_000_000 / weight_milli)`. A lift raises `base`; a change of
//! weight makes the current counter the new `base`. With a constant weight, a counter therefore
//! equals the lifts plus the rounded sum of all charges, however they were batched.
//!
//! # Bounds
//! At most `USERS_MAX` users are kept. A user can be forgotten if it has no requests in flight or
//! waiting, and no weight, limits, budget, models or cache scope of its own. Users who were never
//! charged go first. Then the lowest counter goes. At or below the counter to which arriving users
//! are lifted, this costs no fairness, because the user would be lifted to it anyway; above it, the
//! lowest counter forgives least.

mod admission_account;
mod defaults;
mod fallbacks;
mod forgettable;
mod image;
mod map;
mod plan;
mod published;
mod recent_usage;
mod table;
#[cfg(test)]
mod tests;
mod window;

use std::sync::Arc;

use bincode::de::Decoder;
use bincode::enc::Encoder;
use bincode::error::{DecodeError, EncodeError};
use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::Serialize;

use crate::budgets::{Budget, BudgetStatus};
use crate::ids::{ReplicaId, UserKey};
use crate::quotas::{Quota, RemainingLimits};
use crate::settings::UserLimits;

pub use crate::bounds::CHARGE_TOKENS_MAX;
pub use crate::pricing::{FairnessSettings, WEIGHT_MILLI_DEFAULT};
use admission_account::{AdmissionAccount, add, sum, take};
pub(crate) use fallbacks::DefaultPlan;
use fallbacks::Fallbacks;
use plan::UserPlan;
pub use published::UsersView;
pub use recent_usage::RecentUsage;
pub(crate) use table::{ChargeTerms, Users, UsersImage};
use window::UsageWindow;
pub use window::{WINDOW_BUCKET_MS, WINDOW_BUCKETS};

/// Tokens and requests of one user. Sums saturate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode, Serialize, JsonSchema)]
pub struct UserUsage {
    /// Prompt tokens that the engines computed.
    pub input_uncached: u64,
    /// Prompt tokens that the engines found in their prefix caches.
    pub input_cached: u64,
    /// Output tokens.
    pub output: u64,
    /// Requests that started.
    pub requests: u64,
}

impl UserUsage {
    /// Returns the number of billed tokens: those of prompts and outputs together.
    pub(crate) fn tokens(&self) -> u64 {
        let input = self.input_uncached.saturating_add(self.input_cached);
        input.saturating_add(self.output)
    }

    fn add(&mut self, other: &Self) {
        self.input_uncached = self.input_uncached.saturating_add(other.input_uncached);
        self.input_cached = self.input_cached.saturating_add(other.input_cached);
        self.output = self.output.saturating_add(other.output);
        self.requests = self.requests.saturating_add(other.requests);
    }
}

/// A user as the admin API shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct UserView {
    /// Hash of the name.
    pub key: UserKey,
    /// Name; empty until a replica has reported it.
    pub name: Arc<str>,
    /// Share of service relative to other users, in thousandths: the user's own or the default.
    pub weight_milli: u32,
    /// Whether an operator set the weight. Such a user is never forgotten. A user who is kept only
    /// for its cache scope counts as well, unless it follows the default weight.
    pub is_configured: bool,
    /// Virtual token counter, in thousandths of a priced token at weight 1.
    pub counter_milli_tokens: u64,
    /// Number of requests in flight at all replicas.
    pub in_flight: u64,
    /// Number of requests waiting for admission at all replicas.
    pub waiting: u64,
    /// Limits set for this user. `None` if the default ones apply.
    pub limits: Option<UserLimits>,
    /// Remainder of the effective limits.
    pub left: RemainingLimits,
    /// Budget set for this user. `None` if the default one applies.
    #[serde(skip)]
    pub own_budget: Option<Budget>,
    /// Effective budget and its usage.
    #[serde(skip)]
    pub budget: BudgetStatus,
    /// Models that the user may use. Empty if it may use all.
    pub models: Vec<String>,
    /// Usage since the user became known.
    pub total: UserUsage,
    /// Usage over the last [`WINDOW_BUCKETS`] buckets, including the current one. A bucket lasts
    /// [`WINDOW_BUCKET_MS`], or a fifth of the window that the live policy requests.
    pub window: UserUsage,
    /// Unix time of the last charge, in milliseconds; 0 before the first.
    pub last_charge_ms: u64,
}

/// State of one user, as the table stores it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct User {
    name: Arc<str>,
    weight_milli: u32,
    is_configured: bool,
    /// Whether the user is configured but follows the default weight; encoded separately.
    is_unweighted: bool,
    /// Counter at the time when `charged` was last reset, plus every lift since, in milli-tokens.
    base: u64,
    /// Number of priced tokens charged since the weight last changed.
    charged: u64,
    /// Number of priced tokens ever charged to the user. Together with those of forgotten users,
    /// they add up to all charges (I4).
    charged_ever: u128,
    /// Number of requests in flight by replica, ascending, without zeros.
    in_flight: Vec<(ReplicaId, u32)>,
    total: UserUsage,
    window: UsageWindow,
    last_charge_ms: u64,
    /// Admission account; encoded separately. `None` if empty.
    admission_account: Option<Box<AdmissionAccount>>,
    /// Plan of the user; encoded separately. `None` if empty.
    plan: Option<Box<UserPlan>>,
}

impl Encode for User {
    fn encode<E: Encoder>(&self, encoder: &mut E) -> Result<(), EncodeError> {
        self.name.encode(encoder)?;
        self.weight_milli.encode(encoder)?;
        self.is_configured.encode(encoder)?;
        self.base.encode(encoder)?;
        self.charged.encode(encoder)?;
        self.charged_ever.encode(encoder)?;
        self.in_flight.encode(encoder)?;
        self.total.encode(encoder)?;
        self.window.encode(encoder)?;
        self.last_charge_ms.encode(encoder)
    }
}

impl<C> Decode<C> for User {
    fn decode<D: Decoder<Context = C>>(decoder: &mut D) -> Result<Self, DecodeError> {
        Ok(Self {
            name: Decode::decode(decoder)?,
            weight_milli: Decode::decode(decoder)?,
            is_configured: Decode::decode(decoder)?,
            is_unweighted: false,
            base: Decode::decode(decoder)?,
            charged: Decode::decode(decoder)?,
            charged_ever: Decode::decode(decoder)?,
            in_flight: Decode::decode(decoder)?,
            total: Decode::decode(decoder)?,
            window: Decode::decode(decoder)?,
            last_charge_ms: Decode::decode(decoder)?,
            admission_account: None,
            plan: None,
        })
    }
}
bincode::impl_borrow_decode!(User);

impl User {
    fn new() -> Self {
        Self {
            name: Arc::from(""),
            weight_milli: WEIGHT_MILLI_DEFAULT,
            is_configured: false,
            is_unweighted: false,
            base: 0,
            charged: 0,
            charged_ever: 0,
            in_flight: Vec::new(),
            total: UserUsage::default(),
            window: UsageWindow::default(),
            last_charge_ms: 0,
            admission_account: None,
            plan: None,
        }
    }

    /// Returns the virtual token counter; see the module documentation.
    fn counter(&self) -> u64 {
        let charged = u128::from(self.charged) * 1_000_000 / u128::from(self.weight_milli.max(1));
        self.base
            .saturating_add(u64::try_from(charged).unwrap_or(u64::MAX))
    }

    fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    fn lift_to(&mut self, least: u64) {
        self.base = self
            .base
            .saturating_add(least.saturating_sub(self.counter()));
    }

    fn set_weight(&mut self, weight_milli: u32) {
        self.is_configured = true;
        self.is_unweighted = false;
        self.rebase(weight_milli);
    }

    /// Charges by the weight `weight_milli` from now on. The counter does not change.
    fn rebase(&mut self, weight_milli: u32) {
        if weight_milli != self.weight_milli {
            self.base = self.counter();
            self.charged = 0;
            self.weight_milli = weight_milli;
        }
    }

    fn in_flight(&self) -> u64 {
        sum(&self.in_flight)
    }

    /// Returns the number of waiting requests at all replicas.
    fn waiting(&self) -> u64 {
        self.admission_account
            .as_ref()
            .map_or(0, |it| sum(&it.waiting))
    }

    fn is_waiting(&self) -> bool {
        self.admission_account
            .as_ref()
            .is_some_and(|it| !it.waiting.is_empty())
    }

    /// Applies `change` to the admission account, which it creates if missing and drops if empty.
    fn update_account(&mut self, change: impl FnOnce(&mut AdmissionAccount)) {
        let mut account = self.admission_account.take().unwrap_or_default();
        change(&mut account);
        self.admission_account =
            Some(account).filter(|account| **account != AdmissionAccount::default());
    }

    /// Returns the effective limits: the user's own, or else `of_all`.
    fn limits(&self, of_all: &UserLimits) -> UserLimits {
        let own = self
            .admission_account
            .as_ref()
            .and_then(|account| account.limits);
        own.unwrap_or(*of_all)
    }

    fn quota(&self, of_all: &Fallbacks) -> Quota {
        let account = self.admission_account.as_deref();
        Quota {
            limits: self.limits(&of_all.limits),
            consumed: account.map(|it| it.consumed).unwrap_or_default(),
            in_flight: self.in_flight(),
            waiting: self.waiting(),
            budget: self.budget(&of_all.plan),
        }
    }

    fn view(&self, key: UserKey, now_ms: u64, bucket_ms: u64, of_all: &Fallbacks) -> UserView {
        UserView {
            key,
            name: Arc::clone(&self.name),
            weight_milli: self.weight_in_force(&of_all.plan),
            is_configured: self.is_configured && !self.is_unweighted,
            counter_milli_tokens: self.counter(),
            in_flight: self.in_flight(),
            waiting: self.waiting(),
            limits: self.admission_account.as_ref().and_then(|it| it.limits),
            left: self.quota(of_all).left(now_ms),
            own_budget: self.plan.as_ref().and_then(|plan| plan.budget),
            budget: self.budget(&of_all.plan),
            models: self.models().to_vec(),
            total: self.total,
            window: self.window.sum(now_ms, bucket_ms),
            last_charge_ms: self.last_charge_ms,
        }
    }
}
