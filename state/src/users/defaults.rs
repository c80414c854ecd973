//! What users have who were not given a weight, limits or a budget of their own (ADR 0071).
//!
//! Each of the three is a user's own or the default's as a whole: a budget per day of its own leaves
//! a user without one per month, whatever the default has.
//!
//! # Weights
//! The default weight is not written into users, so that setting it costs the same however many
//! there are. Who follows it keeps the weight under which it was charged last, and passes to the one
//! in force with its next charge. Passing leaves a counter as it is, so that this is the same as
//! passing at once. Only the counter looks at the weight of the last charge; all else is told the
//! weight in force.
//!
//! # Budgets
//! While the default has a budget, every charge counts for it, of users without one of their own.
//! Such a user can be forgotten like one without a budget, and comes back with nothing used:
//! otherwise names that clients make up would fill the table for good.
//!
//! # Formats
//! Users who follow the default and are kept all the same, because they have a cache scope, are
//! marked. There are marks only once defaults were set, which all members then know (format version
//! 8). Who had a scope before and the weight 1 is taken to follow.

use super::fallbacks::{DefaultPlan, Fallbacks};
use super::plan::UserPlan;
use super::table::Users;
use super::{User, WEIGHT_MILLI_DEFAULT};
use crate::encoding;
use crate::ids::UserKey;
use crate::settings::UserLimits;

impl Users {
    /// Sets what users have without their own. `scoped` are those with a cache scope.
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

    /// Takes a user who may have been kept for its cache scope alone to follow the default weight.
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

    /// Returns what was set for users without their own; `None`: nothing ever.
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

    /// Appends the defaults' part of the digest input.
    pub(crate) fn append_defaults_digest(&self, bytes: &mut Vec<u8>) {
        if let Some(defaults) = &self.defaults {
            encoding::append_bytes(&(DEFAULTS_MARK, defaults), bytes);
        }
    }

    /// Whether a user holds nothing that only defaults give.
    pub(super) fn is_plausible(&self, user: &User) -> bool {
        let is_known = self.defaults.is_some();
        let plan = user.plan.as_deref();
        let counts_unasked = plan.is_some_and(UserPlan::counts_unasked);
        (is_known || !counts_unasked) && (!user.is_unweighted || is_known && user.is_configured)
    }
}

/// What stands before the defaults where they are hashed: no other part may pass for them.
const DEFAULTS_MARK: u64 = 0x6566_6564;
