//! `vllm-cache-aware`: the cache-aware policy designed for SGLang's gateway in front of vLLM.
//!
//! Prefers backends that hold more than a given share of the prompt while their load is bounded:
//! the longest match first, then the next one if that backend is full. Otherwise the least loaded
//! backend is chosen. The original compares `load < average * factor`, which no idle fleet
//! satisfies; here the bound is `ceil(factor * (total + 1) / n)`.

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::rank::{MatchBy, Policy, PolicyInputs, Rank, Ranks, Touch, load_bound};
use super::{Candidate, PolicyRequest};
use crate::reject::Rejection;
use crate::validate::{at_least, at_most};

/// Maximum load factor, in thousandths.
const FACTOR_MILLI_MAX: u32 = 1_000_000;

/// Settings of the `vllm-cache-aware` policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct VllmCacheAwareSettings {
    /// A match counts if it covers more than this share of the prompt's blocks, in thousandths.
    #[schemars(range(max = 1000))]
    pub cache_threshold_permille: u32,
    /// Largest load of a backend that is chosen for its prefix, in thousandths of the average.
    #[schemars(range(min = 1000, max = FACTOR_MILLI_MAX))]
    pub load_factor_milli: u32,
    /// How blocks are identified: by their content and what precedes it, or by their position as well.
    pub hashing: BlockNaming,
    /// How often a match renews the age of its blocks: with every request, or with one in eight.
    pub touch: Touch,
}

/// How blocks are identified.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BlockNaming {
    /// By their content and everything before them; found for all backends at once.
    Chained,
    /// By their position as well, as in the original; found for each backend by binary search over
    /// positions. An identity that ignores what precedes a block would match wrongly, so the
    /// chained hash is used at each position.
    Position,
}

impl Default for VllmCacheAwareSettings {
    fn default() -> Self {
        Self {
            cache_threshold_permille: 300,
            load_factor_milli: 1250,
            hashing: BlockNaming::Chained,
            touch: Touch::Always,
        }
    }
}

impl Policy for VllmCacheAwareSettings {
    fn validate(&self) -> Result<(), Rejection> {
        at_most(
            "cache_threshold_permille",
            self.cache_threshold_permille,
            1000,
        )?;
        at_least("load_factor_milli", self.load_factor_milli, 1000)?;
        at_most(
            "load_factor_milli",
            self.load_factor_milli,
            FACTOR_MILLI_MAX,
        )
    }

    fn needs(&self) -> PolicyInputs<'_> {
        PolicyInputs {
            match_by: match self.hashing {
                BlockNaming::Chained => MatchBy::Mask,
                BlockNaming::Position => MatchBy::Position,
            },
            touch: self.touch,
            ..PolicyInputs::default()
        }
    }

    fn ranks<'a>(
        &'a self,
        request: &'a PolicyRequest,
        candidates: &'a [Candidate],
    ) -> impl Ranks + use<'a> {
        VllmCacheAware {
            request,
            threshold_permille: self.cache_threshold_permille,
            load_max: load_bound(self.load_factor_milli, candidates),
        }
    }
}

struct VllmCacheAware<'a> {
    request: &'a PolicyRequest,
    threshold_permille: u32,
    load_max: u64,
}

impl Ranks for VllmCacheAware<'_> {
    fn rank(&self, _: usize, candidate: &Candidate) -> Rank {
        let running = u64::from(candidate.running);
        let matched = candidate.matched.min(self.request.blocks);
        let is_hit = u64::from(matched) * 1000
            > u64::from(self.threshold_permille) * u64::from(self.request.blocks);
        if is_hit && running <= self.load_max {
            Rank::longest_prefix(self.request.missing_blocks(matched), running)
        } else {
            Rank::without_prefix(running)
        }
    }
}
