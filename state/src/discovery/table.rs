//! Who put the backends that no operator put.

use std::collections::BTreeMap;

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::Serialize;

use super::is_source;
use crate::ids::Slot;

/// What the cluster knows of a backend that a source put.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize, JsonSchema)]
pub struct DiscoveredBackend {
    /// Id of the source.
    pub source: String,
    /// Since when the source does not have it. `None`: it has it.
    pub lost: Option<LostBackend>,
}

/// A backend that its source does not have, or says takes no requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, JsonSchema)]
pub struct LostBackend {
    /// Replicated time at which it was lost, in milliseconds.
    pub since_ms: u64,
    /// Whether an operator wants it to drain, so that it goes on when it returns.
    pub drains_anyway: bool,
}

/// All backends that sources put, by slot.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub(crate) struct Discovered(BTreeMap<Slot, DiscoveredBackend>);

impl Discovered {
    /// All of them, to be published.
    pub(crate) fn by_slot(&self) -> &BTreeMap<Slot, DiscoveredBackend> {
        &self.0
    }

    /// The backend in `slot` if this source put it.
    pub(crate) fn of_source(&mut self, slot: Slot, source: &str) -> Option<&mut DiscoveredBackend> {
        self.0.get_mut(&slot).filter(|it| it.source == source)
    }

    /// Notes that a source has put the backend in `slot`.
    pub(crate) fn put(&mut self, slot: Slot, source: String) {
        let lost = None;
        self.0.insert(slot, DiscoveredBackend { source, lost });
    }

    /// Forgets who put the backend in `slot`: an operator did, or it is gone.
    pub(crate) fn forget(&mut self, slot: Slot) -> Option<DiscoveredBackend> {
        self.0.remove(&slot)
    }

    /// Notes what an operator wants of a backend while it is lost.
    pub(crate) fn drained_by_hand(&mut self, slot: Slot, draining: bool) {
        let lost = self.0.get_mut(&slot).and_then(|it| it.lost.as_mut());
        if let Some(lost) = lost {
            lost.drains_anyway = draining;
        }
    }

    /// Checks I132: each is registered, and has a source.
    pub(crate) fn check(&self, is_taken: impl Fn(Slot) -> bool) -> Result<(), String> {
        for (slot, backend) in &self.0 {
            if !is_taken(*slot) {
                return Err(format!("slot {slot} is empty, and {backend:?} put it"));
            }
            if !is_source(&backend.source) {
                return Err(format!("slot {slot} was put by {:?}", backend.source));
            }
        }
        Ok(())
    }
}
