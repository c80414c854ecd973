//! Excludes blocks that engines will evict for earlier requests from predictions.

use state::ids::BlockHash;

use super::Decider;
use super::routing_table::{DecisionScratch, RoutingTable};

impl Decider {
    /// Subtracts the blocks that requests in flight will evict before this one is scheduled from
    /// the matches. Affects only backends whose engines report which blocks they hold.
    pub(super) fn leave_out_evicted(
        &self,
        fleet: &RoutingTable,
        chain: &[BlockHash],
        scratch: &mut DecisionScratch,
    ) {
        let evictions = self.view.evictions();
        for (candidate, at) in scratch.candidates.iter_mut().zip(&scratch.places) {
            if candidate.matched == 0 {
                continue;
            }
            let backend = fleet.handle(*at);
            let Some(coming) = evictions.get(backend) else {
                continue;
            };
            let under_way = (candidate.running, self.overlay.blocks(backend));
            let is_used = |block| self.overlay.uses(backend, block);
            candidate.matched = coming.left(chain, candidate.matched, under_way, is_used);
        }
    }
}
