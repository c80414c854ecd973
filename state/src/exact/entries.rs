//! The entries of one rank's cache, in chunks that a snapshot shares and the writer copies on first
//! change.
//!
//! An entry is a block as the engine names it, with its hash here, the block before it and how many
//! copies there are. Entries are named by index; those that follow one block form a list, so that
//! what hangs on a block is found without looking at the rest. A free entry joins a list of its own.

use std::sync::Arc;

use crate::ids::{BlockHash, EngineHash};
use crate::ownership::index::HashLookup;

/// Entries of one chunk; copying one takes some four microseconds.
pub(super) const CHUNK_ENTRIES: usize = 1024;
/// "No entry".
pub(super) const NONE: u32 = u32::MAX;
/// Indexes stay below: the index of hashes has 24 bits for them.
pub(super) const ENTRIES_MAX: u32 = (1 << 24) - 2;
/// In the place of a parent: the entry is free, and `next` is the next free one.
const FREE: u32 = u32::MAX - 1;

/// A block of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CachedBlock {
    /// What the engine calls it.
    pub(super) engine: EngineHash,
    /// What it is called here.
    pub(super) router: BlockHash,
    /// The block before it; [`NONE`] for a first block.
    pub(super) parent: u32,
    /// The first of the list of those that follow it.
    pub(super) first_child: u32,
    /// The next and the one before in its own parent's list. Entries without parent are in none.
    pub(super) next: u32,
    pub(super) prev: u32,
    /// Physical blocks that hold it. 0: it is gone, and known because others follow it.
    pub(super) copies: u32,
    /// Never owned: see the module's text on blocks that only look alike.
    pub(super) is_foreign: bool,
    /// Whether it is reported to [`crate::ownership`].
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

/// See the module's text.
#[derive(Clone)]
pub(super) struct CachedBlocks {
    chunks: Vec<Arc<BlockChunk>>,
    /// Entries handed out so far, free ones included.
    len: u32,
    /// First free one.
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

    /// Entries handed out so far, free ones included.
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// A present entry. `index` must be that of one.
    pub(super) fn get(&self, index: u32) -> &CachedBlock {
        &self.chunks[index as usize / CHUNK_ENTRIES][index as usize % CHUNK_ENTRIES]
    }

    /// To change a present entry.
    pub(super) fn get_mut(&mut self, index: u32) -> &mut CachedBlock {
        let chunk = &mut self.chunks[index as usize / CHUNK_ENTRIES];
        &mut Arc::make_mut(chunk)[index as usize % CHUNK_ENTRIES]
    }

    /// Stores an entry; answers its index, or `None` when there are too many.
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

    /// Frees a present entry.
    pub(super) fn remove(&mut self, index: u32) {
        let next = self.free;
        *self.get_mut(index) = CachedBlock {
            next,
            ..CachedBlock::EMPTY
        };
        self.free = index;
    }

    /// Appends an entry, or a free one, as an image has them in order. `false`: there are too many.
    pub(super) fn push(&mut self, entry: Option<CachedBlock>) -> bool {
        let free = std::mem::replace(&mut self.free, NONE);
        let index = self.insert(entry.unwrap_or(CachedBlock::EMPTY));
        self.free = free;
        if let (Some(index), None) = (index, entry) {
            self.remove(index);
        }
        index.is_some()
    }

    /// The present entry at `index`.
    pub(super) fn present(&self, index: u32) -> Option<&CachedBlock> {
        (index < self.len)
            .then(|| self.get(index))
            .filter(|entry| entry.parent != FREE)
    }

    /// Present entries with their indexes, ascending by index.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &CachedBlock)> {
        (0..self.len).filter_map(|index| Some((index, self.present(index)?)))
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.chunks.len() * (size_of::<BlockChunk>() + 2 * size_of::<usize>())
            + self.chunks.capacity() * size_of::<Arc<BlockChunk>>()
    }
}

/// Entries by the engine's hash.
pub(super) struct ByEngine<'a>(pub(super) &'a CachedBlocks);

impl HashLookup for ByEngine<'_> {
    #[inline]
    fn hash(&self, record: u32) -> BlockHash {
        BlockHash(self.0.get(record).engine.0)
    }
}

/// Entries by the router's hash.
pub(super) struct ByRouter<'a>(pub(super) &'a CachedBlocks);

impl HashLookup for ByRouter<'_> {
    #[inline]
    fn hash(&self, record: u32) -> BlockHash {
        self.0.get(record).router
    }
}
