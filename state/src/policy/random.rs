//! `random`: any candidate, by the request's jitter. A baseline.

use super::rank::{ByScore, Near, Policy, Ranks};
use super::{Candidate, Reason, Request};

/// The policy; it has no settings.
pub(super) struct Random;

impl Policy for Random {
    fn ranks<'a>(&'a self, _: &'a Request, _: &'a [Candidate]) -> impl Ranks + use<'a> {
        ByScore {
            score: |_: &Candidate| 0,
            near: Near::Equal,
            prefers_prefix: false,
            reason: Reason::Jitter,
        }
    }
}
