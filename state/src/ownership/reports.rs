//! Blocks that engines report, beside those that leases imply.
//!
//! A reported block is held by the report: no capacity and no release takes it. When the engine says
//! it is gone it leaves at once, with what follows it, whoever pins that. Several ranks of one engine
//! report one block each for itself; it stays as long as one of them does.
//!
//! What leases brought and no report ever confirmed fades: [`Ownership::evict_released`].

use crate::ids::{BlockHash, Slot};
use crate::ownership::Ownership;
use crate::ownership::arena::{BlockRecord, NO_RECORD};
use crate::ownership::backend::{BackendBlocks, SharedIndex};

/// A report that is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReportRejection {
    /// The block before it is not owned, or another report has it behind another block.
    Contradiction,
    /// There is no room for it, and nothing of this backend that could go.
    NoRoom,
}

impl Ownership {
    /// Counts one more report of `block` behind `parent`; `None`: it is a first block. A block that
    /// only leases put behind another one moves, and what followed it goes: `outlived` as in
    /// [`Ownership::remove`].
    pub(crate) fn report(
        &mut self,
        slot: Slot,
        parent: Option<BlockHash>,
        block: BlockHash,
        outlived: &mut Vec<BlockHash>,
    ) -> Result<(), ReportRejection> {
        match self.backend_mut(slot) {
            Some((backend, common)) => backend.report(common, parent, block, outlived),
            None => Err(ReportRejection::Contradiction),
        }
    }

    /// Counts one report of `block` less. Without any it goes, with what follows it: `outlived` as in
    /// [`Ownership::remove`].
    pub(crate) fn unreport(&mut self, slot: Slot, block: BlockHash, outlived: &mut Vec<BlockHash>) {
        if let Some((backend, common)) = self.backend_mut(slot) {
            backend.unreport(common, block, outlived);
        }
    }

    /// Loads the memory that reports of `blocks` will touch.
    pub(crate) fn warm(&self, slot: Slot, blocks: &[BlockHash]) {
        if let Some(backend) = self.backend(slot) {
            backend.warm(&self.common, blocks);
        }
    }

    /// The backend's count of releases: the epoch of the last one.
    pub(crate) fn epoch(&self, slot: Slot) -> u64 {
        self.backend(slot).map_or(0, |backend| backend.epoch)
    }

    /// Evicts what was last released at or before `epoch` and nothing holds.
    pub(crate) fn evict_released(&mut self, slot: Slot, epoch: u64) {
        if let Some((backend, common)) = self.backend_mut(slot) {
            while backend.first_epoch().is_some_and(|first| first <= epoch) && backend.evict(common)
            {
            }
        }
    }

    /// Blocks that `slot` owns because its engine reports them.
    pub(crate) fn reported(&self, slot: Slot) -> u64 {
        self.backend(slot)
            .map_or(0, |backend| u64::from(backend.reported))
    }
}

impl BackendBlocks {
    /// Counts one more report of a record; `false` when there are too many to count.
    pub(super) fn count_report(&mut self, index: u32) -> bool {
        let record = self.arena.get(index);
        let Some(reports) = record.reports.checked_add(1) else {
            return false;
        };
        self.unsettle(index, &record);
        self.arena.set(index, BlockRecord { reports, ..record });
        self.reported += u32::from(record.reports == 0);
        true
    }

    fn report(
        &mut self,
        common: &mut SharedIndex,
        parent: Option<BlockHash>,
        block: BlockHash,
        outlived: &mut Vec<BlockHash>,
    ) -> Result<(), ReportRejection> {
        let mut behind = self.behind(parent)?;
        let mut known = self.find(block);
        if let Some(index) = known {
            let record = self.arena.get(index);
            if record.parent != behind {
                if record.reports > 0 {
                    return Err(ReportRejection::Contradiction);
                }
                self.remove(common, block, outlived);
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

    /// The record of the block before one that is reported.
    fn behind(&self, parent: Option<BlockHash>) -> Result<u32, ReportRejection> {
        parent.map_or(Ok(NO_RECORD), |parent| {
            self.find(parent).ok_or(ReportRejection::Contradiction)
        })
    }

    fn unreport(
        &mut self,
        common: &mut SharedIndex,
        block: BlockHash,
        outlived: &mut Vec<BlockHash>,
    ) {
        let Some(index) = self.find(block) else {
            return;
        };
        let record = self.arena.get(index);
        match record.reports {
            0 => {}
            1 => {
                self.remove(common, block, outlived);
            }
            reports => {
                let reports = reports - 1;
                self.arena.set(index, BlockRecord { reports, ..record });
            }
        }
    }
}
