//! One shard's table: the segments whose heads hash to it, written by one thread while others read.
//!
//! The table uses open addressing with linear probing over entries of three words, `[key low, key
//! high, row]`. A key is the head of a segment, and its row holds the [`segment`](super::segment).
//! The table is sound without locks because **a key is written once within a table**. The writer
//! stores the two key words, then `row` with Release. A reader loads `row` first, with Acquire, so
//! the key of a used entry never changes. A segment that lost its last owner keeps its key, as a
//! tombstone. To grow, or to drop tombstones and abandoned rows, the writer builds and publishes
//! another table.
//!
//! A row is allocated to one key and never reused. A reader may see lanes that are slightly old or
//! halfway through several changes, but never an owner that the block never had.

use std::sync::Arc;

use crate::ids::BlockHash;
use crate::view::segment::{ChainSegment, SegmentShape};
use crate::view::sync::{AtomicU32, AtomicU64, Ordering};

/// Value of `row` in an entry that was never used, which ends a probe.
const UNUSED: u32 = 0;
/// Value of `row` in a tombstone.
const TOMBSTONE: u32 = 1;
/// Flag in `row` of an entry with a segment. The other bits are the start of the segment's row.
const LIVE: u32 = 1 << 31;

/// Entry of a table: a key with its segment.
struct Entry {
    key_low: AtomicU32,
    key_high: AtomicU32,
    row: AtomicU32,
}

/// Handle to a table of segments; see the module documentation. Clones share the table.
#[derive(Clone)]
pub(super) struct Table {
    entries: Arc<[Entry]>,
    rows: Arc<[AtomicU64]>,
}

/// Result of looking for a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Probed {
    /// The key is new and belongs at this unused entry.
    Unused(usize),
    /// The key has no segment and is at this entry.
    Tombstone(usize),
    /// The key is at this entry, and its row starts at `row`.
    Segment { entry: usize, row: usize },
}

/// Mixes a hash, so that it is uniform over 64 bits. Block hashes already are, but hashes made up
/// by a test, or drawn from few values, are not.
#[inline]
pub(crate) fn mix(block: BlockHash) -> u64 {
    block.0.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Maps 32 uniform bits to `0..len` (Lemire's fast range). `len` need not be a power of two.
#[inline]
pub(crate) fn spread(bits: u32, len: usize) -> usize {
    ((u64::from(bits) * len as u64) >> 32) as usize
}

/// Maximum number of bits of a mixed hash that select a shard.
pub(super) const SHARD_BITS: u32 = 10;

impl Table {
    pub(super) fn new(capacity: usize, row_words: usize) -> Self {
        let entry = || Entry {
            key_low: AtomicU32::new(0),
            key_high: AtomicU32::new(0),
            row: AtomicU32::new(UNUSED),
        };
        Self {
            entries: (0..capacity).map(|_| entry()).collect(),
            rows: (0..row_words).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    pub(super) fn capacity(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn row_words(&self) -> usize {
        self.rows.len()
    }

    /// Returns the heap size of the table in bytes, without its handles.
    pub(super) fn memory_bytes(&self) -> usize {
        size_of_val(&*self.entries) + size_of_val(&*self.rows)
    }

    /// Prefetches the memory that [`Self::segment`] will read, if the entry is at its home
    /// position. The caller must use the result, so that the compiler keeps the loads.
    #[inline]
    pub(super) fn prefetch(&self, head: BlockHash) -> u64 {
        let row = self.entries[self.home(head)].row.load(Ordering::Acquire);
        let word = self.rows.get((row & !LIVE) as usize);
        word.map_or(0, |word| word.load(Ordering::Relaxed))
    }

    #[inline]
    fn home(&self, block: BlockHash) -> usize {
        spread((mix(block) << SHARD_BITS >> 32) as u32, self.entries.len())
    }

    /// Finds the entry of `head`, or where it belongs.
    ///
    /// Terminates because the writer keeps at least one entry in eight unused.
    #[inline]
    pub(super) fn probe(&self, head: BlockHash) -> Probed {
        let (low, high) = (head.0 as u32, (head.0 >> 32) as u32);
        let mut at = self.home(head);
        loop {
            let entry = &self.entries[at];
            // The first of the three loads: Acquire makes the key of a used entry visible.
            let row = entry.row.load(Ordering::Acquire);
            if row == UNUSED {
                return Probed::Unused(at);
            }
            if entry.key_low.load(Ordering::Relaxed) == low
                && entry.key_high.load(Ordering::Relaxed) == high
            {
                return match row & LIVE {
                    0 => Probed::Tombstone(at),
                    _ => Probed::Segment {
                        entry: at,
                        row: (row & !LIVE) as usize,
                    },
                };
            }
            at += 1;
            if at == self.entries.len() {
                at = 0;
            }
        }
    }

    /// Returns the segment that starts with `head`, if there is one.
    #[inline]
    pub(super) fn segment(&self, head: BlockHash) -> Option<ChainSegment<'_>> {
        match self.probe(head) {
            Probed::Segment { row, .. } => Some(self.segment_at(row)),
            Probed::Unused(_) | Probed::Tombstone(_) => None,
        }
    }

    /// Returns the segment whose row starts at `row`.
    #[inline]
    pub(super) fn segment_at(&self, row: usize) -> ChainSegment<'_> {
        ChainSegment::at(&self.rows[row..])
    }

    /// Calls `each` for every segment, with its head and the segment itself.
    pub(super) fn for_each(&self, mut each: impl FnMut(BlockHash, ChainSegment<'_>)) {
        for entry in self.entries.iter() {
            let row = entry.row.load(Ordering::Acquire);
            if row & LIVE != 0 {
                let (low, high) = (&entry.key_low, &entry.key_high);
                let key = u64::from(high.load(Ordering::Relaxed)) << 32
                    | u64::from(low.load(Ordering::Relaxed));
                each(BlockHash(key), self.segment_at((row & !LIVE) as usize));
            }
        }
    }
}

/// Methods that change the table, which only the writer calls.
impl Table {
    /// Initialises a segment without owners in the row at `row`, which no reader can see yet.
    pub(super) fn initialise_segment(&self, row: usize, shape: SegmentShape) -> ChainSegment<'_> {
        ChainSegment::initialise(&self.rows[row..row + shape.words()], shape)
    }

    /// Writes the key `head` to the unused `entry`, with the start of its row.
    pub(super) fn insert_key(&self, entry: usize, head: BlockHash, row: usize) {
        let entry = &self.entries[entry];
        entry.key_low.store(head.0 as u32, Ordering::Relaxed);
        entry
            .key_high
            .store((head.0 >> 32) as u32, Ordering::Relaxed);
        entry.row.store(LIVE | row as u32, Ordering::Release);
    }

    /// Sets the start of the row of `entry`, which must have a key.
    pub(super) fn set_row(&self, entry: usize, row: usize) {
        self.entries[entry]
            .row
            .store(LIVE | row as u32, Ordering::Release);
    }

    /// Turns `entry`, which must have a key, into a tombstone.
    pub(super) fn make_tombstone(&self, entry: usize) {
        self.entries[entry].row.store(TOMBSTONE, Ordering::Release);
    }
}
