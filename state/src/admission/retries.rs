//! How many requests may be retries at a time, as in Envoy's retry budget.
//!
//! When every engine refuses, retries on the next one multiply the load on overloaded engines.
//! Bounding them by a share of the requests in flight prevents this: an outage adds at most that
//! share.

/// A budget of retries, of one model at one replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryAllowance {
    /// So many retries per hundred requests under way.
    pub percent: u32,
    /// So many always: of few requests a share is none.
    pub concurrency_min: u32,
}

impl RetryAllowance {
    /// How many retries may be under way beside so many requests, these included.
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
    fn a_share_may_be_retries_and_a_few_always() {
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
