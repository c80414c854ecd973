//! The published read view of the block index: many readers that never wait for the one writer.
//!
//! The index is split by hash into shards. Each shard is a `table` of fixed shape, and a `directory`
//! holds them all. The writer (the ownership arena, in `apply`) changes owners in place, one atomic
//! word at a time, and replaces a table when it is full, by publishing another directory. Readers
//! keep the directory that they hold alive. Reading is therefore wait-free and needs no `unsafe`, and
//! a stalled reader blocks nobody.
//!
//! While the writer works, a reader may still see an ownership that ended a moment ago, or miss one
//! that has just begun. It never sees an owner that never held the block. `matching` describes what
//! that means for a prefix; the loom models in `loom_tests` check it.
//!
//! A second index keyed by position would be a second set of shards with a wider entry. Matching
//! takes its probe as a function and would not change.

mod directory;
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
use directory::{Directory, SHARDS_MAX};
use mask::{Mask, WORDS_MAX};
use matching::BlockLookup;
use sync::{Arc, AtomicUsize, Ordering, Swap};
use table::Table;

pub(crate) use table::{mix, spread};
pub(crate) use writer::ViewWriter;

/// Number of shards of an index. At 10 M blocks, a table has about 2,400 entries and is rebuilt in
/// some 20 us, which bounds the cost of one insertion.
pub(crate) const SHARDS: usize = SHARDS_MAX;

/// A handle on the published block index. Cheap to clone. Any number of threads may read while the
/// one writer (`apply`) changes it, and none ever waits.
#[derive(Clone)]
pub struct BlockView {
    shared: Arc<Shared>,
}

struct Shared {
    /// The tables. The high bits of a block's mixed hash select its shard.
    directory: Swap<Directory>,
    /// How many bits do.
    shard_bits: u32,
    /// Number of words in a mask of all slots in use. Only grows, except by a restore.
    width: AtomicUsize,
    /// Number of owned blocks by slot. A figure for policies and not part of the index, so loom
    /// does not check it.
    owned: Box<[std::sync::atomic::AtomicU32]>,
}

impl BlockView {
    /// Creates an index of `shards` shards, a power of two up to [`SHARDS`].
    fn over(directory: Directory, shards: usize) -> Self {
        Self {
            shared: Arc::new(Shared {
                directory: Swap::new(Arc::new(directory)),
                shard_bits: shards.trailing_zeros(),
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
        self.read(|tables| tables.of(block).owns(slot.0, block))
    }

    /// Calls `owner` for every backend that owns `block`, in ascending order of slot.
    pub fn owners(&self, block: BlockHash, mut owner: impl FnMut(Slot)) {
        self.read(|tables| tables.owners::<WORDS_MAX>(block))
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
        let width = self.shared.width.load(Ordering::Acquire);
        self.read(|tables| match width {
            0..=1 => matching::match_prefix::<1>(chain, tables, matched),
            2..=4 => matching::match_prefix::<4>(chain, tables, matched),
            5..=8 => matching::match_prefix::<8>(chain, tables, matched),
            _ => matching::match_prefix::<WORDS_MAX>(chain, tables, matched),
        });
    }

    /// Finds the longest owned prefix of `chain` at one backend, by binary search over positions.
    /// Returns the same as [`BlockView::match_prefix`] for that backend.
    #[must_use]
    pub fn match_by_position(&self, chain: &[BlockHash], slot: Slot) -> u32 {
        let owns = |tables: &Tables<'_>, block| tables.of(block).owns(slot.0, block);
        let matched = self.read(|tables| chain.partition_point(|block| owns(tables, *block)));
        u32::try_from(matched).unwrap_or(u32::MAX)
    }

    /// Runs `read` on the tables as they are published now. Those that the writer replaces meanwhile
    /// stay as they were when they were replaced.
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

/// The tables that one call reads.
struct Tables<'a> {
    directory: &'a Directory,
    shard_bits: u32,
}

impl Tables<'_> {
    #[inline]
    fn of(&self, block: BlockHash) -> &Table {
        self.directory.table(shard_of(block, self.shard_bits))
    }
}

impl BlockLookup for Tables<'_> {
    #[inline]
    fn owners<const W: usize>(&self, block: BlockHash) -> Mask<W> {
        self.of(block).owners(block)
    }

    #[inline]
    fn warm(&self, block: BlockHash) -> u32 {
        self.of(block).warm(block)
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
