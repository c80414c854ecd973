//! The model's cache of a backend, as implied by its leases. Eviction takes the least recently
//! released path first, from its end.

use std::collections::BTreeMap;

use state::command::LeaseOutcome;
use state::ids::BlockHash;

/// Blocks that the model believes a backend to own.
#[derive(Debug, Clone)]
pub struct ModelCache {
    /// Blocks by hash.
    pub blocks: BTreeMap<BlockHash, ModelBlock>,
    /// Maximum number of blocks, exceeded only while none can be evicted; `None` if unbounded.
    pub capacity: Option<u32>,
    /// Whether the contents follow from leases alone, so that the model knows them.
    pub is_followed: bool,
    releases: u64,
}

/// One block of the model's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelBlock {
    /// Block before this one; `None` for the first block of a prompt.
    pub parent: Option<BlockHash>,
    /// Number of leases that end at this block.
    pub leases: u32,
    children: u32,
    /// Number of the last release that ended at this block or at a later block removed since; 0 if
    /// there was none.
    released: u64,
}

impl Default for ModelCache {
    fn default() -> Self {
        Self::new(None)
    }
}

impl ModelCache {
    /// Creates an empty cache with this capacity in blocks.
    #[must_use]
    pub fn new(capacity: Option<u32>) -> Self {
        Self {
            blocks: BTreeMap::new(),
            capacity,
            is_followed: true,
            releases: 0,
        }
    }

    pub(super) fn owns(&self, block: BlockHash) -> bool {
        self.blocks.contains_key(&block)
    }

    pub(super) fn resize(&mut self, capacity: Option<u32>) {
        self.capacity = capacity;
        self.trim(None);
    }

    /// Opens a lease that ends at `tip` or at the last block of `new` behind it. Returns the
    /// lease's tip and the number of inserted blocks.
    pub(super) fn acquire(
        &mut self,
        tip: Option<BlockHash>,
        new: &[BlockHash],
    ) -> (Option<BlockHash>, u32) {
        let (end, inserted) = self.walk(tip, new);
        self.pin(end);
        (end, inserted)
    }

    /// Extends a lease from `tip` by the blocks `new`. Returns the lease's new tip and the number
    /// of inserted blocks.
    pub(super) fn extend(
        &mut self,
        tip: Option<BlockHash>,
        new: &[BlockHash],
    ) -> (Option<BlockHash>, u32) {
        let (end, inserted) = self.walk(tip, new);
        if end != tip {
            self.pin(end);
            self.unpin(tip);
        }
        (end, inserted)
    }

    /// Ends a lease at `tip`. `is_bringer` states whether the lease inserted blocks.
    pub(super) fn release(&mut self, tip: BlockHash, outcome: LeaseOutcome, is_bringer: bool) {
        self.unpin(Some(tip));
        let Some(block) = self.blocks.get_mut(&tip) else {
            return;
        };
        let is_touched = match outcome {
            LeaseOutcome::Kept => true,
            LeaseOutcome::KeptUntouched => is_bringer || block.released == 0,
            LeaseOutcome::Discarded => false,
        };
        if is_touched {
            self.releases += 1;
            block.released = self.releases;
        }
        if outcome == LeaseOutcome::Discarded {
            self.give_back(tip);
        }
        self.trim(None);
    }

    fn walk(&mut self, from: Option<BlockHash>, chain: &[BlockHash]) -> (Option<BlockHash>, u32) {
        let (mut tip, mut inserted) = (from, 0);
        for &hash in chain {
            match self.blocks.get(&hash) {
                Some(block) if block.parent == tip => {}
                // The block has another parent: the chain contradicts itself.
                Some(_) => break,
                None => {
                    if let Some(parent) = tip.and_then(|tip| self.blocks.get_mut(&tip)) {
                        parent.children += 1;
                    }
                    let block = ModelBlock {
                        parent: tip,
                        leases: 0,
                        children: 0,
                        released: 0,
                    };
                    self.blocks.insert(hash, block);
                    inserted += 1;
                }
            }
            tip = Some(hash);
        }
        self.trim(tip);
        (tip, inserted)
    }

    fn pin(&mut self, tip: Option<BlockHash>) {
        if let Some(block) = tip.and_then(|tip| self.blocks.get_mut(&tip)) {
            block.leases += 1;
        }
    }

    fn unpin(&mut self, tip: Option<BlockHash>) {
        if let Some(block) = tip.and_then(|tip| self.blocks.get_mut(&tip)) {
            block.leases = block.leases.saturating_sub(1);
        }
    }

    /// Evicts blocks beyond the capacity. Spares the block `walking`, blocks with leases, and
    /// blocks before others.
    fn trim(&mut self, walking: Option<BlockHash>) {
        let capacity = self.capacity.map_or(usize::MAX, |blocks| blocks as usize);
        while self.blocks.len() > capacity {
            let free = self.blocks.iter().filter(|(hash, block)| {
                block.children == 0 && block.leases == 0 && Some(**hash) != walking
            });
            let Some((&first, _)) = free.min_by_key(|(_, block)| block.released) else {
                return;
            };
            self.take(first);
        }
    }

    /// Removes the blocks from `tip` upwards that no lease holds and no release has kept.
    fn give_back(&mut self, tip: BlockHash) {
        let mut at = Some(tip);
        while let Some(hash) = at {
            let Some(block) = self.blocks.get(&hash) else {
                return;
            };
            if block.children > 0 || block.leases > 0 || block.released > 0 {
                return;
            }
            at = block.parent;
            self.take(hash);
        }
    }

    fn take(&mut self, hash: BlockHash) {
        let Some(gone) = self.blocks.remove(&hash) else {
            return;
        };
        if let Some(parent) = gone.parent.and_then(|parent| self.blocks.get_mut(&parent)) {
            parent.children -= 1;
            parent.released = parent.released.max(gone.released);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(hashes: &[u64]) -> Vec<BlockHash> {
        hashes.iter().copied().map(BlockHash).collect()
    }

    fn owned(cache: &ModelCache) -> Vec<u64> {
        cache.blocks.keys().map(|hash| hash.0).collect()
    }

    #[test]
    fn the_oldest_released_path_is_evicted_from_its_end() {
        let mut cache = ModelCache::new(Some(4));
        for (first, second) in [(1, 2), (3, 4)] {
            let (tip, inserted) = cache.acquire(None, &blocks(&[first, second]));
            assert_eq!(inserted, 2);
            cache.release(tip.unwrap(), LeaseOutcome::Kept, true);
        }
        let (tip, _) = cache.acquire(Some(BlockHash(1)), &[]);
        cache.release(tip.unwrap(), LeaseOutcome::Kept, false);
        let (_, inserted) = cache.acquire(None, &blocks(&[5]));
        assert_eq!((owned(&cache), inserted), (vec![1, 3, 4, 5], 1));
    }

    #[test]
    fn discarded_blocks_are_returned_and_leased_ones_stay() {
        let mut cache = ModelCache::new(Some(2));
        let (held, _) = cache.acquire(None, &blocks(&[1, 2, 3]));
        assert_eq!(owned(&cache), [1, 2, 3]);
        let (other, inserted) = cache.acquire(Some(BlockHash(1)), &blocks(&[9]));
        cache.release(other.unwrap(), LeaseOutcome::Discarded, inserted > 0);
        assert_eq!(owned(&cache), [1, 2, 3]);
        cache.release(held.unwrap(), LeaseOutcome::Kept, true);
        assert_eq!(owned(&cache), [1, 2]);
    }
}
