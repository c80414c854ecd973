//! The published read view of the block index: many readers that never wait for the one writer.
//!
//! The index is split by hash into shards. Each shard is a `table` of fixed shape behind a pointer.
//! The writer (the ownership arena, in `apply`) changes owners in place, one atomic word at a time,
//! and replaces the table when it is full. Readers keep the table that they hold alive. Reading is
//! therefore wait-free and needs no `unsafe`, and a stalled reader blocks nobody.
//!
//! While the writer works, a reader may still see an ownership that ended a moment ago, or miss one
//! that has just begun. It never sees an owner that never held the block. `matching` describes what
//! that means for a prefix; the loom models in `loom_tests` check it.
//!
//! A second index keyed by position would be a second set of shards with a wider entry. Matching
//! takes its probe as a function and would not change.

mod mask;
mod matching;
mod sync;
mod table;
mod writer;

#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(all(test, not(loom)))]
mod tests;

use crate::bounds::BACKENDS_MAX;
use crate::ids::{BlockHash, Slot};
use mask::{Mask, WORDS_MAX};
use sync::{Arc, AtomicUsize, Ordering, Swap};
use table::{SHARD_BITS, Table};

pub(crate) use table::{mix, spread};
pub(crate) use writer::ViewWriter;

/// Number of shards of an index. At 10 M blocks, a table has about 2,400 entries and is rebuilt in
/// some 20 us, which bounds the cost of one insertion.
pub(crate) const SHARDS: usize = 1 << SHARD_BITS;

/// A handle on the published block index. Cheap to clone. Any number of threads may read while the
/// one writer (`apply`) changes it, and none ever waits.
#[derive(Clone)]
pub struct BlockView {
    shared: Arc<Shared>,
}

struct Shared {
    /// A power of two of shards, selected by the high bits of the mixed hash.
    shards: Box<[Swap<Table>]>,
    /// Number of words in a mask of all slots in use. Only grows, except by a restore.
    width: AtomicUsize,
    /// Number of owned blocks by slot. A figure for policies and not part of the index, so loom
    /// does not check it.
    owned: Box<[std::sync::atomic::AtomicU32]>,
}

impl BlockView {
    /// Creates an index over these tables, one per shard. Their number is a power of two, up to
    /// [`SHARDS`].
    fn over(tables: &[Arc<Table>]) -> Self {
        let shards = tables
            .iter()
            .map(|table| Swap::new(Arc::clone(table)))
            .collect();
        Self {
            shared: Arc::new(Shared {
                shards,
                width: AtomicUsize::new(1),
                owned: (0..BACKENDS_MAX).map(|_| Default::default()).collect(),
            }),
        }
    }

    /// Returns how many blocks `slot` is believed to own; 0 for a slot at or above
    /// [`BACKENDS_MAX`].
    #[must_use]
    pub fn owned(&self, slot: Slot) -> u32 {
        let owned = self.shared.owned.get(usize::from(slot.0));
        owned.map_or(0, |owned| owned.load(std::sync::atomic::Ordering::Relaxed))
    }

    /// Whether `slot` is believed to own `block`.
    #[must_use]
    pub fn owns(&self, slot: Slot, block: BlockHash) -> bool {
        self.shared.shards[self.shard_of(block)].read(|table| table.owns(slot.0, block))
    }

    /// Calls `owner` for every backend that owns `block`, in ascending order of slot.
    pub fn owners(&self, block: BlockHash, mut owner: impl FnMut(Slot)) {
        self.probe::<WORDS_MAX>(block)
            .for_each(|slot| owner(Slot(slot)));
    }

    /// Finds the longest owned prefix of `chain` for all backends at once, by mask bisection. Calls
    /// `matched(slot, blocks)` once for every backend that owns at least the first block, in
    /// ascending order of slot. Does not allocate.
    ///
    /// `chain` must be a chain as produced by [`crate::prefix`], where each hash identifies the
    /// whole prefix before it. For unrelated hashes the result is meaningless.
    pub fn match_prefix(&self, chain: &[BlockHash], matched: impl FnMut(Slot, u32)) {
        // A mask just wide enough: 8 bytes for up to 64 backends, against 128 for 1,024.
        match self.shared.width.load(Ordering::Acquire) {
            0..=1 => matching::match_prefix(chain, |block| self.probe::<1>(block), matched),
            2..=4 => matching::match_prefix(chain, |block| self.probe::<4>(block), matched),
            _ => matching::match_prefix(chain, |block| self.probe::<WORDS_MAX>(block), matched),
        }
    }

    /// Finds the longest owned prefix of `chain` at one backend, by binary search over positions.
    /// Returns the same as [`BlockView::match_prefix`] for that backend.
    #[must_use]
    pub fn match_by_position(&self, chain: &[BlockHash], slot: Slot) -> u32 {
        let matched = chain.partition_point(|block| self.owns(slot, *block));
        u32::try_from(matched).unwrap_or(u32::MAX)
    }

    #[inline]
    fn probe<const W: usize>(&self, block: BlockHash) -> Mask<W> {
        self.shared.shards[self.shard_of(block)].read(|table| table.owners(block))
    }

    #[inline]
    fn shard_of(&self, block: BlockHash) -> usize {
        let bits = self.shared.shards.len().trailing_zeros();
        // Two shifts, because a single shift by 64 (one shard) would overflow.
        (mix(block) >> 1 >> (63 - bits)) as usize
    }
}

impl std::fmt::Debug for BlockView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlockView")
            .field("shards", &self.shared.shards.len())
            .finish()
    }
}
