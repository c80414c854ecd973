//! Values for users without their own, and how users follow them. `defaults.rs` explains when they
//! are set, and what setting them costs.

use bincode::{Decode, Encode};

use super::User;
use crate::budgets::{Budget, BudgetStatus};
use crate::pricing::WEIGHT_MILLI_DEFAULT;
use crate::quotas::Quota;
use crate::settings::UserLimits;

/// Weight and budget of users without their own values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub(crate) struct DefaultPlan {
    /// Share of service relative to other users, in thousandths.
    pub(crate) weight_milli: u32,
    /// Budget in tokens per day and month.
    pub(crate) budget: Budget,
}

impl Default for DefaultPlan {
    fn default() -> Self {
        Self {
            weight_milli: WEIGHT_MILLI_DEFAULT,
            budget: Budget::default(),
        }
    }
}

/// All values that apply to users without their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Fallbacks {
    pub(super) limits: UserLimits,
    pub(super) plan: DefaultPlan,
}

impl Fallbacks {
    /// Returns the quota of an unknown user.
    pub(super) fn quota(&self) -> Quota {
        Quota {
            limits: self.limits,
            budget: BudgetStatus {
                budget: self.plan.budget,
                ..BudgetStatus::default()
            },
            ..Quota::default()
        }
    }
}

impl User {
    /// Whether the user follows the default weight instead of one of its own.
    pub(super) fn follows_weight(&self) -> bool {
        !self.is_configured || self.is_unweighted
    }

    /// Returns the weight in force: the user's own or the default.
    pub(super) fn weight_in_force(&self, default: &DefaultPlan) -> u32 {
        match self.follows_weight() {
            true => default.weight_milli,
            false => self.weight_milli,
        }
    }

    /// Switches the user to the weight in force. Must precede a charge.
    pub(super) fn settle_weight(&mut self, default: &DefaultPlan) {
        let weight_milli = self.weight_in_force(default);
        self.rebase(weight_milli);
    }
}
