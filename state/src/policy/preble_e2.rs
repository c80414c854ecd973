//! `preble-e2`: Preble's exploitation and exploration.
//!
//! Source: Srivatsa, He, Abhyankar, Li, Zhang, "Preble: Efficient Distributed Prompt Scheduling for
//! LLM Serving", ICLR 2025, Algorithm E2. If a backend holds more of the prompt than it would have
//! to compute, the policy exploits: it takes the least loaded of the backends with the longest
//! match. Otherwise it explores: the least sum of load `L`, eviction cost `M` and the request's own
//! uncached prefill `P`. It skips holders whose load is out of proportion to the lightest load,
//! which spreads a hot prefix.
//!
//! Two things differ from Preble. Preble sums load by prefix over the last three minutes; here load
//! is what is in flight now, on all replicas. Preble knows how often each prefix was requested;
//! here evicted blocks (least recently used first) are requested again with a fixed probability.

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::rank::{Policy, Rank, Ranks, Tolerance, product};
use super::{Candidate, PolicyRequest, Reason};
use crate::reject::Rejection;
use crate::validate::{at_least, at_most};

/// Maximum setting of the ratio of loads, in thousandths.
const IMBALANCE_MILLI_MAX: u32 = 1_000_000;

/// Settings of the `preble-e2` policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PrebleE2Settings {
    /// The longest match is exploited if it covers more than this share of the prompt's tokens, in
    /// thousandths.
    #[schemars(range(max = 1000))]
    pub exploit_above_permille: u32,
    /// Largest load of an exploited backend, in thousandths of the lightest load.
    #[schemars(range(min = 1000, max = IMBALANCE_MILLI_MAX))]
    pub imbalance_milli: u32,
    /// Probability that an evicted block has to be recomputed, in thousandths.
    #[schemars(range(max = 1000))]
    pub evicted_reuse_permille: u32,
    /// Nanoseconds to prefill one uncached prompt token.
    pub prefill_ns_per_token: u32,
    /// Nanoseconds of load for each running request.
    pub decode_ns_per_request: u32,
}

impl Default for PrebleE2Settings {
    fn default() -> Self {
        Self {
            exploit_above_permille: 500,
            imbalance_milli: 2000,
            evicted_reuse_permille: 500,
            prefill_ns_per_token: 100_000,
            decode_ns_per_request: 1_000_000,
        }
    }
}

impl Policy for PrebleE2Settings {
    fn validate(&self) -> Result<(), Rejection> {
        at_most("exploit_above_permille", self.exploit_above_permille, 1000)?;
        at_least("imbalance_milli", self.imbalance_milli, 1000)?;
        at_most("imbalance_milli", self.imbalance_milli, IMBALANCE_MILLI_MAX)?;
        at_most("evicted_reuse_permille", self.evicted_reuse_permille, 1000)
    }

    fn ranks<'a>(
        &'a self,
        request: &'a PolicyRequest,
        candidates: &'a [Candidate],
    ) -> impl Ranks + use<'a> {
        let matched = candidates.iter().map(|it| it.matched.min(request.blocks));
        let longest = matched.max().unwrap_or(0);
        let cached_tokens = product(longest, request.tokens_per_block);
        let is_hit = u128::from(cached_tokens) * 1000
            > u128::from(self.exploit_above_permille) * u128::from(request.tokens);
        let lightest = candidates.iter().map(|it| self.load_ns(it)).min();
        let own_ns = product(request.tokens, self.prefill_ns_per_token);
        let load_max = (u128::from(lightest.unwrap_or(0)) + u128::from(own_ns))
            * u128::from(self.imbalance_milli)
            / 1000;
        PrebleE2 {
            settings: self,
            request,
            exploited_blocks: (longest > 0 && is_hit).then_some(longest),
            load_ns_max: u64::try_from(load_max)
                .unwrap_or(u64::MAX)
                .saturating_sub(own_ns),
        }
    }
}

impl PrebleE2Settings {
    /// Returns the load in flight (`L`), in nanoseconds.
    fn load_ns(&self, candidate: &Candidate) -> u64 {
        candidate
            .pending_prefill_tokens
            .saturating_mul(u64::from(self.prefill_ns_per_token))
            .saturating_add(product(candidate.running, self.decode_ns_per_request))
    }

    /// Returns the cost of recomputing the evicted blocks (`M`), in nanoseconds.
    fn eviction_ns(&self, request: &PolicyRequest, candidate: &Candidate) -> u64 {
        let evicted = request
            .missing_blocks(candidate.matched)
            .saturating_sub(candidate.free_blocks);
        let cost = u128::from(product(evicted, request.tokens_per_block))
            * u128::from(self.prefill_ns_per_token)
            * u128::from(self.evicted_reuse_permille)
            / 1000;
        u64::try_from(cost).unwrap_or(u64::MAX)
    }

    /// Returns the cost of the request's own prefill (`P`), in nanoseconds.
    fn prefill_ns(&self, request: &PolicyRequest, candidate: &Candidate) -> u64 {
        request
            .uncached_tokens(candidate.matched)
            .saturating_mul(u64::from(self.prefill_ns_per_token))
    }
}

struct PrebleE2<'a> {
    settings: &'a PrebleE2Settings,
    request: &'a PolicyRequest,
    /// Length of the longest match in blocks. `None` if the policy explores instead.
    exploited_blocks: Option<u32>,
    load_ns_max: u64,
}

impl Ranks for PrebleE2<'_> {
    fn rank(&self, _: usize, candidate: &Candidate) -> Rank {
        let load_ns = self.settings.load_ns(candidate);
        let matched = candidate.matched.min(self.request.blocks);
        if self.exploited_blocks == Some(matched) && load_ns <= self.load_ns_max {
            return Rank::first(load_ns, Reason::Exploit);
        }
        let cost = load_ns
            .saturating_add(self.settings.eviction_ns(self.request, candidate))
            .saturating_add(self.settings.prefill_ns(self.request, candidate));
        Rank {
            tier: 1,
            score: cost,
            then: 0,
            reason: Reason::Explore,
        }
    }

    fn near_limit(&self, best: u64) -> u64 {
        Tolerance::Near.limit(best)
    }

    fn prefers_prefix(&self) -> bool {
        true
    }
}
