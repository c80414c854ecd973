//! Routing policies: pure functions from (request, candidates) to a choice with its reasons.
//!
//! A policy sees only what stands in [`Request`] and [`Candidate`]; who gathers them (match, load,
//! health) does so the same way for every policy. Ties among near-equal scores are broken by the
//! request's `jitter`, a hash of its id: without it simultaneous arrivals herd.

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

/// Chooses among `candidates`; `None` when there are none. Allocates nothing.
#[must_use]
pub fn choose(
    policy: &PolicyConfig,
    request: &Request,
    candidates: &[Candidate],
) -> Option<Choice> {
    let _ = (policy, request, candidates);
    unimplemented!("state helper")
}

/// The scores [`choose`] compares, in the order of `candidates`.
#[must_use]
pub fn scores(policy: &PolicyConfig, request: &Request, candidates: &[Candidate]) -> Vec<Score> {
    let _ = (policy, request, candidates);
    unimplemented!("state helper")
}
