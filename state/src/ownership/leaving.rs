//! Which of the blocks that an engine reports it evicts next.
//!
//! An engine evicts what was released longest ago, deepest first, as leases do here. A reported
//! block is held by its reports, and so is in no eviction order; but its age is known wherever a
//! lease over it was released. This keeps the reported leaves that no lease ends at in that order,
//! so that a decision can tell which of them requests under way will push out before the engine
//! says so.
//!
//! Blocks that no lease brought, mostly those of answers, are as old as the request before them: while
//! its lease is open they have no age and are not in the order. All others count as released when
//! the engine stored them.
//!
//! All of it is an estimate beside the state: it follows from records and reports, is not part of
//! the digest or of an image, and is made anew from a snapshot. Blocks of one age stand in no
//! particular order.

use std::collections::{BTreeMap, BTreeSet};

use crate::ownership::arena::{BlockRecord, NO_RECORD};

/// The order; see the module documentation.
#[derive(Default)]
pub(super) struct Leaving {
    /// `age << 24 | record` of every reported leaf that has an age and no lease.
    pub(super) order: BTreeSet<u64>,
    /// Ages of records beyond those of their releases.
    ages: BTreeMap<u32, u64>,
}

impl Leaving {
    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Returns a record's age; 0 if it has none.
    pub(super) fn age(&self, index: u32, record: &BlockRecord) -> u64 {
        let taken = self.ages.get(&index).copied().unwrap_or(0);
        record.epoch.max(taken)
    }

    /// Takes a record out of the order, before it stops being a leaf of this age.
    pub(super) fn take(&mut self, index: u32, record: &BlockRecord) {
        if is_leaf(record) {
            self.order.remove(&key(index, self.age(index, record)));
        }
    }

    /// Forgets a record that is gone. Its parent has its age.
    pub(super) fn forget(&mut self, index: u32, parent: u32) {
        let age = self.ages.remove(&index);
        if let Some(age) = age.filter(|_| parent != NO_RECORD) {
            self.raise(parent, age);
        }
    }

    /// Gives a record an age at least. The caller takes it out of the order before, and back in.
    pub(super) fn raise(&mut self, index: u32, age: u64) {
        let known = self.ages.entry(index).or_default();
        *known = age.max(*known);
    }

    pub(super) fn memory_bytes(&self) -> usize {
        // B-trees, nodes about two thirds full.
        self.order.len() * 14 + self.ages.len() * 22
    }

    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    pub(super) fn contains(&self, index: u32, record: &BlockRecord) -> bool {
        self.order.contains(&key(index, self.age(index, record)))
    }
}

/// Whether the engine alone holds the record, and nothing follows it.
pub(super) fn is_leaf(record: &BlockRecord) -> bool {
    record.children == 0 && record.leases == 0 && record.reports > 0
}

/// Returns a leaf's place in the order.
pub(super) fn key(index: u32, age: u64) -> u64 {
    age << 24 | u64::from(index)
}

/// Returns whose place it is.
pub(super) fn record_of(key: u64) -> u32 {
    (key & u64::from(u32::MAX >> 8)) as u32
}
