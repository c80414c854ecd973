//! Algorithm 1: how many requests a backend's cache holds, from the mean and deviation of what each
//! adds.
//!
//! `b` requests hold `S`, a sum of `b` independent sizes with mean `mu` and deviation `sigma`. By
//! the central limit theorem, `S` stays within the capacity `eta` with the probability that
//! corresponds to `z` if `mu * b + z * sigma * sqrt(b) <= eta`. The limit is the largest such `b`.
//! The original algorithm reserves a fixed share of `eta`. That is too little if a few large
//! requests fill the cache, and wasteful if many small ones do.
//!
//! Only what a request *adds* counts: its uncached prompt tokens and its output. Running requests
//! that share a prefix hold it once, and it counts for the request that computed it. For prefixes
//! that no other request uses at the time this is too little, so the limit errs upwards: the
//! engine's own scheduler then queues or preempts requests, as it would without a router. Erring
//! downwards would idle engines for nothing.

use bincode::{Decode, Encode};

use super::ServiceSample;

/// Minimum number of observed requests for a limit. One request alone reveals nothing about the
/// deviation, and a single long prompt must not stop a backend.
const REQUESTS_MIN: u64 = 16;
/// Number of requests that are remembered. Beyond it, all sums are halved, so that old requests
/// fade.
const REQUESTS_KEPT: u64 = 1024;
/// Maximum number of requests in one sample, and of tokens in one request. Larger values cannot
/// have been measured.
const SAMPLE_REQUESTS_MAX: u64 = 1 << 16;
const REQUEST_TOKENS_MAX: u64 = 1 << 21;
/// Divisor of values in thousandths, such as `memory_z_milli`.
const MILLI: u128 = 1000;

/// Faded sums over requests. They are meaningful from the first request on, whereas an average that
/// starts at 0 would underestimate requests for its first dozen samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
pub(crate) struct Footprint {
    requests: u64,
    tokens: u64,
    squared: u64,
}

impl Footprint {
    pub(crate) fn observe(&mut self, sample: &ServiceSample) {
        let requests = u64::from(sample.ended);
        if !is_possible(requests, sample.added_tokens, sample.added_squared) {
            return;
        }
        self.requests = self.requests.saturating_add(requests);
        self.tokens = self.tokens.saturating_add(sample.added_tokens);
        self.squared = self.squared.saturating_add(sample.added_squared);
        while self.requests > REQUESTS_KEPT {
            self.requests /= 2;
            self.tokens /= 2;
            self.squared /= 2;
        }
    }

    /// Returns the maximum number of requests that fit into `capacity_tokens`, between 1 and
    /// `batch_max`. `None` before enough requests were seen. `z_milli` sets the confidence, for
    /// example 1645 for 95 %.
    pub(crate) fn b_mem(&self, capacity_tokens: u64, z_milli: u32, batch_max: u32) -> Option<u32> {
        if self.requests < REQUESTS_MIN {
            return None;
        }
        let (mut fits, mut beyond) = (1, batch_max.saturating_add(1));
        while beyond - fits > 1 {
            let middle = fits + (beyond - fits) / 2;
            if self.holds(middle, capacity_tokens, z_milli) {
                fits = middle;
            } else {
                beyond = middle;
            }
        }
        Some(fits)
    }

    /// Whether `mu * b + z * sigma * sqrt(b) <= eta`. Multiplies both sides by the number of
    /// requests seen and by 1000, and squares away the root, so that all terms are integers.
    fn holds(&self, b: u32, capacity_tokens: u64, z_milli: u32) -> bool {
        let room = (u128::from(capacity_tokens) * u128::from(self.requests))
            .checked_sub(u128::from(self.tokens) * u128::from(b));
        let Some(room) = room else {
            return false;
        };
        let z = u128::from(z_milli);
        // At most 2^62 * 2^16 * 2^27 by the bounds above and those of the settings. A forged
        // snapshot may exceed it.
        let needed = self.spread().saturating_mul(u128::from(b) * z * z);
        // Compares squares. One that would overflow exceeds anything that may be needed.
        let room = room.saturating_mul(MILLI);
        room.checked_mul(room).is_none_or(|square| square >= needed)
    }

    /// Returns the variance of the tokens per request, times the square of the number of requests.
    fn spread(&self) -> u128 {
        let tokens = u128::from(self.tokens);
        (u128::from(self.squared) * u128::from(self.requests)).saturating_sub(tokens * tokens)
    }

    /// Returns the number of requests that are remembered.
    pub(crate) fn requests(&self) -> u32 {
        u32::try_from(self.requests).unwrap_or(u32::MAX)
    }

    /// Returns `mu`, the mean tokens per request, rounded down; 0 before the first request.
    pub(crate) fn mean(&self) -> u64 {
        self.tokens.checked_div(self.requests).unwrap_or(0)
    }

    /// Returns `sigma`, the standard deviation of a request's tokens, rounded down; 0 at first.
    pub(crate) fn deviation(&self) -> u64 {
        let deviation = self.spread().isqrt().checked_div(self.requests.into());
        deviation.map_or(0, |it| u64::try_from(it).unwrap_or(u64::MAX))
    }
}

/// Whether `tokens` and `squared` can be the sums over this many requests. Rejects a mean square
/// below the squared mean, and requests beyond every model's context: both are faults of the
/// sender.
fn is_possible(requests: u64, tokens: u64, squared: u64) -> bool {
    let mean_square = u128::from(squared) * u128::from(requests);
    let squared_mean = u128::from(tokens) * u128::from(tokens);
    (1..=SAMPLE_REQUESTS_MAX).contains(&requests)
        && tokens <= requests * REQUEST_TOKENS_MAX
        && mean_square >= squared_mean
        && u128::from(squared) <= u128::from(tokens) * u128::from(REQUEST_TOKENS_MAX)
}
