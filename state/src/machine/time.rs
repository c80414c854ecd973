//! Replicated time, the time base of limits, windows and confirmations.
//!
//! A command carries the wall clock of its proposer, its *stamp*. Any of these clocks may be wrong
//! by days, jump, and be corrected again. A wait must nevertheless neither end at once nor last
//! forever. Two values are therefore kept apart. The *calendar* is the latest stamp that the
//! cluster believed; it can be set forward and back. The *time* is how much time has passed
//! according to the stamps. It never falls, and only its differences are meaningful.
//!
//! A stamp close to the calendar ([`is_near`]) is followed at once. Any other stamp may come from a
//! wrong clock, from a correction of all clocks, or after the cluster was suspended. It is believed
//! once such stamps have agreed for [`UNANIMOUS_MS`] without any stamp in between that fits the
//! calendar. Thus a single wrong clock among correct ones is never believed. If the stamps are
//! ahead of the calendar, time advances by the whole gap, at most [`LEAP_MS_MAX`]. If they are
//! behind, time advances by the span of these stamps, at most [`BELIEVED_MS_MAX`].
//!
//! Stamps behind the calendar do not always mean that it was wrong: commands proposed on one side
//! of a partition arrive late and all at once. If a stamp reaches the former calendar within
//! [`DOUBTED_MS_MAX`] of a step back, time therefore advances only by how far the stamp exceeds the
//! former calendar, less what was counted since the step.
//!
//! The first command sets both.

use bincode::{Decode, Encode};

/// Maximum time by which a stamp may precede the last one and count as merely late or from a slow
/// clock, in milliseconds. Time then stands still until the stamps catch up.
pub const STAMP_LATE_MS_MAX: u64 = 1000;
/// Maximum time by which a stamp may be ahead of the last one to be followed at once, in
/// milliseconds.
pub const STAMP_AHEAD_MS_MAX: u64 = 60 * 1000;
/// Time for which diverging stamps must agree before they are believed, in milliseconds.
pub const UNANIMOUS_MS: u64 = 1000;
/// Maximum advance when the calendar is believed to be set back, in milliseconds. The stamps that
/// show the new calendar may be old and far apart.
const BELIEVED_MS_MAX: u64 = 2 * UNANIMOUS_MS;
/// Minimum of the time that would count twice if a step back of the calendar were undone, for the
/// step to be remembered, in milliseconds. Below it, counting twice is better than losing a step.
const SET_BACK_MS_MIN: u64 = 2000;
/// Time for which a calendar that was set back stays in doubt, in milliseconds.
const DOUBTED_MS_MAX: u64 = 60 * 1000;
/// Maximum advance of time by one stamp, in milliseconds. No debt of a user lasts longer.
const LEAP_MS_MAX: u64 = 600 * 24 * 60 * 60 * 1000;

/// Replicated time; see the module documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
pub(super) struct ReplicatedTime {
    /// Current time, in milliseconds. It starts as Unix time and never falls.
    pub(super) now_ms: u64,
    /// Calendar: the latest stamp that was believed, in milliseconds.
    stamp_ms: u64,
    /// Latest stamps that agree with one another but not with `stamp_ms`, if any.
    divergent: Option<DivergentStamps>,
    /// Last step back of the calendar, until the calendar reaches the former point again.
    set_back: Option<SetBack>,
}

/// A step back of the calendar.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
struct SetBack {
    from_ms: u64,
    /// Time that was counted since the step, in milliseconds.
    counted_ms: u64,
}

/// Consecutive stamps that agree with one another, but not with the calendar.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
struct DivergentStamps {
    first_ms: u64,
    last_ms: u64,
}

impl ReplicatedTime {
    /// Returns the calendar, in Unix milliseconds.
    pub(super) fn calendar_ms(&self) -> u64 {
        self.stamp_ms
    }

    /// Advances the time to that of a command with the stamp `stamped_ms`.
    pub(super) fn advance(&mut self, stamped_ms: u64) {
        if *self == Self::default() {
            (self.now_ms, self.stamp_ms) = (stamped_ms, stamped_ms);
        } else {
            let passed_ms = self.follow(stamped_ms);
            self.now_ms = self.now_ms.saturating_add(passed_ms);
        }
    }

    /// Returns this time, or `now_ms` with the same calendar if that is later.
    pub(super) fn at_least(self, now_ms: u64) -> Self {
        let now_ms = self.now_ms.max(now_ms);
        Self { now_ms, ..self }
    }

    /// Returns how far replicated time is ahead of the calendar, in milliseconds.
    pub(super) fn ahead_of_calendar_ms(&self) -> u64 {
        self.now_ms.saturating_sub(self.stamp_ms)
    }

    /// Takes the stamp of a command and returns how much time has passed, in milliseconds.
    fn follow(&mut self, stamped_ms: u64) -> u64 {
        if is_near(stamped_ms, self.stamp_ms) {
            self.divergent = None;
            return self.go_on(stamped_ms);
        }
        let alone = DivergentStamps {
            first_ms: stamped_ms,
            last_ms: stamped_ms,
        };
        let is_before =
            |it: &DivergentStamps| stamped_ms.saturating_add(STAMP_LATE_MS_MAX) < it.last_ms;
        let Some(mut divergent) = self.divergent.filter(|it| !is_before(it)) else {
            self.divergent = Some(alone);
            return 0;
        };
        // A stamp far ahead shows that the others were not a mistake, but must itself be confirmed.
        let fits = is_near(stamped_ms, divergent.last_ms);
        if fits {
            divergent.last_ms = divergent.last_ms.max(stamped_ms);
        }
        let lasted_ms = stamped_ms.saturating_sub(divergent.first_ms);
        if lasted_ms < UNANIMOUS_MS {
            self.divergent = Some(divergent);
            return 0;
        }
        self.divergent = (!fits).then_some(alone);
        if divergent.last_ms >= self.stamp_ms {
            return self.go_on(divergent.last_ms);
        }
        let seen_ms = divergent.last_ms.saturating_sub(divergent.first_ms);
        let passed_ms = seen_ms.min(BELIEVED_MS_MAX);
        let back_ms = self.stamp_ms - divergent.last_ms;
        match &mut self.set_back {
            // The calendar before the first step back may still be the right one.
            Some(open) => open.counted_ms = open.counted_ms.saturating_add(passed_ms),
            None if back_ms.saturating_add(passed_ms) < SET_BACK_MS_MIN => {}
            None => {
                self.set_back = Some(SetBack {
                    from_ms: self.stamp_ms,
                    counted_ms: passed_ms,
                });
            }
        }
        self.stamp_ms = divergent.last_ms;
        passed_ms
    }

    /// Advances the calendar to a later stamp. Returns how much time has passed, in milliseconds.
    fn go_on(&mut self, stamped_ms: u64) -> u64 {
        let step_ms = stamped_ms.saturating_sub(self.stamp_ms);
        self.stamp_ms = self.stamp_ms.max(stamped_ms);
        let passed_ms = match self.set_back.take() {
            Some(back) if stamped_ms >= back.from_ms => {
                (stamped_ms - back.from_ms).saturating_sub(back.counted_ms)
            }
            Some(mut back) => {
                back.counted_ms = back.counted_ms.saturating_add(step_ms);
                self.set_back = (back.counted_ms <= DOUBTED_MS_MAX).then_some(back);
                step_ms
            }
            None => step_ms,
        };
        passed_ms.min(LEAP_MS_MAX)
    }
}

/// Whether the stamp `stamped_ms` is close enough to `last_ms` to be followed at once.
fn is_near(stamped_ms: u64, last_ms: u64) -> bool {
    let from = last_ms.saturating_sub(STAMP_LATE_MS_MAX);
    (from..=last_ms.saturating_add(STAMP_AHEAD_MS_MAX)).contains(&stamped_ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: u64 = 24 * 60 * 60 * 1000;
    const START: u64 = 20_000 * DAY;

    fn begun() -> ReplicatedTime {
        let mut time = ReplicatedTime::default();
        time.advance(START);
        time
    }

    /// Returns the time that passes with each stamp. Stamps are relative to [`START`].
    fn passes(time: &mut ReplicatedTime, stamps: &[i64]) -> Vec<u64> {
        let stamps = stamps.iter().map(|at| START.saturating_add_signed(*at));
        let step = |stamp| {
            let before = time.now_ms;
            time.advance(stamp);
            time.now_ms - before
        };
        stamps.map(step).collect()
    }

    #[test]
    fn time_advances_by_increasing_stamps() {
        let mut time = begun();
        let passed = passes(&mut time, &[20, 40, 30, 40, 1040, 61_040, 60_100]);
        assert_eq!(passed, [20, 20, 0, 0, 1000, 60_000, 0]);
        assert_eq!(
            (time.now_ms, time.ahead_of_calendar_ms()),
            (START + 61_040, 0)
        );
    }

    #[test]
    fn a_single_wrong_clock_is_ignored() {
        let mut time = begun();
        let day = DAY as i64;
        for error in [day, -day, 2 * 60 * 60 * 1000] {
            let base = i64::try_from(time.now_ms - START).unwrap();
            for turn in (0..10_000).step_by(100) {
                let at = base + turn;
                assert_eq!(passes(&mut time, &[at + error]), [0]);
                let passed: u64 = passes(&mut time, &[at + 100]).iter().sum();
                assert_eq!(passed, 100, "at {at} with {error}");
            }
        }
        assert_eq!(time.now_ms, START + 30_000);
    }

    #[test]
    fn time_continues_when_the_calendar_is_set_back() {
        let mut time = begun();
        let back = -(DAY as i64);
        let stamps = [back, back + 500, back + 1000, back + 1500, back + 2000];
        assert_eq!(passes(&mut time, &stamps), [0, 0, 1000, 500, 500]);
        assert_eq!(time.ahead_of_calendar_ms(), DAY);
        assert_eq!(time.stamp_ms, START - DAY + 2000);
    }

    #[test]
    fn late_stamps_are_hardly_counted_twice() {
        let mut time = begun();
        // From a replica that was cut off for a minute: its outbox, and an operator's command.
        let late = passes(&mut time, &[-60_000, -3000, 1000, 2500]);
        assert_eq!(late, [0, 2000, 0, 1500]);
        // A burst whose stamps span more time.
        let burst = passes(&mut time, &[-2000, -1000, -500, 0, 4500, 4600]);
        assert_eq!(burst, [0, 1000, 500, 500, 0, 100]);
        assert_eq!(
            (time.now_ms, time.ahead_of_calendar_ms()),
            (START + 5600, 1000)
        );
    }

    #[test]
    fn two_bursts_of_late_stamps_count_as_one() {
        for second in [[-62_000, -60_500], [-60_100, -59_050]] {
            let mut time = begun();
            assert_eq!(passes(&mut time, &[-60_000, -58_000]), [0, 2000]);
            passes(&mut time, &second);
            passes(&mut time, &[1000, 2000, 6000]);
            let ahead_ms = time.now_ms - START - 6000;
            assert!(ahead_ms <= BELIEVED_MS_MAX, "{ahead_ms} after {second:?}");
        }
    }

    #[test]
    fn a_calendar_set_back_is_accepted_after_a_minute() {
        let mut time = begun();
        let back = -(DAY as i64);
        for at in (0..=62_000).step_by(500) {
            passes(&mut time, &[back + at]);
        }
        assert_eq!(time.now_ms, START + 62_000);
        assert_eq!(passes(&mut time, &[1000, 2000]), [0, DAY - 60_000]);
    }

    #[test]
    fn idle_seconds_count_after_the_calendar_is_set_back() {
        let mut time = begun();
        let back = -(DAY as i64);
        let stamps = [back, back + 900, back + 4400, back + 4500];
        assert_eq!(passes(&mut time, &stamps), [0, 0, 2000, 100]);
    }

    #[test]
    fn a_calendar_set_back_and_forth_does_not_leap() {
        let mut time = begun();
        let back = -(DAY as i64);
        passes(&mut time, &[back, back + 1000, back + 10_000]);
        assert_eq!(time.now_ms, START + 10_000);
        assert_eq!(passes(&mut time, &[20_000, 21_000]), [0, 11_000]);
        assert_eq!(
            (time.now_ms, time.ahead_of_calendar_ms()),
            (START + 21_000, 0)
        );
    }

    #[test]
    fn time_waits_for_stamps_slightly_in_the_past() {
        let mut time = begun();
        assert_eq!(passes(&mut time, &[-900, -500, 0, 100]), [0, 0, 0, 100]);
        // Set back further, but caught up before it is believed.
        let stamps = [-1500, -1000, -500, 0, 150];
        assert_eq!(passes(&mut time, &stamps), [0, 0, 0, 0, 50]);
    }

    #[test]
    fn a_long_gap_is_accepted_with_the_second_command() {
        let mut time = begun();
        let night = 8 * 60 * 60 * 1000;
        let stamps = [night, night + 999, night + 1000, night + 1001];
        let passed = passes(&mut time, &stamps);
        assert_eq!(passed, [0, 0, night as u64 + 1000, 1]);
    }

    #[test]
    fn time_lags_sparse_commands_by_one() {
        let mut time = begun();
        let step = 5 * 60 * 1000;
        let passed = passes(&mut time, &[step, 2 * step, 3 * step, 4 * step]);
        assert_eq!(passed, [0, step as u64, step as u64, step as u64]);
        assert_eq!(passes(&mut time, &[4 * step + 1000]), [step as u64 + 1000]);
    }

    #[test]
    fn extreme_stamps_do_not_stop_time() {
        let mut time = begun();
        for stamp in [u64::MAX, u64::MAX, 0, 0, 1000, u64::MAX, 5, 1005] {
            time.advance(stamp);
        }
        assert!(time.now_ms < START + 4 * LEAP_MS_MAX, "{time:?}");
        let before = time.now_ms;
        time.advance(2005);
        assert_eq!(time.now_ms - before, 1000);
    }
}
