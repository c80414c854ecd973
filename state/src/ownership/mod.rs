//! Ownership: which backend holds which blocks, as leases.

use crate::ids::{BlockHash, Slot};
use crate::view::BlockView;

/// All backends' owned blocks: the writer's side of the block index.
pub struct Ownership {}

/// A dispatch's hold on a backend's blocks: pins its deepest block, and through parent links all
/// before it, until given to [`Ownership::release`].
#[derive(Debug, PartialEq, Eq)]
pub struct Lease {
    /// The backend.
    pub slot: Slot,
    /// Deepest pinned block. `None`: a prompt shorter than one block pins nothing.
    pub tip: Option<BlockHash>,
    /// How many blocks, from the tip up, this lease brought in itself.
    pub inserted: u32,
}

/// The tip an acquire names is not owned by that backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MissingTip;

impl Ownership {
    /// A handle on the published view; always the same index, also after a restore.
    #[must_use]
    pub fn view(&self) -> BlockView {
        unimplemented!("ownership helper")
    }

    /// Starts an empty backend in `slot`; `capacity` in blocks, `None` while unknown (unbounded).
    pub fn add_backend(&mut self, slot: Slot, capacity: Option<u32>) {
        let _ = (slot, capacity);
        unimplemented!("ownership helper")
    }

    /// Forgets the backend and all it owns. Leases on it must not be used any more.
    pub fn remove_backend(&mut self, slot: Slot) {
        let _ = slot;
        unimplemented!("ownership helper")
    }

    /// Changes a backend's capacity and evicts down to it.
    pub fn set_capacity(&mut self, slot: Slot, capacity: Option<u32>) {
        let _ = (slot, capacity);
        unimplemented!("ownership helper")
    }

    /// Pins `tip` and what leads to it, adds `new` behind it, evicts what is then too much.
    ///
    /// # Errors
    /// [`MissingTip`] when `slot` does not own `tip`; nothing changed.
    pub fn acquire(
        &mut self,
        slot: Slot,
        tip: Option<BlockHash>,
        new: &[BlockHash],
    ) -> Result<Lease, MissingTip> {
        let _ = (slot, tip, new);
        unimplemented!("ownership helper")
    }

    /// Adds `new` behind the lease's tip and pins the last of them.
    pub fn extend(&mut self, lease: &mut Lease, new: &[BlockHash]) {
        let _ = (lease, new);
        unimplemented!("ownership helper")
    }

    /// Ends a lease. `keep`: its blocks become evictable, least recently released first, deepest
    /// first within one release; otherwise the blocks it brought in and nobody else pins go.
    pub fn release(&mut self, lease: Lease, keep: bool) {
        let _ = (lease, keep);
        unimplemented!("ownership helper")
    }

    /// Blocks `slot` owns.
    #[must_use]
    pub fn owned(&self, slot: Slot) -> u64 {
        let _ = slot;
        unimplemented!("ownership helper")
    }

    /// Order-independent 128-bit digest over every owned block with its parent, pins and epoch,
    /// kept incrementally.
    #[must_use]
    pub fn digest(&self) -> u128 {
        unimplemented!("ownership helper")
    }
}
