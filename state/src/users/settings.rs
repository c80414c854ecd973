//! What operators set for users: the settings of one user, and the defaults of all.
//!
//! A user's own value of any field replaces the default of that field as a whole: a user with its
//! own daily budget has no monthly one, regardless of the default.

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::budgets::Budget;
use crate::caches::CacheScope;
use crate::form::{As, AsOption, Sharing};
use crate::pricing::WEIGHT_MILLI_DEFAULT;
use crate::reject::Rejection;
use crate::settings::UserLimits;
use crate::validate::{are_models, ensure};

/// Everything that an operator sets for one user. The default applies to a field that is `None`.
#[derive(
    Debug, Clone, PartialEq, Eq, Default, Encode, Decode, Serialize, Deserialize, JsonSchema,
)]
#[serde(default, deny_unknown_fields)]
pub struct UserSettings {
    /// Share of service relative to other users, in thousandths. Default: that of all users.
    #[schemars(range(min = 1))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_milli: Option<u32>,
    /// Limits of the user. Without any bound, the default ones apply.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limits: Option<UserLimits>,
    /// Tokens that the user may use per `day` and `month` (UTC). Without any, the default budget
    /// applies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<Budget>,
    /// Models that the user may use; a trailing `*` matches any suffix. Default: all.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<String>,
    /// Whether the user shares cached blocks: `shared`, `isolated`, or `group:NAME` with the users
    /// of a group. Default: as all users.
    #[serde(with = "AsOption::<Sharing>", skip_serializing_if = "Option::is_none")]
    pub cache: Option<CacheScope>,
}

impl UserSettings {
    /// Returns settings with a weight alone.
    #[must_use]
    pub fn of_weight(weight_milli: u32) -> Self {
        Self {
            weight_milli: Some(weight_milli),
            ..Self::default()
        }
    }

    /// Checks the bounds of every field.
    ///
    /// # Errors
    /// [`Rejection::Invalid`] with the first field that is out of bounds.
    pub fn validate(&self) -> Result<(), Rejection> {
        ensure(self.weight_milli != Some(0), "weight_milli", "at least 1")?;
        self.limits.map_or(Ok(()), |limits| limits.validate())?;
        self.budget.map_or(Ok(()), |budget| budget.validate())?;
        ensure(
            are_models(&self.models),
            "models",
            "1 to 256 bytes each, 1024 bytes together at most",
        )?;
        self.cache.as_ref().map_or(Ok(()), CacheScope::validate)
    }

    /// Removes limits and a budget without any bound. Returns `None` if nothing is left.
    pub(super) fn normalised(mut self) -> Option<Box<Self>> {
        self.limits = self.limits.filter(|limits| !limits.is_unbounded());
        self.budget = self.budget.filter(|budget| !budget.is_unbounded());
        (self != Self::default()).then(|| Box::new(self))
    }
}

/// The replicated settings of `[users.defaults]`, which `PUT /admin/v1/users/defaults` changes.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct UserDefaults {
    /// Share of service, relative to other users and in thousandths, of users without their own
    /// weight. Like all keys of `[users.defaults]`, it is read when a cluster is created; later use
    /// `quorate user defaults set` or `PUT /admin/v1/users/defaults`.
    #[schemars(range(min = 1))]
    pub weight_milli: u32,
    /// Whether users without their own setting share cached blocks: `shared`, `isolated`, or
    /// `group:NAME` with each other and the users of that group (docs/guide/security.md).
    #[serde(with = "As::<Sharing>")]
    pub cache: CacheScope,
    /// Limits of users without their own.
    pub limits: UserLimits,
    /// Budget of users without their own.
    pub budget: Budget,
}

impl Default for UserDefaults {
    fn default() -> Self {
        Self {
            weight_milli: WEIGHT_MILLI_DEFAULT,
            cache: CacheScope::default(),
            limits: UserLimits::default(),
            budget: Budget::default(),
        }
    }
}

impl UserDefaults {
    /// Checks the bounds of every field.
    ///
    /// # Errors
    /// [`Rejection::Invalid`] with the first field that is out of bounds.
    pub fn validate(&self) -> Result<(), Rejection> {
        ensure(self.weight_milli > 0, "weight_milli", "at least 1")?;
        self.limits.validate()?;
        self.budget.validate()?;
        self.cache.validate()
    }
}
