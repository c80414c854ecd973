//! One backend's blocks: a forest of records, with the leaves that may be evicted in order.
//!
//! The story of pins and epochs, which gives vLLM's order at constant cost:
//! - A lease touches its tip only. A block is held while a lease ends at it or a block after it is
//!   owned; so holding the tip holds the path.
//! - A release gives the tip the backend's next epoch. A block's true epoch is the highest of its
//!   own and its descendants', because a release covers the whole path; evicting a leaf hands its
//!   epoch to its parent, which keeps the true epoch of what remains.
//! - Only free leaves can go, and they stand in a set by epoch. The least recently released goes
//!   first, the deepest first within one release, as a parent joins the set when its last child left.
//!
//! At any time an epoch above 0 is carried by one record of a backend at the most: it is given to one
//! tip, and passed on only by a record that ends. So the order has no ties, and the index of a record,
//! which may differ between replicas, decides nothing. A free leaf of epoch 0 does not exist: nobody
//! ever kept it, so it went with the last lease that was discarded over it.
//!
//! What the engine itself reports is held by its reports (`reported`): it leaves when the engine says
//! so, whoever pins it, and counts towards no capacity.

use std::collections::BTreeSet;

use crate::ids::{BlockHash, Slot};
use crate::ownership::arena::{Arena, BlockRecord, EPOCH_MAX, NO_RECORD};
use crate::ownership::digest;
use crate::ownership::index::RecordIndex;
use crate::planted::{self, Bug};
use crate::view::ViewWriter;

/// Blocks whose memory is loaded together before they are changed.
pub(super) const GROUP_BLOCKS: usize = 32;

/// What all backends share.
pub(super) struct SharedIndex {
    /// The published index.
    pub(super) view: ViewWriter,
    /// Blocks owned, over all backends.
    pub(super) owned: u64,
    /// Most of them.
    pub(super) owned_max: u64,
}

/// See the module's text.
pub(super) struct BackendBlocks {
    pub(super) slot: Slot,
    /// Blocks; `None`: unknown, unbounded.
    pub(super) capacity: Option<u32>,
    /// Releases so far.
    pub(super) epoch: u64,
    /// Sum of the records' digests: kept per backend, so that dropping one takes nothing apart.
    pub(super) sum: u128,
    pub(super) arena: Arena,
    pub(super) index: RecordIndex,
    /// `epoch << 24 | record` of every free leaf.
    pub(super) evictable: BTreeSet<u64>,
    /// Blocks owned.
    pub(super) owned: u32,
    /// Of these, how many the engine reports.
    pub(super) reported: u32,
}

/// Where a walk along a chain ended.
pub(super) struct Walk {
    /// The last record of the chain that is owned.
    pub(super) tip: u32,
    /// Records added.
    pub(super) inserted: u32,
}

impl BackendBlocks {
    pub(super) fn new(slot: Slot, capacity: Option<u32>) -> Self {
        Self {
            slot,
            capacity,
            epoch: 0,
            sum: 0,
            arena: Arena::new(),
            index: RecordIndex::new(),
            evictable: BTreeSet::new(),
            owned: 0,
            reported: 0,
        }
    }

    /// The record of `block`.
    pub(super) fn find(&self, block: BlockHash) -> Option<u32> {
        self.index.find(block, &self.arena)
    }

    /// Follows and adds `chain` behind `from` (a record, or [`NO_RECORD`]), then evicts what is more
    /// than the capacity.
    ///
    /// Ends early at a block that is owned behind another parent: the hash of a block names all
    /// before it, so such a chain contradicts itself, and following it would break the rule that
    /// who owns a block owns what is before it. Ends early, too, when there is no room and
    /// nothing to evict.
    pub(super) fn walk(
        &mut self,
        common: &mut SharedIndex,
        from: u32,
        chain: &[BlockHash],
    ) -> Walk {
        let mut walk = Walk {
            tip: from,
            inserted: 0,
        };
        for group in chain.chunks(GROUP_BLOCKS) {
            self.warm(common, group);
            let inserted = walk.inserted;
            let is_whole = self.walk_group(common, &mut walk, group);
            if walk.inserted > inserted {
                self.trim(common);
            }
            if !is_whole {
                break;
            }
        }
        walk
    }

    fn walk_group(
        &mut self,
        common: &mut SharedIndex,
        walk: &mut Walk,
        group: &[BlockHash],
    ) -> bool {
        for &block in group {
            match self.find(block) {
                Some(record) if self.arena.get(record).parent == walk.tip => walk.tip = record,
                Some(_) => return false,
                None if !self.make_room(common, walk.tip) => return false,
                None => {
                    walk.tip = self.insert(common, block, walk.tip);
                    walk.inserted += 1;
                }
            }
        }
        true
    }

    /// Whether one more block fits among all backends' blocks, after evicting here if need be; but not
    /// `tip`, which is to get a child.
    pub(super) fn make_room(&mut self, common: &mut SharedIndex, tip: u32) -> bool {
        if common.owned < common.owned_max {
            return true;
        }
        if tip != NO_RECORD {
            self.unsettle(tip, &self.arena.get(tip));
        }
        self.trim(common);
        while common.owned >= common.owned_max && self.evict(common) {}
        let has_room = common.owned < common.owned_max;
        if tip != NO_RECORD && !has_room && self.arena.get(tip).epoch > 0 {
            self.settle(tip);
        }
        has_room
    }

    /// Loads the memory that `blocks` will touch. They are spread over all of it, so each would
    /// wait for its own cache misses; together these overlap.
    pub(super) fn warm(&self, common: &SharedIndex, blocks: &[BlockHash]) {
        std::hint::black_box(
            self.index
                .warm(blocks)
                .wrapping_add(common.view.warm(blocks)),
        );
    }

    /// Counts one more lease that ends at `index`; `false` when there are too many to count.
    pub(super) fn pin(&mut self, index: u32) -> bool {
        let record = self.arena.get(index);
        let Some(leases) = record.leases.checked_add(1) else {
            return false;
        };
        self.unsettle(index, &record);
        self.change(index, record, BlockRecord { leases, ..record });
        true
    }

    /// Counts one lease less; `false` when there is none, as for a lease that outlived its blocks.
    /// The caller settles the record.
    pub(super) fn unpin(&mut self, index: u32) -> bool {
        let record = self.arena.get(index);
        let Some(leases) = record.leases.checked_sub(1) else {
            return false;
        };
        self.change(index, record, BlockRecord { leases, ..record });
        true
    }

    /// Marks the path that ends in `index` as released now.
    pub(super) fn touch(&mut self, index: u32) {
        let epoch = self.next_epoch();
        let record = self.arena.get(index);
        self.unsettle(index, &record);
        self.change(index, record, BlockRecord { epoch, ..record });
        self.settle(index);
    }

    /// Removes `index` and what is before it, as far as nothing holds it and nobody ever kept it.
    pub(super) fn give_back(&mut self, common: &mut SharedIndex, mut index: u32) {
        while index != NO_RECORD {
            let record = self.arena.get(index);
            if !record.is_free_leaf() || record.epoch > 0 {
                self.settle(index);
                return;
            }
            self.remove_leaf(common, index, &record);
            index = record.parent;
        }
    }

    /// Evicts while more is owned than the capacity allows and anything can go. What the engine
    /// reports does not count: what leases bring comes on top of it, until the engine reports that,
    /// too, or what left for it.
    pub(super) fn trim(&mut self, common: &mut SharedIndex) {
        let mut capacity = self.capacity.unwrap_or(u32::MAX);
        if planted::is(Bug::CapacityOffByOne) {
            capacity = capacity.saturating_add(1);
        }
        while self.unreported() > capacity {
            let group = (self.unreported() - capacity).min(GROUP_BLOCKS as u32);
            self.warm_evictions(common, group as usize);
            for _ in 0..group {
                if !self.evict(common) {
                    return;
                }
            }
        }
    }

    /// Blocks owned because of leases alone.
    pub(super) fn unreported(&self) -> u32 {
        self.owned - self.reported
    }

    /// As [`Self::warm`], for the blocks that are likely to go next: the path of the first leaf.
    fn warm_evictions(&self, common: &SharedIndex, count: usize) {
        let Some(&first) = self.evictable.first() else {
            return;
        };
        let mut path = [BlockHash(0); GROUP_BLOCKS];
        let mut index = record_of(first);
        let mut length = 0;
        while length < count && index != NO_RECORD {
            let record = self.arena.get(index);
            path[length] = record.hash;
            length += 1;
            index = record.parent;
        }
        self.warm(common, &path[..length]);
    }

    /// Removes `block` and all that follows it, whoever holds it; answers how many, and adds to
    /// `outlived` the tips of leases among them.
    pub(super) fn remove(
        &mut self,
        common: &mut SharedIndex,
        block: BlockHash,
        outlived: &mut Vec<BlockHash>,
    ) -> u32 {
        let Some(index) = self.find(block) else {
            return 0;
        };
        let parent = self.arena.get(index).parent;
        let before = self.owned;
        let leaves = self.leaves_below(index);
        self.fell(common, leaves, parent, outlived);
        if parent != NO_RECORD {
            // What only the removed blocks were kept for may have nobody left to keep it.
            self.give_back(common, parent);
        }
        let removed = before - self.owned;
        // What the removed blocks held may be too much now that it can go.
        self.trim(common);
        removed
    }

    /// Removes everything; adds to `outlived` the tips of leases. Only readers are told block by block,
    /// children before parents; the rest is dropped whole.
    pub(super) fn clear(&mut self, common: &mut SharedIndex, outlived: &mut Vec<BlockHash>) {
        let mut group = Vec::with_capacity(GROUP_BLOCKS);
        let mut children: Vec<u32> = vec![0; self.arena.len() as usize];
        for (index, record) in self.arena.live() {
            children[index as usize] = record.children;
            if record.leases > 0 {
                outlived.push(record.hash);
            }
        }
        for (leaf, record) in self.arena.live() {
            if record.children > 0 {
                continue;
            }
            let mut index = leaf;
            while index != NO_RECORD && children[index as usize] == 0 {
                let record = self.arena.get(index);
                group.push(record.hash);
                if group.len() == GROUP_BLOCKS {
                    self.hide(common, &mut group);
                }
                index = record.parent;
                if index != NO_RECORD {
                    children[index as usize] -= 1;
                }
            }
        }
        self.hide(common, &mut group);
        common.owned -= u64::from(self.owned);
        let (slot, capacity, epoch) = (self.slot, self.capacity, self.epoch);
        *self = Self::new(slot, capacity);
        self.epoch = epoch;
    }

    /// Takes a group of blocks from the readers, and empties it.
    fn hide(&self, common: &mut SharedIndex, group: &mut Vec<BlockHash>) {
        std::hint::black_box(common.view.warm(group));
        for block in group.drain(..) {
            common.view.remove(self.slot, block);
        }
    }

    /// Adds a block behind `parent`; readers see it from here on.
    pub(super) fn insert(
        &mut self,
        common: &mut SharedIndex,
        block: BlockHash,
        parent: u32,
    ) -> u32 {
        let parent_hash = (parent != NO_RECORD).then(|| {
            let mut record = self.arena.get(parent);
            self.unsettle(parent, &record);
            record.children += 1;
            self.arena.set(parent, record);
            record.hash
        });
        let record = BlockRecord {
            hash: block,
            parent,
            children: 0,
            leases: 0,
            reports: 0,
            epoch: 0,
        };
        let index = self.arena.insert(record);
        self.index.insert(block, index, &self.arena);
        let added = digest::of_record(self.slot, &record, parent_hash);
        self.sum = self.sum.wrapping_add(added);
        common.owned += 1;
        self.owned += 1;
        common.view.insert(self.slot, block);
        index
    }

    /// The epoch of the free leaf that goes first.
    pub(super) fn first_epoch(&self) -> Option<u64> {
        self.evictable.first().map(|key| key >> 24)
    }

    /// Evicts the first free leaf in order; `false` when there is none.
    pub(super) fn evict(&mut self, common: &mut SharedIndex) -> bool {
        let key = match planted::is(Bug::EvictsByPlace) {
            true => self.pop_by_place(),
            false => self.evictable.pop_first(),
        };
        let Some(key) = key else {
            return false;
        };
        let index = record_of(key);
        let record = self.arena.get(index);
        self.remove_leaf(common, index, &record);
        if record.parent != NO_RECORD {
            self.settle(record.parent);
        }
        true
    }

    /// As a planted bug would choose: where a record lies may differ between replicas.
    fn pop_by_place(&mut self) -> Option<u64> {
        let first = self.evictable.iter().min_by_key(|key| record_of(**key));
        let first = first.copied()?;
        self.evictable.take(&first)
    }

    /// Removes a record without children that is not in `evictable`, and hands its epoch to its
    /// parent, which the caller settles.
    fn remove_leaf(&mut self, common: &mut SharedIndex, index: u32, record: &BlockRecord) {
        common.view.remove(self.slot, record.hash);
        self.index.remove(record.hash, index);
        self.sum = self.sum.wrapping_sub(self.digest_of(record));
        common.owned -= 1;
        self.owned -= 1;
        self.reported -= u32::from(record.reports > 0);
        self.arena.remove(index);
        if record.parent != NO_RECORD {
            let parent = self.arena.get(record.parent);
            let epoch = parent.epoch.max(record.epoch);
            let children = parent.children - 1;
            self.change(
                record.parent,
                parent,
                BlockRecord {
                    epoch,
                    children,
                    ..parent
                },
            );
        }
    }

    /// Removes `leaves` and upwards from each as far as it leaves none behind, up to `end`. Children
    /// go before their parents, so that no reader finds a gap.
    fn fell(
        &mut self,
        common: &mut SharedIndex,
        leaves: Vec<u32>,
        end: u32,
        outlived: &mut Vec<BlockHash>,
    ) {
        for leaf in leaves {
            let mut index = leaf;
            while index != end {
                let record = self.arena.get(index);
                if record.children > 0 {
                    break;
                }
                if record.leases > 0 {
                    outlived.push(record.hash);
                }
                self.unsettle(index, &record);
                self.remove_leaf(common, index, &record);
                index = record.parent;
            }
        }
    }

    /// The records without children at or below `top`. A block without children is asked for by
    /// itself; else every record is looked at once, as parents do not name their children.
    fn leaves_below(&self, top: u32) -> Vec<u32> {
        #[derive(Clone, Copy, PartialEq)]
        enum Side {
            Unknown,
            Below,
            Beside,
        }
        if self.arena.get(top).children == 0 {
            return vec![top];
        }
        let mut sides = vec![Side::Unknown; self.arena.len() as usize];
        sides[top as usize] = Side::Below;
        let mut leaves = Vec::new();
        for (index, record) in self.arena.live() {
            let climb = |mut at: u32, sides: &[Side]| {
                while at != NO_RECORD && sides[at as usize] == Side::Unknown {
                    at = self.arena.get(at).parent;
                }
                at
            };
            let known = climb(index, &sides);
            let side = if known == NO_RECORD {
                Side::Beside
            } else {
                sides[known as usize]
            };
            let mut at = index;
            while at != known {
                sides[at as usize] = side;
                at = self.arena.get(at).parent;
            }
            if side == Side::Below && record.children == 0 {
                leaves.push(index);
            }
        }
        leaves
    }

    /// Puts a free leaf among those that may be evicted.
    pub(super) fn settle(&mut self, index: u32) {
        let record = self.arena.get(index);
        let is_pinned_leaf = record.children == 0 && record.leases > 0;
        if record.is_free_leaf() || is_pinned_leaf && planted::is(Bug::EvictsPinned) {
            self.evictable.insert(key(index, &record));
        }
    }

    /// Takes a record that will not be a free leaf of this epoch any more out of the evictable ones.
    pub(super) fn unsettle(&mut self, index: u32, record: &BlockRecord) {
        // Fresh records are free leaves for a moment, but they are never in the set.
        if record.is_free_leaf() && record.epoch > 0 {
            self.evictable.remove(&key(index, record));
        }
    }

    fn change(&mut self, index: u32, old: BlockRecord, new: BlockRecord) {
        let parent = self.parent_hash(&old);
        let removed = digest::of_record(self.slot, &old, parent);
        let added = digest::of_record(self.slot, &new, parent);
        self.sum = self.sum.wrapping_sub(removed).wrapping_add(added);
        self.arena.set(index, new);
    }

    /// A live record's share of the digest.
    pub(super) fn digest_of(&self, record: &BlockRecord) -> u128 {
        digest::of_record(self.slot, record, self.parent_hash(record))
    }

    fn parent_hash(&self, record: &BlockRecord) -> Option<BlockHash> {
        (record.parent != NO_RECORD).then(|| self.arena.hash(record.parent))
    }

    fn next_epoch(&mut self) -> u64 {
        if self.epoch >= EPOCH_MAX {
            self.renumber();
        }
        self.epoch += 1;
        self.epoch
    }

    /// Renumbers the epochs from 1 in their order: once in 35 years at a thousand releases a
    /// second, but the counter must not stick.
    fn renumber(&mut self) {
        let carriers = self.arena.live().filter(|(_, record)| record.epoch > 0);
        let mut carriers: Vec<_> = carriers
            .map(|(index, record)| (record.epoch, index))
            .collect();
        carriers.sort_unstable();
        self.evictable.clear();
        self.epoch = carriers.len() as u64;
        for (epoch, (_, index)) in (1..).zip(carriers) {
            let record = self.arena.get(index);
            self.change(index, record, BlockRecord { epoch, ..record });
            self.settle(index);
        }
    }

    /// Heap bytes, of which the evictable set's are estimated.
    pub(super) fn memory_bytes(&self) -> usize {
        // A B-tree of eight-byte keys: nodes of eleven, about two thirds full.
        let evictable = self.evictable.len() * 14;
        size_of::<Self>() + self.arena.memory_bytes() + self.index.memory_bytes() + evictable
    }
}

/// The place of a free leaf in the order of eviction.
pub(super) fn key(index: u32, record: &BlockRecord) -> u64 {
    record.epoch << 24 | u64::from(index)
}

fn record_of(key: u64) -> u32 {
    (key & u64::from(u32::MAX >> 8)) as u32
}
