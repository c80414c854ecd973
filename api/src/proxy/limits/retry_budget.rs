//! The retry budget: a limit on how many requests of a model may be retries at a time.
//!
//! If every engine refuses, retries triple the load on engines that are overloaded already. As in
//! Envoy, concurrent retries are limited to a share of the requests in flight, and at least a
//! minimum. A failed connection attempt is no load and consumes no budget. Neither does
//! a stream whose engine is gone: its load was that engine's.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use state::admission::RetryAllowance;

/// Number of cells that models hash to. Models in the same cell share a budget.
const CELLS: u64 = 256;

/// Retry budgets of all models.
pub(in crate::proxy) struct RetryBudget {
    cells: Box<[BudgetCell]>,
    hasher: RandomState,
    allowance: RetryAllowance,
}

#[derive(Default)]
struct BudgetCell {
    requests: AtomicU32,
    retries: AtomicU32,
}

/// Guard of a request, which counts in its model's budget until the guard is dropped.
pub(in crate::proxy) struct BudgetGuard {
    budget: Arc<RetryBudget>,
    at: usize,
    is_retry: bool,
}

impl RetryBudget {
    /// Creates budgets that no request uses yet.
    pub(in crate::proxy) fn new(allowance: RetryAllowance) -> Self {
        Self {
            cells: (0..CELLS).map(|_| BudgetCell::default()).collect(),
            hasher: RandomState::new(),
            allowance,
        }
    }

    pub(in crate::proxy) fn begin(self: &Arc<Self>, model: &str) -> BudgetGuard {
        let at = self.hasher.hash_one(model) % CELLS;
        let at = usize::try_from(at).expect("less than the number of cells");
        self.cells[at].requests.fetch_add(1, Relaxed);
        BudgetGuard {
            budget: Arc::clone(self),
            at,
            is_retry: false,
        }
    }
}

impl BudgetGuard {
    /// Whether the request may go to another engine. If so, it counts as a retry from then on.
    pub(in crate::proxy) fn may_retry(&mut self) -> bool {
        let BudgetCell { requests, retries } = &self.budget.cells[self.at];
        let allowed = self.budget.allowance.retries_max(requests.load(Relaxed));
        if self.is_retry {
            return u64::from(retries.load(Relaxed)) <= allowed;
        }
        if u64::from(retries.fetch_add(1, Relaxed)) >= allowed {
            retries.fetch_sub(1, Relaxed);
            return false;
        }
        self.is_retry = true;
        true
    }
}

impl Drop for BudgetGuard {
    fn drop(&mut self) {
        let cell = &self.budget.cells[self.at];
        cell.requests.fetch_sub(1, Relaxed);
        if self.is_retry {
            cell.retries.fetch_sub(1, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_budget_allows_a_share_of_requests_and_a_minimum() {
        let allowance = RetryAllowance {
            percent: 20,
            concurrency_min: 3,
        };
        let budget = Arc::new(RetryBudget::new(allowance));
        let mut few: Vec<_> = (0..5).map(|_| budget.begin("m")).collect();
        let granted = few.iter_mut().filter_map(|it| it.may_retry().then_some(()));
        assert_eq!(granted.count(), 3);
        drop(few);
        let mut many: Vec<_> = (0..100).map(|_| budget.begin("m")).collect();
        assert_eq!(many.iter_mut().filter(|it| it.is_retry).count(), 0);
        let granted: Vec<_> = many.iter_mut().map(BudgetGuard::may_retry).collect();
        assert_eq!(granted.iter().filter(|may| **may).count(), 20);
        assert!(many[0].may_retry(), "its third engine");
        many.retain(|it| it.is_retry);
        assert!(
            !many[0].may_retry(),
            "there are five times as many as may be"
        );
        drop(many);
        assert!(budget.begin("m").may_retry());
    }
}
