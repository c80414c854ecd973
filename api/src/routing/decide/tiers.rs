//! Blocks on cache tiers below the GPU, which engines load instead of computing.
//!
//! An engine finds a prompt on its GPU first and goes on with what slower tiers hold. So a match on
//! the GPU is extended tier by tier, and what a tier adds is loaded from it.

use state::ids::{BlockHash, Slot};
use state::kv_events::{LowerTier, LowerTierBlocks};
use state::policy::{Candidate, Choice};
use state::view::BlockView;

use super::Decider;

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
    /// GPU.
    pub(super) fn loaded_behind(
        &self,
        chain: &[BlockHash],
        slot: Slot,
        mut matched: u32,
    ) -> LowerTierBlocks {
        let mut loaded = LowerTierBlocks::default();
        for (tier, view) in self.used_tiers() {
            let found = view.match_by_position(chain, slot);
            loaded.extend(&mut matched, tier, found);
        }
        loaded
    }

    /// Returns the tiers below the GPU that any engine has reported.
    pub(super) fn used_tiers(&self) -> impl Iterator<Item = (LowerTier, &BlockView)> {
        let tiers = LowerTier::ALL.into_iter().zip(&self.view.tiers);
        tiers.filter(|(_, view)| !view.is_unused())
    }

    /// Returns a policy's `choice` with the blocks that its engine loads, which the policy did not
    /// see.
    pub(super) fn with_lower_tiers(&self, chain: &[BlockHash], choice: Choice) -> Choice {
        let loaded = self.loaded_behind(chain, choice.slot, choice.matched);
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
