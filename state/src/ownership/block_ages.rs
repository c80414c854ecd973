//! Determines which blocks an engine evicts next. See
//! [`EngineEvictionOrder`](super::engine_eviction_order::EngineEvictionOrder).

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::{BlockHash, Slot};
use crate::ownership::Ownership;
use crate::ownership::arena::{BlockRecord, NO_RECORD};
use crate::ownership::backend::BackendBlocks;
use crate::ownership::engine_eviction_order::{is_leaf, key, record_of};

/// Maximum number of ancestors without an age that a search for an age visits.
const CLIMB_MAX: usize = 64;
/// Number of releases after a request's end during which its events may still arrive.
const LATE_MAX: u64 = 8;

impl BackendBlocks {
    /// Puts a record into the order if it is a reported leaf with an age.
    pub(super) fn insert_reported_leaf(&mut self, index: u32, record: &BlockRecord) {
        if !is_leaf(record) {
            return;
        }
        let mut age = self.engine_order.age(index, record);
        if age == 0 {
            let Some(taken) = self.age_of_stored(record) else {
                return;
            };
            age = taken.max(1);
            self.engine_order.raise(index, age);
        }
        self.engine_order.order.insert(key(index, age));
    }

    /// Returns an age for a stored record that has none yet. `None` if a lease ends at an ancestor:
    /// its request may have made the record. Returns the ancestor's age if the ancestor was
    /// released recently, else the backend's latest one, as if the record was released when the
    /// engine stored it.
    fn age_of_stored(&self, record: &BlockRecord) -> Option<u64> {
        let mut at = record.parent;
        for _ in 0..CLIMB_MAX {
            if at == NO_RECORD {
                break;
            }
            let above = self.arena.get(at);
            if above.leases > 0 {
                return None;
            }
            let age = self.engine_order.age(at, &above);
            if age + LATE_MAX > self.epoch {
                return Some(age);
            }
            if age > 0 {
                break;
            }
            at = above.parent;
        }
        Some(self.epoch)
    }

    /// Returns up to `most` reported blocks in the engine's estimated eviction order.
    fn next_engine_evictions(&self, most: usize) -> Vec<BlockHash> {
        let mut next = Vec::with_capacity(most.min(self.reported as usize));
        // By parent: number of its children that were evicted, and their highest age.
        let mut left = BTreeMap::<u32, (u32, u64)>::new();
        let mut bared = BTreeSet::<u64>::new();
        let mut leaves = self.engine_order.order.iter().copied().peekable();
        while next.len() < most {
            let first = match (leaves.peek(), bared.first()) {
                (Some(leaf), Some(parent)) if parent < leaf => bared.pop_first(),
                (None, _) => bared.pop_first(),
                (Some(_), _) => leaves.next(),
            };
            let Some(first) = first else { break };
            let record = self.arena.get(record_of(first));
            next.push(record.hash);
            if record.parent == NO_RECORD {
                continue;
            }
            let parent = self.arena.get(record.parent);
            let (gone, age) = left.entry(record.parent).or_default();
            *gone += 1;
            *age = (*age).max(first >> 24);
            if *gone == parent.children && parent.leases == 0 && parent.reports > 0 {
                let age = self.engine_order.age(record.parent, &parent).max(*age);
                bared.insert(key(record.parent, age));
            }
        }
        next
    }

    /// Checks that the order contains exactly the reported leaves that have an age.
    pub(super) fn check_engine_order(&self) -> Result<(), String> {
        let mut count = 0;
        for (index, record) in self.arena.live() {
            let belongs = is_leaf(&record) && self.engine_order.age(index, &record) > 0;
            if belongs != (is_leaf(&record) && self.engine_order.contains(index, &record)) {
                return Err(format!("{record:?} in the engine order: {}", !belongs));
            }
            count += usize::from(belongs);
        }
        if count != self.engine_order.len() {
            return Err(format!(
                "{count} leaves, {} in the engine order",
                self.engine_order.len()
            ));
        }
        Ok(())
    }
}

impl Ownership {
    /// Gives `block` the backend's latest age if it is a reported leaf without one, because the
    /// request that made it has ended.
    pub(crate) fn age_leaf(&mut self, slot: Slot, block: BlockHash) {
        let Some((backend, _)) = self.backend_mut(slot) else {
            return;
        };
        let Some(index) = backend.find(block) else {
            return;
        };
        let record = backend.arena.get(index);
        if is_leaf(&record) && backend.engine_order.age(index, &record) == 0 {
            let age = backend.epoch.max(1);
            backend.engine_order.raise(index, age);
            backend.insert_reported_leaf(index, &record);
        }
    }

    /// Returns up to `most` blocks that the engine in `slot` reports, in its estimated eviction
    /// order.
    pub(crate) fn next_engine_evictions(&self, slot: Slot, most: usize) -> Vec<BlockHash> {
        let backend = self.backend(slot);
        backend.map_or_else(Vec::new, |backend| backend.next_engine_evictions(most))
    }

    /// Returns the number of blocks that `slot` owns because of leases alone.
    pub(crate) fn unreported(&self, slot: Slot) -> u64 {
        let backend = self.backend(slot);
        backend.map_or(0, |backend| u64::from(backend.unreported()))
    }

    /// Returns a number that changes whenever the blocks of `slot` or their order may have changed.
    pub(crate) fn version(&self, slot: Slot) -> u128 {
        let backend = self.backend(slot);
        backend.map_or(0, |it| it.sum.wrapping_add(u128::from(it.epoch)))
    }
}
