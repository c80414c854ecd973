//! Published service data: one entry per backend, updated when a sample or a setting changes it.

use schemars::JsonSchema;
use serde::Serialize;

use super::{AccuracyView, LearntPrices, LimitFigures};
use crate::ids::{BackendRef, Slot};

/// Source of a backend's capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CapacitySource {
    /// The operator's value.
    Config,
    /// The engine's value, corrected by what its responses reveal.
    Engine,
    /// A default, because the engine reported none, corrected by what its responses reveal.
    Assumed,
}

/// Service figures of one backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub struct BackendServiceView {
    /// Backend that the figures belong to.
    #[serde(skip)]
    pub backend: BackendRef,
    /// Maximum number of concurrent requests; `None`: unlimited.
    pub limit: Option<u32>,
    /// Figures behind the limit.
    pub limits: LimitFigures,
    /// Cache capacity in blocks that ownership is kept within. `None`: unbounded, until all members
    /// know version 4 of the log format.
    pub capacity_blocks: Option<u32>,
    /// Where that capacity comes from.
    pub capacity_from: CapacitySource,
    /// Learned prices; `None` before the first measurement.
    pub learnt: Option<LearntPrices>,
    /// Accuracy of cache predictions; `None` before the first measurement.
    pub accuracy: Option<AccuracyView>,
}

/// Service figures of all backends, as published to readers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ServiceView {
    /// Figures by slot; `None` for a slot without a backend.
    by_slot: Vec<Option<BackendServiceView>>,
    has_limits: bool,
}

impl ServiceView {
    /// Creates a view of the figures in `served`, which must ascend by slot.
    pub(crate) fn of(served: impl Iterator<Item = BackendServiceView>) -> Self {
        let mut by_slot = Vec::new();
        let mut has_limits = false;
        for served in served {
            has_limits |= served.limit.is_some();
            by_slot.resize(usize::from(served.backend.slot.0), None);
            by_slot.push(Some(served));
        }
        Self {
            by_slot,
            has_limits,
        }
    }

    /// Returns the figures of the backend in `slot`, if there is one.
    #[must_use]
    pub fn get(&self, slot: Slot) -> Option<&BackendServiceView> {
        self.by_slot.get(usize::from(slot.0))?.as_ref()
    }

    /// Whether no backend has a maximum number of concurrent requests.
    #[must_use]
    pub fn is_unlimited(&self) -> bool {
        !self.has_limits
    }

    /// Returns the maximum number of concurrent requests of the backend in `slot`; `None` if
    /// unlimited.
    #[must_use]
    pub fn limit(&self, slot: Slot) -> Option<u32> {
        self.get(slot)?.limit
    }
}
