//! When each engine last had output for a request of this replica.
//!
//! An engine whose core hangs accepts requests and answers probes. It shows only in comparison: it
//! has had no output for anyone while another engine has.

use std::time::Duration;

use state::ids::Slot;
use tokio::time::Instant;

use crate::sync::{AtomicU64, Ordering::Relaxed};

/// Times of the last output, by slot.
pub(super) struct OutputTimes {
    began: Instant,
    /// Microseconds since `began`, plus one; 0 without output.
    last_us: Box<[AtomicU64]>,
}

impl OutputTimes {
    pub(super) fn new(slots: usize) -> Self {
        Self {
            began: Instant::now(),
            last_us: (0..slots).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Records output at `now`.
    pub(super) fn note(&self, slot: Slot, now: Instant) {
        if let Some(last) = self.last_us.get(usize::from(slot.0)) {
            last.store(self.micros(now).saturating_add(1), Relaxed);
        }
    }

    /// Whether the engine in `slot` has had no output since `since`, and another one has.
    pub(super) fn is_outdone(&self, slot: Slot, since: Instant) -> bool {
        let since_us = self.micros(since);
        let own = usize::from(slot.0);
        let has_output = |last: &AtomicU64| last.load(Relaxed) > since_us;
        let is_silent = !self.last_us.get(own).is_some_and(has_output);
        let mut others = self.last_us.iter().enumerate().filter(|(at, _)| *at != own);
        is_silent && others.any(|(_, last)| has_output(last))
    }

    /// Returns the time since the last output of the engine in `slot`; `None` without output.
    pub(super) fn silence(&self, slot: Slot, now: Instant) -> Option<Duration> {
        let last_us = self.last_us.get(usize::from(slot.0))?.load(Relaxed);
        let last_us = last_us.checked_sub(1)?;
        Some(Duration::from_micros(
            self.micros(now).saturating_sub(last_us),
        ))
    }

    fn micros(&self, at: Instant) -> u64 {
        let since = at.saturating_duration_since(self.began).as_micros();
        u64::try_from(since).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_outdone_only_while_silent_beside_another() {
        let times = OutputTimes::new(3);
        let at = |seconds| times.began + Duration::from_secs(seconds);
        assert!(!times.is_outdone(Slot(0), at(0)), "nobody has output");
        times.note(Slot(0), at(1));
        times.note(Slot(1), at(3));
        assert!(times.is_outdone(Slot(0), at(2)));
        assert!(times.is_outdone(Slot(2), at(2)));
        assert!(!times.is_outdone(Slot(0), at(1)), "it had output then");
        assert!(
            !times.is_outdone(Slot(0), at(4)),
            "nobody has had output since"
        );
        assert!(!times.is_outdone(Slot(1), at(2)));
        assert_eq!(times.silence(Slot(0), at(4)), Some(Duration::from_secs(3)));
        assert_eq!(times.silence(Slot(2), at(4)), None);
    }
}
