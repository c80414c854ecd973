//! Conversion between Unix time and numbered UTC days and months. Integers only, so every replica
//! computes the same result.

/// Length of a day, in milliseconds. Unix time has no leap seconds.
const DAY_MS: u64 = 24 * 60 * 60 * 1000;
/// Number of days from 0000-03-01 to 1970-01-01.
const EPOCH_DAYS: u64 = 719_468;
/// Number of days in 400 years.
const ERA_DAYS: u64 = 146_097;

/// Calendar period of a budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum BudgetPeriod {
    /// Day from midnight to midnight, in UTC.
    Day,
    /// Calendar month, in UTC.
    Month,
}

impl BudgetPeriod {
    /// All periods.
    pub const ALL: [Self; 2] = [Self::Day, Self::Month];

    /// Returns the number of the period that contains the Unix time `unix_ms`: days since 1970, or
    /// months since the year 0.
    pub(crate) fn number(self, unix_ms: u64) -> u32 {
        let days = unix_ms / DAY_MS;
        let number = match self {
            Self::Day => days,
            Self::Month => month_of(days),
        };
        u32::try_from(number).unwrap_or(u32::MAX)
    }

    /// Returns the start of period `number`, as Unix time in milliseconds.
    pub(crate) fn begins_ms(self, number: u32) -> u64 {
        let days = match self {
            Self::Day => u64::from(number),
            Self::Month => first_day_of(u64::from(number)),
        };
        days.saturating_mul(DAY_MS)
    }
}

/// Returns the month, counted from the year 0, that contains day `days` since 1970. Uses Howard
/// Hinnant's algorithm `civil_from_days` ("chrono-Compatible Low-Level Date Algorithms"), where
/// years begin in March.
fn month_of(days: u64) -> u64 {
    let days = days + EPOCH_DAYS;
    let (era, day) = (days / ERA_DAYS, days % ERA_DAYS);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    // March is month 2, counted from January of the same year.
    (era * 400 + year) * 12 + month + 2
}

/// Returns the first day of `month`, as days since 1970; 0 for months before 1970.
fn first_day_of(month: u64) -> u64 {
    let from_march = month.saturating_sub(2);
    let (year, month) = (from_march / 12, from_march % 12);
    let (era, year) = (year / 400, year % 400);
    let day = 365 * year + year / 4 - year / 100 + (153 * month + 2) / 5;
    (era * ERA_DAYS + day).saturating_sub(EPOCH_DAYS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn months_follow_the_calendar() {
        // Seconds are those of `date -u +%s`.
        for (date, seconds, month, begins) in [
            ("1970-01-01", 0, 1970 * 12, 0),
            (
                "1999-12-31 23:59:59",
                946_684_799,
                1999 * 12 + 11,
                944_006_400,
            ),
            ("2000-02-29", 951_782_400, 2000 * 12 + 1, 949_363_200),
            ("2000-03-01", 951_868_800, 2000 * 12 + 2, 951_868_800),
            (
                "2026-11-23 07:15",
                1_795_418_100,
                2026 * 12 + 10,
                1_793_491_200,
            ),
            ("2100-02-28", 4_107_456_000, 2100 * 12 + 1, 4_105_123_200),
            ("2100-03-01", 4_107_542_400, 2100 * 12 + 2, 4_107_542_400),
        ] {
            let number = BudgetPeriod::Month.number(seconds * 1000);
            assert_eq!(number, month, "{date}");
            assert_eq!(
                BudgetPeriod::Month.begins_ms(number),
                begins * 1000,
                "{date}"
            );
        }
    }

    #[test]
    fn budget_periods_leave_no_gap() {
        for period in BudgetPeriod::ALL {
            let mut number = period.number(0);
            while number < period.number(0) + 3000 {
                let ends_ms = period.begins_ms(number + 1);
                assert_eq!(period.number(ends_ms - 1), number, "{period:?}");
                number += 1;
                assert_eq!(period.number(ends_ms), number, "{period:?}");
            }
        }
        assert!(BudgetPeriod::Month.number(u64::MAX) > 0);
        assert_eq!(
            BudgetPeriod::Day.begins_ms(u32::MAX),
            u64::from(u32::MAX) * DAY_MS
        );
    }
}
