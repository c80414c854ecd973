//! `power-of-two`: of two candidates drawn at random, the one with fewer requests.
//!
//! Source: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE TPDS 2001.
//! The draw is derived from the request's jitter, so a repeated decision draws the same two.

use super::rank::{Policy, PolicyInputs, Rank, Ranks, draw, requests};
use super::{Candidate, PolicyRequest, Reason};
use crate::ids::Slot;

/// The `power-of-two` policy, which has no settings.
pub(super) struct PowerOfTwo;

impl Policy for PowerOfTwo {
    fn needs(&self) -> PolicyInputs<'_> {
        PolicyInputs::by_load()
    }

    fn ranks<'a>(
        &'a self,
        request: &'a PolicyRequest,
        candidates: &'a [Candidate],
    ) -> impl Ranks + use<'a> {
        let mut drawn: [Option<(u64, Slot)>; 2] = [None; 2];
        for candidate in candidates {
            // Not the draw that breaks ties, which would favour the first of the two.
            let draw = Some((draw(!request.jitter, candidate.slot), candidate.slot));
            if draw > drawn[0] {
                drawn = [draw, drawn[0]];
            } else if draw > drawn[1] {
                drawn[1] = draw;
            }
        }
        PowerOfTwoRanks(drawn.map(|draw| draw.map(|(_, slot)| slot)))
    }
}

struct PowerOfTwoRanks([Option<Slot>; 2]);

impl Ranks for PowerOfTwoRanks {
    fn rank(&self, _: usize, candidate: &Candidate) -> Rank {
        Rank {
            tier: u8::from(!self.0.contains(&Some(candidate.slot))),
            score: requests(candidate),
            then: 0,
            reason: Reason::LeastRequests,
        }
    }
}
