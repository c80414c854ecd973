//! `cost`: least predicted time to first token.
//!
//! The prediction adds up what precedes the request's first token at a backend: prefill that is
//! dispatched but not done, the request's own uncached prefill, the share of each step that
//! decoding requests take, the engine's own queue, and preemption when its KV cache runs full. Each
//! has a price in nanoseconds; the sum saturates.

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::rank::{ByScore, Needs, Policy, Ranks, Tolerance, product};
use super::{Candidate, PolicyRequest, Prices, Reason};
use crate::reject::Rejection;
use crate::validate::at_most;

/// Settings of the `cost` policy. Integers, because settings are replicated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CostSettings {
    /// Nanoseconds to prefill one uncached prompt token.
    pub prefill_ns_per_token: u32,
    /// Nanoseconds that each running request adds to the time to first token.
    pub decode_ns_per_request: u32,
    /// Nanoseconds that each request waiting in the engine adds.
    pub waiting_ns_per_request: u32,
    /// KV cache usage, in thousandths, above which pressure is added.
    #[schemars(range(max = 1000))]
    pub kv_pressure_from_permille: u32,
    /// Nanoseconds added per thousandth of KV cache usage above that.
    pub kv_pressure_ns_per_permille: u32,
    /// Price of eviction: each block that a request would evict from a full cache costs this share,
    /// in thousandths, of recomputing it.
    #[schemars(range(max = 1000))]
    pub eviction_permille: u32,
    /// Costs within this many thousandths of the lowest count as equal.
    #[schemars(range(max = 1000))]
    pub near_permille: u32,
}

impl Default for CostSettings {
    fn default() -> Self {
        Self {
            prefill_ns_per_token: 100_000,
            decode_ns_per_request: 1_000_000,
            waiting_ns_per_request: 50_000_000,
            kv_pressure_from_permille: 900,
            kv_pressure_ns_per_permille: 5_000_000,
            eviction_permille: 300,
            near_permille: 20,
        }
    }
}

impl Policy for CostSettings {
    fn validate(&self) -> Result<(), Rejection> {
        at_most("eviction_permille", self.eviction_permille, 1000)?;
        at_most("near_permille", self.near_permille, 1000)?;
        at_most(
            "kv_pressure_from_permille",
            self.kv_pressure_from_permille,
            1000,
        )
    }

    fn needs(&self) -> Needs<'_> {
        Needs {
            learnt: true,
            ..Needs::default()
        }
    }

    fn ranks<'a>(
        &'a self,
        request: &'a PolicyRequest,
        candidates: &'a [Candidate],
    ) -> impl Ranks + use<'a> {
        let usual = usual_prices(self, candidates);
        ByScore {
            score: move |candidate: &Candidate| score(self, usual, request, candidate),
            near: Tolerance::Permille(self.near_permille),
            prefers_prefix: true,
            reason: Reason::LeastCost,
        }
    }
}

/// Returns the prices for a candidate without learned ones: the mean of the other candidates'
/// prices, or the settings if nothing is learned about any. A mix of learned and configured prices
/// would send everything to one side, and a backend without requests never learns.
pub(super) fn usual_prices(settings: &CostSettings, candidates: &[Candidate]) -> Prices {
    let (mut prefill_ns, mut decode_ns, mut count) = (0_u64, 0_u64, 0_u64);
    for prices in candidates.iter().filter_map(|candidate| candidate.prices) {
        prefill_ns += u64::from(prices.prefill_ns_per_token);
        decode_ns += u64::from(prices.decode_ns_per_request);
        count += 1;
    }
    let mean = |sum: u64, set: u32| {
        let mean = sum.checked_div(count);
        mean.map_or(set, |mean| u32::try_from(mean).unwrap_or(u32::MAX))
    };
    Prices {
        prefill_ns_per_token: mean(prefill_ns, settings.prefill_ns_per_token),
        decode_ns_per_request: mean(decode_ns, settings.decode_ns_per_request),
        first_tokens: USUAL_FIRST_TOKENS,
    }
}

/// Weight of the usual prices, as a number of first tokens. Engines are more often alike than not,
/// and the learned prices of equal engines differ by noise, which would attract requests to the
/// luckiest one.
const USUAL_FIRST_TOKENS: u32 = 64;

/// Returns a candidate's prices, shrunk towards the usual ones if they rest on little data.
fn believed(own: Option<Prices>, usual: Prices) -> Prices {
    let Some(own) = own else { return usual };
    let all = (u64::from(own.first_tokens) + u64::from(usual.first_tokens)).max(1);
    let mix = |own_ns: u32, usual_ns: u32| {
        let sum = u64::from(own_ns)
            .saturating_mul(u64::from(own.first_tokens))
            .saturating_add(u64::from(usual_ns).saturating_mul(u64::from(usual.first_tokens)));
        u32::try_from(sum / all).unwrap_or(u32::MAX)
    };
    Prices {
        prefill_ns_per_token: mix(own.prefill_ns_per_token, usual.prefill_ns_per_token),
        decode_ns_per_request: mix(own.decode_ns_per_request, usual.decode_ns_per_request),
        first_tokens: own.first_tokens,
    }
}

/// Returns the predicted time to first token, in nanoseconds.
pub(super) fn score(
    settings: &CostSettings,
    usual: Prices,
    request: &PolicyRequest,
    candidate: &Candidate,
) -> u64 {
    let prices = believed(candidate.prices, usual);
    let prefill_tokens = candidate
        .pending_prefill_tokens
        .saturating_add(request.uncached_tokens(candidate.matched));
    let pressure_permille = candidate
        .kv_usage_permille
        .saturating_sub(settings.kv_pressure_from_permille);
    [
        prefill_tokens.saturating_mul(u64::from(prices.prefill_ns_per_token)),
        product(candidate.running, prices.decode_ns_per_request),
        product(candidate.waiting, settings.waiting_ns_per_request),
        product(pressure_permille, settings.kv_pressure_ns_per_permille),
        eviction_ns(settings, prices, request, candidate),
    ]
    .into_iter()
    .fold(0, u64::saturating_add)
}

/// Returns the cost to other requests, in nanoseconds: the blocks that a full cache evicts for this
/// request's new ones, at the price of recomputing them, weighted by how likely they are to be
/// requested again. Without it, a backend that holds the one block shared by all prompts would
/// attract every request while others are idle.
fn eviction_ns(
    settings: &CostSettings,
    prices: Prices,
    request: &PolicyRequest,
    candidate: &Candidate,
) -> u64 {
    let new = request.blocks.saturating_sub(candidate.matched);
    let evicted = new.saturating_sub(candidate.free_blocks);
    product(evicted, request.tokens_per_block)
        .saturating_mul(u64::from(prices.prefill_ns_per_token))
        .saturating_mul(u64::from(settings.eviction_permille))
        / 1000
}
