//! Budgets of users: tokens per day and per month of the calendar, in UTC.
//!
//! A budget counts the tokens of prompts, cached ones included, and of answers, unpriced, as engines
//! report them and clients are billed. They are counted in the replicated state as charges are
//! applied, in the period that the charge's stamp lies in: the cluster's clock, which a minority of
//! wrong clocks does not move.
//!
//! A replica refuses a request once what is used, all replicas together, reaches the budget. What it
//! admitted before runs to its end, and what other replicas charged in the last exchange is not
//! known here. A budget is thus exceeded by no more than what the user's requests that were in
//! flight at that moment cost, and those that replicas admitted meanwhile; limits on requests at
//! once bound both.
//!
//! A clock that is set back leaves the period as it is for [`BACK_MS_MAX`]: around midnight, stamps
//! of two replicas may alternate. When it is set back further the period was wrong, and the earlier
//! one begins anew.

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

/// How far behind the present period a time may lie and still count for it, in milliseconds.
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
    /// Checks every bound.
    ///
    /// # Errors
    /// [`Rejection::Invalid`] with the first that is out of bounds.
    pub fn validate(&self) -> Result<(), Rejection> {
        let is_valid =
            |tokens: Option<u64>| tokens.is_none_or(|tokens| (1..=TOKENS_MAX).contains(&tokens));
        ensure(is_valid(self.day), "budget.day", "1 to 2^53")?;
        ensure(is_valid(self.month), "budget.month", "1 to 2^53")
    }

    /// Whether no bound is set.
    #[must_use]
    pub fn is_unbounded(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the tokens of a period.
    #[must_use]
    pub fn tokens(&self, period: BudgetPeriod) -> Option<u64> {
        match period {
            BudgetPeriod::Day => self.day,
            BudgetPeriod::Month => self.month,
        }
    }
}

/// Tokens used in one period.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
struct PeriodUse {
    /// Number of the period.
    period: u32,
    tokens: u64,
}

/// What a user has used of the present day and month.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
pub(crate) struct BudgetUse {
    day: PeriodUse,
    month: PeriodUse,
}

impl BudgetUse {
    /// Adds tokens used at this Unix time.
    pub(crate) fn spend(&mut self, unix_ms: u64, tokens: u64) {
        for period in BudgetPeriod::ALL {
            let present = self.at(period, unix_ms);
            *self.of_mut(period) = PeriodUse {
                tokens: present.tokens.saturating_add(tokens),
                ..present
            };
        }
    }

    /// Returns what is used of the period that this Unix time lies in, or is taken to lie in.
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

/// A user's budget and what is used of it, as of one applied index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BudgetStatus {
    /// The user's own budget, or that of all users.
    pub budget: Budget,
    pub(crate) used: BudgetUse,
}

/// What is left of a budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct BudgetLeft {
    /// Its size, in tokens.
    pub limit: u64,
    /// Tokens that were used. May exceed the size.
    pub used: u64,
    /// Unix time at which the period ends, in milliseconds.
    pub resets_at_ms: u64,
}

impl BudgetLeft {
    /// Returns the tokens that are left.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.limit.saturating_sub(self.used)
    }
}

impl BudgetStatus {
    /// Returns what is left of a period's budget at this Unix time, where `pending` tokens are not in
    /// the state yet; `None` if it has no bound.
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

    /// Returns the budget that is used up at this Unix time; of both the one that ends last.
    #[must_use]
    pub fn exhausted(&self, unix_ms: u64, pending: u64) -> Option<(BudgetPeriod, BudgetLeft)> {
        let left = BudgetPeriod::ALL.into_iter().filter_map(|period| {
            let left = self.left(period, unix_ms, pending)?;
            (left.tokens() == 0).then_some((period, left))
        });
        left.max_by_key(|(_, left)| left.resets_at_ms)
    }
}
