//! `round-robin`: one candidate after another, by slot, with a separate count per replica.
//!
//! The count is part of the request. Sharing it between replicas would cost a log entry before
//! every decision, and replacing it by a hash of the request would be `random`.

use super::rank::{BySlot, Policy, PolicyInputs, Rank, Ranks};
use super::{Candidate, PolicyRequest, Reason};
use crate::ids::Slot;

/// The `round-robin` policy, which has no settings.
pub(super) struct RoundRobin;

impl Policy for RoundRobin {
    fn needs(&self) -> PolicyInputs<'_> {
        PolicyInputs {
            turn: true,
            ..PolicyInputs::by_load()
        }
    }

    fn ranks<'a>(
        &'a self,
        request: &'a PolicyRequest,
        candidates: &'a [Candidate],
    ) -> impl Ranks + use<'a> {
        let count = (candidates.len() as u64).max(1);
        // Below the number of candidates, which is a `usize`.
        let place = (request.turn % count) as usize;
        RoundRobinRanks(BySlot::of(candidates).slot(place))
    }
}

/// Ranking that prefers the slot whose turn it is.
struct RoundRobinRanks(Slot);

impl Ranks for RoundRobinRanks {
    fn rank(&self, _: usize, candidate: &Candidate) -> Rank {
        let behind = candidate.slot.0.wrapping_sub(self.0.0);
        Rank::first(u64::from(behind), Reason::Turn)
    }
}
