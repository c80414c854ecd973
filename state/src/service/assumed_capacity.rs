//! Capacity of a cache of unknown size, learned from misses.
//!
//! Without a bound, everything ever sent to such an engine would count as cached forever. A backend
//! is therefore assumed to hold at most [`RoutingSettings::assumed_blocks`], and all such backends
//! together [`RoutingSettings::assumed_blocks_total`]. From there on the engine's responses decide:
//! after every [`TOKENS_PER_STEP`] prompt tokens, the predictions since the last step are compared
//! with the cached tokens that the engine reported.
//!
//! - *Missed*: more than 1/32 of the prompt tokens were predicted but not cached. The capacity
//!   shrinks to 7/8 of the owned blocks, not of the assumption, which may be far above them.
//! - *Held*, while the assumption bounds the owned blocks: it grows by 1/128.
//!
//! Both caches drop the least recently used blocks, so predictions are right if the assumption does
//! not exceed the cache. This is the additive increase, multiplicative decrease of congestion
//! control: the assumption falls in a few steps and then stays within 1/8 of what the engine holds.

use std::collections::BTreeMap;

use bincode::{Decode, Encode};

use super::ServiceSample;
use crate::ids::Slot;
use crate::policy::RoutingSettings;

/// Minimum learned capacity of a backend, in blocks.
const BLOCKS_MIN: u32 = 16;
/// Number of prompt tokens after which a step compares predictions with cached tokens.
const TOKENS_PER_STEP: u64 = 16_384;
/// Inverse share of missed tokens: a step counts as missed if more than one prompt token in this
/// many was predicted but not cached.
const MISSED_PART: u64 = 32;
/// Inverse growth of a capacity in a step: it grows by one part in this many.
const GROWTH_PART: u32 = 128;

/// Returns the initial capacity of each of `untold` backends of unknown capacity, in blocks.
pub(crate) fn share(untold: usize, settings: &RoutingSettings) -> u32 {
    let untold = u32::try_from(untold).unwrap_or(u32::MAX).max(1);
    let share = settings.assumed_blocks_total / untold;
    share.clamp(1, settings.assumed_blocks)
}

/// Learned capacity of one incarnation of a backend.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
struct AssumedCapacity {
    /// Learned capacity in blocks. `None` if the initial capacity applies: before the first miss,
    /// and after growing back to it.
    blocks: Option<u32>,
    /// Number of prompt tokens since the last step.
    prompt_tokens: u64,
    /// Number of tokens in `prompt_tokens` that were predicted to be cached.
    predicted_tokens: u64,
    /// Number of tokens in `prompt_tokens` that were cached.
    cached_tokens: u64,
}

impl AssumedCapacity {
    fn observe(&mut self, sample: &ServiceSample, share: u32, owned: u32) {
        let add = |sum: &mut u64, tokens: u64| *sum = sum.saturating_add(tokens);
        add(&mut self.prompt_tokens, sample.predicted_prompt_tokens);
        add(&mut self.predicted_tokens, sample.predicted_cached_tokens);
        add(&mut self.cached_tokens, sample.cached_tokens);
        if self.prompt_tokens < TOKENS_PER_STEP {
            return;
        }
        let missed = self.predicted_tokens.saturating_sub(self.cached_tokens);
        let capacity = self.blocks.unwrap_or(share).min(share);
        if missed > self.prompt_tokens / MISSED_PART {
            let believed = capacity.min(owned);
            self.blocks = Some((believed - believed / 8).max(BLOCKS_MIN));
        } else if self.blocks.is_some() && u64::from(owned) * 16 >= u64::from(capacity) * 15 {
            let grown = capacity.saturating_add(capacity / GROWTH_PART + 1);
            self.blocks = Some(grown).filter(|grown| *grown < share);
        }
        (
            self.prompt_tokens,
            self.predicted_tokens,
            self.cached_tokens,
        ) = (0, 0, 0);
    }
}

/// Learned capacities by slot. Contains only backends whose capacity is neither configured nor
/// reported.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub(crate) struct AssumedCapacities(BTreeMap<Slot, AssumedCapacity>);

impl AssumedCapacities {
    /// Adds a plausible sample of the backend in `slot`, which owns `owned` blocks. `share` is its
    /// initial capacity.
    pub(crate) fn observe(&mut self, slot: Slot, sample: &ServiceSample, share: u32, owned: u64) {
        if sample.predicted_prompt_tokens > 0 {
            let owned = u32::try_from(owned).unwrap_or(u32::MAX);
            let learnt = self.0.entry(slot).or_default();
            learnt.observe(sample, share, owned);
        }
    }

    /// Returns the capacity of the backend in `slot`, in blocks: the learned one, at most `share`.
    pub(crate) fn blocks(&self, slot: Slot, share: u32) -> u32 {
        let learnt = self.0.get(&slot).and_then(|learnt| learnt.blocks);
        learnt.map_or(share, |blocks| blocks.min(share))
    }

    /// Forgets the learned capacity of a backend that was removed or starts a new incarnation.
    pub(crate) fn forget(&mut self, slot: Slot) {
        self.0.remove(&slot);
    }

    /// Iterates over the slots with a learned capacity, ascending.
    pub(crate) fn slots(&self) -> impl Iterator<Item = Slot> {
        self.0.keys().copied()
    }
}
