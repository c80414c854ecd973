//! Prices of a backend's work, learned from the replicas' measurements.
//!
//! The module has two simple linear models:
//! - Time to first token = base + prefill tokens before it × price of a token + running requests ×
//!   price of a request + tokens loaded from each lower cache tier × price of the tier.
//! - Time between two tokens = base + running requests × price of a request.
//!
//! A replica's report contains the means over its interval; `fit` turns a sequence of these into
//! prices. Prices belong to one incarnation of a backend, so learning restarts with the engine.

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::Serialize;

use super::fit::{RecursiveLeastSquares, Regressor};
use super::{LoadingSample, ServiceSample};
use crate::kv_events::LOWER_TIERS;
use crate::policy::{LoadPrices, Prices};

/// Minimum faded number of first tokens for the prices of a backend to be used.
pub const LEARNT_FIRST_TOKENS_MIN: u32 = 32;

/// Number of parts per request in which running requests are counted, because means are not whole
/// numbers.
const RUNNING_PARTS: u64 = 16;

/// Value of `kept_in` for a prior whose weight does not grow with the observations.
const FADES: i64 = i64::MAX;

/// Returns the regressor of a base term, which occurs once per event.
const fn once(prior_us: i64, most_us: i64) -> Regressor {
    Regressor {
        amount_max: 1,
        typical: 1,
        prior_milli: prior_us * 1000,
        bounds_milli: (0, most_us * 1000),
        kept_in: FADES,
    }
}

/// Returns the regressor of a token loaded from a tier below the GPU, with a prior in nanoseconds.
const fn loaded(prior_ns: u32) -> Regressor {
    Regressor {
        amount_max: 1 << 18,
        typical: 512,
        prior_milli: prior_ns as i64,
        // Up to 1 millisecond: slower than computing is useless.
        bounds_milli: (0, 1_000_000),
        kept_in: 24,
    }
}

/// Regressors of the time to first token without loading, in microseconds: base, per prefill token,
/// and per 1/16 of a request.
const FIRST_TOKEN: [Regressor; 3] = [
    once(0, 60_000_000),
    Regressor {
        amount_max: 1 << 18,
        typical: 512,
        // A prior of 100 microseconds, between 1 microsecond and 10 milliseconds.
        prior_milli: 100_000,
        bounds_milli: (1_000, 10_000_000),
        // Only variation reveals the price: loads that vary by a hundred tokens weigh as much as
        // the prior.
        kept_in: 24,
    },
    Regressor {
        amount_max: 1 << 14,
        typical: 4 * RUNNING_PARTS as i64,
        // A prior of 1 millisecond per request, up to 1 second.
        prior_milli: 1_000_000 / RUNNING_PARTS as i64,
        bounds_milli: (0, 1_000_000_000 / RUNNING_PARTS as i64),
        kept_in: FADES,
    },
];

/// Regressors of the time to first token with loading, in microseconds: those of [`FIRST_TOKEN`], and
/// per token loaded from each tier below the GPU.
const LOADING: [Regressor; 3 + LOWER_TIERS] = {
    let [base, token, request] = FIRST_TOKEN;
    [
        base,
        token,
        request,
        loaded(LoadPrices::ASSUMED.cpu_ns_per_token),
        loaded(LoadPrices::ASSUMED.disk_ns_per_token),
        loaded(LoadPrices::ASSUMED.store_ns_per_token),
    ]
};

/// Regressors of the time between two tokens, in microseconds: base, and per 1/16 of a request.
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

/// Estimators of the prices of one incarnation of a backend.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub(crate) struct PriceLearner {
    first_token: RecursiveLeastSquares<3>,
    /// Unused before the first request that loads: most engines have no tiers below the GPU.
    loading: RecursiveLeastSquares<{ 3 + LOWER_TIERS }>,
    gap: RecursiveLeastSquares<2>,
}

/// Learned prices of a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub struct LearntPrices {
    /// Prices of the work before a first token.
    #[serde(flatten)]
    pub prices: Prices,
    /// Time to first token at an idle backend, without prefill, in microseconds; milliseconds in
    /// JSON.
    #[serde(
        rename = "first_token_base_ms",
        serialize_with = "crate::readable::ms_of_us"
    )]
    #[schemars(with = "f64")]
    pub first_token_base_us: u32,
    /// Time per token of a request that runs alone, in microseconds; milliseconds in JSON.
    #[serde(rename = "gap_base_ms", serialize_with = "crate::readable::ms_of_us")]
    #[schemars(with = "f64")]
    pub gap_base_us: u32,
    /// Increase of the time between two tokens per running request, in nanoseconds; milliseconds
    /// in JSON.
    #[serde(
        rename = "gap_ms_per_request",
        serialize_with = "crate::readable::ms_of_ns"
    )]
    #[schemars(with = "f64")]
    pub gap_ns_per_request: u32,
    /// Number of first tokens observed, faded.
    pub first_tokens: u32,
    /// Number of gaps between tokens observed, faded.
    pub gaps: u32,
}

impl LearntPrices {
    /// Returns the prices for decisions; `None` while they rest on too few first tokens.
    #[must_use]
    pub fn trusted(&self) -> Option<Prices> {
        (self.first_tokens >= LEARNT_FIRST_TOKENS_MIN).then_some(self.prices)
    }
}

fn mean(sum: u64, count: u64) -> i64 {
    let mean = sum.checked_div(count).unwrap_or(0);
    i64::try_from(mean).unwrap_or(i64::MAX)
}

impl PriceLearner {
    /// Learns from a plausible sample.
    pub(crate) fn observe(&mut self, sample: &ServiceSample) {
        let running = |sum: u64, count: u64| mean(sum.saturating_mul(RUNNING_PARTS), count);
        let first_tokens = u64::from(sample.first_tokens);
        let amounts = [
            1,
            mean(sample.prefill_tokens, first_tokens),
            running(sample.first_running, first_tokens),
        ];
        self.observe_loading(&sample.loading);
        let mut first_token_us = mean(sample.first_token_us, first_tokens);
        first_token_us -= self.loading_us(sample);
        // What loading explains altogether says nothing of the rest.
        if first_token_us > 0 {
            self.first_token
                .observe(&FIRST_TOKEN, amounts, first_token_us, first_tokens);
        }
        let amounts = [1, running(sample.gap_running, sample.gaps)];
        let gap_us = mean(sample.gap_us, sample.gaps);
        self.gap.observe(&GAP, amounts, gap_us, sample.gaps);
    }

    /// Returns the expected time that a request of the sample spent on loading, in microseconds.
    fn loading_us(&self, sample: &ServiceSample) -> i64 {
        let count = u64::from(sample.first_tokens);
        let loads = sample.loaded_tokens.iter().enumerate();
        let ns = loads.map(|(tier, tokens)| {
            mean(*tokens, count).saturating_mul(self.load_ns_per_token(tier).into())
        });
        ns.fold(0, i64::saturating_add) / 1000
    }

    /// Returns the learned price of loading a token from a tier. Engines have tiers because loading
    /// is no slower than computing.
    fn load_ns_per_token(&self, tier: usize) -> u32 {
        let loading = self.loading.expected_milli(&LOADING, 3 + tier);
        let computing = self.first_token.expected_milli(&FIRST_TOKEN, 1);
        u32::try_from(loading.min(computing).max(0)).unwrap_or(u32::MAX)
    }

    fn observe_loading(&mut self, sample: &LoadingSample) {
        let count = u64::from(sample.requests);
        let [cpu, disk, store] = sample.loaded_tokens.map(|it| mean(it, count));
        let amounts = [
            1,
            mean(sample.prefill_tokens, count),
            mean(sample.running.saturating_mul(RUNNING_PARTS), count),
            cpu,
            disk,
            store,
        ];
        let first_token_us = mean(sample.first_token_us, count);
        self.loading.learn(&LOADING, amounts, first_token_us, count);
    }

    /// Returns the prices learned so far; `None` before the first sample.
    pub(crate) fn learnt(&self) -> Option<LearntPrices> {
        let (first_token, gap) = (&self.first_token, &self.gap);
        if first_token.weight() == 0 && gap.weight() == 0 {
            return None;
        }
        // Thousandths of a microsecond are nanoseconds.
        let ns: fn(i64) -> u32 = |ns| u32::try_from(ns.max(0)).unwrap_or(u32::MAX);
        let per_request: fn(i64) -> u32 =
            |per_part| u32::try_from(per_part * RUNNING_PARTS as i64).unwrap_or(u32::MAX);
        let both = |of: fn(i64) -> u32, range: Option<(i64, i64)>| {
            range.map(|(least, most)| (of(least), of(most)))
        };
        let gap_ns_per_request = per_request(gap.coefficient_milli(1));
        let decode_ns_per_request = per_request(first_token.coefficient_milli(2));
        let decode_range = if gap_ns_per_request > decode_ns_per_request {
            gap.range_milli(1)
        } else {
            first_token.range_milli(2)
        };
        let prefill_ns_per_token = ns(first_token.coefficient_milli(1));
        Some(LearntPrices {
            prices: Prices {
                prefill_ns_per_token,
                decode_ns_per_request: decode_ns_per_request.max(gap_ns_per_request),
                prefill_range_ns: both(ns, first_token.range_milli(1)),
                decode_range_ns: both(per_request, decode_range),
                load: LoadPrices {
                    cpu_ns_per_token: self.load_ns_per_token(0),
                    disk_ns_per_token: self.load_ns_per_token(1),
                    store_ns_per_token: self.load_ns_per_token(2),
                },
            },
            first_token_base_us: ns(first_token.coefficient_milli(0) / 1000),
            gap_base_us: ns(gap.coefficient_milli(0) / 1000),
            gap_ns_per_request,
            first_tokens: first_token.weight(),
            gaps: gap.weight(),
        })
    }
}
