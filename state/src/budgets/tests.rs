//! Tests of budgets by example: periods, clocks, and remaining tokens.

use super::*;

const DAY_MS: u64 = 86_400_000;
/// Unix time of 2026-11-30 12:00 UTC, in milliseconds.
const NOON_MS: u64 = 1_796_040_000_000;

fn status(day: Option<u64>, month: Option<u64>, used: BudgetUse) -> BudgetStatus {
    let budget = Budget { day, month };
    BudgetStatus { budget, used }
}

#[test]
fn budget_periods_end_at_midnight_and_month_end() {
    let mut used = BudgetUse::default();
    used.spend(NOON_MS, 60);
    used.spend(NOON_MS + 1000, 40);
    let both = status(Some(100), Some(150), used);
    assert_eq!(status(None, None, used).exhausted(NOON_MS, 0), None);
    let (period, left) = both.exhausted(NOON_MS + 1000, 0).unwrap();
    assert_eq!((period, left.used), (BudgetPeriod::Day, 100));
    let midnight_ms = NOON_MS + DAY_MS / 2;
    assert_eq!(left.resets_at_ms, midnight_ms);
    assert_eq!(both.exhausted(midnight_ms, 0), None);
    // The day is the last of November, so the month is over, too.
    let left = both.left(BudgetPeriod::Month, midnight_ms, 0).unwrap();
    assert_eq!((left.used, left.tokens()), (0, 150));
    // A day earlier, the month was not over.
    let mut used = BudgetUse::default();
    used.spend(NOON_MS - DAY_MS, 149);
    let both = status(Some(100), Some(150), used);
    assert_eq!(both.exhausted(NOON_MS, 0), None);
    let (period, left) = both.exhausted(NOON_MS, 1).unwrap();
    assert_eq!(period, BudgetPeriod::Month);
    assert_eq!(left.resets_at_ms, midnight_ms);
}

#[test]
fn a_clock_slightly_back_does_not_reopen_a_period() {
    let midnight_ms = NOON_MS + DAY_MS / 2;
    let mut used = BudgetUse::default();
    used.spend(midnight_ms, 70);
    used.spend(midnight_ms - 5, 30);
    let day = status(Some(100), None, used);
    assert!(day.exhausted(midnight_ms + 1, 0).is_some());
    assert!(day.exhausted(midnight_ms - 1000, 0).is_some());
    // Usage counted for a day that turned out wrong is dropped.
    assert_eq!(day.exhausted(midnight_ms - BACK_MS_MAX - 1, 0), None);
    used.spend(NOON_MS, 1);
    let left = status(Some(100), None, used).left(BudgetPeriod::Day, NOON_MS, 0);
    assert_eq!(left.unwrap().used, 1);
}

#[test]
fn budgets_out_of_bounds_are_refused() {
    let budget = |day, month| Budget { day, month }.validate();
    assert_eq!(budget(Some(1), Some(TOKENS_MAX)), Ok(()));
    assert!(budget(Some(0), None).is_err());
    assert!(budget(None, Some(TOKENS_MAX + 1)).is_err());
}
