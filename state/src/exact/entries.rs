//! The entries of one rank's cache, in chunks that snapshots share and the writer copies on first
//! change.
//!
//! An entry is a block under the engine's hash, with the router's hash, its parent and the number
//! of copies. Entries are addressed by index. The children of a block form a linked list, so that
//! everything behind a block is found without scanning the rest. Free entries form a list of their
//! own.

use std::sync::Arc;

use crate::ids::{BlockHash, EngineHash};
use crate::ownership::index::HashLookup;

/// Entries per chunk. Copying a chunk takes about four microseconds.
pub(super) const CHUNK_ENTRIES: usize = 1024;
/// "No entry".
pub(super) const NONE: u32 = u32::MAX;
/// Upper bound of indexes, which have 24 bits in the hash index.
pub(super) const ENTRIES_MAX: u32 = (1 << 24) - 2;
/// In place of a parent: the entry is free, and `next` is the next free one.
const FREE: u32 = u32::MAX - 1;

/// A block in the engine's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CachedBlock {
    /// The engine's hash of the block.
    pub(super) engine: EngineHash,
    /// The router's hash of the block.
    pub(super) router: BlockHash,
    /// Index of the parent; [`NONE`] for a first block.
    pub(super) parent: u32,
    /// Head of the list of children.
    pub(super) first_child: u32,
    /// Next and previous entry in the parent's list of children. Entries without a parent are in no
    /// list.
    pub(super) next: u32,
    pub(super) prev: u32,
    /// Number of physical blocks that hold it. 0: it is gone, but kept because others follow it.
    pub(super) copies: u32,
    /// A foreign block is never owned; see "Blocks that only look alike" in the module
    /// documentation.
    pub(super) is_foreign: bool,
    /// Whether the block is reported to [`crate::ownership`].
    pub(super) is_reported: bool,
}

impl CachedBlock {
    const EMPTY: Self = Self {
        engine: EngineHash(0),
        router: BlockHash(0),
        parent: FREE,
        first_child: NONE,
        next: NONE,
        prev: NONE,
        copies: 0,
        is_foreign: false,
        is_reported: false,
    };
}

pub(super) type BlockChunk = [CachedBlock; CHUNK_ENTRIES];

/// All entries of one rank; see the module documentation.
#[derive(Clone)]
pub(super) struct CachedBlocks {
    chunks: Vec<Arc<BlockChunk>>,
    /// Number of entries allocated so far, including free ones.
    len: u32,
    /// Head of the free list.
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

    /// Returns an entry in use. `index` must refer to one.
    pub(super) fn get(&self, index: u32) -> &CachedBlock {
        &self.chunks[index as usize / CHUNK_ENTRIES][index as usize % CHUNK_ENTRIES]
    }

    /// Returns an entry in use, mutably.
    pub(super) fn get_mut(&mut self, index: u32) -> &mut CachedBlock {
        let chunk = &mut self.chunks[index as usize / CHUNK_ENTRIES];
        &mut Arc::make_mut(chunk)[index as usize % CHUNK_ENTRIES]
    }

    /// Stores an entry and returns its index; `None` if there are too many.
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

    /// Frees an entry.
    pub(super) fn remove(&mut self, index: u32) {
        let next = self.free;
        *self.get_mut(index) = CachedBlock {
            next,
            ..CachedBlock::EMPTY
        };
        self.free = index;
    }

    /// Appends an entry, or a free one, in the order of an image. Returns `false` if there are too
    /// many.
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

    /// Iterates over entries in use with their indexes, ascending.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &CachedBlock)> {
        (0..self.len).filter_map(|index| Some((index, self.present(index)?)))
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.chunks.len() * (size_of::<BlockChunk>() + 2 * size_of::<usize>())
            + self.chunks.capacity() * size_of::<Arc<BlockChunk>>()
    }
}

/// Lookup by the engine's hash.
pub(super) struct ByEngine<'a>(pub(super) &'a CachedBlocks);

impl HashLookup for ByEngine<'_> {
    #[inline]
    fn hash(&self, record: u32) -> BlockHash {
        BlockHash(self.0.get(record).engine.0)
    }
}

/// Lookup by the router's hash.
pub(super) struct ByRouter<'a>(pub(super) &'a CachedBlocks);

impl HashLookup for ByRouter<'_> {
    #[inline]
    fn hash(&self, record: u32) -> BlockHash {
        self.0.get(record).router
    }
}
