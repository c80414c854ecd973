//! Segments: up to 64 consecutive blocks of a chain, with the backends that own a prefix of them.
//!
//! A chain is divided into windows of [`SEGMENT_BLOCKS`] positions. A segment is identified by its
//! first block, its *head*, and lies within one window. It starts at the start of a window or where
//! a chain branches off from another segment. Because a hash identifies the whole prefix before it,
//! two chains that agree in one block of a segment agree in all blocks before it.
//!
//! A segment occupies a row of words in its shard's table:
//!
//! - *Lanes* of 17 bits each: a slot (10 bits) and how many of the segment's blocks it owns (7
//!   bits; 0 for a vacant lane). The first word has two lanes, each further one has three.
//! - In the first word also the segment's shape: window position of the head (6 bits), number of
//!   hashes written (7), capacity less one (6), logarithm of the number of lane words (4).
//! - With more than eleven owners, two bitmaps by slot: owners of the head, and owners of all
//!   blocks up to the end of the window. They repeat the lanes for many slots at once: a lane is
//!   written before its bit is set, and after its bit is cleared.
//! - The hashes of its blocks except for the head, which is the key of the row.
//!
//! **A hash is written once within a row**, before a lane counts it. So a reader that loads a lane
//! with Acquire may compare that many hashes. Lanes change in place, one atomic word at a time. A
//! row that becomes too small is copied to another one and never used again.

use crate::ids::BlockHash;
use crate::view::mask::{Mask, WORDS_MAX};
use crate::view::sync::{AtomicU64, Ordering};

/// Maximum number of blocks of a segment, and length of a chain's windows. Few in unit tests and
/// loom models, so that short chains have several windows.
pub(crate) const SEGMENT_BLOCKS: usize = if cfg!(loom) {
    2
} else if cfg!(test) {
    4
} else {
    64
};

const SLOT_BITS: u32 = 10;
const LANE_BITS: u32 = SLOT_BITS + 7;
const LANE: u64 = (1 << LANE_BITS) - 1;
/// Number of lanes in the first word of a segment.
const FIRST_LANES: usize = 2;
const NEXT_LANES: usize = 3;
/// Minimum number of lane words of a segment with bitmaps. Loom models have at most three owners.
const WIDE_LANE_WORDS: usize = if cfg!(loom) { 2 } else { 8 };
/// Number of the bit at which the shape starts in the first word.
const SHAPE_SHIFT: u32 = FIRST_LANES as u32 * LANE_BITS;

/// Shape of a segment, as encoded in its first word beside the lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SegmentShape {
    /// Position of the head in its window, in blocks.
    pub(super) base: usize,
    /// Number of hashes written so far, including the head's.
    pub(super) filled: usize,
    /// Number of hashes for which the row has room, including the head's.
    pub(super) capacity: usize,
    /// Number of words with lanes, a power of two.
    pub(super) lane_words: usize,
}

impl SegmentShape {
    pub(super) fn decode(first: u64) -> Self {
        let field =
            |shift: u32, bits: u32| (first >> (SHAPE_SHIFT + shift)) as usize & ((1 << bits) - 1);
        Self {
            base: field(0, 6),
            filled: field(6, 7),
            capacity: field(13, 6) + 1,
            lane_words: 1 << field(19, 4),
        }
    }

    /// Returns the first word of a segment of this shape without its lanes.
    pub(super) fn encode(self) -> u64 {
        let shape = self.base
            | self.filled << 6
            | (self.capacity - 1) << 13
            | (self.lane_words.trailing_zeros() as usize) << 19;
        (shape as u64) << SHAPE_SHIFT
    }

    /// Returns the number of words in the segment's row.
    pub(super) fn words(self) -> usize {
        hashes_at(self.lane_words) + self.capacity - 1
    }

    /// Returns the number of blocks from the head to the end of the window.
    pub(super) fn room(self) -> usize {
        SEGMENT_BLOCKS.saturating_sub(self.base)
    }
}

/// Returns the number of lane words that hold this many owners.
pub(super) fn lane_words(owners: usize) -> usize {
    let further = owners.saturating_sub(FIRST_LANES).div_ceil(NEXT_LANES);
    (1 + further).next_power_of_two()
}

/// Returns the index of the first hash in a row with this many lane words.
#[inline]
fn hashes_at(lane_words: usize) -> usize {
    let bitmaps = if lane_words >= WIDE_LANE_WORDS { 2 } else { 0 };
    lane_words + bitmaps * WORDS_MAX
}

/// Returns the number of lanes in the `nth` lane word.
#[inline]
fn lanes_of(nth: usize) -> usize {
    if nth == 0 { FIRST_LANES } else { NEXT_LANES }
}

#[inline]
fn slot_of(lane: u64) -> u16 {
    (lane & ((1 << SLOT_BITS) - 1)) as u16
}

/// Position of a lane within the segment's words.
#[derive(Clone, Copy)]
struct LanePlace {
    word: usize,
    shift: u32,
}

impl LanePlace {
    fn nth(lane: usize) -> Self {
        let (word, lane) = match lane.checked_sub(FIRST_LANES) {
            None => (0, lane),
            Some(further) => (1 + further / NEXT_LANES, further % NEXT_LANES),
        };
        Self {
            word,
            shift: lane as u32 * LANE_BITS,
        }
    }
}

/// Segment in the rows of a table. Readers and the writer use it; only the writer calls the methods
/// that change it.
#[derive(Clone, Copy)]
pub(super) struct ChainSegment<'a> {
    words: &'a [AtomicU64],
    lane_words: usize,
}

impl<'a> ChainSegment<'a> {
    /// Returns the segment whose row starts at `words`.
    #[inline]
    pub(super) fn at(words: &'a [AtomicU64]) -> Self {
        let first = words[0].load(Ordering::Acquire);
        let lane_words = 1 << (first >> (SHAPE_SHIFT + 19) & 0xf);
        Self { words, lane_words }
    }

    /// Initialises a segment without owners in `words`, which no reader can see yet.
    pub(super) fn initialise(words: &'a [AtomicU64], shape: SegmentShape) -> Self {
        words[0].store(shape.encode(), Ordering::Relaxed);
        for word in &words[1..hashes_at(shape.lane_words)] {
            word.store(0, Ordering::Relaxed);
        }
        Self {
            words,
            lane_words: shape.lane_words,
        }
    }

    pub(super) fn shape(&self) -> SegmentShape {
        SegmentShape::decode(self.words[0].load(Ordering::Acquire))
    }

    /// Calls `owner(slot, blocks)` for every owner, in no particular order. `blocks` is the number
    /// of the segment's blocks that it owns.
    #[inline]
    pub(super) fn for_each_owner(&self, mut owner: impl FnMut(u16, usize)) {
        for nth in 0..self.lane_words {
            let mut word = self.words[nth].load(Ordering::Acquire);
            for _ in 0..lanes_of(nth) {
                let lane = word & LANE;
                if lane >> SLOT_BITS != 0 {
                    owner(slot_of(lane), (lane >> SLOT_BITS) as usize);
                }
                word >>= LANE_BITS;
            }
        }
    }

    /// Returns the owners of the head among the slots below `64 * W`.
    #[inline]
    pub(super) fn owners<const W: usize>(&self) -> Mask<W> {
        if self.is_wide() {
            return self.bitmap(0);
        }
        let mut mask = Mask::EMPTY;
        self.for_each_owner(|slot, _| mask.insert(slot));
        mask
    }

    /// Returns the slots that own all blocks up to the end of the window. Empty if the segment has
    /// no bitmaps.
    #[inline]
    pub(super) fn full_owners<const W: usize>(&self) -> Mask<W> {
        if self.is_wide() {
            self.bitmap(1)
        } else {
            Mask::EMPTY
        }
    }

    #[inline]
    fn is_wide(&self) -> bool {
        self.lane_words >= WIDE_LANE_WORDS
    }

    #[inline]
    fn bitmap<const W: usize>(&self, nth: usize) -> Mask<W> {
        let from = self.lane_words + nth * WORDS_MAX;
        let words = &self.words[from..from + WORDS_MAX];
        Mask(std::array::from_fn(|word| {
            words[word].load(Ordering::Acquire)
        }))
    }

    /// Returns the highest number of the segment's blocks that any of `slots` owns.
    #[inline]
    pub(super) fn most_owned<const W: usize>(&self, slots: &Mask<W>) -> usize {
        let mut most = 0;
        self.for_each_owner(|slot, blocks| {
            if slots.contains(slot) {
                most = blocks.max(most);
            }
        });
        most
    }

    /// Whether `slot` owns the head.
    #[inline]
    pub(super) fn has_owner(&self, slot: u16) -> bool {
        if self.is_wide() {
            return self.bitmap::<WORDS_MAX>(0).contains(slot);
        }
        self.owned(slot) > 0
    }

    /// Returns the number of the segment's blocks that `slot` owns.
    #[inline]
    pub(super) fn owned(&self, slot: u16) -> usize {
        let mut owned = 0;
        self.for_each_owner(|owner, blocks| {
            if owner == slot {
                owned = blocks;
            }
        });
        owned
    }

    /// Returns the hash of the `nth` block. `nth` must be at least 1, and below the number of
    /// blocks that some owner was seen to own or, for the writer, the number of hashes written.
    #[inline]
    pub(super) fn hash(&self, nth: usize) -> BlockHash {
        BlockHash(self.words[hashes_at(self.lane_words) + nth - 1].load(Ordering::Relaxed))
    }

    /// Returns the number of leading blocks that the segment shares with `chain`, which starts with
    /// the head. `limit` must not exceed the number of blocks that some owner was seen to own.
    #[inline]
    pub(super) fn common(&self, chain: &[BlockHash], limit: usize) -> usize {
        /// Number of hashes in a cache line.
        const LINE: usize = 8;
        let limit = limit.min(chain.len());
        if limit <= 1 || self.hash(limit - 1) == chain[limit - 1] {
            return limit;
        }
        // A hash identifies all before it: compare one per cache line, with all loads in flight.
        let mut from = 1;
        while from + LINE < limit && self.hash(from + LINE - 1) == chain[from + LINE - 1] {
            from += LINE;
        }
        while self.hash(from) == chain[from] {
            from += 1;
        }
        from
    }

    /// Sets the number of the segment's blocks that `slot` owns, and the number of hashes written.
    /// Returns `false`, without a change, if no lane is free.
    pub(super) fn set_owned(&self, slot: u16, blocks: usize, filled: usize) -> bool {
        let own = |lane: u64| lane >> SLOT_BITS != 0 && slot_of(lane) == slot;
        let lane = self
            .lane(own)
            .or_else(|| self.lane(|lane| lane >> SLOT_BITS == 0));
        if let Some(lane) = lane {
            self.set_lane(lane, slot, blocks, filled);
        }
        lane.is_some()
    }

    /// Sets the lane of the `nth` owner of a newly initialised segment.
    pub(super) fn put_owner(&self, nth: usize, slot: u16, blocks: usize, filled: usize) {
        self.set_lane(LanePlace::nth(nth), slot, blocks, filled);
    }

    fn set_lane(
        &self,
        LanePlace { word, shift }: LanePlace,
        slot: u16,
        blocks: usize,
        filled: usize,
    ) {
        let first = self.words[0].load(Ordering::Relaxed);
        let shape = SegmentShape {
            filled,
            ..SegmentShape::decode(first)
        };
        let is_whole = blocks > 0 && blocks == shape.room();
        self.clear_bits(slot, blocks > 0, is_whole);
        let first = first & ((1 << SHAPE_SHIFT) - 1) | shape.encode();
        let lane = match blocks {
            0 => 0,
            _ => (blocks as u64) << SLOT_BITS | u64::from(slot),
        };
        let with_lane = |bits: u64| bits & !(LANE << shift) | lane << shift;
        if word == 0 {
            self.words[0].store(with_lane(first), Ordering::Release);
        } else {
            self.words[0].store(first, Ordering::Release);
            let bits = self.words[word].load(Ordering::Relaxed);
            self.words[word].store(with_lane(bits), Ordering::Release);
        }
        self.set_bits(slot, blocks > 0, is_whole);
    }

    /// Clears the bits of `slot` in the bitmaps unless it is an owner, or owns all blocks.
    fn clear_bits(&self, slot: u16, is_owner: bool, is_whole: bool) {
        if !is_whole {
            self.change_bit(1, slot, |bits, bit| bits & !bit);
        }
        if !is_owner {
            self.change_bit(0, slot, |bits, bit| bits & !bit);
        }
    }

    /// Sets the bits of `slot` in the bitmaps if it is an owner, or owns all blocks.
    fn set_bits(&self, slot: u16, is_owner: bool, is_whole: bool) {
        if is_owner {
            self.change_bit(0, slot, |bits, bit| bits | bit);
        }
        if is_whole {
            self.change_bit(1, slot, |bits, bit| bits | bit);
        }
    }

    fn change_bit(&self, bitmap: usize, slot: u16, change: impl Fn(u64, u64) -> u64) {
        if !self.is_wide() {
            return;
        }
        let word = &self.words[self.lane_words + bitmap * WORDS_MAX + usize::from(slot) / 64];
        let bits = word.load(Ordering::Relaxed);
        word.store(change(bits, 1 << (slot % 64)), Ordering::Release);
    }

    /// Writes hashes that no lane counts yet, starting with the hash of the `nth` block.
    pub(super) fn write_hashes(&self, nth: usize, hashes: impl Iterator<Item = BlockHash>) {
        let from = hashes_at(self.lane_words) + nth - 1;
        for (word, hash) in self.words[from..].iter().zip(hashes) {
            word.store(hash.0, Ordering::Relaxed);
        }
    }

    /// Returns the first lane that satisfies `is_wanted`.
    fn lane(&self, is_wanted: impl Fn(u64) -> bool) -> Option<LanePlace> {
        (0..self.lane_words).find_map(|word| {
            let bits = self.words[word].load(Ordering::Relaxed);
            let mut shifts = (0..lanes_of(word) as u32).map(|lane| lane * LANE_BITS);
            let shift = shifts.find(|shift| is_wanted(bits >> shift & LANE))?;
            Some(LanePlace { word, shift })
        })
    }
}
