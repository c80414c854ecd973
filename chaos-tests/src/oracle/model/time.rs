//! The model's replicated time, which follows the stamps of commands.

/// Maximum time by which a stamp may be before the last one and still fit it, in milliseconds.
const LATE_MS: u64 = 1000;
/// Maximum time by which a stamp may be after the last one and still fit it, in milliseconds.
const AHEAD_MS: u64 = 60_000;
/// Time after which stamps are believed that fit each other but not the calendar, in milliseconds.
const BELIEVED_MS: u64 = 1000;
/// Maximum time that passes when stamps set the calendar back, in milliseconds.
const TRUSTED_MS: u64 = 2000;
/// Minimum time that might count twice for the former calendar to be remembered, in milliseconds.
const SLIGHT_MS: u64 = 2000;
/// Time for which a calendar that was set back may still prove wrong, in milliseconds.
const DOUBTED_MS: u64 = 60_000;
/// Maximum time that passes at once, in milliseconds.
const LEAP_MS: u64 = 600 * 24 * 3_600_000;

/// Replicated time with the calendar that determines its pace.
#[derive(Debug, Clone, Default)]
pub struct ModelTime {
    /// Replicated time, in milliseconds.
    pub now_ms: u64,
    /// Last believed stamp; `None` before the first command.
    pub(super) calendar_ms: Option<u64>,
    /// Later stamps that fit each other but not the calendar.
    odd: Vec<u64>,
    /// Calendar before it was set back, and the time passed since, if it may still prove right.
    back: Option<(u64, u64)>,
}

impl ModelTime {
    pub(super) fn pass(&mut self, stamp_ms: u64) {
        let Some(calendar_ms) = self.calendar_ms else {
            (self.now_ms, self.calendar_ms) = (stamp_ms, Some(stamp_ms));
            return;
        };
        if fits(stamp_ms, calendar_ms) {
            self.odd.clear();
            self.go_on(calendar_ms, stamp_ms.max(calendar_ms));
            return;
        }
        let newest_ms = self.odd.iter().copied().max();
        let Some(newest_ms) = newest_ms.filter(|it| stamp_ms.saturating_add(LATE_MS) >= *it) else {
            self.odd = vec![stamp_ms];
            return;
        };
        if fits(stamp_ms, newest_ms) {
            self.odd.push(stamp_ms);
        }
        let first_ms = self.odd[0];
        if stamp_ms.saturating_sub(first_ms) < BELIEVED_MS {
            return;
        }
        let reached_ms = self.odd.iter().copied().max().unwrap_or(newest_ms);
        if reached_ms < calendar_ms {
            let passed_ms = (reached_ms - first_ms).min(TRUSTED_MS);
            let twice_ms = (calendar_ms - reached_ms).saturating_add(passed_ms);
            let fresh = (twice_ms >= SLIGHT_MS).then_some((calendar_ms, 0));
            let back = self.back.or(fresh);
            self.back = back.map(|(from_ms, since_ms)| (from_ms, since_ms + passed_ms));
            self.calendar_ms = Some(reached_ms);
            self.now_ms = self.now_ms.saturating_add(passed_ms);
        } else {
            self.go_on(calendar_ms, reached_ms);
        }
        self.odd = match fits(stamp_ms, newest_ms) {
            true => Vec::new(),
            false => vec![stamp_ms],
        };
    }

    fn go_on(&mut self, was_ms: u64, is_ms: u64) {
        let mut passed_ms = is_ms - was_ms;
        if let Some((from_ms, since_ms)) = self.back {
            let since_after_ms = since_ms.saturating_add(passed_ms);
            if is_ms >= from_ms {
                // The former calendar was right. This much of the time since was already counted.
                passed_ms = (is_ms - from_ms).saturating_sub(since_ms);
                self.back = None;
            } else {
                let is_doubted = since_after_ms <= DOUBTED_MS;
                self.back = is_doubted.then_some((from_ms, since_after_ms));
            }
        }
        self.calendar_ms = Some(is_ms);
        self.now_ms = self.now_ms.saturating_add(passed_ms.min(LEAP_MS));
    }
}

/// Returns whether a stamp plausibly follows the stamp `last_ms`.
fn fits(stamp_ms: u64, last_ms: u64) -> bool {
    stamp_ms.saturating_add(LATE_MS) >= last_ms && stamp_ms <= last_ms.saturating_add(AHEAD_MS)
}
