//! `least-request`: fewest requests running and waiting, whatever they hold. A baseline.

use super::rank::{ByScore, Near, Policy, Ranks, requests};
use super::{Candidate, Reason, Request};

/// The policy; it has no settings.
pub(super) struct LeastRequest;

impl Policy for LeastRequest {
    fn ranks<'a>(&'a self, _: &'a Request, _: &'a [Candidate]) -> impl Ranks + use<'a> {
        ByScore {
            score: requests,
            near: Near::Equal,
            prefers_prefix: false,
            reason: Reason::LeastRequests,
        }
    }
}
