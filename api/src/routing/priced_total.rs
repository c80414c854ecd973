//! Sums of priced tokens charged here. [`crate::admission`] derives the service rate and the gate's
//! slack from them.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Priced tokens charged here.
#[derive(Debug, Default)]
pub(super) struct PricedTotal {
    all: AtomicU64,
    largest_request: AtomicU64,
    largest_output: AtomicU64,
}

/// Largest prices of requests, in priced tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LargestRequest {
    /// Price of a whole request.
    pub request: u64,
    /// Price of a request's output, possibly of another request.
    pub output: u64,
}

impl LargestRequest {
    /// Returns the larger of each field.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            request: self.request.max(other.request),
            output: self.output.max(other.output),
        }
    }
}

impl PricedTotal {
    /// Adds tokens that go into the outbox.
    pub(super) fn add(&self, tokens: u64) {
        self.all.fetch_add(tokens, Relaxed);
    }

    /// Returns the sum of all tokens.
    pub(super) fn all(&self) -> u64 {
        self.all.load(Relaxed)
    }

    /// Returns the largest request since [`PricedTotal::take_largest`].
    pub(super) fn largest(&self) -> LargestRequest {
        LargestRequest {
            request: self.largest_request.load(Relaxed),
            output: self.largest_output.load(Relaxed),
        }
    }

    /// Returns [`PricedTotal::largest`] and starts a new maximum.
    pub(super) fn take_largest(&self) -> LargestRequest {
        LargestRequest {
            request: self.largest_request.swap(0, Relaxed),
            output: self.largest_output.swap(0, Relaxed),
        }
    }

    /// Counts a finished request.
    pub(super) fn request(&self, price: LargestRequest) {
        self.largest_request.fetch_max(price.request, Relaxed);
        self.largest_output.fetch_max(price.output, Relaxed);
    }
}
