//! `lmetric`: least product of the prefill before the first token and the number of requests on the
//! engine. It uses no prices, so no price can be wrong.

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::rank::{ByScore, Policy, Ranks, Tolerance};
use super::{Candidate, PolicyRequest, Reason};

/// Settings of the `lmetric` policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LmetricSettings {
    /// Tokens added to the prefill: the cost of a fully cached request.
    pub base_tokens: u32,
}

impl Default for LmetricSettings {
    fn default() -> Self {
        Self { base_tokens: 256 }
    }
}

impl Policy for LmetricSettings {
    fn ranks<'a>(&'a self, request: &'a PolicyRequest, _: &'a [Candidate]) -> impl Ranks + use<'a> {
        ByScore {
            score: |candidate: &Candidate| score(self, request, candidate),
            near: Tolerance::Near,
            prefers_prefix: true,
            reason: Reason::LeastCost,
        }
    }
}

/// Returns the product of the prefill tokens before the first token and the requests on the engine.
fn score(settings: &LmetricSettings, request: &PolicyRequest, candidate: &Candidate) -> u64 {
    let prefill_tokens = candidate
        .pending_prefill_tokens
        .saturating_add(request.uncached_tokens(candidate.matched))
        .saturating_add(u64::from(settings.base_tokens));
    prefill_tokens.saturating_mul(u64::from(candidate.running) + 1)
}
