//! Token budgets of users, per calendar day and month in UTC.
//!
//! A budget counts the tokens of prompts, cached ones included, and of responses, unpriced, as
//! engines report them and clients are billed. `apply` adds each charge to the period that contains
//! its stamp. Stamps follow the cluster's clock, which a minority of wrong clocks does not move.
//!
//! A replica rejects a request once the usage at all replicas reaches the budget. Requests admitted
//! earlier run to their end, and charges that other replicas have not committed yet are unknown
//! here. A budget is thus exceeded by at most the cost of the user's requests in flight at that
//! moment and of those that replicas admit meanwhile. Limits on concurrent requests bound both.
//!
//! A stamp up to [`BACK_MS_MAX`] before the current period still counts for it, because around
//! midnight the stamps of two replicas may alternate. An earlier stamp means that the current
//! period was wrong, and the earlier one starts again from zero.

mod calendar;
#[cfg(test)]
mod tests;

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::reject::Rejection;
use crate::settings::TOKENS_MAX;
use crate::validate::ensure;

pub use calendar::BudgetPeriod;

/// Maximum time by which a stamp may precede the current period and still count for it, in
/// milliseconds.
pub const BACK_MS_MAX: u64 = 60 * 60 * 1000;

/// Tokens that a user may use. `None` means unlimited.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode, Serialize, Deserialize, JsonSchema,
)]
#[serde(default, deny_unknown_fields)]
pub struct Budget {
    /// Tokens per day (UTC). Default: unlimited.
    #[schemars(range(min = 1, max = TOKENS_MAX))]
    pub day: Option<u64>,
    /// Tokens per month (UTC). Default: unlimited.
    #[schemars(range(min = 1, max = TOKENS_MAX))]
    pub month: Option<u64>,
}

impl Budget {
    /// Checks the bounds of every field.
    ///
    /// # Errors
    /// [`Rejection::Invalid`] with the first field that is out of bounds.
    pub fn validate(&self) -> Result<(), Rejection> {
        let is_valid =
            |tokens: Option<u64>| tokens.is_none_or(|tokens| (1..=TOKENS_MAX).contains(&tokens));
        ensure(is_valid(self.day), "budget.day", "1 to 2^53")?;
        ensure(is_valid(self.month), "budget.month", "1 to 2^53")
    }

    /// Whether neither the day nor the month is limited.
    #[must_use]
    pub fn is_unbounded(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the budget of `period`, in tokens; `None` if unlimited.
    #[must_use]
    pub fn tokens(&self, period: BudgetPeriod) -> Option<u64> {
        match period {
            BudgetPeriod::Day => self.day,
            BudgetPeriod::Month => self.month,
        }
    }
}

/// Number of tokens used in one period.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
struct PeriodUse {
    /// Number of the period, as [`BudgetPeriod::number`] returns it.
    period: u32,
    tokens: u64,
}

/// Tokens that a user has used in the current day and in the current month.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
pub(crate) struct BudgetUse {
    day: PeriodUse,
    month: PeriodUse,
}

impl BudgetUse {
    /// Adds `tokens` used at the Unix time `unix_ms` to the day and the month.
    pub(crate) fn spend(&mut self, unix_ms: u64, tokens: u64) {
        for period in BudgetPeriod::ALL {
            let present = self.at(period, unix_ms);
            *self.of_mut(period) = PeriodUse {
                tokens: present.tokens.saturating_add(tokens),
                ..present
            };
        }
    }

    /// Returns the usage of the period for which a stamp of this Unix time counts.
    fn at(&self, period: BudgetPeriod, unix_ms: u64) -> PeriodUse {
        let known = self.of(period);
        let number = period.number(unix_ms);
        let is_slightly_back = number < known.period
            && unix_ms.saturating_add(BACK_MS_MAX) >= period.begins_ms(known.period);
        if number == known.period || is_slightly_back {
            return known;
        }
        PeriodUse {
            period: number,
            tokens: 0,
        }
    }

    fn of(&self, period: BudgetPeriod) -> PeriodUse {
        match period {
            BudgetPeriod::Day => self.day,
            BudgetPeriod::Month => self.month,
        }
    }

    fn of_mut(&mut self, period: BudgetPeriod) -> &mut PeriodUse {
        match period {
            BudgetPeriod::Day => &mut self.day,
            BudgetPeriod::Month => &mut self.month,
        }
    }
}

/// Budget and usage of a user as of one applied index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BudgetStatus {
    /// Budget of the user: its own, or the default.
    pub budget: Budget,
    pub(crate) used: BudgetUse,
}

/// Budget and usage of a user in one period.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct BudgetLeft {
    /// Budget, in tokens.
    pub limit: u64,
    /// Number of tokens used. May exceed the limit.
    pub used: u64,
    /// Unix time at which the period ends, in milliseconds.
    pub resets_at_ms: u64,
}

impl BudgetLeft {
    /// Returns the number of remaining tokens.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.limit.saturating_sub(self.used)
    }
}

impl BudgetStatus {
    /// Returns limit and usage of `period` at this Unix time, counting `pending` tokens that are
    /// not applied yet. `None` if the period is unlimited.
    #[must_use]
    pub fn left(&self, period: BudgetPeriod, unix_ms: u64, pending: u64) -> Option<BudgetLeft> {
        let limit = self.budget.tokens(period)?;
        let present = self.used.at(period, unix_ms);
        Some(BudgetLeft {
            limit,
            used: present.tokens.saturating_add(pending),
            resets_at_ms: period.begins_ms(present.period.saturating_add(1)),
        })
    }

    /// Returns the period whose budget is used up at this Unix time, counting `pending` tokens that
    /// are not applied yet. If both are used up, returns the one that ends last.
    #[must_use]
    pub fn exhausted(&self, unix_ms: u64, pending: u64) -> Option<(BudgetPeriod, BudgetLeft)> {
        let left = BudgetPeriod::ALL.into_iter().filter_map(|period| {
            let left = self.left(period, unix_ms, pending)?;
            (left.tokens() == 0).then_some((period, left))
        });
        left.max_by_key(|(_, left)| left.resets_at_ms)
    }
}
