//! A backend's index from block hash to record: extendible hashing over small segments.
//!
//! An entry is a record index plus eight bits of the hash as a tag. The hash itself is in the
//! arena, which is only read when the tag matches. An entry thus takes 4.7 to 6.1 bytes per record.
//! A doubling table of `u32` (hashbrown) takes 5.7 to 11.4 bytes, which together with 23 bytes in
//! the arena and 9 to 24 in the view would exceed the bound of 48; it would also rehash a million
//! entries at once. Here a segment with more than [`SEGMENT_RECORDS_MAX`] records splits, so no
//! insertion takes longer than rebuilding two segments.

use crate::ids::BlockHash;
use crate::view::{mix, spread};

/// Maximum number of records in a segment before it splits.
const SEGMENT_RECORDS_MAX: usize = 2048;
/// Maximum number of hash bits that the directory uses: 8,192 segments hold the maximum of 16 M
/// records. Beyond it, which means that hashes are not uniform, segments grow instead.
const DEPTH_MAX: u32 = 14;
/// Percentage of used entries above which a segment is rebuilt.
const LOAD_MAX: usize = 85;
/// Percentage of used entries directly after a rebuild.
const LOAD_FRESH: usize = 66;
/// Number of entries in the smallest segment.
const CAPACITY_MIN: usize = 8;

/// Bits of an entry that hold the record index. The bits above hold the tag.
const RECORD: u32 = (1 << 24) - 1;
/// Value of an entry that was never used, which ends a probe.
const UNUSED: u32 = u32::MAX;
/// Value of an entry whose record was removed.
const REMOVED: u32 = u32::MAX - 1;

/// Source of the records' hashes.
pub(crate) trait HashLookup {
    /// Returns the hash of a record that is in the index.
    fn hash(&self, record: u32) -> BlockHash;
}

/// Index from block hash to record; see the module documentation.
pub(crate) struct RecordIndex {
    /// Number of hash bits that index `directory`.
    depth: u32,
    /// Segments by the upper `depth` bits of the mixed hash.
    directory: Vec<u32>,
    segments: Vec<Segment>,
}

struct Segment {
    entries: Box<[u32]>,
    /// Number of entries that are not [`UNUSED`].
    used: u32,
    /// Number of entries that refer to a record.
    live: u32,
    /// Number of leading hash bits that all records of the segment share.
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

    /// Creates an empty index with room for `records` uniform hashes without a split.
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

    /// Returns the record index of `block`; `None` if the index lacks the block.
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

    /// Prefetches the entries where lookups of `blocks` start. Returning the sum keeps the compiler
    /// from removing the loads.
    pub(crate) fn prefetch(&self, blocks: &[BlockHash]) -> u32 {
        let load = |&block: &BlockHash| {
            let mixed = mix(block);
            let entries = &self.segments[self.segment_of(mixed)].entries;
            entries[home(mixed, entries.len())]
        };
        blocks.iter().map(load).fold(0, u32::wrapping_add)
    }

    /// Adds the record of `block`, which must be in the arena but not in the index.
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

    /// Removes the record of `block`. The arena may have dropped it already.
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

    /// Returns the number of records in the index.
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
        // Two shifts, because a single shift by 64 (one segment) would overflow.
        self.directory[(mixed >> 1 >> (63 - self.depth)) as usize] as usize
    }

    /// Splits the segment `id` in two by the next bit of the hash.
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
    /// Creates an empty segment with room for somewhat more than `records`.
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

    /// Puts an entry into the first free place of its probe sequence. There must be one.
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

/// Returns the low bits of the hash in the position of the tag. The high bits of the mixed hash
/// determine the entry's place.
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
