//! `prefix-cache`: AIBrix's prefix-cache-aware routing.
//!
//! Source: AIBrix gateway, `pkg/plugins/gateway/algorithms` (README and `prefix_cache.go`). If the
//! load is imbalanced, the backend with the fewest running requests is chosen. Otherwise the policy
//! tries the backends that hold enough of the prompt, in decreasing order of match and increasing
//! order of running requests. It takes the first whose running requests are within some standard
//! deviations of the mean. If there is none, it takes the one with the fewest running requests.
//!
//! The standard deviation is that of the population of all candidates. The comparison avoids roots
//! and fractions: with `n` candidates, `running <= mean + factor * stddev` is equivalent to `d <=
//! 0` or `d² <= factor² * (n * sum of squares - sum²)` for `d = n * running - sum`.

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::rank::{Policy, Rank, Ranks};
use super::{Candidate, PolicyRequest, Reason};
use crate::reject::Rejection;
use crate::validate::{at_least, at_most};

/// Maximum factor of the standard deviation, in thousandths.
const FACTOR_MILLI_MAX: u32 = 1_000_000;

/// Settings of the `prefix-cache` policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PrefixCacheSettings {
    /// Load is imbalanced, and prefixes are ignored, when the most and the least loaded backend
    /// differ by more running requests than this.
    pub imbalance_abs_count: u32,
    /// How far above the mean a backend's running requests may be to be chosen for its prefix, in
    /// thousandths of a standard deviation.
    #[schemars(range(max = FACTOR_MILLI_MAX))]
    pub standard_deviation_factor_milli: u32,
    /// Minimum number of leading blocks that count as a match; all blocks of a shorter prompt.
    #[schemars(range(min = 1))]
    pub min_match_blocks: u32,
}

impl Default for PrefixCacheSettings {
    fn default() -> Self {
        Self {
            imbalance_abs_count: 16,
            standard_deviation_factor_milli: 2000,
            min_match_blocks: 2,
        }
    }
}

impl Policy for PrefixCacheSettings {
    fn validate(&self) -> Result<(), Rejection> {
        at_most(
            "standard_deviation_factor_milli",
            self.standard_deviation_factor_milli,
            FACTOR_MILLI_MAX,
        )?;
        at_least("min_match_blocks", self.min_match_blocks, 1)
    }

    fn ranks<'a>(
        &'a self,
        request: &'a PolicyRequest,
        candidates: &'a [Candidate],
    ) -> impl Ranks + use<'a> {
        let spread = LoadDistribution::of(candidates);
        PrefixCache {
            request,
            is_imbalanced: spread.most - spread.fewest > self.imbalance_abs_count,
            blocks_min: self.min_match_blocks.min(request.blocks).max(1),
            factor_milli: self.standard_deviation_factor_milli,
            spread,
        }
    }
}

/// Distribution of the running requests over all candidates.
struct LoadDistribution {
    count: u64,
    fewest: u32,
    most: u32,
    sum: u64,
    sum_of_squares: u128,
}

impl LoadDistribution {
    fn of(candidates: &[Candidate]) -> Self {
        let running = || candidates.iter().map(|candidate| candidate.running);
        Self {
            count: candidates.len() as u64,
            fewest: running().min().unwrap_or(0),
            most: running().max().unwrap_or(0),
            sum: running().map(u64::from).sum(),
            sum_of_squares: running().map(|it| u128::from(it) * u128::from(it)).sum(),
        }
    }

    /// Whether `running <= mean + factor * stddev`; see the module documentation.
    fn is_within(&self, running: u32, factor_milli: u32) -> bool {
        let (count, sum) = (u128::from(self.count), u128::from(self.sum));
        let Some(above) = (count * u128::from(running)).checked_sub(sum) else {
            return true;
        };
        let variance = count * self.sum_of_squares - sum * sum;
        let factor = u128::from(factor_milli);
        let scaled = above.saturating_mul(above).saturating_mul(1_000_000);
        scaled <= (factor * factor).saturating_mul(variance)
    }
}

struct PrefixCache<'a> {
    request: &'a PolicyRequest,
    is_imbalanced: bool,
    blocks_min: u32,
    factor_milli: u32,
    spread: LoadDistribution,
}

impl Ranks for PrefixCache<'_> {
    fn rank(&self, _: usize, candidate: &Candidate) -> Rank {
        let running = u64::from(candidate.running);
        if self.is_imbalanced {
            return Rank::first(running, Reason::Imbalanced);
        }
        let is_eligible = candidate.matched >= self.blocks_min
            && self.spread.is_within(candidate.running, self.factor_milli);
        if is_eligible {
            Rank::longest_prefix(self.request.missing_blocks(candidate.matched), running)
        } else {
            Rank::without_prefix(running)
        }
    }
}
