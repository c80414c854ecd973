//! The published read view of the block index: many readers that never wait for the one writer.
//!
//! A `segment` holds consecutive blocks of a chain and is looked up by its first block. That hash
//! assigns segments to shards. Each shard is a `table` of fixed shape, and a `directory` holds them
//! all. The writer (the ownership arena, in `apply`) changes owners in place, one atomic word at a
//! time. It replaces a full table by publishing another directory. The former one lives as
//! long as a reader uses it. Reading is therefore wait-free and needs no `unsafe`, and a stalled
//! reader blocks no other thread.
//!
//! While the writer works, a reader may still see an ownership that just ended, or miss one that
//! just began. It never sees an owner that never held the block. `matching` describes what that
//! means for a prefix; the loom models in `loom_tests` check it.

mod by_hash;
mod directory;
mod mask;
mod matching;
mod segment;
mod sync;
mod table;
mod writer;

#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(all(test, not(loom)))]
mod tests;

use std::collections::BTreeMap;

use crate::bounds::BACKENDS_MAX;
use crate::ids::{BlockHash, Slot};
use by_hash::BlockSearch;
use directory::{Directory, SHARDS_MAX};
use mask::{Mask, WORDS_MAX};
use segment::ChainSegment;
use sync::{Arc, AtomicUsize, Ordering, Swap};
use table::Table;

pub(crate) use table::{mix, spread};
pub(crate) use writer::{BlockPlace, ViewWriter};

/// Number of shards of an index. At 10 M blocks, a shard has about 10,000 blocks in a few hundred
/// kilobytes, which bounds what one rebuild copies.
pub(crate) const SHARDS: usize = SHARDS_MAX;

/// Handle to the published block index. Cheap to clone. Any number of threads may read while the
/// one writer (`apply`) changes it, and none ever waits.
#[derive(Clone)]
pub struct BlockView {
    shared: Arc<Shared>,
}

struct Shared {
    /// Tables of all shards. The high bits of a block's mixed hash select its shard.
    directory: Swap<Directory>,
    /// Number of bits that select a shard.
    shard_bits: u32,
    /// Number of words in a mask of all slots in use. Only grows, except by a restore.
    width: AtomicUsize,
    /// Number of owned blocks by slot. Policies read it; it is not part of the index, so loom does
    /// not check it.
    owned: Box<[std::sync::atomic::AtomicU32]>,
}

impl BlockView {
    /// Creates an index of `shards` shards, a power of two up to [`SHARDS`].
    fn over(directory: Directory, shards: usize) -> Self {
        Self {
            shared: Arc::new(Shared {
                directory: Swap::new(Arc::new(directory)),
                shard_bits: shards.trailing_zeros(),
                width: AtomicUsize::new(0),
                owned: (0..BACKENDS_MAX).map(|_| Default::default()).collect(),
            }),
        }
    }

    /// Whether the index has never had a backend, so that nothing can match.
    #[must_use]
    pub fn is_unused(&self) -> bool {
        self.shared.width.load(Ordering::Acquire) == 0
    }

    /// Returns the number of blocks that `slot` is believed to own; 0 for a slot at or above
    /// [`BACKENDS_MAX`].
    #[must_use]
    pub fn owned(&self, slot: Slot) -> u32 {
        let owned = self.shared.owned.get(usize::from(slot.0));
        owned.map_or(0, |owned| owned.load(std::sync::atomic::Ordering::Relaxed))
    }

    /// Whether `slot` is believed to own `block`. As slow as [`BlockView::owners`]; for tests.
    #[must_use]
    pub fn owns(&self, slot: Slot, block: BlockHash) -> bool {
        self.owners(&[block])[&block].contains(&slot)
    }

    /// Returns the backends that own each of `blocks`, in ascending order of slot.
    ///
    /// Blocks are kept in chains, and a hash alone does not identify the chain. This reads the
    /// whole index, some 20 ms for 10 M blocks. For operators and tests; requests match chains.
    #[must_use]
    pub fn owners(&self, blocks: &[BlockHash]) -> BTreeMap<BlockHash, Vec<Slot>> {
        let found = self.read(|tables| BlockSearch::new(blocks).run(tables));
        let slots = |mask: Mask<WORDS_MAX>| {
            let mut slots = Vec::new();
            mask.for_each(|slot| slots.push(Slot(slot)));
            slots
        };
        let found = found.into_iter();
        found.map(|(block, mask)| (block, slots(mask))).collect()
    }

    /// Calls `run(slot, from, blocks)` for the blocks that each backend owns of each segment. They
    /// follow one another in a chain, the first one `from` blocks after the start of a window of 64
    /// blocks. Reads the whole index, like [`BlockView::owners`].
    pub fn for_each_run(&self, mut run: impl FnMut(Slot, usize, &[BlockHash])) {
        let mut blocks = Vec::with_capacity(segment::SEGMENT_BLOCKS);
        let each = |head, segment: ChainSegment<'_>| {
            let from = segment.shape().base;
            blocks.clear();
            blocks.push(head);
            segment.for_each_owner(|slot, owned| {
                blocks.extend((blocks.len()..owned).map(|nth| segment.hash(nth)));
                run(Slot(slot), from, &blocks[..owned]);
            });
        };
        self.read(|tables| tables.for_each_segment(each));
    }

    /// Finds the longest owned prefix of `chain` for all backends at once, by mask bisection. Calls
    /// `matched(slot, blocks)` once for every backend that owns at least the first block, in
    /// ascending order of slot. Does not allocate.
    ///
    /// `chain` must be a chain as produced by [`crate::prefix`], where each hash identifies the
    /// whole prefix before it. For unrelated hashes the result is meaningless.
    pub fn match_prefix(&self, chain: &[BlockHash], matched: impl FnMut(Slot, u32)) {
        // A mask just wide enough: 8 bytes for up to 64 backends, compared with 128 for 1,024.
        let width = self.shared.width.load(Ordering::Acquire);
        self.read(|tables| match width {
            0..=1 => matching::match_prefix::<1>(chain, tables, matched),
            2..=4 => matching::match_prefix::<4>(chain, tables, matched),
            5..=8 => matching::match_prefix::<8>(chain, tables, matched),
            _ => matching::match_prefix::<WORDS_MAX>(chain, tables, matched),
        });
    }

    /// Finds the longest owned prefix of `chain` at one backend. Returns the same as
    /// [`BlockView::match_prefix`] for that backend.
    #[must_use]
    pub fn match_by_position(&self, chain: &[BlockHash], slot: Slot) -> u32 {
        self.read(|tables| matching::match_slot(chain, tables, slot, 0))
    }

    /// Returns how many leading blocks of `chain` `slot` owns, if the first `known` were found to
    /// be owned before. Checks only what follows them. Returns less than `known` if they are no
    /// longer owned.
    #[must_use]
    pub fn match_from(&self, chain: &[BlockHash], slot: Slot, known: u32) -> u32 {
        self.read(|tables| matching::match_slot(chain, tables, slot, known as usize))
    }

    /// Runs `read` on the currently published tables. A table that the writer replaces in the
    /// meantime stays as it was when it was replaced.
    #[inline]
    fn read<R>(&self, read: impl FnOnce(&Tables<'_>) -> R) -> R {
        let shard_bits = self.shared.shard_bits;
        self.shared.directory.read(|directory| {
            read(&Tables {
                directory,
                shard_bits,
            })
        })
    }
}

/// Tables of all shards as one call reads them.
struct Tables<'a> {
    directory: &'a Directory,
    shard_bits: u32,
}

impl Tables<'_> {
    #[inline]
    fn of(&self, head: BlockHash) -> &Table {
        self.directory.table(shard_of(head, self.shard_bits))
    }

    /// Calls `each` for every segment, with its head and the segment itself.
    fn for_each_segment(&self, mut each: impl FnMut(BlockHash, ChainSegment<'_>)) {
        for shard in 0..1 << self.shard_bits {
            self.directory.table(shard).for_each(&mut each);
        }
    }

    /// Returns the segment that starts with `head`, if there is one.
    #[inline]
    fn segment(&self, head: BlockHash) -> Option<ChainSegment<'_>> {
        self.of(head).segment(head)
    }

    /// Prefetches the memory that [`Self::segment`] will read. The caller must use the result, so
    /// that the compiler keeps the loads.
    #[inline]
    fn prefetch(&self, head: BlockHash) -> u64 {
        self.of(head).prefetch(head)
    }
}

#[inline]
fn shard_of(block: BlockHash, bits: u32) -> usize {
    // Two shifts, because a single shift by 64 (one shard) would overflow.
    (mix(block) >> 1 >> (63 - bits)) as usize
}

impl std::fmt::Debug for BlockView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlockView")
            .field("shards", &(1_usize << self.shared.shard_bits))
            .finish()
    }
}
