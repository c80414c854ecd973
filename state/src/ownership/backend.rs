//! One backend's blocks: a forest of records and the eviction order of its free leaves.
//!
//! Pins and epochs reproduce vLLM's eviction order at constant cost:
//! - A lease touches only its tip. A block is held while a lease ends at it or an owned block
//!   follows it, so holding the tip holds the whole path.
//! - A release assigns the backend's next epoch to the tip. A block's true epoch is the highest of
//!   its own and its descendants', because a release covers the whole path. Evicting a leaf passes
//!   its epoch to its parent, which preserves the true epoch of the remaining blocks.
//! - Only free leaves can be evicted; they are kept in a set ordered by epoch. The least recently
//!   released goes first. Within one release the deepest goes first, because a parent joins the set
//!   when its last child leaves.
//!
//! At most one record of a backend carries a given epoch above 0: the epoch is assigned to one tip,
//! and only a record that is removed passes it on. The order therefore has no ties, and the record
//! index, which may differ between replicas, decides nothing. A free leaf of epoch 0 cannot exist:
//! no lease over it was ever kept, so discarding the last lease over it removed it.
//!
//! Reports hold the blocks that the engine reports (`reported`). Such blocks leave when the engine
//! reports so, regardless of leases, and do not count towards the capacity.

use std::collections::BTreeSet;

use crate::ids::{BlockHash, Slot};
use crate::ownership::arena::{Arena, BlockRecord, EPOCH_MAX, NO_RECORD};
use crate::ownership::digest;
use crate::ownership::engine_eviction_order::EngineEvictionOrder;
use crate::ownership::index::RecordIndex;
use crate::view::{BlockPlace, ViewWriter};

/// Number of blocks whose memory is prefetched together before they change.
pub(super) const GROUP_BLOCKS: usize = 32;

/// State shared by all backends.
pub(super) struct SharedIndex {
    /// The published index.
    pub(super) view: ViewWriter,
    /// Number of owned blocks over all backends.
    pub(super) owned: u64,
    /// Maximum of `owned`.
    pub(super) owned_max: u64,
}

/// The blocks of one backend; see the module documentation.
pub(super) struct BackendBlocks {
    pub(super) slot: Slot,
    /// Capacity in blocks; `None` if unknown, which means unbounded.
    pub(super) capacity: Option<u32>,
    /// Number of releases so far: the epoch of the last one.
    pub(super) epoch: u64,
    /// Wrapping sum of the records' digests. Kept per backend, so that dropping a backend need not
    /// touch its records.
    pub(super) sum: u128,
    pub(super) arena: Arena,
    pub(super) index: RecordIndex,
    /// `epoch << 24 | record` of every free leaf.
    pub(super) evictable: BTreeSet<u64>,
    /// Number of owned blocks.
    pub(super) owned: u32,
    /// Number of owned blocks that the engine reports.
    pub(super) reported: u32,
    /// Reported leaves in the estimated order in which the engine evicts them.
    pub(super) engine_order: EngineEvictionOrder,
    /// A live record and the head of its segment: the record added last, or the parent of the one
    /// removed last. The next change is usually there. `None` if there is no such record, or if the
    /// parent is in another segment than the removed record was.
    known_head: Option<(u32, BlockHash)>,
}

/// Result of a walk along a chain of blocks.
pub(super) struct Walk {
    /// Record of the last owned block of the chain; [`NO_RECORD`] if there is none.
    pub(super) tip: u32,
    /// Number of records added.
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
            engine_order: EngineEvictionOrder::default(),
            known_head: None,
        }
    }

    /// Returns the index of the record of `block`, if there is one.
    pub(super) fn find(&self, block: BlockHash) -> Option<u32> {
        self.index.find(block, &self.arena)
    }

    /// Follows `chain` from the record `from` (or [`NO_RECORD`]), adds missing blocks, then evicts
    /// down to the capacity.
    ///
    /// Stops at a block that is owned behind another parent. A block's hash identifies everything
    /// before it, so such a chain contradicts itself. Following it would break the rule that the
    /// owner of a block owns everything before it. Also stops if there is neither room nor anything
    /// to evict.
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
            self.prefetch(group);
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
        let mut new = group;
        while let Some((&block, rest)) = new.split_first() {
            match self.find(block) {
                Some(record) if self.arena.get(record).parent == walk.tip => walk.tip = record,
                Some(_) => return false,
                None => break,
            }
            new = rest;
        }
        self.add_new(common, walk, new)
    }

    /// Adds up to [`GROUP_BLOCKS`] of the `new` blocks at the end of `walk`, then shows them to
    /// readers. Returns whether it added them all: each had room, and none was owned already.
    fn add_new(&mut self, common: &mut SharedIndex, walk: &mut Walk, new: &[BlockHash]) -> bool {
        let from = walk.tip;
        let mut added = [NO_RECORD; GROUP_BLOCKS];
        let mut count = 0;
        for &block in new {
            if self.find(block).is_some() || !self.make_room(common, walk.tip) {
                break;
            }
            walk.tip = self.add(common, block, walk.tip);
            added[count] = walk.tip;
            count += 1;
        }
        walk.inserted += count as u32;
        self.show(common, from, &added[..count], &new[..count]);
        count == new.len()
    }

    /// Makes room for one more block in the total over all backends, evicting from this backend if
    /// necessary. Never evicts `tip`, which is about to get a child. Returns whether there is room.
    pub(super) fn make_room(&mut self, common: &mut SharedIndex, tip: u32) -> bool {
        if common.owned < common.owned_max {
            return true;
        }
        if tip != NO_RECORD {
            self.unlink_leaf(tip, &self.arena.get(tip));
        }
        self.trim(common);
        while common.owned >= common.owned_max && self.evict(common) {}
        let has_room = common.owned < common.owned_max;
        if tip != NO_RECORD && !has_room && self.arena.get(tip).epoch > 0 {
            self.link_leaf(tip);
        }
        has_room
    }

    /// Prefetches the memory that changes of `blocks` will touch. One by one, each scattered access
    /// would wait for its own cache miss; issued together, the misses overlap.
    pub(super) fn prefetch(&self, blocks: &[BlockHash]) {
        std::hint::black_box(self.index.prefetch(blocks));
    }

    /// Adds a lease that ends at `index`. Returns `false` if the lease counter is full.
    pub(super) fn pin(&mut self, index: u32) -> bool {
        let record = self.arena.get(index);
        let Some(leases) = record.leases.checked_add(1) else {
            return false;
        };
        self.unlink_leaf(index, &record);
        self.change(index, record, BlockRecord { leases, ..record });
        true
    }

    /// Removes a lease from `index`; the caller then links or removes the record. Returns `false`
    /// if the record has no lease, for example because the lease outlived its blocks.
    pub(super) fn unpin(&mut self, index: u32) -> bool {
        let record = self.arena.get(index);
        let Some(leases) = record.leases.checked_sub(1) else {
            return false;
        };
        self.change(index, record, BlockRecord { leases, ..record });
        true
    }

    /// Marks the path that ends at `index` as released now.
    pub(super) fn touch(&mut self, index: u32) {
        let epoch = self.next_epoch();
        let record = self.arena.get(index);
        self.unlink_leaf(index, &record);
        self.change(index, record, BlockRecord { epoch, ..record });
        self.link_leaf(index);
    }

    /// Removes `index` and its ancestors while nothing holds them and no lease over them was ever
    /// kept.
    pub(super) fn release_unheld(&mut self, common: &mut SharedIndex, mut index: u32) {
        while index != NO_RECORD {
            let record = self.arena.get(index);
            if !record.is_free_leaf() || record.epoch > 0 {
                self.link_leaf(index);
                return;
            }
            self.remove_leaf(common, index, &record);
            index = record.parent;
        }
    }

    /// Evicts until the capacity is met or nothing more can be evicted. Only blocks that leases
    /// alone account for count. They come on top of reported blocks until the engine reports them
    /// too, or reports that it evicted others for them.
    pub(super) fn trim(&mut self, common: &mut SharedIndex) {
        let capacity = self.capacity.unwrap_or(u32::MAX);
        while self.unreported() > capacity {
            let group = (self.unreported() - capacity).min(GROUP_BLOCKS as u32);
            self.warm_evictions(group as usize);
            for _ in 0..group {
                if !self.evict(common) {
                    return;
                }
            }
        }
    }

    /// Returns the number of blocks owned because of leases alone.
    pub(super) fn unreported(&self) -> u32 {
        self.owned - self.reported
    }

    /// Prefetches the memory of the `count` blocks that are likely to be evicted next: the path of
    /// the first leaf in eviction order.
    fn warm_evictions(&self, count: usize) {
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
        self.prefetch(&path[..length]);
    }

    /// Removes `block` and everything after it, even if held. Returns the number of removed blocks,
    /// and adds those at which leases end to `closed_lease_tips`.
    pub(super) fn remove(
        &mut self,
        common: &mut SharedIndex,
        block: BlockHash,
        closed_lease_tips: &mut Vec<BlockHash>,
    ) -> u32 {
        let Some(index) = self.find(block) else {
            return 0;
        };
        let parent = self.arena.get(index).parent;
        let before = self.owned;
        let leaves = self.leaves_below(index);
        self.remove_subtree(common, leaves, parent, closed_lease_tips);
        if parent != NO_RECORD {
            // Blocks kept only for the removed ones may have no holder left.
            self.release_unheld(common, parent);
        }
        let removed = before - self.owned;
        // Blocks that the removed ones held can now be evicted, and may exceed the capacity.
        self.trim(common);
        removed
    }

    /// Removes all blocks and adds those at which leases end to `closed_lease_tips`. Updates only
    /// the view, segment by segment and newest first; drops the rest as a whole. Meanwhile, a
    /// reader may find blocks whose predecessors are gone, as if it had looked a moment earlier.
    pub(super) fn clear(
        &mut self,
        common: &mut SharedIndex,
        closed_lease_tips: &mut Vec<BlockHash>,
    ) {
        closed_lease_tips.extend(self.arena.tips());
        let mut heads = self.arena.heads();
        loop {
            let group: Vec<_> = heads.by_ref().take(GROUP_BLOCKS).collect();
            if group.is_empty() {
                break;
            }
            std::hint::black_box(common.view.prefetch(&group));
            for head in group {
                common.view.clear(self.slot, head);
            }
        }
        drop(heads);
        common.owned -= u64::from(self.owned);
        let (slot, capacity, epoch) = (self.slot, self.capacity, self.epoch);
        *self = Self::new(slot, capacity);
        self.epoch = epoch;
    }

    /// Adds `block` behind `parent`, shows it to readers, and returns its record index.
    pub(super) fn insert(
        &mut self,
        common: &mut SharedIndex,
        block: BlockHash,
        parent: u32,
    ) -> u32 {
        let index = self.add(common, block, parent);
        self.show(common, parent, &[index], &[block]);
        index
    }

    /// Shows consecutive blocks behind `parent` to readers, and records their places.
    pub(super) fn show(
        &mut self,
        common: &mut SharedIndex,
        parent: u32,
        records: &[u32],
        blocks: &[BlockHash],
    ) {
        let after = (parent != NO_RECORD).then(|| self.place(parent));
        let mut head = after.map(|after| after.head);
        let mut places = records.iter().zip(blocks);
        common.view.append(self.slot, after, blocks, |behind| {
            if let Some((&record, &block)) = places.next() {
                self.arena.set_behind(record, behind);
                if behind == 0 {
                    head = Some(block);
                }
            }
        });
        if let Some(&last) = records.last() {
            self.known_head = head.map(|head| (last, head));
        }
    }

    /// Returns the place of a live record's block in the view.
    pub(super) fn place(&self, index: u32) -> BlockPlace {
        let behind = self.arena.get(index).behind;
        let head = match self.known_head {
            Some((known, head)) if known == index => head,
            _ => self.arena.hash(self.arena.head(index, behind)),
        };
        BlockPlace { head, behind }
    }

    /// Adds `block` behind `parent` without showing it to readers, and returns its record index.
    fn add(&mut self, common: &mut SharedIndex, block: BlockHash, parent: u32) -> u32 {
        let parent_hash = (parent != NO_RECORD).then(|| {
            let mut record = self.arena.get(parent);
            self.unlink_leaf(parent, &record);
            record.children += 1;
            self.arena.set(parent, record);
            record.hash
        });
        let record = BlockRecord {
            hash: block,
            parent,
            behind: 0,
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
        index
    }

    /// Returns the epoch of the first free leaf in eviction order, if there is one.
    pub(super) fn first_epoch(&self) -> Option<u64> {
        self.evictable.first().map(|key| key >> 24)
    }

    /// Evicts the first free leaf in eviction order. Returns `false` if there is none.
    pub(super) fn evict(&mut self, common: &mut SharedIndex) -> bool {
        let Some(key) = self.evictable.pop_first() else {
            return false;
        };
        let index = record_of(key);
        let record = self.arena.get(index);
        self.remove_leaf(common, index, &record);
        if record.parent != NO_RECORD {
            self.link_leaf(record.parent);
        }
        true
    }

    /// Removes a record that has no children and is not in `evictable`, and passes its epoch to its
    /// parent. The caller then links or removes the parent.
    fn remove_leaf(&mut self, common: &mut SharedIndex, index: u32, record: &BlockRecord) {
        let place = self.place(index);
        common.view.remove(self.slot, place);
        self.known_head = (place.behind > 0).then_some((record.parent, place.head));
        self.index.remove(record.hash, index);
        self.sum = self.sum.wrapping_sub(self.digest_of(record));
        common.owned -= 1;
        self.owned -= 1;
        self.reported -= u32::from(record.reports > 0);
        self.arena.remove(index);
        self.engine_order.forget(index, record.parent);
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

    /// Removes each of `leaves`, and its ancestors up to `end` that are left without children.
    /// Removes children before their parents, so that no reader finds a gap.
    fn remove_subtree(
        &mut self,
        common: &mut SharedIndex,
        leaves: Vec<u32>,
        end: u32,
        closed_lease_tips: &mut Vec<BlockHash>,
    ) {
        for leaf in leaves {
            let mut index = leaf;
            while index != end {
                let record = self.arena.get(index);
                if record.children > 0 {
                    break;
                }
                if record.leases > 0 {
                    closed_lease_tips.push(record.hash);
                }
                self.unlink_leaf(index, &record);
                self.remove_leaf(common, index, &record);
                index = record.parent;
            }
        }
    }

    /// Returns the records without children at or below `top`. Cheap if `top` has no children.
    /// Otherwise visits every record once, because parents do not list their children.
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

    /// Adds the record at `index` to the evictable set if it is a free leaf, or to the engine's
    /// eviction order if it is a reported leaf.
    pub(super) fn link_leaf(&mut self, index: u32) {
        let record = self.arena.get(index);
        if record.is_free_leaf() {
            self.evictable.insert(key(index, &record));
        } else {
            self.insert_reported_leaf(index, &record);
        }
    }

    /// Removes the record at `index` from the evictable set and from the engine's eviction order.
    /// Must be called before its leaf state or epoch changes.
    pub(super) fn unlink_leaf(&mut self, index: u32, record: &BlockRecord) {
        // New records are free leaves for a moment, but never in the set.
        if record.is_free_leaf() && record.epoch > 0 {
            self.evictable.remove(&key(index, record));
        } else {
            self.engine_order.take(index, record);
        }
    }

    fn change(&mut self, index: u32, old: BlockRecord, new: BlockRecord) {
        let parent = self.parent_hash(&old);
        let removed = digest::of_record(self.slot, &old, parent);
        let added = digest::of_record(self.slot, &new, parent);
        self.sum = self.sum.wrapping_sub(removed).wrapping_add(added);
        self.arena.set(index, new);
    }

    /// Returns a live record's share of the digest.
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

    /// Renumbers the epochs from 1, preserving their order. At a thousand releases per second this
    /// happens once in 35 years, but the counter must not get stuck.
    fn renumber(&mut self) {
        let carriers = self.arena.live().filter(|(_, record)| record.epoch > 0);
        let mut carriers: Vec<_> = carriers
            .map(|(index, record)| (record.epoch, index))
            .collect();
        carriers.sort_unstable();
        self.evictable.clear();
        self.engine_order.clear();
        self.epoch = carriers.len() as u64;
        for (epoch, (_, index)) in (1..).zip(carriers) {
            let record = self.arena.get(index);
            self.change(index, record, BlockRecord { epoch, ..record });
            self.link_leaf(index);
        }
    }

    /// Returns the heap size in bytes; the evictable set's share is estimated.
    pub(super) fn memory_bytes(&self) -> usize {
        // A B-tree of eight-byte keys: nodes of eleven, about two thirds full.
        let evictable = self.evictable.len() * 14;
        let sets = evictable + self.engine_order.memory_bytes();
        size_of::<Self>() + self.arena.memory_bytes() + self.index.memory_bytes() + sets
    }
}

/// Returns the key of a free leaf in the evictable set.
pub(super) fn key(index: u32, record: &BlockRecord) -> u64 {
    record.epoch << 24 | u64::from(index)
}

fn record_of(key: u64) -> u32 {
    (key & u64::from(u32::MAX >> 8)) as u32
}
