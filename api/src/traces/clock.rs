//! The time of spans.

use std::time::SystemTime;

use tokio::time::Instant;

/// When a request came, on two clocks.
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

/// A count as attributes are.
pub(super) fn number(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
