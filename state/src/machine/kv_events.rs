//! Application of KV events, and of the assignment of their readers.

use super::RouterState;
use crate::backends::SlotChange;
use crate::kv_events::{KvBatch, KvUncertainty};
use crate::reader_assignment::Assignment;
use crate::reject::Rejection;

impl RouterState {
    pub(super) fn assign_readers(&mut self, readers: &[Assignment]) -> Result<(), Rejection> {
        let backends = &self.backends;
        let changed = self.readers.replace(readers, |it| backends.is_live(it))?;
        let slots = changed
            .into_iter()
            .flat_map(|it| self.backends.rank_slots(it));
        for slot in slots.collect::<Vec<_>>() {
            let spec = self.backends.in_slot(slot).map(|backend| &backend.spec);
            if spec.is_some_and(|spec| spec.kv_events.is_some()) {
                self.exact.doubt(slot, KvUncertainty::Handover);
            } else if self.exact.forget(slot) {
                // Without a reader, nothing updates the reported blocks: start over with leases.
                self.follow(&[SlotChange::Begun(slot)]);
            }
        }
        self.is_cold_changed = true;
        Ok(())
    }

    pub(super) fn kv_events(&mut self, batch: &KvBatch) -> bool {
        if !self.backends.is_live(batch.backend) {
            return false;
        }
        let Some(backend) = self.backends.rank_of(batch.backend, batch.rank) else {
            return false;
        };
        let Some(changes) =
            (self.exact).apply(backend, batch, (&mut self.ownership, &mut self.tiers))
        else {
            return false;
        };
        self.leases
            .forget_tips(backend.slot, &changes.closed_lease_tips);
        self.is_cold_changed |= changes.is_condition_changed;
        true
    }
}
