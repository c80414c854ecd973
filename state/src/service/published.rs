//! Published service data: one entry per backend, updated when a sample or a setting changes it.

use serde::Serialize;

use super::{AccuracyView, LearntPrices, LimitFigures};
use crate::ids::{BackendRef, Slot};

/// What is known of one backend's service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct BackendServiceView {
    /// The backend.
    #[serde(skip)]
    pub backend: BackendRef,
    /// Most requests it is given at once; `None`: as many as come.
    pub limit: Option<u32>,
    /// What the limit follows from.
    pub limits: LimitFigures,
    /// Blocks its cache is taken to hold: as the operator says, else as the engine says,
    /// corrected by what its answers say; `None`: unknown.
    pub capacity_blocks: Option<u32>,
    /// Its prices; `None` before anything was measured.
    pub learnt: Option<LearntPrices>,
    /// How well predictions of its cache hold; `None` before anything was measured.
    pub accuracy: Option<AccuracyView>,
}

/// What is known of all backends.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ServiceView {
    /// By slot.
    by_slot: Vec<Option<BackendServiceView>>,
}

impl ServiceView {
    /// Of `served`, by slot ascending.
    pub(crate) fn of(served: impl Iterator<Item = BackendServiceView>) -> Self {
        let mut by_slot = Vec::new();
        for served in served {
            by_slot.resize(usize::from(served.backend.slot.0), None);
            by_slot.push(Some(served));
        }
        Self { by_slot }
    }

    /// Of the backend in `slot`.
    #[must_use]
    pub fn get(&self, slot: Slot) -> Option<&BackendServiceView> {
        self.by_slot.get(usize::from(slot.0))?.as_ref()
    }

    /// Most requests the backend in `slot` is given at once; `None`: as many as come.
    #[must_use]
    pub fn limit(&self, slot: Slot) -> Option<u32> {
        self.get(slot)?.limit
    }
}
