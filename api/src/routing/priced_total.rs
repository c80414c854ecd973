//! Sums of priced tokens that were charged here: what the rate of service and the gate's slack of
//! [`crate::admission`] follow from.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What was charged here, in priced tokens.
#[derive(Debug, Default)]
pub(super) struct PricedTotal {
    all: AtomicU64,
    largest_request: AtomicU64,
    largest_output: AtomicU64,
}

/// The most that a request came to, in priced tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LargestRequest {
    /// All of one.
    pub request: u64,
    /// The output of one, perhaps another.
    pub output: u64,
}

impl LargestRequest {
    /// The larger of each.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            request: self.request.max(other.request),
            output: self.output.max(other.output),
        }
    }
}

impl PricedTotal {
    /// Counts what goes into the outbox.
    pub(super) fn add(&self, tokens: u64) {
        self.all.fetch_add(tokens, Relaxed);
    }

    /// All that was counted.
    pub(super) fn all(&self) -> u64 {
        self.all.load(Relaxed)
    }

    /// The largest request since [`PricedTotal::take_largest`].
    pub(super) fn largest(&self) -> LargestRequest {
        LargestRequest {
            request: self.largest_request.load(Relaxed),
            output: self.largest_output.load(Relaxed),
        }
    }

    /// The same; looks for a new one from here on.
    pub(super) fn take_largest(&self) -> LargestRequest {
        LargestRequest {
            request: self.largest_request.swap(0, Relaxed),
            output: self.largest_output.swap(0, Relaxed),
        }
    }

    /// Counts a request that is over.
    pub(super) fn request(&self, price: LargestRequest) {
        self.largest_request.fetch_max(price.request, Relaxed);
        self.largest_output.fetch_max(price.output, Relaxed);
    }
}
