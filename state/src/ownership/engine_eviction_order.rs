//! Estimates which reported blocks an engine evicts next.
//!
//! An engine evicts the least recently released block first, and the deepest first within one
//! release, as leases do here. The backend's own eviction order lacks reported blocks, because
//! their reports hold them. The age of a reported block is known if a lease over it was released.
//! This module keeps the reported leaves without leases in the engine's order. A decision can then
//! predict which of them the requests in flight will displace before the engine reports it.
//!
//! Blocks that no lease brought, mostly those of responses, are as old as the request before them.
//! While its lease is open, they have no age and are not in the order. All others count as released
//! when the engine stored them.
//!
//! The order is an estimate that follows from records and reports. It is not part of the digest or
//! an image; reading a snapshot rebuilds it. Blocks of the same age are in no particular order.

use std::collections::{BTreeMap, BTreeSet};

use crate::ownership::arena::{BlockRecord, NO_RECORD};

/// Estimated order in which an engine evicts its reported blocks; see the module documentation.
#[derive(Default)]
pub(super) struct EngineEvictionOrder {
    /// `age << 24 | record` of every reported leaf that has an age and no lease.
    pub(super) order: BTreeSet<u64>,
    /// Ages by record index, for records whose age is higher than their epoch.
    ages: BTreeMap<u32, u64>,
}

impl EngineEvictionOrder {
    /// Removes all records and ages.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Returns the age of the record at `index`; 0 if it has none.
    pub(super) fn age(&self, index: u32, record: &BlockRecord) -> u64 {
        let taken = self.ages.get(&index).copied().unwrap_or(0);
        record.epoch.max(taken)
    }

    /// Removes a record from the order. Must be called before the record's age changes or it stops
    /// being a leaf.
    pub(super) fn take(&mut self, index: u32, record: &BlockRecord) {
        if is_leaf(record) {
            self.order.remove(&key(index, self.age(index, record)));
        }
    }

    /// Removes the age of a removed record, and raises its parent's age to it.
    pub(super) fn forget(&mut self, index: u32, parent: u32) {
        let age = self.ages.remove(&index);
        if let Some(age) = age.filter(|_| parent != NO_RECORD) {
            self.raise(parent, age);
        }
    }

    /// Raises a record's age to at least `age`. The record must not be in the order.
    pub(super) fn raise(&mut self, index: u32, age: u64) {
        let known = self.ages.entry(index).or_default();
        *known = age.max(*known);
    }

    pub(super) fn memory_bytes(&self) -> usize {
        // B-trees with nodes about two thirds full.
        self.order.len() * 14 + self.ages.len() * 22
    }

    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    pub(super) fn contains(&self, index: u32, record: &BlockRecord) -> bool {
        self.order.contains(&key(index, self.age(index, record)))
    }
}

/// Whether the record is a leaf that only engine reports hold: no lease ends at it and no block
/// follows it.
pub(super) fn is_leaf(record: &BlockRecord) -> bool {
    record.children == 0 && record.leases == 0 && record.reports > 0
}

/// Returns a leaf's key in the order.
pub(super) fn key(index: u32, age: u64) -> u64 {
    age << 24 | u64::from(index)
}

/// Returns the record index in a key of the order.
pub(super) fn record_of(key: u64) -> u32 {
    (key & u64::from(u32::MAX >> 8)) as u32
}
