//! The block pool of a vLLM v1 engine: finds, allocates, caches and evicts blocks.
//!
//! Source: vLLM `v1/core/block_pool.py`, `kv_cache_manager.py` and
//! `single_type_kv_cache_manager.py`. Blocks have a reference count. Blocks without a reference
//! wait in a free queue, still cached. New blocks are taken from its head, which evicts their
//! content. A finished request appends its blocks to the tail in reverse, so that the deepest are
//! evicted first. Blocks without a hash go to the head instead (vLLM 0.24 and later). Only full
//! blocks are cached. One hash may be in several physical blocks, for example because a prompt of
//! exactly `k` blocks recomputes its last block. Block 0 is reserved, like vLLM's null block.
//! Changes of the cache are recorded as [`BlockEvent`]s, in vLLM's order.

use std::collections::HashMap;
use std::ops::Range;

use super::text::EngineHash;

const NONE: u32 = u32::MAX;

/// A change of the cache, as in vLLM's KV events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BlockEvent {
    /// Blocks became full and can be hit from now on.
    Stored {
        /// Chained hashes of the blocks, in prompt order.
        hashes: Vec<EngineHash>,
        /// Hash of the block before the first; `None` at the start of a prompt.
        parent: Option<EngineHash>,
    },
    /// One physical block was evicted, to be used for other content.
    Removed {
        /// Hash of the evicted content. Another copy may still be cached.
        hash: EngineHash,
    },
    /// The whole cache was reset.
    Cleared,
}

/// A physical block: its reference count, its content and its place in the free queue.
#[derive(Debug, Clone)]
struct Block {
    references: u32,
    hash: Option<EngineHash>,
    /// Next physical block with the same hash.
    next_copy: u32,
    /// Previous block in the free queue. Like `next`, meaningless outside it.
    previous: u32,
    next: u32,
}

/// The engine's KV cache blocks, with an index by hash and the free queue.
#[derive(Debug, Clone)]
pub struct BlockPool {
    block_tokens: u32,
    blocks: Vec<Block>,
    /// First physical block of each cached hash.
    cached: HashMap<EngineHash, u32>,
    head: u32,
    tail: u32,
    free: u32,
    events: Vec<BlockEvent>,
}

/// Blocks that a request holds, in prompt order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HeldBlocks {
    blocks: Vec<u32>,
    /// Number of leading blocks that are registered in the cache.
    registered: usize,
}

impl HeldBlocks {
    /// Returns the number of blocks held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Returns whether the request holds no block.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }
}

/// Cached prefix of a prompt, found but not yet allocated.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PrefixHit {
    blocks: Vec<u32>,
}

impl PrefixHit {
    /// Returns the number of tokens in the cached prefix, which need not be computed.
    #[must_use]
    pub fn tokens(&self, pool: &BlockPool) -> u32 {
        count(self.blocks.len()) * pool.block_tokens
    }
}

impl BlockPool {
    /// Creates an empty pool of `blocks` blocks of `block_tokens` tokens.
    ///
    /// # Panics
    /// If `blocks` is less than two or `block_tokens` is zero.
    #[must_use]
    pub fn new(blocks: u32, block_tokens: u32) -> Self {
        assert!(
            blocks >= 2 && block_tokens > 0,
            "pool of {blocks} blocks of {block_tokens} tokens"
        );
        let empty = Block {
            references: 0,
            hash: None,
            next_copy: NONE,
            previous: NONE,
            next: NONE,
        };
        let mut pool = Self {
            block_tokens,
            blocks: vec![empty; blocks as usize],
            cached: HashMap::new(),
            head: NONE,
            tail: NONE,
            free: 0,
            events: Vec::new(),
        };
        for block in 1..blocks {
            pool.append_free(block);
        }
        pool
    }

    /// Returns the number of tokens per block.
    #[must_use]
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Returns the number of blocks that requests can hold: all but the reserved one.
    #[must_use]
    pub fn usable_blocks(&self) -> u32 {
        count(self.blocks.len()) - 1
    }

    /// Returns the number of blocks without a reference.
    #[must_use]
    pub fn free_blocks(&self) -> u32 {
        self.free
    }

    /// Returns the number of distinct cached hashes.
    #[must_use]
    pub fn cached_hashes(&self) -> usize {
        self.cached.len()
    }

    /// Finds the longest cached prefix of a sequence of `tokens` tokens with these block `hashes`.
    /// The last token is always computed, so at most `tokens - 1` tokens hit.
    #[must_use]
    pub fn find(&self, hashes: &[EngineHash], tokens: u32) -> PrefixHit {
        let most = (tokens.saturating_sub(1) / self.block_tokens) as usize;
        let found = |hash| self.cached.get(hash).copied();
        PrefixHit {
            blocks: hashes.iter().take(most).map_while(found).collect(),
        }
    }

    /// Allocates the blocks that `held` lacks for a request's first `tokens` tokens, those of `hit`
    /// first. Returns `false` and takes nothing if too few blocks are free.
    ///
    /// # Panics
    /// If `hit` has blocks and the request already holds some.
    pub fn allocate(&mut self, held: &mut HeldBlocks, hit: &PrefixHit, tokens: u32) -> bool {
        assert!(
            hit.blocks.is_empty() || held.is_empty(),
            "a hit of {} for a request that holds {}",
            hit.blocks.len(),
            held.len()
        );
        let wanted = tokens.div_ceil(self.block_tokens) as usize;
        let new = wanted.saturating_sub(held.len() + hit.blocks.len());
        let is_idle = |block: &&u32| self.blocks[**block as usize].references == 0;
        let from_queue = hit.blocks.iter().filter(is_idle).count();
        if new + from_queue > self.free as usize {
            return false;
        }
        for &block in &hit.blocks {
            self.reference(block);
        }
        held.blocks.extend_from_slice(&hit.blocks);
        held.registered += hit.blocks.len();
        for _ in 0..new {
            let block = self.take_oldest();
            held.blocks.push(block);
        }
        true
    }

    /// Registers the request's new full blocks, given `tokens` scheduled tokens and the known
    /// `hashes`. Returns the range of these blocks, if any, and records a [`BlockEvent::Stored`].
    pub fn register(
        &mut self,
        held: &mut HeldBlocks,
        hashes: &[EngineHash],
        tokens: u32,
    ) -> Option<Range<usize>> {
        let full = ((tokens / self.block_tokens) as usize)
            .min(hashes.len())
            .min(held.len());
        if full <= held.registered {
            return None;
        }
        let new = held.registered..full;
        for index in new.clone() {
            self.insert_copy(held.blocks[index], hashes[index]);
        }
        self.events.push(BlockEvent::Stored {
            hashes: hashes[new.clone()].to_vec(),
            parent: new.start.checked_sub(1).map(|parent| hashes[parent]),
        });
        held.registered = full;
        Some(new)
    }

    /// Resets the cache. Returns `false` and does nothing while a request holds a block.
    pub fn reset(&mut self) -> bool {
        if self.free != self.usable_blocks() {
            return false;
        }
        for block in &mut self.blocks {
            block.hash = None;
            block.next_copy = NONE;
        }
        self.cached.clear();
        self.events.push(BlockEvent::Cleared);
        true
    }

    /// Returns the cached hashes, in no particular order.
    pub fn hashes(&self) -> impl Iterator<Item = EngineHash> {
        self.cached.keys().copied()
    }

    /// Releases all blocks of a request, deepest first. Blocks stay cached until they are taken for
    /// other content; unregistered blocks are taken first.
    pub fn release(&mut self, held: &mut HeldBlocks) {
        for block in std::mem::take(held).blocks.into_iter().rev() {
            let Block {
                references, hash, ..
            } = &mut self.blocks[block as usize];
            *references -= 1;
            match (*references, *hash) {
                (0, Some(_)) => self.append_free(block),
                (0, None) => self.prepend_free(block),
                _ => {}
            }
        }
    }

    /// Returns the changes of the cache since the last call.
    pub fn take_events(&mut self) -> Vec<BlockEvent> {
        std::mem::take(&mut self.events)
    }

    fn reference(&mut self, block: u32) {
        if self.blocks[block as usize].references == 0 {
            self.unlink(block);
        }
        self.blocks[block as usize].references += 1;
    }

    fn take_oldest(&mut self) -> u32 {
        let block = self.head;
        assert!(
            block != NONE,
            "free queue ran dry with {} counted free",
            self.free
        );
        self.reference(block);
        if let Some(hash) = self.blocks[block as usize].hash.take() {
            self.remove_copy(block, hash);
            self.events.push(BlockEvent::Removed { hash });
        }
        block
    }

    fn insert_copy(&mut self, block: u32, hash: EngineHash) {
        self.blocks[block as usize].hash = Some(hash);
        self.blocks[block as usize].next_copy = NONE;
        let mut last = *self.cached.entry(hash).or_insert(block);
        if last == block {
            return;
        }
        while self.blocks[last as usize].next_copy != NONE {
            last = self.blocks[last as usize].next_copy;
        }
        self.blocks[last as usize].next_copy = block;
    }

    fn remove_copy(&mut self, block: u32, hash: EngineHash) {
        let after = std::mem::replace(&mut self.blocks[block as usize].next_copy, NONE);
        let first = self.cached[&hash];
        if first == block {
            if after == NONE {
                self.cached.remove(&hash);
            } else {
                self.cached.insert(hash, after);
            }
            return;
        }
        let mut before = first;
        while self.blocks[before as usize].next_copy != block {
            before = self.blocks[before as usize].next_copy;
        }
        self.blocks[before as usize].next_copy = after;
    }

    fn append_free(&mut self, block: u32) {
        let last = self.tail;
        self.blocks[block as usize].previous = last;
        self.blocks[block as usize].next = NONE;
        if last == NONE {
            self.head = block;
        } else {
            self.blocks[last as usize].next = block;
        }
        self.tail = block;
        self.free += 1;
    }

    fn prepend_free(&mut self, block: u32) {
        let first = self.head;
        self.blocks[block as usize].previous = NONE;
        self.blocks[block as usize].next = first;
        if first == NONE {
            self.tail = block;
        } else {
            self.blocks[first as usize].previous = block;
        }
        self.head = block;
        self.free += 1;
    }

    fn unlink(&mut self, block: u32) {
        let Block { previous, next, .. } = self.blocks[block as usize];
        if previous == NONE {
            self.head = next;
        } else {
            self.blocks[previous as usize].next = next;
        }
        if next == NONE {
            self.tail = previous;
        } else {
            self.blocks[next as usize].previous = previous;
        }
        self.free -= 1;
    }
}

fn count(blocks: usize) -> u32 {
    u32::try_from(blocks).expect("block numbers are u32")
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;
