//! One user: its settings, counter, open requests and usage.

use std::sync::Arc;

use bincode::{Decode, Encode};

use super::window::UsageWindow;
use super::{UserDefaults, UserSettings, UserUsage, UserView};
use crate::budgets::{BudgetStatus, BudgetUse};
use crate::caches::CacheScope;
use crate::charge::Charge;
use crate::ids::{ReplicaId, UserKey};
use crate::pricing::WEIGHT_MILLI_DEFAULT;
use crate::quotas::{Consumed, Quota};
use crate::settings::UserLimits;
use crate::validate::stands_for;

/// State of one user, as the table stores it.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub(super) struct User {
    pub(super) name: Arc<str>,
    /// What an operator set for this user; `None` if nothing.
    pub(super) own: Option<Box<UserSettings>>,
    /// Weight at the last charge, in thousandths, by which `charged` counts.
    pub(super) charged_weight_milli: u32,
    /// Counter at the time when `charged` was last reset, plus every lift since, in milli-tokens.
    pub(super) base: u64,
    /// Number of priced tokens charged since the weight last changed.
    pub(super) charged: u64,
    /// Number of priced tokens ever charged to the user. Together with those of forgotten users,
    /// they add up to all charges (I4).
    pub(super) charged_ever: u128,
    /// Number of requests in flight by replica, ascending, without zeros.
    pub(super) in_flight: Vec<(ReplicaId, u32)>,
    /// Number of waiting requests by replica, ascending, without zeros.
    pub(super) waiting: Vec<(ReplicaId, u32)>,
    pub(super) total: UserUsage,
    pub(super) window: UsageWindow,
    pub(super) last_charge_ms: u64,
    /// Usage counted against the limits.
    pub(super) consumed: Consumed,
    /// Usage counted against the budget.
    pub(super) budget_used: BudgetUse,
}

impl Default for User {
    fn default() -> Self {
        Self {
            name: Arc::from(""),
            own: None,
            charged_weight_milli: WEIGHT_MILLI_DEFAULT,
            base: 0,
            charged: 0,
            charged_ever: 0,
            in_flight: Vec::new(),
            waiting: Vec::new(),
            total: UserUsage::default(),
            window: UsageWindow::default(),
            last_charge_ms: 0,
            consumed: Consumed::default(),
            budget_used: BudgetUse::default(),
        }
    }
}

impl User {
    /// Returns the virtual token counter; see the module documentation.
    pub(super) fn counter(&self) -> u64 {
        let weight_milli = u128::from(self.charged_weight_milli.max(1));
        let charged = u128::from(self.charged) * 1_000_000 / weight_milli;
        self.base
            .saturating_add(u64::try_from(charged).unwrap_or(u64::MAX))
    }

    pub(super) fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    pub(super) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Returns the number of requests in flight at all replicas.
    pub(super) fn in_flight(&self) -> u64 {
        sum(&self.in_flight)
    }

    /// Returns the number of waiting requests at all replicas.
    pub(super) fn waiting(&self) -> u64 {
        sum(&self.waiting)
    }

    /// Whether `replica` has requests of the user in flight or waiting.
    pub(super) fn is_open_at(&self, replica: ReplicaId) -> bool {
        let open = self.in_flight.iter().chain(&self.waiting);
        open.into_iter().any(|(other, _)| *other == replica)
    }

    /// Raises the counter to `least`, if it is lower.
    pub(super) fn lift_to(&mut self, least: u64) {
        self.base = self
            .base
            .saturating_add(least.saturating_sub(self.counter()));
    }

    /// Counts by the effective weight from now on. The counter does not change.
    pub(super) fn settle_weight(&mut self, weight_milli: u32) {
        if weight_milli != self.charged_weight_milli {
            self.base = self.counter();
            self.charged = 0;
            self.charged_weight_milli = weight_milli;
        }
    }

    /// Returns the effective weight, in thousandths.
    pub(super) fn weight_milli(&self, defaults: &UserDefaults) -> u32 {
        let own = self.own.as_ref().and_then(|own| own.weight_milli);
        own.unwrap_or(defaults.weight_milli)
    }

    /// Returns the effective limits.
    pub(super) fn limits(&self, defaults: &UserDefaults) -> UserLimits {
        let own = self.own.as_ref().and_then(|own| own.limits);
        own.unwrap_or(defaults.limits)
    }

    /// Returns the effective budget and its usage.
    pub(super) fn budget(&self, defaults: &UserDefaults) -> BudgetStatus {
        let own = self.own.as_ref().and_then(|own| own.budget);
        BudgetStatus {
            budget: own.unwrap_or(defaults.budget),
            used: self.budget_used,
        }
    }

    /// Returns the models that the user may use; empty if all.
    pub(super) fn models(&self) -> &[String] {
        self.own.as_ref().map_or(&[], |own| &own.models)
    }

    /// Whether the user may use `model`.
    pub(super) fn allows_model(&self, model: &str) -> bool {
        let models = self.models();
        models.is_empty() || models.iter().any(|it| stands_for(it, model))
    }

    /// Returns the user's own cache scope; `None` if the default applies.
    pub(super) fn own_scope(&self) -> Option<&CacheScope> {
        self.own.as_ref()?.cache.as_ref()
    }

    /// Adds a charge of `replica`, with its `usage`, to the limits and the budget.
    pub(super) fn spend(
        &mut self,
        charge: &Charge,
        usage: &UserUsage,
        defaults: &UserDefaults,
        (now_ms, calendar_ms): (u64, u64),
    ) {
        let limits = self.limits(defaults);
        if limits.has_rate() || self.consumed != Consumed::default() {
            let tokens = usage.input_uncached.saturating_add(usage.output);
            self.consumed
                .spend(&limits, now_ms, u64::from(charge.started), tokens);
        }
        let tokens = usage.tokens();
        if tokens > 0 && !self.budget(defaults).budget.is_unbounded() {
            self.budget_used.spend(calendar_ms, tokens);
        }
    }

    /// Returns limits and budget, and their usage.
    pub(super) fn quota(&self, defaults: &UserDefaults) -> Quota {
        Quota {
            limits: self.limits(defaults),
            consumed: self.consumed,
            in_flight: self.in_flight(),
            waiting: self.waiting(),
            budget: self.budget(defaults),
        }
    }

    pub(super) fn view(
        &self,
        key: UserKey,
        (now_ms, bucket_ms): (u64, u64),
        defaults: &UserDefaults,
    ) -> UserView {
        UserView {
            key,
            name: Arc::clone(&self.name),
            own: self.own.as_deref().cloned().unwrap_or_default(),
            weight_milli: self.weight_milli(defaults),
            counter_milli_tokens: self.counter(),
            in_flight: self.in_flight(),
            waiting: self.waiting(),
            left: self.quota(defaults).left(now_ms),
            budget: self.budget(defaults),
            total: self.total,
            window: self.window.sum(now_ms, bucket_ms),
            last_charge_ms: self.last_charge_ms,
        }
    }

    /// Whether every field is within its bounds.
    pub(super) fn is_valid(&self) -> bool {
        let are_counts = |counts: &[(ReplicaId, u32)]| {
            counts.is_sorted_by(|a, b| a.0 < b.0) && counts.iter().all(|(_, count)| *count > 0)
        };
        let is_normal = |own: &UserSettings| own.clone().normalised().as_deref() == Some(own);
        let own = self.own.as_deref();
        self.charged_weight_milli > 0
            && are_counts(&self.in_flight)
            && are_counts(&self.waiting)
            && own.is_none_or(|own| own.validate().is_ok() && is_normal(own))
            && self.consumed.is_valid()
    }
}

/// Adds `requests` to the count of `replica`.
pub(super) fn add(counts: &mut Vec<(ReplicaId, u32)>, replica: ReplicaId, requests: u32) {
    if requests == 0 {
        return;
    }
    match counts.binary_search_by_key(&replica, |(replica, _)| *replica) {
        Ok(place) => counts[place].1 = counts[place].1.saturating_add(requests),
        Err(place) => counts.insert(place, (replica, requests)),
    }
}

/// Subtracts `requests` from the count of `replica`, stopping at 0.
pub(super) fn take(counts: &mut Vec<(ReplicaId, u32)>, replica: ReplicaId, requests: u32) {
    if let Ok(place) = counts.binary_search_by_key(&replica, |(replica, _)| *replica) {
        counts[place].1 = counts[place].1.saturating_sub(requests);
        if counts[place].1 == 0 {
            counts.remove(place);
        }
    }
}

/// Returns the sum of the counts over all replicas.
fn sum(counts: &[(ReplicaId, u32)]) -> u64 {
    counts
        .iter()
        .map(|(_, requests)| u64::from(*requests))
        .sum()
}
