//! Users and their usage: virtual token counters as in VTC.
//!
//! Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024 (VTC), Algorithm 2
//! for the lift. A user's counter rises by `(input_price * uncached input tokens + output_price *
//! output tokens) / weight`. A user who arrives with nothing waiting is lifted to the lowest
//! counter among users waiting for admission or, if none waits, to the counter of the user who last
//! stopped waiting or was dispatched. Idling therefore earns no credit. Before any user has waited,
//! the lift takes the lowest counter among users with requests in flight or, if there are none, the
//! counter at which the last user became idle.
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
//! waiting, and no settings of its own; its usage of limits and budgets goes with it. Otherwise,
//! names that clients invent would fill the table permanently. Users who were never charged go
//! first. Then the lowest counter goes. At or below the counter to which arriving users are lifted,
//! this costs no fairness, because the user would be lifted to it anyway; above it, the lowest
//! counter forgives least.

mod forgettable;
mod map;
mod published;
mod recent_usage;
mod settings;
mod snapshot;
mod table;
#[cfg(test)]
mod tests;
mod user;
mod window;

use std::sync::Arc;

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::Serialize;

use crate::budgets::BudgetStatus;
use crate::charge::Charge;
use crate::ids::UserKey;
use crate::quotas::RemainingLimits;

pub use crate::bounds::CHARGE_TOKENS_MAX;
pub use crate::pricing::{FairnessSettings, WEIGHT_MILLI_DEFAULT};
pub use published::UsersView;
pub use recent_usage::RecentUsage;
pub use settings::{UserDefaults, UserSettings};
pub(crate) use snapshot::UsersImage;
pub(crate) use table::{ChargeTerms, Users};
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
    /// Returns what a charge counts, with each number of tokens within its bound.
    pub(crate) fn of(charge: &Charge) -> Self {
        Self {
            input_uncached: charge.input_uncached.min(CHARGE_TOKENS_MAX),
            input_cached: charge.input_cached.min(CHARGE_TOKENS_MAX),
            output: charge.output.min(CHARGE_TOKENS_MAX),
            requests: u64::from(charge.started),
        }
    }

    /// Returns the number of billed tokens: those of prompts and outputs together.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        let input = self.input_uncached.saturating_add(self.input_cached);
        input.saturating_add(self.output)
    }

    /// Adds other usage, saturating.
    pub fn add(&mut self, other: &Self) {
        self.input_uncached = self.input_uncached.saturating_add(other.input_uncached);
        self.input_cached = self.input_cached.saturating_add(other.input_cached);
        self.output = self.output.saturating_add(other.output);
        self.requests = self.requests.saturating_add(other.requests);
    }
}

/// A user as the admin API shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserView {
    /// Hash of the name.
    pub key: UserKey,
    /// Name; empty until a replica has reported it.
    pub name: Arc<str>,
    /// What an operator set for this user. A user with any settings is never forgotten.
    pub own: UserSettings,
    /// Share of service relative to other users, in thousandths: the user's own or the default.
    pub weight_milli: u32,
    /// Virtual token counter, in thousandths of a priced token at weight 1.
    pub counter_milli_tokens: u64,
    /// Number of requests in flight at all replicas.
    pub in_flight: u64,
    /// Number of requests waiting for admission at all replicas.
    pub waiting: u64,
    /// Remainder of the effective limits.
    pub left: RemainingLimits,
    /// Effective budget and its usage.
    pub budget: BudgetStatus,
    /// Usage since the user became known.
    pub total: UserUsage,
    /// Usage over the last [`WINDOW_BUCKETS`] buckets, including the current one. A bucket lasts
    /// [`WINDOW_BUCKET_MS`], or a fifth of the window that the live policy requests.
    pub window: UserUsage,
    /// Unix time of the last charge, in milliseconds; 0 before the first.
    pub last_charge_ms: u64,
}
