//! A backend's lookup from block hash to record: extendible hashing over small segments.
//!
//! An entry is a record index with eight bits of the hash as a tag; the hash itself stands in the
//! arena, which is asked only when the tag agrees. That makes 4.7 to 6.1 bytes a record. A table of
//! `u32` that doubles (hashbrown) takes 5.7 to 11.4, which with the 23 of the arena and the 14 to 16
//! of the view would break the bound of 48; and it would rehash a million entries in one go. Here a
//! segment has at most [`SEGMENT_RECORDS_MAX`] records, then it splits, so that no insertion takes
//! longer than rebuilding two of them.

use crate::ids::BlockHash;
use crate::view::{mix, spread};

/// Records of a segment; one more and it splits.
const SEGMENT_RECORDS_MAX: usize = 2048;
/// Bits of the hash the directory uses at most: 8,192 segments hold the 16 M records there can be.
/// Beyond it (hashes that are not uniform) segments grow instead.
const DEPTH_MAX: u32 = 14;
/// A segment is rebuilt when more of its entries than this are used, in percent.
const LOAD_MAX: usize = 85;
/// Entries used just after a rebuild, in percent.
const LOAD_FRESH: usize = 66;
/// Entries of the smallest segment.
const CAPACITY_MIN: usize = 8;

/// Record bits of an entry; the tag is above.
const RECORD: u32 = (1 << 24) - 1;
/// An entry never used: ends a probe.
const UNUSED: u32 = u32::MAX;
/// An entry whose record is gone.
const REMOVED: u32 = u32::MAX - 1;

/// Where the hash of a record is looked up.
pub(crate) trait HashLookup {
    /// The hash of a record that the index holds.
    fn hash(&self, record: u32) -> BlockHash;
}

/// See the module's text.
pub(crate) struct RecordIndex {
    /// Bits of the hash that choose in `directory`.
    depth: u32,
    /// Segment by the upper `depth` bits of the mixed hash.
    directory: Vec<u32>,
    segments: Vec<Segment>,
}

struct Segment {
    entries: Box<[u32]>,
    /// Entries that are not [`UNUSED`].
    used: u32,
    /// Entries that name a record.
    live: u32,
    /// Bits of the hash all its records share.
    depth: u32,
}

impl RecordIndex {
    pub(crate) fn new() -> Self {
        Self {
            depth: 0,
            directory: vec![0],
            segments: vec![Segment::new(0, 0)],
        }
    }

    /// An empty index that takes `records` of uniform hash without a split.
    pub(crate) fn with_room(records: usize) -> Self {
        let segments = records
            .div_ceil(SEGMENT_RECORDS_MAX / 4 * 3)
            .next_power_of_two();
        let segments = segments.min(1 << DEPTH_MAX);
        let depth = segments.trailing_zeros();
        Self {
            depth,
            directory: (0..segments as u32).collect(),
            segments: (0..segments)
                .map(|_| Segment::new(records / segments, depth))
                .collect(),
        }
    }

    /// The record of `block`.
    #[inline]
    pub(crate) fn find(&self, block: BlockHash, records: &impl HashLookup) -> Option<u32> {
        let mixed = mix(block);
        let entries = &self.segments[self.segment_of(mixed)].entries;
        let tag = tag(block);
        let mut at = home(mixed, entries.len());
        loop {
            let entry = entries[at];
            if entry == UNUSED {
                return None;
            }
            if entry & !RECORD == tag && entry != REMOVED && records.hash(entry & RECORD) == block {
                return Some(entry & RECORD);
            }
            at = if at + 1 == entries.len() { 0 } else { at + 1 };
        }
    }

    /// Loads the entries that lookups of `blocks` begin with; the sum is for the compiler, that it may
    /// not leave the loads out.
    pub(crate) fn warm(&self, blocks: &[BlockHash]) -> u32 {
        let load = |&block: &BlockHash| {
            let mixed = mix(block);
            let entries = &self.segments[self.segment_of(mixed)].entries;
            entries[home(mixed, entries.len())]
        };
        blocks.iter().map(load).fold(0, u32::wrapping_add)
    }

    /// Adds a record that the arena holds and the index does not.
    pub(crate) fn insert(&mut self, block: BlockHash, record: u32, records: &impl HashLookup) {
        let mixed = mix(block);
        let mut id = self.segment_of(mixed);
        if self.segments[id].live as usize >= SEGMENT_RECORDS_MAX
            && self.segments[id].depth < DEPTH_MAX
        {
            self.split(id, records);
            id = self.segment_of(mixed);
        }
        let segment = &mut self.segments[id];
        if (segment.used as usize + 1) * 100 > segment.entries.len() * LOAD_MAX {
            segment.rebuild(records);
        }
        segment.put(mixed, tag(block) | record);
    }

    /// Removes a record; the arena need not hold it any more.
    pub(crate) fn remove(&mut self, block: BlockHash, record: u32) {
        let mixed = mix(block);
        let id = self.segment_of(mixed);
        let segment = &mut self.segments[id];
        let len = segment.entries.len();
        let mut at = home(mixed, len);
        loop {
            let entry = segment.entries[at];
            if entry == UNUSED {
                return;
            }
            let next = if at + 1 == len { 0 } else { at + 1 };
            if entry == tag(block) | record {
                let ends_run = segment.entries[next] == UNUSED;
                segment.entries[at] = if ends_run { UNUSED } else { REMOVED };
                segment.used -= u32::from(ends_run);
                segment.live -= 1;
                return;
            }
            at = next;
        }
    }

    /// Records in the index.
    pub(crate) fn len(&self) -> u64 {
        self.segments
            .iter()
            .map(|segment| u64::from(segment.live))
            .sum()
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        let entries: usize = self.segments.iter().map(|s| size_of_val(&*s.entries)).sum();
        entries
            + self.segments.capacity() * size_of::<Segment>()
            + self.directory.capacity() * size_of::<u32>()
    }

    #[inline]
    fn segment_of(&self, mixed: u64) -> usize {
        // In two steps, because a shift by 64 (one segment) is none.
        self.directory[(mixed >> 1 >> (63 - self.depth)) as usize] as usize
    }

    /// Shares a segment's records out to two by the next bit of their hash.
    fn split(&mut self, id: usize, records: &impl HashLookup) {
        let depth = self.segments[id].depth;
        if depth == self.depth {
            self.directory = self.directory.iter().flat_map(|&id| [id, id]).collect();
            self.depth += 1;
        }
        let other = self.segments.len();
        let old = std::mem::replace(&mut self.segments[id], Segment::new(0, 0));
        let is_upper = |mixed: u64| mixed >> (63 - depth) & 1 == 1;
        let upper = old
            .records()
            .filter(|&entry| is_upper(mixed(entry, records)))
            .count();
        let mut halves = [
            Segment::new(old.live as usize - upper, depth + 1),
            Segment::new(upper, depth + 1),
        ];
        for entry in old.records() {
            let mixed = mixed(entry, records);
            halves[usize::from(is_upper(mixed))].put(mixed, entry);
        }
        let [lower, upper] = halves;
        self.segments[id] = lower;
        self.segments.push(upper);
        for (place, segment) in self.directory.iter_mut().enumerate() {
            if *segment == id as u32 && place >> (self.depth - depth - 1) & 1 == 1 {
                *segment = other as u32;
            }
        }
    }
}

impl Segment {
    /// An empty segment that takes `records` and some more.
    fn new(records: usize, depth: u32) -> Self {
        let capacity = ((records + 1) * 100).div_ceil(LOAD_FRESH).max(CAPACITY_MIN);
        Self {
            entries: vec![UNUSED; capacity].into(),
            used: 0,
            live: 0,
            depth,
        }
    }

    fn records(&self) -> impl Iterator<Item = u32> {
        self.entries
            .iter()
            .copied()
            .filter(|&entry| entry < REMOVED)
    }

    /// Puts an entry into the first place that is not taken. There is one.
    fn put(&mut self, mixed: u64, entry: u32) {
        let len = self.entries.len();
        let mut at = home(mixed, len);
        while self.entries[at] < REMOVED {
            at = if at + 1 == len { 0 } else { at + 1 };
        }
        self.used += u32::from(self.entries[at] == UNUSED);
        self.live += 1;
        self.entries[at] = entry;
    }

    fn rebuild(&mut self, records: &impl HashLookup) {
        let mut fresh = Self::new(self.live as usize, self.depth);
        for entry in self.records() {
            fresh.put(mixed(entry, records), entry);
        }
        *self = fresh;
    }
}

/// The low bits of the hash, in the place of the tag: the mixed hash's high bits chose the place.
fn tag(block: BlockHash) -> u32 {
    (block.0 as u32) << 24
}

fn mixed(entry: u32, records: &impl HashLookup) -> u64 {
    mix(records.hash(entry & RECORD))
}

#[inline]
fn home(mixed: u64, len: usize) -> usize {
    spread((mixed << DEPTH_MAX >> 32) as u32, len)
}
