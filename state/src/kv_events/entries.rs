//! The entries of one rank's cache, in chunks that snapshots share and the writer copies on first
//! change.
//!
//! An entry is a block under the engine's hash, with the router's hash, its parent and the number
//! of copies. Entries are addressed by index. The children of a block form a linked list, so that
//! everything behind a block is found without scanning the rest. Free entries form another list.

use std::sync::Arc;

use crate::ids::{BlockHash, EngineHash};
use crate::kv_events::tiers::{LOWER_TIERS, LowerTier};
use crate::ownership::index::HashLookup;

/// Number of entries per chunk. Copying a chunk takes about four microseconds.
pub(super) const CHUNK_ENTRIES: usize = 1024;
/// Index that stands for no entry.
pub(super) const NONE: u32 = u32::MAX;
/// Maximum number of entries, limited by the 24 bits of an index in the hash index.
pub(super) const ENTRIES_MAX: u32 = (1 << 24) - 2;
/// Value of `parent` that marks an entry as free; its `next` is the next free entry.
const FREE: u32 = u32::MAX - 1;

/// A block of the engine's cache, as one entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CachedBlock {
    /// Hash of the block at the engine.
    pub(super) engine: EngineHash,
    /// Hash of the block at the router.
    pub(super) router: BlockHash,
    /// Index of the parent block; [`NONE`] for the first block of a prompt.
    pub(super) parent: u32,
    /// Index of the first entry in the list of children, or [`NONE`].
    pub(super) first_child: u32,
    /// Indexes of the next and previous entry in the parent's list of children, or [`NONE`].
    /// Entries without a parent are in no list.
    pub(super) next: u32,
    pub(super) prev: u32,
    /// Number of physical blocks of the GPU that hold the block.
    pub(super) copies: u32,
    /// Number of copies on each tier below the GPU. Saturates, at 1 below the host's memory.
    pub(super) lower: [u8; LOWER_TIERS],
    /// [`FOREIGN`], and one bit for each level at which the block is reported.
    pub(super) flags: u8,
}

/// Flag of a foreign block, which is never owned; see "Blocks that only look alike" in the
/// documentation of [`crate::kv_events`].
const FOREIGN: u8 = 1 << 7;

impl CachedBlock {
    const EMPTY: Self = Self {
        engine: EngineHash(0),
        router: BlockHash(0),
        parent: FREE,
        first_child: NONE,
        next: NONE,
        prev: NONE,
        copies: 0,
        lower: [0; LOWER_TIERS],
        flags: 0,
    };

    /// Creates a block without copies behind the entry `parent`.
    pub(super) fn new(engine: EngineHash, router: BlockHash, parent: u32) -> Self {
        Self {
            engine,
            router,
            parent,
            ..Self::EMPTY
        }
    }

    pub(super) fn is_foreign(&self) -> bool {
        self.flags & FOREIGN != 0
    }

    pub(super) fn set_foreign(&mut self) {
        self.flags |= FOREIGN;
    }

    /// Whether the block is reported at `level`: to [`crate::ownership`] at level 0, to
    /// [`crate::kv_events::tiers`] at others.
    pub(super) fn is_reported(&self, level: usize) -> bool {
        self.flags & 1 << level != 0
    }

    pub(super) fn set_reported(&mut self, level: usize, is_reported: bool) {
        self.flags = self.flags & !(1 << level) | u8::from(is_reported) << level;
    }

    /// Whether a tier up to `level` holds the block.
    pub(super) fn is_held(&self, level: usize) -> bool {
        self.copies > 0 || self.lower[..level].iter().any(|copies| *copies > 0)
    }

    /// Whether no tier holds the block. It is then kept because others follow it.
    pub(super) fn is_gone(&self) -> bool {
        !self.is_held(LOWER_TIERS)
    }

    pub(super) fn is_on(&self, tier: LowerTier) -> bool {
        self.lower[tier.at()] > 0
    }
}

pub(super) type BlockChunk = [CachedBlock; CHUNK_ENTRIES];

/// All entries of one rank; see the module documentation.
#[derive(Clone)]
pub(super) struct CachedBlocks {
    chunks: Vec<Arc<BlockChunk>>,
    /// Number of entries allocated so far, including free ones.
    len: u32,
    /// Index of the first free entry, or [`NONE`].
    free: u32,
}

impl CachedBlocks {
    pub(super) fn new() -> Self {
        Self {
            chunks: Vec::new(),
            len: 0,
            free: NONE,
        }
    }

    /// Returns the number of entries allocated so far, including free ones.
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// Returns the entry at `index`, which must be in use.
    pub(super) fn get(&self, index: u32) -> &CachedBlock {
        &self.chunks[index as usize / CHUNK_ENTRIES][index as usize % CHUNK_ENTRIES]
    }

    /// Returns the entry at `index` for a change. Copies its chunk if a snapshot shares it.
    pub(super) fn get_mut(&mut self, index: u32) -> &mut CachedBlock {
        let chunk = &mut self.chunks[index as usize / CHUNK_ENTRIES];
        &mut Arc::make_mut(chunk)[index as usize % CHUNK_ENTRIES]
    }

    /// Stores an entry and returns its index; `None` if all [`ENTRIES_MAX`] entries are in use.
    pub(super) fn insert(&mut self, entry: CachedBlock) -> Option<u32> {
        if self.free != NONE {
            let index = self.free;
            self.free = self.get(index).next;
            *self.get_mut(index) = entry;
            return Some(index);
        }
        let index = self.len;
        if index >= ENTRIES_MAX {
            return None;
        }
        if index as usize / CHUNK_ENTRIES == self.chunks.len() {
            self.chunks
                .push(Arc::new([CachedBlock::EMPTY; CHUNK_ENTRIES]));
        }
        self.len += 1;
        *self.get_mut(index) = entry;
        Some(index)
    }

    /// Frees the entry at `index`.
    pub(super) fn remove(&mut self, index: u32) {
        let next = self.free;
        *self.get_mut(index) = CachedBlock {
            next,
            ..CachedBlock::EMPTY
        };
        self.free = index;
    }

    /// Appends an entry of an image, or a free one for `None`, at the next index. Returns `false`
    /// if there are too many.
    pub(super) fn push(&mut self, entry: Option<CachedBlock>) -> bool {
        let free = std::mem::replace(&mut self.free, NONE);
        let index = self.insert(entry.unwrap_or(CachedBlock::EMPTY));
        self.free = free;
        if let (Some(index), None) = (index, entry) {
            self.remove(index);
        }
        index.is_some()
    }

    /// Returns the entry at `index` if it is in use.
    pub(super) fn present(&self, index: u32) -> Option<&CachedBlock> {
        (index < self.len)
            .then(|| self.get(index))
            .filter(|entry| entry.parent != FREE)
    }

    /// Iterates over the entries in use and their indexes, in ascending order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &CachedBlock)> {
        (0..self.len).filter_map(|index| Some((index, self.present(index)?)))
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.chunks.len() * (size_of::<BlockChunk>() + 2 * size_of::<usize>())
            + self.chunks.capacity() * size_of::<Arc<BlockChunk>>()
    }
}

/// Lookup of entries by the engine's hash.
pub(super) struct ByEngine<'a>(pub(super) &'a CachedBlocks);

impl HashLookup for ByEngine<'_> {
    #[inline]
    fn hash(&self, record: u32) -> BlockHash {
        BlockHash(self.0.get(record).engine.0)
    }
}

/// Lookup of entries by the router's hash.
pub(super) struct ByRouter<'a>(pub(super) &'a CachedBlocks);

impl HashLookup for ByRouter<'_> {
    #[inline]
    fn hash(&self, record: u32) -> BlockHash {
        self.0.get(record).router
    }
}
