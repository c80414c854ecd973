//! `least-kv`: least KV cache usage, as last reported by the engines. A baseline.
//!
//! Engines report about once a second, and scores do not change between two reports. Backends with
//! near-equal usage therefore share the requests.

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::rank::{ByScore, Policy, Ranks, Tolerance};
use super::{Candidate, PolicyRequest, Reason};
use crate::reject::Rejection;
use crate::validate::at_most;

/// Settings of the `least-kv` policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LeastKvSettings {
    /// Usages within this many thousandths of the cache above the lowest count as equal.
    #[schemars(range(max = 1000))]
    pub near_permille: u32,
}

impl Default for LeastKvSettings {
    fn default() -> Self {
        Self { near_permille: 20 }
    }
}

impl Policy for LeastKvSettings {
    fn validate(&self) -> Result<(), Rejection> {
        at_most("near_permille", self.near_permille, 1000)
    }

    fn ranks<'a>(&'a self, _: &'a PolicyRequest, _: &'a [Candidate]) -> impl Ranks + use<'a> {
        ByScore {
            score: |candidate: &Candidate| u64::from(candidate.kv_usage_permille),
            near: Tolerance::Within(u64::from(self.near_permille)),
            prefers_prefix: false,
            reason: Reason::LeastKv,
        }
    }
}
