//! The published read view: what many readers see without ever waiting for the one writer.

use crate::ids::{BlockHash, Slot};

/// A set of backend slots, as matching sees them: bit `slot` of word `slot / 64`.
/// A handle on the published block index. Cheap to clone; any number of threads may read while the
/// one writer (`apply`) changes it, and none ever waits.
#[derive(Clone)]
pub struct BlockView {}

impl BlockView {
    /// Whether `slot` is believed to own `block`.
    #[must_use]
    pub fn owns(&self, slot: Slot, block: BlockHash) -> bool {
        let _ = (slot, block);
        unimplemented!("ownership helper")
    }

    /// Calls `owner` for every backend that owns `block`, in ascending order of slot.
    pub fn owners(&self, block: BlockHash, owner: impl FnMut(Slot)) {
        let _ = (block, owner);
        unimplemented!("ownership helper")
    }

    /// Longest owned prefix of `chain` per backend, for all backends at once, by mask bisection:
    /// calls `matched(slot, blocks)` once for every backend that owns at least the first block,
    /// in ascending order of slot. Allocates nothing.
    pub fn match_prefix(&self, chain: &[BlockHash], matched: impl FnMut(Slot, u32)) {
        let _ = (chain, matched);
        unimplemented!("ownership helper")
    }
}
