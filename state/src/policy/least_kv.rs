//! `least-kv`: least KV cache usage, as last reported by the engines. A baseline.
//!
//! Engines report about once a second, and scores do not change between two reports. Backends with
//! near-equal usage therefore share the requests.

use super::rank::{ByScore, Policy, PolicyInputs, Ranks, Tolerance};
use super::{Candidate, PolicyRequest, Reason};

/// Difference of cache usages that count as equal, in thousandths of the cache.
const NEAR_PERMILLE: u64 = 20;

/// The `least-kv` policy, which has no settings.
pub(super) struct LeastKv;

impl Policy for LeastKv {
    fn needs(&self) -> PolicyInputs<'_> {
        PolicyInputs::by_load()
    }

    fn ranks<'a>(&'a self, _: &'a PolicyRequest, _: &'a [Candidate]) -> impl Ranks + use<'a> {
        ByScore {
            score: |candidate: &Candidate| u64::from(candidate.kv_usage_permille),
            near: Tolerance::Within(NEAR_PERMILLE),
            prefers_prefix: false,
            reason: Reason::LeastKv,
        }
    }
}
