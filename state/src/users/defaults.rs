//! The defaults for users without their own weight, limits or budget (ADR 0034).
//!
//! Each of the three is either the user's own or the default as a whole: a user with its own daily
//! budget has no monthly one, regardless of the default.
//!
//! # Weights
//!
//! The default weight is not stored per user, so that setting it costs the same for any number of
//! users. A user that follows it keeps the weight of its last charge, and switches to the current
//! one with its next charge. Switching does not change a counter, so this is equivalent to
//! switching at once. Only the counter uses the weight of the last charge; everything else uses the
//! current one.
//!
//! # Budgets
//!
//! While the default has a budget, every charge of users without their own counts towards it. Such
//! a user can be forgotten like one without a budget, and returns with nothing used. Otherwise,
//! names that clients invent would fill the table permanently.
//!
//! # Formats
//!
//! Users who follow the default but are kept because they have a cache scope are marked. Marks
//! exist only after defaults were set, which all members then know (format version 8). A user who
//! already had a scope and the weight 1 is assumed to follow the default.

use super::fallbacks::{DefaultPlan, Fallbacks};
use super::plan::UserPlan;
use super::table::Users;
use super::{User, WEIGHT_MILLI_DEFAULT};
use crate::encoding;
use crate::ids::UserKey;
use crate::settings::UserLimits;

impl Users {
    /// Sets the defaults for users without their own. `scoped` are the users with a cache scope.
    pub(crate) fn set_defaults(
        &mut self,
        plan: DefaultPlan,
        scoped: impl Iterator<Item = UserKey>,
    ) {
        if self.defaults.is_none() {
            for key in scoped {
                self.mark_unweighted(key);
            }
        }
        self.defaults = Some(plan);
        self.is_changed = true;
    }

    /// Makes a user follow the default weight if it may have been kept only for its cache scope.
    fn mark_unweighted(&mut self, key: UserKey) {
        let is_odd = |user: &User| !user.is_configured || user.weight_milli != WEIGHT_MILLI_DEFAULT;
        if self.map.get(&key).is_none_or(is_odd) {
            return;
        }
        self.change(key, |user| {
            user.is_unweighted = true;
            false
        });
    }

    /// Returns the defaults for users without their own values; `None` if they were never set.
    pub(crate) fn defaults(&self) -> Option<DefaultPlan> {
        self.defaults
    }

    pub(super) fn default_plan(&self) -> DefaultPlan {
        self.defaults.unwrap_or_default()
    }

    pub(super) fn fallbacks(&self, limits: UserLimits) -> Fallbacks {
        Fallbacks {
            limits,
            plan: self.default_plan(),
        }
    }

    /// Appends the defaults to the digest input, if they were set.
    pub(crate) fn append_defaults_digest(&self, bytes: &mut Vec<u8>) {
        if let Some(defaults) = &self.defaults {
            encoding::append_bytes(&(DEFAULTS_MARK, defaults), bytes);
        }
    }

    /// Whether a restored user is consistent with the defaults. Without defaults, no user follows a
    /// default weight or has usage that is counted only because of a default budget.
    pub(super) fn is_plausible(&self, user: &User) -> bool {
        let is_known = self.defaults.is_some();
        let plan = user.plan.as_deref();
        let counts_unasked = plan.is_some_and(UserPlan::counts_unasked);
        (is_known || !counts_unasked) && (!user.is_unweighted || is_known && user.is_configured)
    }
}

/// Prefix of the defaults in the digest input, which distinguishes them from all other parts.
const DEFAULTS_MARK: u64 = 0x6566_6564;
