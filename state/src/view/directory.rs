//! The published tables of all shards: a tree of three levels, which a reader takes hold of as a whole.
//!
//! One guard per match instead of one per probe: taking hold costs two ordered writes, which keep the
//! memory accesses of successive probes from overlapping. To replace a shard's table, the writer
//! copies the path to it, some fifty pointers; all other nodes are shared with the former tree.

use std::sync::Arc;

use crate::view::table::Table;

/// Bits of a shard's number that one level decides. Models have one shard, and need no tree.
const LEVEL_BITS: u32 = if cfg!(loom) { 0 } else { 4 };
const FANOUT: usize = 1 << LEVEL_BITS;
/// Maximum number of shards.
pub(super) const SHARDS_MAX: usize = FANOUT * FANOUT * FANOUT;

/// Tables by shard; see the module documentation.
#[derive(Clone)]
pub(super) struct Directory([Arc<Branch>; FANOUT]);

type Branch = [Arc<Leaf>; FANOUT];
type Leaf = [Table; FANOUT];

impl Directory {
    /// Creates a directory with the same table for every shard.
    pub(super) fn of(table: &Table) -> Self {
        let leaf: Arc<Leaf> = Arc::new(std::array::from_fn(|_| table.clone()));
        let branch: Arc<Branch> = Arc::new(std::array::from_fn(|_| Arc::clone(&leaf)));
        Self(std::array::from_fn(|_| Arc::clone(&branch)))
    }

    /// Returns the table of `shard`, which is below [`SHARDS_MAX`].
    #[inline]
    pub(super) fn table(&self, shard: usize) -> &Table {
        let (top, middle, low) = path(shard);
        &self.0[top][middle][low]
    }

    /// Replaces the table of `shard`.
    pub(super) fn set(&mut self, shard: usize, table: Table) {
        let (top, middle, low) = path(shard);
        let branch = Arc::make_mut(&mut self.0[top]);
        Arc::make_mut(&mut branch[middle])[low] = table;
    }

    /// Returns the heap size of a directory with tables of their own for so many shards, without what
    /// is in the tables.
    pub(super) fn memory_bytes(shards: usize) -> usize {
        let leaves = shards.div_ceil(FANOUT);
        let branches = leaves.div_ceil(FANOUT);
        size_of::<Self>() + branches * size_of::<Branch>() + leaves * size_of::<Leaf>()
    }
}

#[inline]
fn path(shard: usize) -> (usize, usize, usize) {
    let level = |above: u32| (shard >> (above * LEVEL_BITS)) % FANOUT;
    (level(2), level(1), level(0))
}
