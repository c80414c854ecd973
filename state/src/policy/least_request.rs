//! `least-request`: fewest requests, running or waiting in the engine, regardless of what backends
//! hold. A baseline.

use super::rank::{ByScore, Policy, PolicyInputs, Ranks, Tolerance, requests};
use super::{Candidate, PolicyRequest, Reason};

/// The `least-request` policy, which has no settings.
pub(super) struct LeastRequest;

impl Policy for LeastRequest {
    fn needs(&self) -> PolicyInputs<'_> {
        PolicyInputs::by_load()
    }

    fn ranks<'a>(&'a self, _: &'a PolicyRequest, _: &'a [Candidate]) -> impl Ranks + use<'a> {
        ByScore {
            score: requests,
            near: Tolerance::Equal,
            prefers_prefix: false,
            reason: Reason::LeastRequests,
        }
    }
}
