//! The published tables of all shards: a tree of two levels, which a reader acquires as a whole.
//!
//! A match takes one guard instead of one per probe: acquiring costs two ordered writes, which keep
//! the memory accesses of successive probes from overlapping. To replace a shard's table, the
//! writer copies the path to it, some hundred pointers; all other nodes are shared with the
//! previous tree.

use std::sync::Arc;

use crate::view::table::Table;

/// Number of bits of a shard's number per level. Loom models have one shard and need no tree.
const LEVEL_BITS: u32 = if cfg!(loom) { 0 } else { 5 };
const FANOUT: usize = 1 << LEVEL_BITS;
/// Maximum number of shards of an index.
pub(super) const SHARDS_MAX: usize = FANOUT * FANOUT;

/// Tables by shard; see the module documentation.
#[derive(Clone)]
pub(super) struct Directory([Arc<Leaf>; FANOUT]);

type Leaf = [Table; FANOUT];

impl Directory {
    /// Creates a directory in which every shard has the same `table`.
    pub(super) fn of(table: &Table) -> Self {
        let leaf: Arc<Leaf> = Arc::new(std::array::from_fn(|_| table.clone()));
        Self(std::array::from_fn(|_| Arc::clone(&leaf)))
    }

    /// Returns the table of `shard`, which must be below [`SHARDS_MAX`].
    #[inline]
    pub(super) fn table(&self, shard: usize) -> &Table {
        &self.0[shard / FANOUT % FANOUT][shard % FANOUT]
    }

    /// Replaces the table of `shard`.
    pub(super) fn set(&mut self, shard: usize, table: Table) {
        Arc::make_mut(&mut self.0[shard / FANOUT % FANOUT])[shard % FANOUT] = table;
    }

    /// Returns the heap size in bytes of a directory with distinct tables for this many shards,
    /// without the contents of the tables.
    pub(super) fn memory_bytes(shards: usize) -> usize {
        let leaves = shards.div_ceil(FANOUT);
        size_of::<Self>() + leaves * size_of::<Leaf>()
    }
}
