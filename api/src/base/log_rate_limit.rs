//! Rate limiting for log lines that clients and engines could trigger without end.

use std::collections::HashMap;
use std::net::IpAddr;
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

/// Limiter that allows one line per address and period, so that one address cannot hide another.
#[derive(Debug)]
pub struct AddressLogLimit {
    period: Duration,
    /// Time of the last line about each address, and the number of lines suppressed since.
    said: Mutex<HashMap<IpAddr, (Instant, u64)>>,
}

/// Maximum number of addresses that a limiter remembers. Lines about more are suppressed.
const ADDRESSES_MAX: usize = 1024;

impl AddressLogLimit {
    /// Creates a limiter that allows one line per address and `period`.
    #[must_use]
    pub fn new(period: Duration) -> Self {
        Self {
            period,
            said: Mutex::default(),
        }
    }

    /// Decides whether a line about `address` may be written. If so, returns the number of lines
    /// about it suppressed since the last one; `None` if this line is to be suppressed.
    pub fn try_acquire(&self, address: IpAddr) -> Option<u64> {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if let Some((at, suppressed)) = said.get_mut(&address) {
            if now - *at < self.period {
                *suppressed += 1;
                return None;
            }
            *at = now;
            return Some(std::mem::take(suppressed));
        }
        if said.len() >= ADDRESSES_MAX {
            said.retain(|_, (at, _)| now - *at < self.period);
        }
        if said.len() >= ADDRESSES_MAX {
            return None;
        }
        said.insert(address, (now, 0));
        Some(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_line_per_address_and_period_is_allowed() {
        let address = |number: u32| IpAddr::from(number.to_be_bytes());
        let limit = AddressLogLimit::new(Duration::from_secs(60));
        assert_eq!(limit.try_acquire(address(1)), Some(0));
        assert_eq!(limit.try_acquire(address(1)), None);
        assert_eq!(limit.try_acquire(address(2)), Some(0));
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!(limit.try_acquire(address(1)), Some(1));
        let many = 3..=u32::try_from(ADDRESSES_MAX).unwrap() + 1;
        for number in many {
            assert_eq!(limit.try_acquire(address(number)), Some(0), "{number}");
        }
        assert_eq!(limit.try_acquire(address(0)), None);
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!(limit.try_acquire(address(0)), Some(0));
    }

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
