//! Blocks that engines report, in addition to those that leases imply.
//!
//! Reports hold a reported block: neither capacity nor a release removes it. When the engine
//! reports its removal, the block and everything after it are removed at once, regardless of
//! leases. Each rank of an engine reports a block for itself; the block stays while any rank does.
//!
//! Blocks of a lease that no report confirmed fade: see [`Ownership::evict_released`].

use crate::ids::{BlockHash, Slot};
use crate::ownership::Ownership;
use crate::ownership::arena::{BlockRecord, NO_RECORD};
use crate::ownership::backend::{BackendBlocks, SharedIndex};

/// Reason for rejecting a report of a cached block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReportRejection {
    /// The slot has no backend, the previous block is not owned, another report places the block
    /// behind a different one, or the block's report counter is full.
    Contradiction,
    /// There is no room, and nothing of this backend can be evicted.
    NoRoom,
}

impl Ownership {
    /// Adds a report of `block` behind `parent` (`None` for a first block). If only leases placed
    /// the block behind another parent, moves it and removes what followed it. Adds the removed
    /// blocks at which leases end to `closed_lease_tips`.
    pub(crate) fn report(
        &mut self,
        slot: Slot,
        parent: Option<BlockHash>,
        block: BlockHash,
        closed_lease_tips: &mut Vec<BlockHash>,
    ) -> Result<(), ReportRejection> {
        match self.backend_mut(slot) {
            Some((backend, common)) => backend.report(common, parent, block, closed_lease_tips),
            None => Err(ReportRejection::Contradiction),
        }
    }

    /// Removes one report of `block`. If it was the last one, also removes the block and everything
    /// after it, and adds the removed blocks at which leases end to `closed_lease_tips`.
    pub(crate) fn unreport(
        &mut self,
        slot: Slot,
        block: BlockHash,
        closed_lease_tips: &mut Vec<BlockHash>,
    ) {
        if let Some((backend, common)) = self.backend_mut(slot) {
            backend.unreport(common, block, closed_lease_tips);
        }
    }

    /// Prefetches the memory that reports of `blocks` will touch.
    pub(crate) fn prefetch(&self, slot: Slot, blocks: &[BlockHash]) {
        if let Some(backend) = self.backend(slot) {
            backend.prefetch(blocks);
        }
    }

    /// Returns the backend's release count: the epoch of its last release.
    pub(crate) fn epoch(&self, slot: Slot) -> u64 {
        self.backend(slot).map_or(0, |backend| backend.epoch)
    }

    /// Evicts the blocks that nothing holds and whose last release was at or before `epoch`.
    pub(crate) fn evict_released(&mut self, slot: Slot, epoch: u64) {
        if let Some((backend, common)) = self.backend_mut(slot) {
            while backend.first_epoch().is_some_and(|first| first <= epoch) && backend.evict(common)
            {
            }
        }
    }

    /// Returns the number of blocks that `slot` owns because its engine reports them.
    pub(crate) fn reported(&self, slot: Slot) -> u64 {
        self.backend(slot)
            .map_or(0, |backend| u64::from(backend.reported))
    }
}

impl BackendBlocks {
    /// Adds a report to the record at `index`. Returns `false` if the counter is full.
    pub(super) fn count_report(&mut self, index: u32) -> bool {
        let record = self.arena.get(index);
        let Some(reports) = record.reports.checked_add(1) else {
            return false;
        };
        self.unlink_leaf(index, &record);
        self.arena.set(index, BlockRecord { reports, ..record });
        self.reported += u32::from(record.reports == 0);
        self.link_leaf(index);
        true
    }

    fn report(
        &mut self,
        common: &mut SharedIndex,
        parent: Option<BlockHash>,
        block: BlockHash,
        closed_lease_tips: &mut Vec<BlockHash>,
    ) -> Result<(), ReportRejection> {
        let mut behind = self.behind(parent)?;
        let mut known = self.find(block);
        if let Some(index) = known {
            let record = self.arena.get(index);
            if record.parent != behind {
                if record.reports > 0 {
                    return Err(ReportRejection::Contradiction);
                }
                self.remove(common, block, closed_lease_tips);
                behind = self.behind(parent)?;
                known = None;
            }
        }
        let index = match known {
            Some(index) => index,
            None if self.make_room(common, behind) => self.insert(common, block, behind),
            None => return Err(ReportRejection::NoRoom),
        };
        if self.count_report(index) {
            Ok(())
        } else {
            Err(ReportRejection::Contradiction)
        }
    }

    /// Returns the record of `parent`, or [`NO_RECORD`] if it is `None`, as for a first block.
    fn behind(&self, parent: Option<BlockHash>) -> Result<u32, ReportRejection> {
        parent.map_or(Ok(NO_RECORD), |parent| {
            self.find(parent).ok_or(ReportRejection::Contradiction)
        })
    }

    fn unreport(
        &mut self,
        common: &mut SharedIndex,
        block: BlockHash,
        closed_lease_tips: &mut Vec<BlockHash>,
    ) {
        let Some(index) = self.find(block) else {
            return;
        };
        let record = self.arena.get(index);
        match record.reports {
            0 => {}
            1 => {
                self.remove(common, block, closed_lease_tips);
            }
            reports => {
                let reports = reports - 1;
                self.arena.set(index, BlockRecord { reports, ..record });
            }
        }
    }
}
