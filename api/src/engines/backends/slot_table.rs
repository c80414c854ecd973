//! Maps registry slots to watched backends. A watcher is a probe or, in a simulation, a model.

use std::collections::BTreeMap;
use std::sync::Arc;

use state::ids::Slot;
use state::{Backend, Registry};
use tokio::time::Instant;

use super::Backends;
use super::engine::EngineMetrics;
use super::health::{Fault, OccupancyId, ProbeRecord};

/// The backends of a registry, each with its own watcher. A watcher is dropped when its backend is
/// removed or moves to another address. Its reports have no effect after that.
pub struct SlotTable<W> {
    backends: Arc<Backends>,
    seen: Option<Arc<Registry>>,
    entries: BTreeMap<Slot, SlotEntry<W>>,
}

struct SlotEntry<W> {
    id: String,
    url: String,
    watcher: W,
}

impl<W> SlotTable<W> {
    /// Creates an empty table.
    #[must_use]
    pub fn new(backends: Arc<Backends>) -> Self {
        Self {
            backends,
            seen: None,
            entries: BTreeMap::new(),
        }
    }

    /// Adapts the table to `registry`: removes backends that are gone, and calls `begin` to create
    /// a watcher for each new one.
    pub fn follow(
        &mut self,
        registry: Arc<Registry>,
        mut begin: impl FnMut(Occupancy, &Backend) -> W,
    ) {
        let is_known = |seen: &Arc<Registry>| Arc::ptr_eq(seen, &registry);
        if self.seen.as_ref().is_some_and(is_known) {
            return;
        }
        let backends = &self.backends;
        self.entries.retain(|slot, entry| {
            let known = backend_at(&registry, *slot, &entry.url);
            let is_there = known.is_some_and(|backend| backend.spec.id == entry.id);
            if !is_there {
                backends.board.unregister(*slot);
                backends.circuits.forget(*slot);
                backends.answers.forget(*slot);
                backends.changed();
            }
            is_there
        });
        for backend in &registry.backends {
            let slot = backend.handle.slot;
            self.entries.entry(slot).or_insert_with(|| SlotEntry {
                id: backend.spec.id.clone(),
                url: backend.spec.url.clone(),
                watcher: begin(Occupancy::begin(backends, backend), backend),
            });
        }
        self.seen = Some(registry);
    }

    /// Iterates over the watchers by slot.
    pub fn watchers(&mut self) -> impl Iterator<Item = (Slot, &mut W)> {
        let entries = self.entries.iter_mut();
        entries.map(|(slot, entry)| (*slot, &mut entry.watcher))
    }
}

/// Returns the backend in `slot` if it is the one at `url`.
pub(super) fn backend_at<'a>(registry: &'a Registry, slot: Slot, url: &str) -> Option<&'a Backend> {
    let backend = registry.backend(slot)?;
    (backend.spec.url == url).then_some(backend)
}

/// A backend's occupancy of a slot. Reports have no effect after the backend has left the slot.
pub struct Occupancy {
    backends: Arc<Backends>,
    slot: Slot,
    occupancy: OccupancyId,
}

impl Occupancy {
    fn begin(backends: &Arc<Backends>, backend: &Backend) -> Self {
        let slot = backend.handle.slot;
        Self {
            backends: Arc::clone(backends),
            slot,
            occupancy: backends.board.register(slot, &backend.spec.id),
        }
    }

    /// Records a passed probe.
    pub fn passed(&self) {
        self.update(|record| {
            record.passed();
            record.passed_at = Some(Instant::now());
        });
    }

    /// Records a failed probe and the reason.
    pub fn failed(&self, fault: Fault, why: String) {
        self.update(|record| record.probe_failed(fault, why));
    }

    /// Records figures that the engine reported about itself.
    pub fn scraped(&self, metrics: EngineMetrics) {
        self.update(|record| record.scraped(metrics));
    }

    pub(super) fn update(&self, change: impl FnOnce(&mut ProbeRecord)) {
        let board = &self.backends.board;
        let turned = board.update(self.slot, Some(self.occupancy), change);
        self.backends.changed();
        if let Some(is_healthy) = turned {
            self.backends.tell(self.slot, is_healthy);
        }
    }

    pub(super) fn slot(&self) -> Slot {
        self.slot
    }
}
