//! The table of backends that sources registered.

use std::collections::BTreeMap;

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::Serialize;

use super::is_source;
use crate::ids::Slot;

/// A backend that a source registered.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize, JsonSchema)]
pub struct DiscoveredBackend {
    /// Id of the source.
    pub source: String,
    /// Loss of the backend; `None` if it is not lost.
    pub lost: Option<LostBackend>,
}

/// A backend that its source no longer lists, or lists as not ready or leaving.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize, JsonSchema)]
pub struct LostBackend {
    /// Replicated time at which it was lost, in milliseconds.
    pub since_ms: u64,
    /// Whether an operator drains it as well, so that it keeps draining when its source lists it
    /// again.
    pub drains_anyway: bool,
}

/// All backends that sources registered, by slot.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub(crate) struct Discovered(BTreeMap<Slot, DiscoveredBackend>);

impl Discovered {
    /// Returns the table, to be published.
    pub(crate) fn by_slot(&self) -> &BTreeMap<Slot, DiscoveredBackend> {
        &self.0
    }

    /// Returns the entry of the backend in `slot` if `source` registered it.
    pub(crate) fn of_source(&mut self, slot: Slot, source: &str) -> Option<&mut DiscoveredBackend> {
        self.0.get_mut(&slot).filter(|it| it.source == source)
    }

    /// Records that `source` registered the backend in `slot`, which is not lost.
    pub(crate) fn put(&mut self, slot: Slot, source: String) {
        let lost = None;
        self.0.insert(slot, DiscoveredBackend { source, lost });
    }

    /// Removes and returns the entry, if there is one, of the backend in `slot`, which is gone or
    /// now belongs to an operator.
    pub(crate) fn forget(&mut self, slot: Slot) -> Option<DiscoveredBackend> {
        self.0.remove(&slot)
    }

    /// Records whether an operator drains the backend in `slot`, if it is lost.
    pub(crate) fn drained_by_hand(&mut self, slot: Slot, draining: bool) {
        let lost = self.0.get_mut(&slot).and_then(|it| it.lost.as_mut());
        if let Some(lost) = lost {
            lost.drains_anyway = draining;
        }
    }

    /// Checks I132: each entry belongs to a registered backend and has a valid source.
    ///
    /// # Errors
    /// Describes the first violation.
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
