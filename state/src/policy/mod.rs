//! Routing policies: pure functions from (request, candidates) to a choice with its reasons.
//!
//! A policy sees only what stands in [`Request`] and [`Candidate`]; who gathers them (match, load,
//! health) does so the same way for every policy. Ties among near-equal scores are broken by the
//! request's `jitter`, a hash of its id: without it simultaneous arrivals herd.
//!
//! A policy is one file with its score and one arm of `with_ranking`; picking, near-equality and
//! jitter are the same for all. Integers only, so that a decision repeats bit for bit anywhere.

mod cost;
mod least_request;
#[cfg(test)]
mod tests;

use bincode::{Decode, Encode};
use serde::{Deserialize, Serialize};

use crate::ids::Slot;

/// The live policy with its settings: replicated, changed by `PUT /admin/v1/policy`.
#[derive(Debug, Clone, PartialEq, Encode, Decode, Serialize, Deserialize)]
#[serde(tag = "policy", rename_all = "kebab-case", deny_unknown_fields)]
pub enum PolicyConfig {
    /// Least predicted time to first token.
    Cost(CostSettings),
    /// Fewest requests running and waiting.
    LeastRequest,
}

/// Constants of the `cost` policy. Integers: the settings are replicated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CostSettings {
    /// Nanoseconds an engine computes on one uncached prompt token.
    pub prefill_ns_per_token: u32,
    /// Nanoseconds each request already running adds to a new one's first token.
    pub decode_ns_per_request: u32,
    /// Nanoseconds each request waiting in the engine's own queue adds.
    pub waiting_ns_per_request: u32,
    /// KV usage, in thousandths, above which pressure counts.
    pub kv_pressure_from_permille: u32,
    /// Nanoseconds one thousandth of KV usage above that adds.
    pub kv_pressure_ns_per_permille: u32,
    /// Thousandths of the price of computing them again that blocks count with which the request
    /// would evict from a full cache: how likely they are to be asked for again.
    pub eviction_permille: u32,
    /// Costs within this many thousandths of the least count as equal.
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

/// What a policy knows of the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Hash of the request id: breaks ties.
    pub jitter: u64,
    /// Full blocks of the prompt that an engine could have (the last-token rule applied).
    pub blocks: u32,
    /// Estimated prompt tokens.
    pub tokens: u32,
    /// Estimated tokens of one block.
    pub tokens_per_block: u32,
}

/// What a policy knows of one backend it may choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Candidate {
    /// The backend.
    pub slot: Slot,
    /// Leading blocks of the prompt it is believed to hold.
    pub matched: u32,
    /// Blocks it is believed to hold in all.
    pub owned_blocks: u32,
    /// Blocks its cache holds; `None` is unknown.
    pub capacity_blocks: Option<u32>,
    /// Requests dispatched to it and not over, from all replicas.
    pub running: u32,
    /// Requests in the engine's own queue, as it last reported.
    pub waiting: u32,
    /// Uncached prompt tokens dispatched to it whose first byte has not come, from all replicas.
    pub pending_prefill_tokens: u64,
    /// KV cache in use, in thousandths, as the engine last reported.
    pub kv_usage_permille: u32,
}

/// A decision: which candidate, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Choice {
    /// The chosen backend.
    pub slot: Slot,
    /// Blocks of the prompt it is believed to hold.
    pub matched: u32,
    /// Why this one.
    pub reason: Reason,
}

/// Why a candidate was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// The only candidate.
    OnlyCandidate,
    /// Least predicted cost.
    LeastCost,
    /// Fewest requests.
    LeastRequests,
    /// Several were near-equal; the request's jitter decided.
    Jitter,
}

/// One candidate's score as `explain` shows it; lower is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Score {
    /// The candidate.
    pub slot: Slot,
    /// What the policy compared. `cost`: nanoseconds; `least-request`: requests.
    pub score: u64,
}

impl PolicyConfig {
    /// The policy's name, as config and response headers spell it.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Cost(_) => "cost",
            Self::LeastRequest => "least-request",
        }
    }
}

/// Chooses among `candidates`; `None` when there are none. Allocates nothing.
///
/// The order of `candidates` does not matter; each slot stands in it once.
#[must_use]
pub fn choose(
    policy: &PolicyConfig,
    request: &Request,
    candidates: &[Candidate],
) -> Option<Choice> {
    if let [only] = candidates {
        return Some(Choice {
            slot: only.slot,
            matched: only.matched,
            reason: Reason::OnlyCandidate,
        });
    }
    with_ranking(policy, request, |ranking| ranking.pick(request, candidates))
}

/// The scores [`choose`] compares, in the order of `candidates`.
#[must_use]
pub fn scores(policy: &PolicyConfig, request: &Request, candidates: &[Candidate]) -> Vec<Score> {
    with_ranking(policy, request, |ranking| {
        let score = |candidate: &Candidate| Score {
            slot: candidate.slot,
            score: (ranking.score)(candidate),
        };
        candidates.iter().map(score).collect()
    })
}

/// How a policy orders candidates.
struct Ranking<'a> {
    /// Lower is better.
    score: &'a dyn Fn(&Candidate) -> u64,
    /// Scores within this many thousandths of the least count as equal.
    near_permille: u32,
    /// Whether, among near-equal scores, only those that hold most of the prompt stay in: under
    /// load the window is wider than what a matched prefix saves.
    prefers_prefix: bool,
    /// What a clear choice is explained by.
    reason: Reason,
}

/// The one place that knows every policy.
fn with_ranking<R>(
    policy: &PolicyConfig,
    request: &Request,
    read: impl FnOnce(&Ranking<'_>) -> R,
) -> R {
    match policy {
        PolicyConfig::Cost(settings) => read(&Ranking {
            score: &|candidate| cost::score(settings, request, candidate),
            near_permille: settings.near_permille,
            prefers_prefix: true,
            reason: Reason::LeastCost,
        }),
        PolicyConfig::LeastRequest => read(&Ranking {
            score: &least_request::score,
            near_permille: 0,
            prefers_prefix: false,
            reason: Reason::LeastRequests,
        }),
    }
}

impl Ranking<'_> {
    /// The least score; among near-equal ones the highest draw of the request's jitter.
    fn pick(&self, request: &Request, candidates: &[Candidate]) -> Option<Choice> {
        let best = candidates.iter().map(self.score).min()?;
        let limit = near_limit(best, self.near_permille);
        let is_near = |candidate: &&Candidate| (self.score)(candidate) <= limit;
        let most_held = candidates
            .iter()
            .filter(is_near)
            .map(|near| self.held(near))
            .max()?;
        let near = candidates
            .iter()
            .filter(is_near)
            .filter(|candidate| self.held(candidate) == most_held);
        let chosen = near.clone().max_by_key(|candidate| {
            (
                draw(request.jitter, candidate.slot),
                std::cmp::Reverse(candidate.slot),
            )
        })?;
        let reason = if near.take(2).count() > 1 {
            Reason::Jitter
        } else {
            self.reason
        };
        Some(Choice {
            slot: chosen.slot,
            matched: chosen.matched,
            reason,
        })
    }

    /// What counts as held for the comparison of near-equal scores.
    fn held(&self, candidate: &Candidate) -> u32 {
        if self.prefers_prefix {
            candidate.matched
        } else {
            0
        }
    }
}

/// `best` and `near_permille` thousandths of it, rounded down.
fn near_limit(best: u64, near_permille: u32) -> u64 {
    let window = u128::from(best) * u128::from(near_permille) / 1000;
    best.saturating_add(u64::try_from(window).unwrap_or(u64::MAX))
}

/// A request's draw for one slot: rendezvous hashing, so that the winner among a set does not
/// depend on who else was near. The finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014).
fn draw(jitter: u64, slot: Slot) -> u64 {
    let mut x = jitter ^ (u64::from(slot.0) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
