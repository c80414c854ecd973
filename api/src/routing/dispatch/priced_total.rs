//! Totals of the priced tokens charged at this replica. [`crate::admission`] derives the service
//! rate and the gate's slack from them.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Total of the priced tokens charged at this replica, and the largest prices of requests.
#[derive(Debug, Default)]
pub(in crate::routing) struct PricedTotal {
    all: AtomicU64,
    largest_request: AtomicU64,
    largest_output: AtomicU64,
}

/// Largest prices among requests, in priced tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LargestRequest {
    /// Highest price of a whole request.
    pub request: u64,
    /// Highest price of a request's output, possibly of a different request.
    pub output: u64,
}

impl LargestRequest {
    /// Returns the larger value of each field.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            request: self.request.max(other.request),
            output: self.output.max(other.output),
        }
    }
}

impl PricedTotal {
    /// Adds priced tokens that are charged through the outbox.
    pub(in crate::routing) fn add(&self, tokens: u64) {
        self.all.fetch_add(tokens, Relaxed);
    }

    /// Returns the total of all priced tokens added.
    pub(in crate::routing) fn all(&self) -> u64 {
        self.all.load(Relaxed)
    }

    /// Returns the largest prices since the last [`PricedTotal::take_largest`].
    pub(super) fn largest(&self) -> LargestRequest {
        LargestRequest {
            request: self.largest_request.load(Relaxed),
            output: self.largest_output.load(Relaxed),
        }
    }

    /// Returns the largest prices and resets them to 0.
    pub(super) fn take_largest(&self) -> LargestRequest {
        LargestRequest {
            request: self.largest_request.swap(0, Relaxed),
            output: self.largest_output.swap(0, Relaxed),
        }
    }

    /// Records the price of a request that ended.
    pub(in crate::routing) fn request(&self, price: LargestRequest) {
        self.largest_request.fetch_max(price.request, Relaxed);
        self.largest_output.fetch_max(price.output, Relaxed);
    }
}
