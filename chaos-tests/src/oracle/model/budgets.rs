//! What the model's users have used of a day and a month, by counting through the calendar.

use state::budgets::{BACK_MS_MAX, Budget};

const DAY_MS: u64 = 86_400_000;

/// A period's number and the tokens used in it, of a day and of a month.
pub type BudgetTally = [(u32, u64); 2];

/// A user's budget.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ModelBudget {
    is_set: bool,
    pub(super) used: BudgetTally,
}

impl ModelBudget {
    pub(super) fn set(&mut self, budget: &Budget) {
        self.is_set = !budget.is_unbounded();
        if !self.is_set {
            self.used = BudgetTally::default();
        }
    }

    pub(super) fn spend(&mut self, stamp_ms: u64, tokens: u64) {
        if !self.is_set || tokens == 0 {
            return;
        }
        for (at, (period, used)) in self.used.iter_mut().enumerate() {
            let number = period_at(at, stamp_ms);
            // It began not long ago, by this clock.
            let is_slightly_back =
                number < *period && period_at(at, stamp_ms + BACK_MS_MAX) >= *period;
            if number != *period && !is_slightly_back {
                (*period, *used) = (number, 0);
            }
            *used += tokens;
        }
    }
}

/// The number of the day (0) or month (1) that a time lies in.
fn period_at(which: usize, unix_ms: u64) -> u32 {
    let day = unix_ms / DAY_MS;
    let number = match which {
        0 => day,
        _ => month_of(day),
    };
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// The month of a day since 1970, counted from the year 0.
fn month_of(day: u64) -> u64 {
    let (mut first, mut year) = (0, 1970);
    loop {
        let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let february = if is_leap { 29 } else { 28 };
        let months = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        for (month, days) in (0..).zip(months) {
            if day < first + days {
                return year * 12 + month;
            }
            first += days;
        }
        year += 1;
    }
}
