//! `epp`: the endpoint picker of the Gateway API inference extension.
//!
//! A LoRA filter comes first: it keeps the engines that list the model themselves (a loaded adapter
//! is listed as a model) and whose queue is not too long, if any. Then a weighted sum of three
//! scores from 0 to 1 decides: the cached share of the prompt, `(longest - waiting) / (longest -
//! shortest)` of the engines' queues, and the free share of the KV cache. A match that would save
//! too little counts as none. Source: the extension's proposal 0602 (prefix cache) and
//! `pkg/epp/scheduling` (`queue.go`, `kvcache-utilization`, `lora-affinity`).

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::rank::{Policy, Rank, Ranks, Tolerance, product};
use super::{Candidate, PolicyRequest, Reason};
use crate::reject::Rejection;
use crate::validate::{at_most, ensure};

/// Maximum weight of one score.
const WEIGHT_MAX: u32 = 1000;
/// Resolution of a score: the value of a perfect one.
const PARTS: u64 = 1_000_000;

/// Settings of the `epp` policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EppSettings {
    /// Weight of the prefix score: the cached share of the prompt.
    #[schemars(range(max = WEIGHT_MAX))]
    pub prefix_weight: u32,
    /// Weight of the queue score: the engine's queue relative to the longest and the shortest.
    #[schemars(range(max = WEIGHT_MAX))]
    pub queue_weight: u32,
    /// Weight of the KV cache score: the free share of the cache.
    #[schemars(range(max = WEIGHT_MAX))]
    pub kv_weight: u32,
    /// Minimum number of tokens that a match must save.
    pub min_match_tokens: u32,
}

/// Longest engine queue at which an engine with the adapter loaded is preferred.
const LORA_WAITING_MAX: u32 = 50;
/// Difference of scores that count as equal, in thousandths of the sum of weights.
const NEAR_PERMILLE: u64 = 10;

impl Default for EppSettings {
    fn default() -> Self {
        Self {
            prefix_weight: 3,
            queue_weight: 2,
            kv_weight: 2,
            min_match_tokens: 64,
        }
    }
}

impl Policy for EppSettings {
    fn validate(&self) -> Result<(), Rejection> {
        at_most("prefix_weight", self.prefix_weight, WEIGHT_MAX)?;
        at_most("queue_weight", self.queue_weight, WEIGHT_MAX)?;
        at_most("kv_weight", self.kv_weight, WEIGHT_MAX)?;
        ensure(
            self.weights() > 0,
            "prefix_weight",
            "at least one of prefix_weight, queue_weight and kv_weight above 0",
        )
    }

    fn ranks<'a>(
        &'a self,
        request: &'a PolicyRequest,
        candidates: &'a [Candidate],
    ) -> impl Ranks + use<'a> {
        let waiting = || candidates.iter().map(|candidate| candidate.waiting);
        Epp {
            settings: self,
            request,
            shortest: waiting().min().unwrap_or(0),
            longest: waiting().max().unwrap_or(0),
        }
    }
}

impl EppSettings {
    fn weights(&self) -> u64 {
        u64::from(self.prefix_weight) + u64::from(self.queue_weight) + u64::from(self.kv_weight)
    }
}

struct Epp<'a> {
    settings: &'a EppSettings,
    request: &'a PolicyRequest,
    shortest: u32,
    longest: u32,
}

impl Epp<'_> {
    /// Returns how far `candidate` is below the highest possible sum, in millionths of a weight.
    fn missing(&self, candidate: &Candidate) -> u64 {
        let settings = self.settings;
        let weigh = |weight: u32, parts: u64| u64::from(weight) * parts.min(PARTS);
        weigh(settings.prefix_weight, self.missing_prefix(candidate))
            + weigh(settings.queue_weight, self.missing_queue(candidate))
            + weigh(
                settings.kv_weight,
                u64::from(candidate.kv_usage_permille) * 1000,
            )
    }

    fn missing_prefix(&self, candidate: &Candidate) -> u64 {
        let matched = candidate.matched.min(self.request.blocks);
        let is_worth_it = product(matched, self.request.tokens_per_block)
            >= u64::from(self.settings.min_match_tokens);
        if matched == 0 || !is_worth_it {
            return PARTS;
        }
        u64::from(self.request.missing_blocks(matched)) * PARTS / u64::from(self.request.blocks)
    }

    fn missing_queue(&self, candidate: &Candidate) -> u64 {
        let range = u64::from(self.longest - self.shortest);
        (u64::from(candidate.waiting - self.shortest) * PARTS)
            .checked_div(range)
            .unwrap_or(0)
    }
}

impl Ranks for Epp<'_> {
    fn rank(&self, _: usize, candidate: &Candidate) -> Rank {
        let goes_first = candidate.is_model_listed && candidate.waiting <= LORA_WAITING_MAX;
        Rank {
            tier: u8::from(!goes_first),
            score: self.missing(candidate),
            then: 0,
            reason: Reason::BestScore,
        }
    }

    fn near_limit(&self, best: u64) -> u64 {
        let sum = self.settings.weights() * PARTS / 1000;
        let window = sum.saturating_mul(NEAR_PERMILLE);
        Tolerance::Within(window).limit(best)
    }
}
