//! `round-robin`: one candidate after the other, by slot, each replica by a count of its own.
//!
//! The count is data of the request. A count that replicas share would cost a log entry before
//! every decision, and a hash of the request in its place would be `random`.

use super::rank::{BySlot, Needs, Policy, Rank, Ranks};
use super::{Candidate, PolicyRequest, Reason};
use crate::ids::Slot;

/// The policy; it has no settings.
pub(super) struct RoundRobin;

impl Policy for RoundRobin {
    fn needs(&self) -> Needs<'_> {
        Needs {
            turn: true,
            ..Needs::default()
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

/// Whose turn it is.
struct RoundRobinRanks(Slot);

impl Ranks for RoundRobinRanks {
    fn rank(&self, _: usize, candidate: &Candidate) -> Rank {
        let behind = candidate.slot.0.wrapping_sub(self.0.0);
        Rank::first(u64::from(behind), Reason::Turn)
    }
}
