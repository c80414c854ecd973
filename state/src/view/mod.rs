//! The published read view of the block index: what many readers see without ever waiting for the
//! one writer.
//!
//! The index is cut by hash into shards. Each shard is an immutable-in-shape `table` behind a
//! pointer; the writer (the ownership arena, in `apply`) changes owners in place, one atomic word
//! at a time, and replaces the table when it is full. Readers keep the table they hold alive. So
//! reading is wait-free, needs no `unsafe`, and a reader that falls asleep blocks nobody.
//!
//! What a reader may see while the writer works: an ownership that ended a moment ago, or not yet
//! one that just began. What it never sees: an owner that never held the block. `matching` says
//! what that means for a prefix; loom models in `loom_tests` check it.
//!
//! A second index keyed by position (seed 002) would be a second set of shards with a wider entry
//! beside this one; matching takes its probe as a function and would not change.

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

/// Shards of an index: at 10 M blocks a table has about 2,400 entries and is rebuilt in some
/// 20 us, which bounds what one insertion can cost.
pub(crate) const SHARDS: usize = 1 << SHARD_BITS;

/// A handle on the published block index. Cheap to clone; any number of threads may read while the
/// one writer (`apply`) changes it, and none ever waits.
#[derive(Clone)]
pub struct BlockView {
    shared: Arc<Shared>,
}

struct Shared {
    /// A power of two, by the high bits of the mixed hash.
    shards: Box<[Swap<Table>]>,
    /// Words a mask of every slot in use takes; only grows, except by a restore.
    width: AtomicUsize,
    /// Blocks owned by slot: a figure for policies, no part of the index, so never loom's.
    owned: Box<[std::sync::atomic::AtomicU32]>,
}

impl BlockView {
    /// The index of these tables, one per shard: a power of two, up to [`SHARDS`].
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

    /// How many blocks `slot` is believed to own; 0 for a slot beyond [`BACKENDS_MAX`].
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

    /// Longest owned prefix of `chain` per backend, for all backends at once, by mask bisection:
    /// calls `matched(slot, blocks)` once for every backend that owns at least the first block,
    /// in ascending order of slot. Allocates nothing.
    ///
    /// `chain` is a chain as [`crate::prefix`] makes it: each hash names the whole prefix before it.
    /// Of hashes that do not follow from one another the answer says nothing.
    pub fn match_prefix(&self, chain: &[BlockHash], matched: impl FnMut(Slot, u32)) {
        // A mask just wide enough: 8 bytes for up to 64 backends against 128 for 1,024.
        match self.shared.width.load(Ordering::Acquire) {
            0..=1 => matching::match_prefix(chain, |block| self.probe::<1>(block), matched),
            2..=4 => matching::match_prefix(chain, |block| self.probe::<4>(block), matched),
            _ => matching::match_prefix(chain, |block| self.probe::<WORDS_MAX>(block), matched),
        }
    }

    /// Longest owned prefix of `chain` at one backend, by binary search over positions: the answer
    /// of [`BlockView::match_prefix`], found for each backend by itself.
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
        // In two steps, because a shift by 64 (one shard) is none.
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
