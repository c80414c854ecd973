//! Prediction of what engines evict next, so that routing can see what earlier requests will leave
//! in the cache.
//!
//! Events report an eviction after the fact, but what a cache must evict for the running requests
//! is known before. An engine with `n` blocks holds the blocks that it has reported, those that
//! leases added and it has not reported yet, and one partial block per request. The excess over `n`
//! is evicted in the order of
//! [`Ownership::next_engine_evictions`](crate::ownership::Ownership::next_engine_evictions).

use std::sync::Arc;

use crate::ids::{BackendRef, BlockHash};

/// Number of blocks listed in addition to those that the engine must evict already.
const LISTED_BEYOND: i64 = 256;
/// Maximum number of blocks listed for one backend.
const LISTED_MAX: i64 = 1024;

/// Blocks that the engine of one backend evicts next.
#[derive(Debug, PartialEq, Eq)]
pub struct ComingEvictions {
    backend: BackendRef,
    fill: CacheFill,
    blocks: Vec<BlockHash>,
}

/// Fill level of an engine's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CacheFill {
    /// Version that changes whenever blocks or their eviction order may have changed.
    pub(crate) version: u128,
    /// Number of physical blocks with content that lookups can find.
    pub(crate) held: u64,
    /// Number of blocks that leases added and the engine has not reported.
    pub(crate) unreported: u64,
    /// Number of physical blocks of the cache.
    pub(crate) capacity: u32,
}

impl CacheFill {
    /// Returns by how many blocks demand exceeds capacity, not counting partial blocks of requests.
    /// Negative while blocks are free. One block of an engine is never available to requests.
    fn beyond(&self) -> i64 {
        let number = |count: u64| i64::try_from(count).unwrap_or(i64::MAX / 4);
        let usable = i64::from(self.capacity).saturating_sub(1);
        // An engine that holds more blocks than that has more capacity than it reports.
        let usable = usable.max(number(self.held));
        number(self.held) + number(self.unreported) - usable
    }

    /// Returns the number of blocks to list.
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

    /// Whether the prediction was made for this backend and fill level, and so is still valid.
    pub(crate) fn is_of(&self, backend: BackendRef, fill: CacheFill) -> bool {
        (self.backend, self.fill) == (backend, fill)
    }

    /// Returns how many of the first `matched` blocks of `chain` the backend still has after it
    /// makes room for `requests` in flight and for `blocks` that the log does not contain yet.
    /// Blocks for which `is_used` returns `true` are not evicted.
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
            // A used block stays and others go instead. This is checked only for blocks of `chain`.
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

/// Coming evictions of the backends for which they can be predicted, in ascending order of slots.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EvictionsView(pub(crate) Vec<Arc<ComingEvictions>>);

impl EvictionsView {
    /// Returns the coming evictions of `backend`; `None` if unknown.
    #[must_use]
    pub fn get(&self, backend: BackendRef) -> Option<&Arc<ComingEvictions>> {
        let place = self.0.binary_search_by_key(&backend, |it| it.backend);
        place.ok().map(|place| &self.0[place])
    }
}
