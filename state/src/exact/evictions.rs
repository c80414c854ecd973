//! Predicts what engines evict next, for decisions: a request finds what earlier ones leave in the
//! cache.
//!
//! Events report an eviction after the fact, but what a cache must evict for the running requests
//! is known before: an engine of `n` blocks holds those that it has reported, those that leases
//! brought and it has not reported yet, and one partial block for each request; the excess over `n`
//! is evicted in the order of
//! [`Ownership::next_leaving`](crate::ownership::Ownership::next_leaving).

use std::sync::Arc;

use crate::ids::{BackendRef, BlockHash};

/// Blocks that are listed beyond those that must go already.
const LISTED_BEYOND: i64 = 256;
/// Maximum number of blocks that are listed.
const LISTED_MAX: i64 = 1024;

/// What the engine of one backend evicts next.
#[derive(Debug, PartialEq, Eq)]
pub struct ComingEvictions {
    backend: BackendRef,
    fill: CacheFill,
    blocks: Vec<BlockHash>,
}

/// How full an engine's cache is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CacheFill {
    /// Changes whenever blocks or their order may have.
    pub(crate) stamp: u128,
    /// Physical blocks that hold something that can be found.
    pub(crate) held: u64,
    /// Blocks that leases brought and the engine has not reported.
    pub(crate) unreported: u64,
    /// Physical blocks that there are.
    pub(crate) capacity: u32,
}

impl CacheFill {
    /// How many blocks are needed beyond those there are, without the partial ones of requests. One
    /// block of an engine is no request's.
    fn beyond(&self) -> i64 {
        let number = |count: u64| i64::try_from(count).unwrap_or(i64::MAX / 4);
        let usable = i64::from(self.capacity).saturating_sub(1);
        // An engine that holds more than it should be able to has more room than it says.
        let usable = usable.max(number(self.held));
        number(self.held) + number(self.unreported) - usable
    }

    /// How many blocks are worth listing.
    pub(crate) fn listed(&self) -> usize {
        let wanted = self.beyond() + LISTED_BEYOND;
        usize::try_from(wanted.clamp(0, LISTED_MAX)).unwrap_or(0)
    }
}

impl ComingEvictions {
    pub(crate) fn new(backend: BackendRef, fill: CacheFill, blocks: Vec<BlockHash>) -> Self {
        Self {
            backend,
            fill,
            blocks,
        }
    }

    /// Whether these are still the ones.
    pub(crate) fn is_of(&self, backend: BackendRef, fill: CacheFill) -> bool {
        (self.backend, self.fill) == (backend, fill)
    }

    /// Returns how many leading blocks of `chain` are left of the first `matched`, which the backend
    /// has, once it has made room for `requests` under way and for `blocks` that the log does not
    /// know yet. What `is_used` by a request that the log does not know yet stays.
    #[must_use]
    pub fn left(
        &self,
        chain: &[BlockHash],
        matched: u32,
        (requests, blocks): (u32, usize),
        is_used: impl Fn(BlockHash) -> bool,
    ) -> u32 {
        let blocks = i64::try_from(blocks).unwrap_or(i64::MAX / 4);
        let going = self.fill.beyond() + i64::from(requests) + blocks;
        let going = usize::try_from(going).unwrap_or(0);
        if going == 0 {
            return matched;
        }
        let mut left = chain.len().min(matched as usize);
        let goes = |block: BlockHash| {
            let place = self.blocks.iter().position(|it| *it == block);
            // What is used stays, and others go in its place; looked at only when it matters.
            !is_used(block)
                && place.is_some_and(|place| {
                    let used = self.blocks[..place].iter().filter(|it| is_used(**it));
                    place - used.count() < going
                })
        };
        while left > 0 && goes(chain[left - 1]) {
            left -= 1;
        }
        u32::try_from(left).unwrap_or(matched)
    }
}

/// What engines evict next, of all backends whose KV events are followed, by slot.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EvictionsView(pub(crate) Vec<Arc<ComingEvictions>>);

impl EvictionsView {
    /// Returns what the engine of `backend` evicts next; `None`: nobody knows.
    #[must_use]
    pub fn get(&self, backend: BackendRef) -> Option<&Arc<ComingEvictions>> {
        let place = self.0.binary_search_by_key(&backend, |it| it.backend);
        place.ok().map(|place| &self.0[place])
    }
}
