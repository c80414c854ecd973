//! A user's plan: its budget, the budget's usage, and the models it may use.
//!
//! It is stored next to the user but encoded separately, so that users without one are written and
//! hashed as before format version 6.

use bincode::{Decode, Encode};

use super::table::Users;
use super::{DefaultPlan, User};
use crate::budgets::{Budget, BudgetStatus, BudgetUse};
use crate::ids::UserKey;
use crate::validate::{are_models, stands_for};

/// Plan of a user. A plan with default values is not stored.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub(super) struct UserPlan {
    /// The user's own budget. `None` if the default one applies.
    pub(super) budget: Option<Budget>,
    /// Usage of the effective budget.
    pub(super) used: BudgetUse,
    /// Models that the user may use; empty if all. A final `*` matches any suffix.
    pub(super) models: Vec<String>,
}

impl UserPlan {
    /// Whether a restored plan is one that this code could have created.
    pub(super) fn is_valid(&self) -> bool {
        let is_sound = |budget: &Budget| !budget.is_unbounded() && budget.validate().is_ok();
        *self != Self::default()
            && self.budget.as_ref().is_none_or(is_sound)
            && are_models(&self.models)
    }

    /// Whether the plan contains usage although the user has no budget of its own.
    pub(super) fn counts_unasked(&self) -> bool {
        self.budget.is_none() && self.used != BudgetUse::default()
    }

    /// Whether an operator set a part of the plan, so that the user is kept.
    pub(super) fn is_given(&self) -> bool {
        self.budget.is_some() || !self.models.is_empty()
    }
}

impl User {
    /// Applies `change` to the plan, which it creates if missing and drops if empty.
    pub(super) fn replan(&mut self, change: impl FnOnce(&mut UserPlan)) {
        let mut plan = self.plan.take().unwrap_or_default();
        change(&mut plan);
        self.plan = Some(plan).filter(|plan| **plan != UserPlan::default());
    }

    /// Counts tokens towards the effective budget, if there is one.
    pub(super) fn spend(&mut self, unix_ms: u64, tokens: u64, default: &DefaultPlan) {
        let has_own = self.plan.as_ref().is_some_and(|plan| plan.budget.is_some());
        if (has_own || !default.budget.is_unbounded()) && tokens > 0 {
            self.replan(|plan| plan.used.spend(unix_ms, tokens));
        }
    }

    /// Returns the effective budget and its usage.
    pub(super) fn budget(&self, default: &DefaultPlan) -> BudgetStatus {
        let plan = self.plan.as_deref();
        BudgetStatus {
            budget: plan.and_then(|plan| plan.budget).unwrap_or(default.budget),
            used: plan.map(|plan| plan.used).unwrap_or_default(),
        }
    }

    /// Returns the models that the user may use; empty if all.
    pub(super) fn models(&self) -> &[String] {
        self.plan.as_ref().map_or(&[], |plan| &plan.models)
    }

    /// Whether the user may use `model`.
    pub(super) fn allows_model(&self, model: &str) -> bool {
        let models = self.models();
        models.is_empty() || models.iter().any(|it| stands_for(it, model))
    }
}

impl Users {
    /// Sets a user's budget, its models, or both. An unbounded budget removes the user's own one. A
    /// budget that is set where none applied starts with nothing used. Returns whether the table
    /// had room.
    pub(crate) fn plan(
        &mut self,
        key: UserKey,
        name: &str,
        (budget, models): (Option<Budget>, Option<Vec<String>>),
    ) -> bool {
        let changes_nothing =
            budget.is_none_or(|it| it.is_unbounded()) && models.as_ref().is_none_or(Vec::is_empty);
        if changes_nothing && self.map.get(&key).is_none() {
            return true;
        }
        let is_counted = !self.default_plan().budget.is_unbounded();
        self.change(key, |user| {
            user.name = name.into();
            user.replan(|plan| {
                if let Some(budget) = budget {
                    plan.budget = Some(budget).filter(|budget| !budget.is_unbounded());
                }
                if plan.budget.is_none() && !is_counted {
                    plan.used = BudgetUse::default();
                }
                if let Some(models) = models {
                    plan.models = models;
                }
            });
            false
        })
    }
}
