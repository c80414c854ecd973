//! Ownership: which backend holds which blocks.
//!
//! This is the writer's side of the block index; `apply` owns it. Each backend has a forest of
//! records (`arena`), an index by hash (`index`) and an eviction order (`backend`). The view
//! publishes every change to readers: parents before children when blocks are added, children
//! before parents when they are removed. Readers therefore always find ownership prefix-closed.
//!
//! All functions are total: no sequence of calls, with any hashes, panics or breaks an invariant of
//! [`Ownership::check`].

mod arena;
mod backend;
mod block_ages;
mod check;
mod digest;
mod engine_eviction_order;
pub(crate) mod index;
mod reports;
mod snapshot;

#[cfg(all(test, not(loom)))]
mod model_tests;
#[cfg(all(test, not(loom)))]
mod tests;

use crate::bounds::BACKENDS_MAX;
use crate::ids::{BlockHash, Slot};
use crate::view::{BlockView, SHARDS, ViewWriter};
use arena::NO_RECORD;
use backend::{BackendBlocks, SharedIndex};

pub(crate) use reports::ReportRejection;
pub use snapshot::FrozenOwnership;

/// Maximum number of owned blocks over all backends. A backend that would exceed it evicts its own
/// blocks, and leaves out blocks for which that does not make room.
pub const OWNED_BLOCKS_MAX: u64 = 16_000_000;

/// All backends' owned blocks: the writer's side of the block index.
pub struct Ownership {
    /// Backends, indexed by slot.
    backends: Vec<Option<Box<BackendBlocks>>>,
    common: SharedIndex,
}

/// A dispatch's hold on a backend's blocks. It pins the deepest block, and through the parent links
/// everything before it, until [`Ownership::release`].
///
/// A lease is plain data, so that it can be stored. Its holder must drop it when its tip is removed
/// ([`Ownership::remove`] and [`Ownership::clear`] report the tips). Otherwise, if the block
/// returned with another lease on it, this lease would release that one.
#[derive(Debug, PartialEq, Eq)]
pub struct Lease {
    /// Backend that holds the blocks.
    pub slot: Slot,
    /// Deepest pinned block. `None` if nothing is pinned, for example because the prompt is shorter
    /// than one block.
    pub tip: Option<BlockHash>,
    /// Number of blocks that this lease added itself.
    pub inserted: u32,
}

/// Description of one owned block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnedBlock {
    /// Hash of the block.
    pub block: BlockHash,
    /// Previous block; `None` for a first block.
    pub parent: Option<BlockHash>,
    /// Number of open leases that end here.
    pub leases: u16,
    /// Number of the engine's ranks that report the block as cached.
    pub reports: u8,
}

/// Error of [`Ownership::acquire`]: the backend does not own the given tip.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MissingTip;

impl Default for Ownership {
    fn default() -> Self {
        Self::new()
    }
}

impl Ownership {
    /// Creates an ownership without backends or blocks.
    #[must_use]
    pub fn new() -> Self {
        Self::with_limits(SHARDS, OWNED_BLOCKS_MAX)
    }

    /// Creates an ownership with `shards` shards in the view and at most `owned_max` blocks in
    /// total.
    pub(crate) fn with_limits(shards: usize, owned_max: u64) -> Self {
        let view = ViewWriter::new(shards);
        Self {
            backends: Vec::new(),
            common: SharedIndex {
                view,
                owned: 0,
                owned_max,
            },
        }
    }

    /// Returns a handle to the published view. The handle stays valid, even after a restore.
    #[must_use]
    pub fn view(&self) -> BlockView {
        self.common.view.view().clone()
    }

    /// Adds an empty backend in `slot`, replacing the previous occupant. `capacity` is in blocks,
    /// `None` if unknown (unbounded). Ignores a slot at or above [`BACKENDS_MAX`].
    pub fn add_backend(&mut self, slot: Slot, capacity: Option<u32>) {
        let at = usize::from(slot.0);
        if at >= BACKENDS_MAX {
            return;
        }
        self.remove_backend(slot);
        if self.backends.len() <= at {
            self.backends.resize_with(at + 1, || None);
        }
        self.common.view.admit(slot);
        self.backends[at] = Some(Box::new(BackendBlocks::new(slot, capacity)));
    }

    /// Whether there is a backend in `slot`.
    pub(crate) fn has(&self, slot: Slot) -> bool {
        self.backend(slot).is_some()
    }

    /// Removes the backend in `slot` and everything it owns. Its leases become invalid.
    pub fn remove_backend(&mut self, slot: Slot) {
        self.clear(slot, &mut Vec::new());
        if let Some(place) = self.backends.get_mut(usize::from(slot.0)) {
            *place = None;
        }
    }

    /// Returns the capacity in blocks of the backend in `slot`; `None` if it is unknown.
    pub(crate) fn capacity(&self, slot: Slot) -> Option<u32> {
        let backend = self.backends.get(usize::from(slot.0))?;
        backend.as_ref()?.capacity
    }

    /// Sets a backend's capacity in blocks (`None` for unbounded) and evicts down to it.
    pub fn set_capacity(&mut self, slot: Slot, capacity: Option<u32>) {
        if let Some((backend, common)) = self.backend_mut(slot) {
            backend.capacity = capacity;
            backend.trim(common);
        }
    }

    /// Pins `tip` and everything before it, adds `new` behind it, then evicts down to the capacity.
    ///
    /// The chain ends before a block of `new` for which there is no room, or that is owned behind
    /// another parent, which hashes of honest prompts never cause. A slot without a backend owns
    /// nothing.
    ///
    /// # Errors
    /// [`MissingTip`] if `slot` does not own `tip`. Nothing has changed then.
    pub fn acquire(
        &mut self,
        slot: Slot,
        tip: Option<BlockHash>,
        new: &[BlockHash],
    ) -> Result<Lease, MissingTip> {
        let mut lease = Lease {
            slot,
            tip: None,
            inserted: 0,
        };
        let Some((backend, common)) = self.backend_mut(slot) else {
            return if tip.is_some() {
                Err(MissingTip)
            } else {
                Ok(lease)
            };
        };
        let from = match tip {
            Some(tip) => backend.find(tip).ok_or(MissingTip)?,
            None => NO_RECORD,
        };
        let walk = backend.walk(common, from, new);
        if walk.tip != NO_RECORD && backend.pin(walk.tip) {
            lease.tip = Some(backend.arena.hash(walk.tip));
            lease.inserted = walk.inserted;
        }
        Ok(lease)
    }

    /// Adds `new` behind the lease's tip and pins the last block. The chain ends before a block for
    /// which there is no room, or that is owned behind another parent. Does nothing if the lease's
    /// blocks were removed.
    pub fn extend(&mut self, lease: &mut Lease, new: &[BlockHash]) {
        let Some((backend, common)) = self.backend_mut(lease.slot) else {
            return;
        };
        let from = match lease.tip.map(|tip| backend.find(tip)) {
            Some(Some(tip)) => tip,
            Some(None) => return, // Outlived its blocks.
            None => NO_RECORD,
        };
        let walk = backend.walk(common, from, new);
        if walk.tip == from || !backend.pin(walk.tip) {
            return;
        }
        if from != NO_RECORD {
            // It has a child now, so it stays even if this was its last lease.
            backend.unpin(from);
        }
        lease.tip = Some(backend.arena.hash(walk.tip));
        lease.inserted = lease.inserted.saturating_add(walk.inserted);
    }

    /// Ends `lease`.
    ///
    /// With `keep`, its blocks become evictable: least recently released first, and deepest first
    /// within one release. Otherwise, removes the blocks that no other lease pins and that no lease
    /// ever kept, because no engine ever computed them.
    #[allow(clippy::needless_pass_by_value)] // A lease ends here: who has given it cannot use it.
    pub fn release(&mut self, lease: Lease, keep: bool) {
        let Some((backend, common)) = self.backend_mut(lease.slot) else {
            return;
        };
        let Some(tip) = lease.tip.and_then(|tip| backend.find(tip)) else {
            return;
        };
        if !backend.unpin(tip) {
            return;
        }
        if keep {
            backend.touch(tip);
        } else {
            backend.release_unheld(common, tip);
        }
        backend.trim(common);
    }

    /// Ends a lease like [`Self::release`] with `keep`, but without refreshing the age of the
    /// blocks that the lease found. They are evicted as if the lease had not existed. A lease that
    /// added blocks, or whose tip was never released and so has no age, still touches the whole
    /// path.
    #[allow(clippy::needless_pass_by_value)] // A lease ends here, as in `release`.
    pub fn release_untouched(&mut self, lease: Lease) {
        let Some((backend, common)) = self.backend_mut(lease.slot) else {
            return;
        };
        let Some(tip) = lease.tip.and_then(|tip| backend.find(tip)) else {
            return;
        };
        if !backend.unpin(tip) {
            return;
        }
        if lease.inserted > 0 || backend.arena.get(tip).epoch == 0 {
            backend.touch(tip);
        } else {
            backend.link_leaf(tip);
        }
        backend.trim(common);
    }

    /// Removes `block` and all blocks that follow it from `slot`, even pinned ones, and returns
    /// their number. Adds the removed blocks at which leases end to `closed_lease_tips`; those
    /// leases are over. Removing a leaf is cheap; removing a block with successors visits every
    /// block of the backend.
    pub fn remove(
        &mut self,
        slot: Slot,
        block: BlockHash,
        closed_lease_tips: &mut Vec<BlockHash>,
    ) -> u32 {
        match self.backend_mut(slot) {
            Some((backend, common)) => backend.remove(common, block, closed_lease_tips),
            None => 0,
        }
    }

    /// Removes every block from `slot`, even pinned ones, but keeps the backend. Adds the blocks at
    /// which leases end to `closed_lease_tips`; those leases are over.
    pub fn clear(&mut self, slot: Slot, closed_lease_tips: &mut Vec<BlockHash>) {
        if let Some((backend, common)) = self.backend_mut(slot) {
            backend.clear(common, closed_lease_tips);
        }
    }

    /// Returns the number of blocks that `slot` owns.
    #[must_use]
    pub fn owned(&self, slot: Slot) -> u64 {
        self.backend(slot)
            .map_or(0, |backend| u64::from(backend.owned))
    }

    /// Iterates over the blocks that `slot` owns, in no particular order.
    pub fn blocks(&self, slot: Slot) -> impl Iterator<Item = OwnedBlock> {
        let arena = self.backend(slot).map(|backend| &backend.arena);
        let records = arena.into_iter().flat_map(|arena| {
            let records = arena.live();
            records.map(move |(_, record)| (arena, record))
        });
        records.map(|(arena, record)| OwnedBlock {
            block: record.hash,
            parent: (record.parent != NO_RECORD).then(|| arena.hash(record.parent)),
            leases: record.leases,
            reports: record.reports,
        })
    }

    /// Returns the number of owned blocks over all backends. A block with two owners counts twice.
    #[must_use]
    pub fn owned_total(&self) -> u64 {
        self.common.owned
    }

    /// Returns an order-independent 128-bit digest over every owned block with its parent, open
    /// leases and epoch, and over each backend's capacity and release count. Kept incrementally.
    #[must_use]
    pub fn digest(&self) -> u128 {
        let backends = self.backends.iter().flatten();
        backends.fold(0, |sum: u128, backend| {
            let figures = digest::of_backend(backend.slot, backend.capacity, backend.epoch);
            sum.wrapping_add(backend.sum).wrapping_add(figures)
        })
    }

    /// Returns the heap size of the index in bytes: records, lookups and view. Exact except for the
    /// nodes of the sets of evictable leaves, which are estimated, and for allocator overhead.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        let backends: usize = self
            .backends
            .iter()
            .flatten()
            .map(|b| b.memory_bytes())
            .sum();
        (backends + self.common.view.memory_bytes()) as u64
    }

    fn backend(&self, slot: Slot) -> Option<&BackendBlocks> {
        self.backends.get(usize::from(slot.0))?.as_deref()
    }

    fn backend_mut(&mut self, slot: Slot) -> Option<(&mut BackendBlocks, &mut SharedIndex)> {
        let backend = self.backends.get_mut(usize::from(slot.0))?.as_deref_mut()?;
        Some((backend, &mut self.common))
    }
}

impl std::fmt::Debug for Ownership {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ownership")
            .field("owned", &self.common.owned)
            .finish_non_exhaustive()
    }
}
