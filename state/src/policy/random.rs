//! `random`: a candidate drawn by the request's jitter. A baseline.

use super::rank::{ByScore, Policy, PolicyInputs, Ranks, Tolerance, draw};
use super::{Candidate, PolicyRequest, Reason};

/// The `random` policy, which has no settings.
pub(super) struct Random;

impl Policy for Random {
    fn needs(&self) -> PolicyInputs<'_> {
        PolicyInputs::by_load()
    }

    fn ranks<'a>(&'a self, request: &'a PolicyRequest, _: &'a [Candidate]) -> impl Ranks + use<'a> {
        ByScore {
            // Not equal scores, among which the home of a session would always win.
            score: |candidate: &Candidate| !draw(request.jitter, candidate.slot),
            near: Tolerance::Equal,
            prefers_prefix: false,
            reason: Reason::Jitter,
        }
    }
}
