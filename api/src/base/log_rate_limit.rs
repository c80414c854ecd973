//! Rate limiting for log lines that clients and engines could trigger without end.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Limiter that allows a number of lines per period and counts the suppressed ones.
#[derive(Debug)]
pub struct LogRateLimit {
    lines_max: u32,
    period: Duration,
    said: Mutex<LoggedLines>,
}

#[derive(Debug, Default)]
struct LoggedLines {
    /// Start of the period; `None` before the first line.
    since: Option<Instant>,
    /// Number of lines in the period.
    lines: u32,
    /// Number of lines suppressed since the last allowed one.
    suppressed: u64,
}

impl LogRateLimit {
    /// Creates a limiter that allows at most `lines_max` lines per `period`.
    #[must_use]
    pub fn new(lines_max: u32, period: Duration) -> Self {
        Self {
            lines_max,
            period,
            said: Mutex::default(),
        }
    }

    /// Decides whether a line may be written. If so, returns the number of lines suppressed since
    /// the last line that was allowed; `None` if this line is to be suppressed.
    pub fn try_acquire(&self) -> Option<u64> {
        // The counts are consistent between any two changes.
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if said.since.is_none_or(|since| now - since >= self.period) {
            (said.since, said.lines) = (Some(now), 0);
        }
        if said.lines == self.lines_max {
            said.suppressed += 1;
            return None;
        }
        said.lines += 1;
        Some(std::mem::take(&mut said.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn log_lines_per_period_are_bounded_and_the_rest_counted() {
        let seldom = LogRateLimit::new(2, Duration::from_secs(10));
        let said: Vec<_> = (0..5).map(|_| seldom.try_acquire()).collect();
        assert_eq!(said, [Some(0), Some(0), None, None, None]);
        tokio::time::advance(Duration::from_secs(9)).await;
        assert_eq!(seldom.try_acquire(), None);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(
            [seldom.try_acquire(), seldom.try_acquire()],
            [Some(4), Some(0)]
        );
        assert_eq!(seldom.try_acquire(), None);
    }
}
