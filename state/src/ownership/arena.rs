//! Stores a backend's block records in chunks that snapshots share (copy on write).
//!
//! A record holds a block, its parent, its place in the view, the number of children, open leases
//! and engine reports that hold it, and the epoch of its last release. Records are stored in
//! columns of 23 bytes in total, which a snapshot reads in runs. They are addressed by index. A
//! freed record joins a free list that runs through the `parent` column, so a frozen chunk is
//! self-contained.

use std::sync::Arc;

use crate::ids::BlockHash;
use crate::ownership::index::HashLookup;

/// Number of records per chunk. Copying a chunk takes about two microseconds, which is the cost of
/// its first change after a snapshot started.
pub(super) const CHUNK_RECORDS: usize = 1024;
/// Index that refers to no record, as the parent of a first block does.
pub(super) const NO_RECORD: u32 = u32::MAX;
/// Upper bound of record indexes. They fit in 24 bits, beside an eight-bit tag or a 40-bit epoch.
pub(super) const RECORDS_MAX: u32 = (1 << 24) - 2;
/// Maximum epoch, which has 40 bits.
pub(super) const EPOCH_MAX: u64 = (1 << 40) - 1;
/// Flag in the parent column of a free record. The other bits are the index of the next free one.
const FREE: u32 = 1 << 31;
const FREE_END: u32 = FREE | PARENT;
/// Bits of the parent column that hold the parent's index, all set for none. The bits between them
/// and [`FREE`] hold the distance to the head of the block's segment.
const PARENT: u32 = (1 << PARENT_BITS) - 1;
const PARENT_BITS: u32 = 24;

const CHILDREN_BITS: u32 = 24;
const CHILDREN: u64 = (1 << CHILDREN_BITS) - 1;

/// A chunk of records; see the module documentation.
#[derive(Clone)]
pub(super) struct Chunk {
    hash: [u64; CHUNK_RECORDS],
    /// Epoch in the upper 40 bits, number of children in the lower 24.
    meta: [u64; CHUNK_RECORDS],
    parent: [u32; CHUNK_RECORDS],
    leases: [u16; CHUNK_RECORDS],
    reports: [u8; CHUNK_RECORDS],
}

impl Chunk {
    const EMPTY: Self = Self {
        hash: [0; CHUNK_RECORDS],
        meta: [0; CHUNK_RECORDS],
        parent: [FREE_END; CHUNK_RECORDS],
        leases: [0; CHUNK_RECORDS],
        reports: [0; CHUNK_RECORDS],
    };

    /// Returns the record at `at`; `None` if it is free.
    pub(super) fn get(&self, at: usize) -> Option<BlockRecord> {
        let parent = self.parent[at];
        (parent & FREE == 0).then(|| BlockRecord {
            hash: BlockHash(self.hash[at]),
            parent: decode_parent(parent),
            behind: (parent >> PARENT_BITS) as u8,
            children: (self.meta[at] & CHILDREN) as u32,
            leases: self.leases[at],
            reports: self.reports[at],
            epoch: self.meta[at] >> CHILDREN_BITS,
        })
    }

    pub(super) fn set(&mut self, at: usize, record: BlockRecord) {
        self.hash[at] = record.hash.0;
        self.meta[at] = record.epoch << CHILDREN_BITS | u64::from(record.children);
        self.parent[at] = record.parent & PARENT | u32::from(record.behind) << PARENT_BITS;
        self.leases[at] = record.leases;
        self.reports[at] = record.reports;
    }
}

fn decode_parent(column: u32) -> u32 {
    match column & PARENT {
        PARENT => NO_RECORD,
        parent => parent,
    }
}

/// One owned block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BlockRecord {
    pub(super) hash: BlockHash,
    /// Index of the parent; [`NO_RECORD`] for a first block.
    pub(super) parent: u32,
    /// Number of blocks from the head of the block's segment in the view to the block. Depends on
    /// history, so it is part of neither the digest nor an image.
    pub(super) behind: u8,
    /// Number of owned blocks that directly follow this one.
    pub(super) children: u32,
    /// Number of open leases whose tip is this block.
    pub(super) leases: u16,
    /// Number of ranks of the engine that report the block as cached. Not part of the digest or of
    /// an image, because it follows from the state of [`crate::kv_events`], which is.
    pub(super) reports: u8,
    /// The backend's release count at the block's last release as a tip, or the highest one of
    /// descendants evicted since. 0 if no lease over it was ever kept.
    pub(super) epoch: u64,
}

impl BlockRecord {
    /// Whether nothing holds the record: no lease ends at it, no owned block follows it, and no
    /// engine reports it.
    pub(super) fn is_free_leaf(&self) -> bool {
        self.children == 0 && self.leases == 0 && self.reports == 0
    }
}

/// The records of one backend; see the module documentation.
#[derive(Clone)]
pub(super) struct Arena {
    chunks: Vec<Arc<Chunk>>,
    /// Number of record indexes allocated so far, including free ones.
    len: u32,
    /// Head of the free list, as a `parent` entry.
    free: u32,
}

impl Arena {
    pub(super) fn new() -> Self {
        Self {
            chunks: Vec::new(),
            len: 0,
            free: FREE_END,
        }
    }

    /// Returns the number of record indexes allocated so far, including free ones.
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    pub(super) fn chunks(&self) -> &[Arc<Chunk>] {
        &self.chunks
    }

    /// Returns the live record at `index`. The index must refer to one.
    pub(super) fn get(&self, index: u32) -> BlockRecord {
        let (chunk, at) = place(index);
        self.chunks[chunk]
            .get(at)
            .expect("an index that is kept names a live record")
    }

    /// Returns the record at `index`, or `None` if no live record is there.
    pub(super) fn try_get(&self, index: u32) -> Option<BlockRecord> {
        let (chunk, at) = place(index);
        self.chunks.get(chunk)?.get(at)
    }

    /// Returns the block hash of the record at `index`. Any index below `len` is valid.
    #[inline]
    pub(super) fn hash(&self, index: u32) -> BlockHash {
        let (chunk, at) = place(index);
        BlockHash(self.chunks[chunk].hash[at])
    }

    /// Returns the index of the head of a live record's segment in the view, given the record's
    /// `index` and its distance `behind` from the head.
    pub(super) fn head(&self, index: u32, behind: u8) -> u32 {
        (0..behind).fold(index, |at, _| {
            let (chunk, at) = place(at);
            decode_parent(self.chunks[chunk].parent[at])
        })
    }

    /// Sets the distance of a live record from the head of its segment.
    pub(super) fn set_behind(&mut self, index: u32, behind: u8) {
        let (chunk, at) = place(index);
        let chunk = Arc::make_mut(&mut self.chunks[chunk]);
        chunk.parent[at] = chunk.parent[at] & PARENT | u32::from(behind) << PARENT_BITS;
    }

    /// Overwrites a live record.
    pub(super) fn set(&mut self, index: u32, record: BlockRecord) {
        let (chunk, at) = place(index);
        Arc::make_mut(&mut self.chunks[chunk]).set(at, record);
    }

    /// Stores a new record and returns its index. The caller keeps the number of records below
    /// [`RECORDS_MAX`].
    pub(super) fn insert(&mut self, record: BlockRecord) -> u32 {
        let index = if self.free == FREE_END {
            self.len
        } else {
            self.free & !FREE
        };
        let (chunk, at) = place(index);
        if chunk == self.chunks.len() {
            self.chunks.push(Arc::new(Chunk::EMPTY));
        }
        let chunk = Arc::make_mut(&mut self.chunks[chunk]);
        if index == self.len {
            self.len += 1;
        } else {
            self.free = chunk.parent[at];
        }
        chunk.set(at, record);
        index
    }

    /// Frees a live record.
    pub(super) fn remove(&mut self, index: u32) {
        let (chunk, at) = place(index);
        Arc::make_mut(&mut self.chunks[chunk]).parent[at] = self.free;
        self.free = FREE | index;
    }

    /// Appends a chunk from a snapshot, with `None` for free records. Only valid in order and
    /// before any other change.
    pub(super) fn push_chunk(&mut self, records: &[Option<BlockRecord>]) {
        let mut chunk = Chunk::EMPTY;
        for (at, record) in records.iter().enumerate() {
            match record {
                Some(record) => chunk.set(at, *record),
                None => {
                    chunk.parent[at] = self.free;
                    self.free = FREE | (self.len + at as u32);
                }
            }
        }
        self.len += records.len() as u32;
        self.chunks.push(Arc::new(chunk));
    }

    /// Iterates over the blocks at the heads of the view's segments.
    pub(super) fn heads(&self) -> impl Iterator<Item = BlockHash> {
        self.hashes(|chunk, at| chunk.parent[at] >> PARENT_BITS == 0)
    }

    /// Iterates over the blocks at which leases end.
    pub(super) fn tips(&self) -> impl Iterator<Item = BlockHash> {
        self.hashes(|chunk, at| chunk.leases[at] > 0)
    }

    /// Iterates over the blocks of the live records that satisfy `is_wanted`.
    fn hashes(&self, is_wanted: fn(&Chunk, usize) -> bool) -> impl Iterator<Item = BlockHash> {
        self.chunks.iter().rev().flat_map(move |chunk| {
            let wanted = (0..CHUNK_RECORDS).rev();
            let wanted =
                wanted.filter(move |&at| chunk.parent[at] & FREE == 0 && is_wanted(chunk, at));
            wanted.map(|at| BlockHash(chunk.hash[at]))
        })
    }

    /// Iterates over live records with their indexes, ascending.
    pub(super) fn live(&self) -> impl Iterator<Item = (u32, BlockRecord)> {
        (0..self.len).filter_map(|index| Some((index, self.try_get(index)?)))
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let chunk = size_of::<Chunk>() + 2 * size_of::<usize>();
        self.chunks.len() * chunk + self.chunks.capacity() * size_of::<Arc<Chunk>>()
    }
}

impl HashLookup for Arena {
    #[inline]
    fn hash(&self, record: u32) -> BlockHash {
        Arena::hash(self, record)
    }
}

fn place(index: u32) -> (usize, usize) {
    (
        index as usize / CHUNK_RECORDS,
        index as usize % CHUNK_RECORDS,
    )
}
