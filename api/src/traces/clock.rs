//! Conversion of monotonic times to times of spans.

use std::time::SystemTime;

use tokio::time::Instant;

/// Arrival of a request on the monotonic and on the wall clock.
#[derive(Debug, Clone, Copy)]
pub(super) struct TraceClock {
    instant: Instant,
    pub(super) time: SystemTime,
}

impl TraceClock {
    pub(super) fn now() -> Self {
        Self {
            instant: Instant::now(),
            time: SystemTime::now(),
        }
    }

    pub(super) fn at(&self, moment: Instant) -> SystemTime {
        self.time + moment.saturating_duration_since(self.instant)
    }
}

/// Converts a count to the type of attributes.
pub(super) fn number(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
