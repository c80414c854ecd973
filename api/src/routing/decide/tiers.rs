//! Blocks on cache tiers below the GPU, which engines load instead of computing.
//!
//! An engine finds a prompt on its GPU first and goes on with what slower tiers hold. So a match on
//! the GPU is extended tier by tier, and what a tier adds is loaded from it.

use state::ids::{BlockHash, Slot};
use state::kv_events::{LowerTier, LowerTierBlocks};
use state::policy::{Candidate, Choice, PolicyConfig};
use state::view::BlockView;

use super::Decider;
use super::routing_table::{RoutingTable, matchable};
use crate::routing::RoutingRequest;

impl Decider {
    /// Extends the candidates' matches of the prompt's `chain` with blocks on tiers below the GPU.
    pub(super) fn match_lower_tiers(&self, chain: &[BlockHash], candidates: &mut [Candidate]) {
        for (tier, view) in self.used_tiers() {
            for candidate in &mut *candidates {
                let is_used = candidate.evicts_to.is_none() && view.owned(candidate.slot) > 0;
                candidate.evicts_to = is_used.then_some(tier).or(candidate.evicts_to);
            }
            each_match(view, chain, candidates, |candidate, found| {
                candidate.loaded.extend(&mut candidate.matched, tier, found);
            });
        }
    }

    /// Returns the blocks of `chain` that the engine in `slot` loads behind the `matched` ones on its
    /// GPU. `shorten` leaves out blocks of what a tier holds.
    pub(super) fn loaded_behind(
        &self,
        chain: &[BlockHash],
        slot: Slot,
        mut matched: u32,
        shorten: impl Fn(&mut u32),
    ) -> LowerTierBlocks {
        let mut loaded = LowerTierBlocks::default();
        for (tier, view) in self.used_tiers() {
            let mut found = view.match_by_position(chain, slot);
            shorten(&mut found);
            loaded.extend(&mut matched, tier, found);
        }
        loaded
    }

    /// Returns the tiers below the GPU that any engine has reported.
    pub(super) fn used_tiers(&self) -> impl Iterator<Item = (LowerTier, &BlockView)> {
        let tiers = LowerTier::ALL.into_iter().zip(&self.view.tiers);
        tiers.filter(|(_, view)| !view.is_unused())
    }

    /// Returns the `choice` of a policy that does not see tiers below the GPU, the backend at `at`,
    /// with the blocks that its engine loads. Returns that of another policy as it is.
    pub(super) fn with_lower_tiers(
        &self,
        (fleet, ask): (&RoutingTable, &RoutingRequest<'_>),
        config: &PolicyConfig,
        (choice, at): (Choice, usize),
    ) -> Choice {
        if fleet.registry.routing.shows_lower_tiers(config) {
            return choice;
        }
        let shorten = |found: &mut u32| fleet.leave_out_dropped(at, ask, found);
        let loaded = self.loaded_behind(matchable(ask), choice.slot, choice.matched, shorten);
        Choice {
            matched: choice.matched + loaded.total(),
            loaded,
            ..choice
        }
    }
}

/// Calls `found` with each candidate that holds leading blocks of `chain` in `view`, and their number.
pub(super) fn each_match(
    view: &BlockView,
    chain: &[BlockHash],
    candidates: &mut [Candidate],
    mut found: impl FnMut(&mut Candidate, u32),
) {
    let mut candidates = candidates.iter_mut().peekable();
    view.match_prefix(chain, |slot, matched| {
        while candidates.next_if(|it| it.slot < slot).is_some() {}
        if let Some(candidate) = candidates.next_if(|it| it.slot == slot) {
            found(candidate, matched);
        }
    });
}
