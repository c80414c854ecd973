//! Current health and engine metrics of each backend, readable by the data plane without blocking.
//!
//! A [`HealthTable`] has one cell per slot. Writers (the probes, and the data plane when a request fails)
//! take the cell's short lock, change the record and publish it twice: as one packed word for the
//! candidate loop of every request, side by side with the other slots' words, and as an
//! [`Arc<Health>`] for whoever wants the words too.

use std::sync::{Arc, PoisonError};

use serde::Serialize;
use state::command::EngineFacts;
use state::ids::Slot;

use super::engine::EngineMetrics;
use crate::sync::{ArcSwapOption, AtomicU64, Mutex, MutexGuard, Notify, Ordering};

/// Failed probes in a row after which a backend takes no more requests.
pub const FAILURES_MAX: u32 = 2;
/// Failed scrapes in a row after which the last engine figures count as unknown.
pub const SCRAPE_FAILURES_MAX: u32 = 3;

/// What the last probes said of one backend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Health {
    /// Whether requests may go there.
    pub is_healthy: bool,
    /// Why not, or the last failure.
    pub detail: Option<String>,
    /// Requests in the engine's queue.
    pub waiting: u32,
    /// Requests running in the engine, all clients.
    pub running: u32,
    /// KV cache in use, thousandths.
    pub kv_usage_permille: u32,
}

/// What a failed probe says of a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// Connections are refused there.
    Unreachable,
    /// A connection is taken, or nothing is heard at all; the probe was not answered in time, or not well.
    /// That may be the probe's own fault.
    Unwell,
}

/// The figures of [`Health`] that a decision needs, read from one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Glance {
    /// Whether requests may go there.
    pub is_healthy: bool,
    /// Whether it is unhealthy, but the last probe was not refused a connection.
    pub is_doubtful: bool,
    /// Requests in the engine's queue, at most [`Glance::COUNT_MAX`].
    pub waiting: u32,
    /// Requests running in the engine, at most [`Glance::COUNT_MAX`].
    pub running: u32,
    /// KV cache in use, thousandths.
    pub kv_usage_permille: u32,
}

impl Glance {
    /// Largest count a glance tells apart.
    pub const COUNT_MAX: u32 = (1 << 24) - 1;

    /// Bit 63: something stands here, bit 62: healthy, bit 61: doubtful, then from bit 57 on 10 bits of
    /// usage and 24 of each count.
    fn pack(self) -> u64 {
        let count = |count: u32| u64::from(count.min(Self::COUNT_MAX));
        1 << 63
            | u64::from(self.is_healthy) << 62
            | u64::from(self.is_doubtful) << 61
            | u64::from(self.kv_usage_permille.min(1000)) << 48
            | count(self.waiting) << 24
            | count(self.running)
    }

    fn unpack(word: u64) -> Option<Self> {
        let count = |shift: u32| (word >> shift) as u32 & Self::COUNT_MAX;
        (word >> 63 == 1).then(|| Self {
            is_healthy: word >> 62 & 1 == 1,
            is_doubtful: word >> 61 & 1 == 1,
            kv_usage_permille: (word >> 48) as u32 & 1023,
            waiting: count(24),
            running: count(0),
        })
    }
}

/// Everything the probes know of one backend, for the admin API.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct ProbeRecord {
    /// The backend's id.
    pub id: String,
    /// Whether requests may go there.
    pub is_healthy: bool,
    /// Why not, or the last failure.
    pub detail: Option<String>,
    /// How the last probe failed; `None`: it passed, or there was none.
    pub fault: Option<Fault>,
    /// Failed probes and reported failures in a row.
    pub failures_in_row: u32,
    /// Failed probes and reported failures since this replica knows the backend.
    pub failures_total: u64,
    /// Probes since this replica knows the backend.
    pub probes_total: u64,
    /// Failed metric scrapes in a row.
    pub scrape_failures_in_row: u32,
    /// Why the engine's metrics are not known.
    pub metrics_detail: Option<String>,
    /// The engine's own figures, as of the last good scrape.
    pub metrics: EngineMetrics,
    /// Model ids of its last model list.
    pub models: Option<Vec<String>>,
    /// What was last told to the cluster about it from here.
    pub told: Option<EngineFacts>,
}

impl ProbeRecord {
    fn unprobed(id: &str) -> Self {
        Self {
            id: id.to_owned(),
            detail: Some("not probed yet".to_owned()),
            ..Self::default()
        }
    }

    /// A probe passed: one success is enough.
    pub(crate) fn passed(&mut self) {
        self.probes_total += 1;
        self.fault = None;
        self.failures_in_row = 0;
        self.is_healthy = true;
        self.detail = None;
    }

    /// A probe failed.
    pub(crate) fn probe_failed(&mut self, fault: Fault, why: String) {
        self.probes_total += 1;
        self.fault = Some(fault);
        self.failed(why);
    }

    /// A probe failed, or could not be made, or a request failed.
    pub(crate) fn failed(&mut self, why: String) {
        self.failures_total += 1;
        self.failures_in_row = self.failures_in_row.saturating_add(1);
        if self.failures_in_row >= FAILURES_MAX {
            self.is_healthy = false;
        }
        self.detail = Some(why);
    }

    /// A scrape gave figures.
    pub(crate) fn scraped(&mut self, metrics: EngineMetrics) {
        self.scrape_failures_in_row = 0;
        self.metrics_detail = None;
        self.metrics = metrics;
    }

    /// A scrape failed; old figures are worse than none.
    pub(crate) fn scrape_failed(&mut self, why: String) {
        self.scrape_failures_in_row = self.scrape_failures_in_row.saturating_add(1);
        self.metrics_detail = Some(why);
        if self.scrape_failures_in_row >= SCRAPE_FAILURES_MAX {
            self.metrics = EngineMetrics::default();
        }
    }

    /// What a decision needs of it.
    pub(crate) fn glance(&self) -> Glance {
        Glance {
            is_healthy: self.is_healthy,
            is_doubtful: !self.is_healthy && self.fault == Some(Fault::Unwell),
            waiting: self.metrics.waiting.unwrap_or(0),
            running: self.metrics.running.unwrap_or(0),
            kv_usage_permille: self.metrics.kv_usage_permille.unwrap_or(0),
        }
    }

    fn health(&self) -> Health {
        Health {
            is_healthy: self.is_healthy,
            detail: self.detail.clone(),
            waiting: self.metrics.waiting.unwrap_or(0),
            running: self.metrics.running.unwrap_or(0),
            kv_usage_permille: self.metrics.kv_usage_permille.unwrap_or(0),
        }
    }
}

/// Counts the tenants of a cell, so that a probe of an earlier one cannot write into it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct OccupancyId(u64);

#[derive(Default)]
struct Occupant {
    tenancy: OccupancyId,
    record: Option<ProbeRecord>,
}

/// One slot's place.
#[derive(Default)]
struct HealthCell {
    health: ArcSwapOption<Health>,
    tenant: Mutex<Occupant>,
    alarm: Notify,
}

/// What is known of every slot.
pub(crate) struct HealthTable {
    /// Apart from the cells: a decision that looks at hundreds of backends reads a few cache lines.
    glances: Box<[AtomicU64]>,
    cells: Box<[HealthCell]>,
}

impl HealthTable {
    pub(crate) fn new(slots: usize) -> Self {
        Self {
            glances: (0..slots).map(|_| AtomicU64::new(0)).collect(),
            cells: (0..slots).map(|_| HealthCell::default()).collect(),
        }
    }

    /// Figures for a decision; `None` when nothing stands there.
    pub(crate) fn glance(&self, slot: Slot) -> Option<Glance> {
        let glance = self.glances.get(usize::from(slot.0))?;
        Glance::unpack(glance.load(Ordering::Acquire))
    }

    pub(crate) fn health(&self, slot: Slot) -> Option<Arc<Health>> {
        self.cell(slot)?.health.load_full()
    }

    pub(crate) fn record(&self, slot: Slot) -> Option<ProbeRecord> {
        self.cell(slot)?.lock().record.clone()
    }

    /// Woken when the data plane saw a failure and the backend should be probed at once.
    ///
    /// # Panics
    /// For a slot off the board.
    pub(crate) fn alarm(&self, slot: Slot) -> &Notify {
        &self.cells[usize::from(slot.0)].alarm
    }

    /// A backend that nothing is known of moves in. A slot off the board stays as it is.
    pub(crate) fn register(&self, slot: Slot, id: &str) -> OccupancyId {
        self.replace(slot, Some(ProbeRecord::unprobed(id)))
    }

    /// The backend is gone.
    pub(crate) fn unregister(&self, slot: Slot) {
        self.replace(slot, None);
    }

    fn replace(&self, slot: Slot, record: Option<ProbeRecord>) -> OccupancyId {
        let Some(cell) = self.cell(slot) else {
            return OccupancyId::default();
        };
        let mut tenant = cell.lock();
        tenant.tenancy.0 += 1;
        tenant.record = record;
        self.publish(slot, cell, &tenant);
        tenant.tenancy
    }

    /// Changes the record of `tenancy`, unless it is over. `None` stands for whoever lives there.
    /// Answers whether the backend became healthy or unhealthy by it.
    pub(crate) fn update(
        &self,
        slot: Slot,
        tenancy: Option<OccupancyId>,
        change: impl FnOnce(&mut ProbeRecord),
    ) -> Option<bool> {
        let cell = self.cell(slot)?;
        let mut tenant = cell.lock();
        if tenancy.is_some_and(|tenancy| tenancy != tenant.tenancy) {
            return None;
        }
        let record = tenant.record.as_mut()?;
        let was_healthy = record.is_healthy;
        change(record);
        let turned = (record.is_healthy != was_healthy).then_some(record.is_healthy);
        self.publish(slot, cell, &tenant);
        turned
    }

    fn publish(&self, slot: Slot, cell: &HealthCell, tenant: &Occupant) {
        let record = tenant.record.as_ref();
        let word = record.map_or(0, |record| record.glance().pack());
        cell.health
            .store(record.map(|record| Arc::new(record.health())));
        self.glances[usize::from(slot.0)].store(word, Ordering::Release);
    }

    fn cell(&self, slot: Slot) -> Option<&HealthCell> {
        self.cells.get(usize::from(slot.0))
    }
}

impl HealthCell {
    fn lock(&self) -> MutexGuard<'_, Occupant> {
        // A record is whole between any two of its changes: a panic elsewhere does not spoil it.
        self.tenant.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const S: Slot = Slot(0);

    #[test]
    fn two_failures_in_a_row_make_unhealthy_and_one_success_healthy() {
        let board = HealthTable::new(1);
        assert_eq!(board.glance(S), None);
        let tenancy = Some(board.register(S, "a"));
        assert!(!board.glance(S).unwrap().is_healthy);
        assert_eq!(board.update(S, tenancy, ProbeRecord::passed), Some(true));
        assert_eq!(board.update(S, tenancy, |r| r.failed("one".into())), None);
        assert_eq!(board.update(S, tenancy, ProbeRecord::passed), None);
        assert_eq!(board.update(S, tenancy, |r| r.failed("one".into())), None);
        assert!(board.health(S).unwrap().is_healthy);
        assert_eq!(
            board.update(S, None, |r| r.failed("two".into())),
            Some(false),
            "a report of the data plane counts like a probe"
        );
        assert_eq!(board.health(S).unwrap().detail.as_deref(), Some("two"));
        assert_eq!(board.update(S, tenancy, ProbeRecord::passed), Some(true));
        assert_eq!(board.record(S).unwrap().failures_total, 3);
    }

    #[test]
    fn only_a_probe_that_was_not_refused_is_doubtful() {
        let board = HealthTable::new(1);
        let is_doubtful = || board.glance(S).unwrap().is_doubtful;
        let tenancy = Some(board.register(S, "a"));
        assert!(!is_doubtful(), "not probed yet");
        board.update(S, tenancy, ProbeRecord::passed);
        for _ in 0..FAILURES_MAX {
            assert!(!is_doubtful(), "it is healthy");
            board.update(S, tenancy, |r| r.probe_failed(Fault::Unwell, "slow".into()));
        }
        assert!(is_doubtful());
        board.update(S, None, |r| r.failed("a request failed".into()));
        assert!(is_doubtful(), "a request tells nothing of probes");
        board.update(S, tenancy, |r| {
            r.probe_failed(Fault::Unreachable, "refused".into());
        });
        assert!(!is_doubtful());
        board.update(S, tenancy, ProbeRecord::passed);
        for _ in 0..FAILURES_MAX {
            board.update(S, None, |r| r.failed("a request failed".into()));
        }
        let glance = board.glance(S).unwrap();
        assert!(!glance.is_healthy && !glance.is_doubtful, "requests failed");
    }

    #[test]
    fn a_probe_of_an_earlier_backend_changes_nothing() {
        let board = HealthTable::new(1);
        let first = board.register(S, "a");
        board.unregister(S);
        assert_eq!(board.update(S, Some(first), ProbeRecord::passed), None);
        assert_eq!(board.health(S), None);
        board.register(S, "a");
        assert_eq!(board.update(S, Some(first), ProbeRecord::passed), None);
        assert!(!board.health(S).unwrap().is_healthy);
    }

    #[test]
    fn old_figures_are_forgotten_after_failed_scrapes() {
        let mut record = ProbeRecord::unprobed("a");
        record.scraped(EngineMetrics {
            waiting: Some(9),
            ..EngineMetrics::default()
        });
        record.scrape_failed("no".into());
        record.scrape_failed("no".into());
        assert_eq!(record.health().waiting, 9);
        record.scrape_failed("no".into());
        assert_eq!(record.health().waiting, 0);
    }

    proptest! {
        #[test]
        fn a_glance_is_read_as_it_was_packed(
            is_healthy: bool,
            is_doubtful: bool,
            waiting: u32,
            running: u32,
            kv_usage_permille in 0u32..=1000,
        ) {
            let glance = Glance { is_healthy, is_doubtful, waiting, running, kv_usage_permille };
            prop_assert_eq!(Glance::unpack(glance.pack()).unwrap(), Glance {
                waiting: waiting.min(Glance::COUNT_MAX),
                running: running.min(Glance::COUNT_MAX),
                ..glance
            });
        }
    }
}
