//! Prices of a backend's work, learned from the replicas' measurements.
//!
//! Two models, each linear and small enough to be understood:
//! - Time to first token = a base + prefill tokens before it × price of a token + requests running
//!   × price of a request.
//! - Time between two tokens = a base + requests running × price of a request.
//!
//! A replica's report gives the means over its interval; `fit` turns a sequence of these into
//! prices. Prices are per life of a backend, so a restarted engine is learnt anew.

use bincode::{Decode, Encode};
use serde::Serialize;

use super::ServiceSample;
use super::fit::{RecursiveLeastSquares, Regressor};
use crate::policy::Prices;

/// First tokens (faded) after which the prices of a backend are used.
pub const LEARNT_FIRST_TOKENS_MIN: u32 = 32;

/// Requests are counted in sixteenths: means are no whole numbers.
const RUNNING_PARTS: u64 = 16;

/// Where a coefficient began does not count for more as more is seen.
const FADES: i64 = i64::MAX;

/// A base: there once per event.
const fn once(prior_us: i64, most_us: i64) -> Regressor {
    Regressor {
        amount_max: 1,
        typical: 1,
        prior_milli: prior_us * 1000,
        bounds_milli: (0, most_us * 1000),
        kept_in: FADES,
    }
}

/// Microseconds of base, per prefill token, per sixteenth of a running request.
const FIRST_TOKEN: [Regressor; 3] = [
    once(0, 60_000_000),
    Regressor {
        amount_max: 1 << 18,
        typical: 512,
        // A price of 100 microseconds, between 1 microsecond and 10 milliseconds.
        prior_milli: 100_000,
        bounds_milli: (1_000, 10_000_000),
        // What counts is how far loads lie apart: a hundred tokens weigh as much as the beginning.
        kept_in: 24,
    },
    Regressor {
        amount_max: 1 << 14,
        typical: 4 * RUNNING_PARTS as i64,
        // A price of 1 millisecond a request, up to 1 second.
        prior_milli: 1_000_000 / RUNNING_PARTS as i64,
        bounds_milli: (0, 1_000_000_000 / RUNNING_PARTS as i64),
        kept_in: FADES,
    },
];

/// Microseconds of base, per sixteenth of a running request.
const GAP: [Regressor; 2] = [
    once(10_000, 10_000_000),
    Regressor {
        amount_max: 1 << 14,
        typical: 4 * RUNNING_PARTS as i64,
        prior_milli: 0,
        bounds_milli: (0, 1_000_000_000 / RUNNING_PARTS as i64),
        kept_in: FADES,
    },
];

/// What is being learnt of one life of a backend.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub(crate) struct PriceLearner {
    first_token: RecursiveLeastSquares<3>,
    gap: RecursiveLeastSquares<2>,
}

/// Prices of a backend, as learnt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct LearntPrices {
    /// What one uncached prompt token adds to a first token, nanoseconds.
    pub prefill_ns_per_token: u32,
    /// What each request running adds to a first token, nanoseconds: at least one step's share.
    pub decode_ns_per_request: u32,
    /// What a first token takes at an idle backend beside its prefill, microseconds.
    pub first_token_base_us: u32,
    /// What a token takes when its request runs alone, microseconds.
    pub gap_base_us: u32,
    /// What each request running adds to the time between two tokens, nanoseconds.
    pub gap_ns_per_request: u32,
    /// First tokens behind this, faded.
    pub first_tokens: u32,
    /// Gaps behind this, faded.
    pub gaps: u32,
}

impl LearntPrices {
    /// What a decision counts with; `None` while too little is behind it.
    #[must_use]
    pub fn prices(&self) -> Option<Prices> {
        (self.first_tokens >= LEARNT_FIRST_TOKENS_MIN).then_some(Prices {
            prefill_ns_per_token: self.prefill_ns_per_token,
            decode_ns_per_request: self.decode_ns_per_request,
            first_tokens: self.first_tokens,
        })
    }
}

impl PriceLearner {
    /// Takes in a plausible sample.
    pub(crate) fn observe(&mut self, sample: &ServiceSample) {
        let mean = |sum: u64, count: u64| {
            let mean = sum.checked_div(count).unwrap_or(0);
            i64::try_from(mean).unwrap_or(i64::MAX)
        };
        let running = |sum: u64, count: u64| mean(sum.saturating_mul(RUNNING_PARTS), count);
        let first_tokens = u64::from(sample.first_tokens);
        let amounts = [
            1,
            mean(sample.prefill_tokens, first_tokens),
            running(sample.first_running, first_tokens),
        ];
        let first_token_us = mean(sample.first_token_us, first_tokens);
        self.first_token
            .observe(&FIRST_TOKEN, amounts, first_token_us, first_tokens);
        let amounts = [1, running(sample.gap_running, sample.gaps)];
        let gap_us = mean(sample.gap_us, sample.gaps);
        self.gap.observe(&GAP, amounts, gap_us, sample.gaps);
    }

    /// The prices, as far as they are known; `None` before the first sample.
    pub(crate) fn learnt(&self) -> Option<LearntPrices> {
        let (first_token, gap) = (&self.first_token, &self.gap);
        if first_token.weight() == 0 && gap.weight() == 0 {
            return None;
        }
        // Thousandths of a microsecond are nanoseconds.
        let ns = |ns: i64| u32::try_from(ns.max(0)).unwrap_or(u32::MAX);
        let per_request = |ns_per_part: i64| ns(ns_per_part * RUNNING_PARTS as i64);
        let gap_ns_per_request = per_request(gap.coefficient_milli(1));
        let decode_ns_per_request = per_request(first_token.coefficient_milli(2));
        Some(LearntPrices {
            prefill_ns_per_token: ns(first_token.coefficient_milli(1)),
            decode_ns_per_request: decode_ns_per_request.max(gap_ns_per_request),
            first_token_base_us: ns(first_token.coefficient_milli(0) / 1000),
            gap_base_us: ns(gap.coefficient_milli(0) / 1000),
            gap_ns_per_request,
            first_tokens: first_token.weight(),
            gaps: gap.weight(),
        })
    }
}
