//! Usage of the cluster: tokens and requests by day, user, API key and model, for bills and reports.
//!
//! Each charge names a *source*, the API key and the model of its requests. `apply` adds the charge
//! to the user's row of the day and the source, in the step in which it reaches the user's counters.
//! So the rows and what was dropped by age add up to all that was ever charged. Days are those of
//! UTC and follow the rule for stamps of [`crate::budgets`].
//!
//! Rows older than `admission.usage_days` days are dropped. There are at
//! most [`USAGE_ROWS_MAX`]. A table that is full keeps its totals and loses detail, the oldest day
//! first: the rows of users who have several become one of [`SourceKey::OTHER`] each, and then those
//! of all users become one of [`NOBODY`]. Each row that folds makes room or prepares it for the next,
//! so no command folds more than three for a row that is new. A bill of a recent day is worth more than the detail of an old one.
//!
//! A deleted user's rows become rows of [`NOBODY`] that keep day and model, so that the fleet's use
//! still adds up and nothing leads to the user.

mod sources;
mod table;
#[cfg(test)]
mod tests;

use bincode::{Decode, Encode};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::cow::PathKey;
use crate::ids::{ApiKeyId, SourceKey, UserKey};

pub(crate) use table::UsageTable;
pub use table::{UsageRow, UsageView};

/// Maximum number of rows.
pub const USAGE_ROWS_MAX: usize = 200_000;
/// User of rows whose users are not known any more.
pub const NOBODY: UserKey = UserKey(0);

/// What a request was sent with: an API key and a model.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub struct UsageSource {
    /// The cluster's API key; `None` without one.
    pub key: Option<ApiKeyId>,
    /// Name of the model.
    pub model: String,
}

/// Returns the key of a source: `xxh3_64` of the model, seeded with the `xxh3_64` of the API key's id,
/// little-endian, seeded with the cluster's `hash_seed`. Without a key, the id has no bytes.
#[must_use]
pub fn source_key(hash_seed: u64, key: Option<ApiKeyId>, model: &str) -> SourceKey {
    let id = key.map(|id| id.0.to_le_bytes());
    let seed = xxh3_64_with_seed(id.as_ref().map_or(&[], |id| &id[..]), hash_seed);
    SourceKey(xxh3_64_with_seed(model.as_bytes(), seed))
}

/// What a row counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Encode, Decode)]
struct RowKey {
    /// Days since 1970.
    day: u32,
    user: UserKey,
    source: SourceKey,
}

impl PathKey for RowKey {
    // Users and sources are hashes. Days are not, so they are multiplied (Fibonacci hashing).
    fn path(&self) -> u64 {
        let day = u64::from(self.day).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.user.0 ^ self.source.0.rotate_left(32) ^ day
    }
}

/// How a user's rows of a day fold. Those of a day fold in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fold {
    /// Several rows become one of [`SourceKey::OTHER`].
    IntoUser,
    /// The only row becomes part of the day's row.
    IntoDay,
}

impl RowKey {
    /// Returns the first and the last key that a user's rows of a day may have.
    fn of_user(day: u32, user: UserKey) -> std::ops::RangeInclusive<Self> {
        let key = |source| Self { day, user, source };
        key(SourceKey::OTHER)..=key(SourceKey(u64::MAX))
    }

    /// Returns the row that this one folds into.
    fn folded(self, fold: Fold) -> Self {
        Self {
            user: match fold {
                Fold::IntoUser => self.user,
                Fold::IntoDay => NOBODY,
            },
            source: SourceKey::OTHER,
            ..self
        }
    }
}
