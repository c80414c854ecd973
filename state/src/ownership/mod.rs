//! Ownership: which backend holds which blocks, as leases.
//!
//! The writer's side of the block index, owned by `apply`. Per backend a forest of records (`arena`),
//! looked up by hash (`index`), with the order in which they go (`backend`); every change is shown
//! to readers through the published view, parents before children when blocks come, children before
//! parents when they go, so that readers, too, find ownership prefix-closed.
//!
//! Everything here is total: no sequence of calls with whatever hashes panics or breaks what
//! [`Ownership::check`] states.

mod arena;
mod backend;
mod check;
mod digest;
pub(crate) mod index;
mod reports;
mod snapshot;

#[cfg(all(test, not(loom)))]
mod model_tests;
#[cfg(all(test, not(loom)))]
mod tests;

use crate::bounds::BACKENDS_MAX;
use crate::ids::{BlockHash, Slot};
use crate::planted::{self, Bug};
use crate::view::{BlockView, SHARDS, ViewWriter};
use arena::NO_RECORD;
use backend::{BackendBlocks, SharedIndex};

pub(crate) use reports::ReportRejection;
pub use snapshot::FrozenOwnership;

/// Most blocks owned over all backends. A backend that inserts beyond it evicts its own; what it
/// then cannot hold is left out.
pub const OWNED_BLOCKS_MAX: u64 = 16_000_000;

/// All backends' owned blocks: the writer's side of the block index.
pub struct Ownership {
    /// By slot.
    backends: Vec<Option<Box<BackendBlocks>>>,
    common: SharedIndex,
}

/// A dispatch's hold on a backend's blocks: pins its deepest block, and through parent links all
/// before it, until given to [`Ownership::release`].
///
/// It is plain data, so that it can be stored. One whose tip was taken away under it
/// ([`Ownership::remove`], [`Ownership::clear`] say which) must be forgotten by who keeps it: the block
/// may come back, and another lease with it, which this one would release.
#[derive(Debug, PartialEq, Eq)]
pub struct Lease {
    /// The backend.
    pub slot: Slot,
    /// Deepest pinned block. `None`: a prompt shorter than one block pins nothing.
    pub tip: Option<BlockHash>,
    /// How many blocks this lease brought in itself.
    pub inserted: u32,
}

/// One owned block, as data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnedBlock {
    /// The block.
    pub block: BlockHash,
    /// The block before it; `None`: it is a first one.
    pub parent: Option<BlockHash>,
    /// Open leases that end here.
    pub leases: u16,
    /// Ranks of the engine that report it.
    pub reports: u8,
}

/// The tip an acquire names is not owned by that backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MissingTip;

impl Default for Ownership {
    fn default() -> Self {
        Self::new()
    }
}

impl Ownership {
    /// No backends, no blocks.
    #[must_use]
    pub fn new() -> Self {
        Self::with_limits(SHARDS, OWNED_BLOCKS_MAX)
    }

    /// With a view of `shards` shards and at most `owned_max` blocks in all.
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

    /// A handle on the published view; always the same index, also after a restore.
    #[must_use]
    pub fn view(&self) -> BlockView {
        self.common.view.view().clone()
    }

    /// Starts an empty backend in `slot`; `capacity` in blocks, `None` while unknown (unbounded).
    /// What stood there is forgotten; a slot beyond [`BACKENDS_MAX`] is left alone.
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

    /// Forgets the backend and all it owns. Leases on it must not be used any more.
    pub fn remove_backend(&mut self, slot: Slot) {
        self.clear(slot, &mut Vec::new());
        if let Some(place) = self.backends.get_mut(usize::from(slot.0)) {
            *place = None;
        }
    }

    /// Changes a backend's capacity and evicts down to it.
    pub fn set_capacity(&mut self, slot: Slot, capacity: Option<u32>) {
        if let Some((backend, common)) = self.backend_mut(slot) {
            backend.capacity = capacity;
            backend.trim(common);
        }
    }

    /// Pins `tip` and what leads to it, adds `new` behind it, evicts what is then too much.
    ///
    /// `new` counts as far as it is a chain: a block that is owned behind another parent than the one
    /// given here ends it, as hashes of honest prompts never do. Of a slot without a backend nothing
    /// is owned and nothing kept.
    ///
    /// # Errors
    /// [`MissingTip`] when `slot` does not own `tip`; nothing changed.
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
            Some(tip) => match backend.find(tip) {
                None if planted::is(Bug::MissingTipIsFirst) => NO_RECORD,
                found => found.ok_or(MissingTip)?,
            },
            None => NO_RECORD,
        };
        let walk = backend.walk(common, from, new);
        if walk.tip != NO_RECORD && backend.pin(walk.tip) {
            lease.tip = Some(backend.arena.hash(walk.tip));
            lease.inserted = walk.inserted;
        }
        Ok(lease)
    }

    /// Adds `new` behind the lease's tip and pins the last of them. `new` ends where
    /// [`Self::acquire`] says.
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
            // It has a child now, so it stays whether or not this was the last lease on it.
            backend.unpin(from);
        }
        lease.tip = Some(backend.arena.hash(walk.tip));
        lease.inserted = lease.inserted.saturating_add(walk.inserted);
    }

    /// Ends a lease. `keep`: its blocks become evictable, least recently released first, deepest
    /// first within one release. Otherwise those blocks go that no other lease pins and that none
    /// ever kept, which is to say that no engine ever computed them.
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
            backend.give_back(common, tip);
        }
        backend.trim(common);
    }

    /// As [`Self::release`] with `keep`, but the age of blocks that the lease found is not renewed:
    /// they go when they would have gone without it. A lease that brought blocks touches the whole
    /// path all the same, as does one whose tip nobody has released before: an age it must have.
    #[allow(clippy::needless_pass_by_value)] // As above.
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
            backend.settle(tip);
        }
        backend.trim(common);
    }

    /// Takes `block` and every block that follows it from `slot`, whoever pins them; answers how many
    /// were owned, and adds to `outlived` those at which leases end: these leases are over. A block
    /// that others follow costs a look at every block of the backend, a leaf does not.
    pub fn remove(&mut self, slot: Slot, block: BlockHash, outlived: &mut Vec<BlockHash>) -> u32 {
        match self.backend_mut(slot) {
            Some((backend, common)) => backend.remove(common, block, outlived),
            None => 0,
        }
    }

    /// Takes every block from `slot`, whoever pins them, and keeps the backend. `outlived` as in
    /// [`Self::remove`].
    pub fn clear(&mut self, slot: Slot, outlived: &mut Vec<BlockHash>) {
        if let Some((backend, common)) = self.backend_mut(slot) {
            backend.clear(common, outlived);
        }
    }

    /// Blocks `slot` owns.
    #[must_use]
    pub fn owned(&self, slot: Slot) -> u64 {
        self.backend(slot)
            .map_or(0, |backend| u64::from(backend.owned))
    }

    /// What `slot` owns, in no particular order.
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

    /// Blocks owned over all backends: a block that two own counts twice.
    #[must_use]
    pub fn owned_total(&self) -> u64 {
        self.common.owned
    }

    /// Order-independent 128-bit digest over every owned block with its parent, open leases and
    /// epoch, kept incrementally, and over each backend's capacity and release count.
    #[must_use]
    pub fn digest(&self) -> u128 {
        let backends = self.backends.iter().flatten();
        backends.fold(0, |sum: u128, backend| {
            let figures = digest::of_backend(backend.slot, backend.capacity, backend.epoch);
            sum.wrapping_add(backend.sum).wrapping_add(figures)
        })
    }

    /// Heap bytes of the index: records, lookups and view. Exact but for the sets of evictable
    /// leaves, whose nodes are estimated, and for what the allocator adds.
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
