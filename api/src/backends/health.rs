//! What is known of each backend at the moment, where the data plane reads it without waiting.
//!
//! One [`Cell`] per slot. Writers (the probes, and the data plane when a request fails) take the
//! cell's short lock, change the record and publish it twice: as one packed word for the candidate
//! loop of every request, and as an [`Arc<Health>`] for whoever wants the words too.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwapOption;
use serde::Serialize;
use state::command::EngineFacts;
use tokio::sync::Notify;

use super::engine::EngineMetrics;

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

/// The figures of [`Health`] that a decision needs, read from one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Glance {
    /// Whether requests may go there.
    pub is_healthy: bool,
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

    /// Bit 63: something stands here, bit 62: healthy, then 10 bits of usage and 24 of each count.
    fn pack(health: &Health) -> u64 {
        let count = |count: u32| u64::from(count.min(Self::COUNT_MAX));
        1 << 63
            | u64::from(health.is_healthy) << 62
            | u64::from(health.kv_usage_permille.min(1000)) << 48
            | count(health.waiting) << 24
            | count(health.running)
    }

    fn unpack(word: u64) -> Option<Self> {
        let count = |shift: u32| (word >> shift) as u32 & Self::COUNT_MAX;
        (word >> 63 == 1).then(|| Self {
            is_healthy: word >> 62 & 1 == 1,
            kv_usage_permille: (word >> 48) as u32 & 1023,
            waiting: count(24),
            running: count(0),
        })
    }
}

/// Everything the probes know of one backend, for the admin API.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Record {
    /// The backend's id.
    pub id: String,
    /// Whether requests may go there.
    pub is_healthy: bool,
    /// Why not, or the last failure.
    pub detail: Option<String>,
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

impl Record {
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
        self.failures_in_row = 0;
        self.is_healthy = true;
        self.detail = None;
    }

    /// A probe failed, or a request did.
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
pub(crate) struct Tenancy(u64);

#[derive(Default)]
struct Tenant {
    tenancy: Tenancy,
    record: Option<Record>,
}

/// One slot's place.
#[derive(Default)]
pub(crate) struct Cell {
    glance: AtomicU64,
    health: ArcSwapOption<Health>,
    tenant: Mutex<Tenant>,
    /// Woken when the data plane saw a failure and the backend should be probed at once.
    pub(crate) alarm: Notify,
}

impl Cell {
    /// Figures for a decision; `None` when nothing stands here.
    pub(crate) fn glance(&self) -> Option<Glance> {
        Glance::unpack(self.glance.load(Ordering::Acquire))
    }

    pub(crate) fn health(&self) -> Option<Arc<Health>> {
        self.health.load_full()
    }

    pub(crate) fn record(&self) -> Option<Record> {
        self.lock().record.clone()
    }

    /// A backend that nothing is known of moves in.
    pub(crate) fn move_in(&self, id: &str) -> Tenancy {
        let mut tenant = self.lock();
        tenant.tenancy.0 += 1;
        tenant.record = Some(Record::unprobed(id));
        self.publish(&tenant);
        tenant.tenancy
    }

    /// The backend is gone.
    pub(crate) fn move_out(&self) {
        let mut tenant = self.lock();
        tenant.tenancy.0 += 1;
        tenant.record = None;
        self.publish(&tenant);
    }

    /// Changes the record of `tenancy`, unless it is over. `None` stands for whoever lives here.
    /// Answers whether the backend became healthy or unhealthy by it.
    pub(crate) fn update(
        &self,
        tenancy: Option<Tenancy>,
        change: impl FnOnce(&mut Record),
    ) -> Option<bool> {
        let mut tenant = self.lock();
        if tenancy.is_some_and(|tenancy| tenancy != tenant.tenancy) {
            return None;
        }
        let record = tenant.record.as_mut()?;
        let was_healthy = record.is_healthy;
        change(record);
        let turned = (record.is_healthy != was_healthy).then_some(record.is_healthy);
        self.publish(&tenant);
        turned
    }

    fn publish(&self, tenant: &Tenant) {
        let health = tenant.record.as_ref().map(Record::health);
        let word = health.as_ref().map_or(0, Glance::pack);
        self.health.store(health.map(Arc::new));
        self.glance.store(word, Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, Tenant> {
        // A record is whole between any two of its changes: a panic elsewhere does not spoil it.
        self.tenant.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn two_failures_in_a_row_make_unhealthy_and_one_success_healthy() {
        let cell = Cell::default();
        assert_eq!(cell.glance(), None);
        let tenancy = Some(cell.move_in("a"));
        assert!(!cell.glance().unwrap().is_healthy);
        assert_eq!(cell.update(tenancy, Record::passed), Some(true));
        assert_eq!(cell.update(tenancy, |r| r.failed("one".into())), None);
        assert_eq!(cell.update(tenancy, Record::passed), None);
        assert_eq!(cell.update(tenancy, |r| r.failed("one".into())), None);
        assert!(cell.health().unwrap().is_healthy);
        assert_eq!(
            cell.update(None, |r| r.failed("two".into())),
            Some(false),
            "a report of the data plane counts like a probe"
        );
        assert_eq!(cell.health().unwrap().detail.as_deref(), Some("two"));
        assert_eq!(cell.update(tenancy, Record::passed), Some(true));
        assert_eq!(cell.record().unwrap().failures_total, 3);
    }

    #[test]
    fn a_probe_of_an_earlier_backend_changes_nothing() {
        let cell = Cell::default();
        let first = cell.move_in("a");
        cell.move_out();
        assert_eq!(cell.update(Some(first), Record::passed), None);
        assert_eq!(cell.health(), None);
        cell.move_in("a");
        assert_eq!(cell.update(Some(first), Record::passed), None);
        assert!(!cell.health().unwrap().is_healthy);
    }

    #[test]
    fn old_figures_are_forgotten_after_failed_scrapes() {
        let mut record = Record::unprobed("a");
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
        fn a_glance_says_what_health_says(
            is_healthy: bool, waiting: u32, running: u32, kv_usage_permille in 0u32..=1000
        ) {
            let health = Health { is_healthy, detail: None, waiting, running, kv_usage_permille };
            let glance = Glance::unpack(Glance::pack(&health)).unwrap();
            prop_assert_eq!(glance, Glance {
                is_healthy,
                waiting: waiting.min(Glance::COUNT_MAX),
                running: running.min(Glance::COUNT_MAX),
                kv_usage_permille,
            });
        }
    }
}
