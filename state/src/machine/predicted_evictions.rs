//! Publication of the coming evictions of engines, see [`crate::kv_events::EvictionsView`].

use std::sync::Arc;

use super::RouterState;
use crate::ids::{BackendRef, Slot};
use crate::kv_events::{CacheFill, ComingEvictions, EvictionsView};

impl RouterState {
    /// Publishes the coming evictions of all engines. Recomputes those that may have changed.
    pub(super) fn publish_evictions(&mut self) {
        let known = self.view.evictions();
        let mut has_changed = false;
        let mut next = Vec::with_capacity(known.0.len());
        for (backend, held) in self.exact.shown() {
            let Some(fill) = self.cache_fill(backend.slot, held) else {
                continue;
            };
            match known.get(backend).filter(|it| it.is_of(backend, fill)) {
                Some(same) => next.push(Arc::clone(same)),
                None => {
                    has_changed = true;
                    next.push(Arc::new(self.coming_evictions(backend, fill)));
                }
            }
        }
        if has_changed || next.len() != known.0.len() {
            self.view.publish_evictions(EvictionsView(next));
        }
    }

    fn coming_evictions(&self, backend: BackendRef, fill: CacheFill) -> ComingEvictions {
        let blocks = self
            .ownership
            .next_engine_evictions(backend.slot, fill.listed());
        ComingEvictions::new(backend, fill, blocks)
    }

    /// Returns the fill level of the cache of the engine in `slot`; `None` if its size is unknown.
    fn cache_fill(&self, slot: Slot, held: u64) -> Option<CacheFill> {
        let capacity = self.backends.in_slot(slot)?.facts.capacity_blocks?;
        Some(CacheFill {
            version: self.ownership.version(slot),
            held,
            unreported: self.ownership.unreported(slot),
            capacity,
        })
    }
}
