//! Retry budget: how many requests in flight may be retries, as in Envoy.
//!
//! When every engine refuses, retries on the next one multiply the load on overloaded engines.
//! Bounding them by a share of the requests in flight prevents this: an outage adds at most that
//! share.

/// Retry budget of one model at one replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryAllowance {
    /// Maximum number of retries per hundred requests in flight.
    pub percent: u32,
    /// Number of concurrent retries that are always allowed, because a share of few requests is 0.
    pub concurrency_min: u32,
}

impl RetryAllowance {
    /// Returns the maximum number of concurrent retries for `requests` in flight, retries included.
    #[must_use]
    pub fn retries_max(self, requests: u32) -> u64 {
        let share = u64::from(requests) * u64::from(self.percent) / 100;
        share.max(u64::from(self.concurrency_min))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_budget_allows_a_share_and_a_minimum() {
        let allowance = RetryAllowance {
            percent: 20,
            concurrency_min: 3,
        };
        let allowed = [0, 1, 15, 19, 20, 100, u32::MAX].map(|it| allowance.retries_max(it));
        assert_eq!(allowed, [3, 3, 3, 3, 4, 20, 858_993_459]);
        let none = RetryAllowance {
            percent: 0,
            concurrency_min: 0,
        };
        assert_eq!(none.retries_max(u32::MAX), 0);
    }
}
