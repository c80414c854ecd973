//! Current health and engine metrics of each backend, which the data plane reads without blocking.
//!
//! A [`HealthTable`] has one cell per slot. Writers (the probes, and the data plane when its
//! request makes an engine load an adapter) take the cell's short lock, change the record and
//! publish it twice: as one packed word, next to the other slots' words, for the candidate loop of
//! every request, and as an [`Arc<Health>`] for readers that also need the texts.

use std::sync::{Arc, PoisonError};

use serde::Serialize;
use state::command::EngineFacts;
use state::ids::Slot;
use tokio::time::Instant;

use super::activity::Standstill;
use super::adapters::EngineAdapters;
use super::engine::{EngineKind, EngineMetrics, EngineModel};
use super::modes::DisaggregationFacts;
use crate::sync::{ArcSwapOption, AtomicU64, Mutex, MutexGuard, Notify, Ordering};

/// Number of consecutive failed probes after which a backend gets no more requests.
pub const FAILURES_MAX: u32 = 2;
/// Number of consecutive failed scrapes after which the last engine figures are dropped.
pub const SCRAPE_FAILURES_MAX: u32 = 3;

/// Health of one backend according to the last probes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Health {
    /// Whether the backend may get requests.
    pub is_healthy: bool,
    /// Last failure; `None` if nothing has failed since the last passed probe.
    pub detail: Option<String>,
    /// Number of requests in the engine's queue.
    pub waiting: u32,
    /// Number of requests running in the engine, from all clients.
    pub running: u32,
    /// KV cache usage, in thousandths.
    pub kv_usage_permille: u32,
    /// LoRA adapters of the engine; `None` if it reports none.
    pub adapters: Option<Arc<EngineAdapters>>,
}

/// Kind of a probe failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// No connection could be established, for example because it was refused. Timeouts are
    /// [`Fault::Unwell`].
    Unreachable,
    /// The connection was accepted or got no reply at all, and the probe got no proper response in
    /// time. The probe itself may be at fault.
    Unwell,
}

/// The part of [`Health`] that a decision needs, packed in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HealthFlags {
    /// Whether the backend may get requests.
    pub is_healthy: bool,
    /// Whether the backend is unhealthy, but the last probe was not refused a connection.
    pub is_doubtful: bool,
    /// Whether the engine reports its adapters, so that [`Health::adapters`] is known.
    pub has_adapters: bool,
    /// Whether this kind and version of engine supports `cache_salt`.
    pub knows_salts: bool,
    /// Whether the engine, once it has a role, must meet another engine in a bootstrap room.
    pub meets_in_rooms: bool,
    /// Number of requests in the engine's queue, at most [`HealthFlags::COUNT_MAX`].
    pub waiting: u32,
    /// Number of requests running in the engine, at most [`HealthFlags::COUNT_MAX`].
    pub running: u32,
    /// KV cache usage, in thousandths.
    pub kv_usage_permille: u32,
}

impl HealthFlags {
    /// Largest number of requests that can be represented.
    pub const COUNT_MAX: u32 = (1 << 24) - 1;

    /// Packs the fields into one word. Bit 63: slot occupied, 62: healthy, 61: doubtful, 60:
    /// adapters, 59: salts, 58: rooms, 48 to 57: usage, 24 to 47: waiting, 0 to 23: running.
    fn pack(self) -> u64 {
        let count = |count: u32| u64::from(count.min(Self::COUNT_MAX));
        1 << 63
            | u64::from(self.is_healthy) << 62
            | u64::from(self.is_doubtful) << 61
            | u64::from(self.has_adapters) << 60
            | u64::from(self.knows_salts) << 59
            | u64::from(self.meets_in_rooms) << 58
            | u64::from(self.kv_usage_permille.min(1000)) << 48
            | count(self.waiting) << 24
            | count(self.running)
    }

    fn unpack(word: u64) -> Option<Self> {
        let count = |shift: u32| (word >> shift) as u32 & Self::COUNT_MAX;
        (word >> 63 == 1).then(|| Self {
            is_healthy: word >> 62 & 1 == 1,
            is_doubtful: word >> 61 & 1 == 1,
            has_adapters: word >> 60 & 1 == 1,
            knows_salts: word >> 59 & 1 == 1,
            meets_in_rooms: word >> 58 & 1 == 1,
            kv_usage_permille: (word >> 48) as u32 & 1023,
            waiting: count(24),
            running: count(0),
        })
    }
}

/// All that the probes know about one backend, for the admin API.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct ProbeRecord {
    /// Id of the backend.
    pub id: String,
    /// Whether the backend may get requests.
    pub is_healthy: bool,
    /// Why the backend is unhealthy, or what has failed since the last passed probe, if anything.
    pub detail: Option<String>,
    /// How the last probe failed; `None` if it passed or there was none.
    pub fault: Option<Fault>,
    /// Why the engine does no work although it answers probes; `None` if it works, as far as known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub standstill: Option<Standstill>,
    /// Number of consecutive failed probes and reported failures.
    pub failures_in_row: u32,
    /// Number of failed probes and reported failures since this replica has known the backend.
    pub failures_total: u64,
    /// Number of probes since this replica has known the backend.
    pub probes_total: u64,
    /// Time at which the last probe passed; `None` if none has.
    #[serde(skip)]
    pub passed_at: Option<Instant>,
    /// Number of probes that were refused a connection.
    #[serde(skip)]
    pub(crate) refusals_total: u64,
    /// Number of signs so far that another process may have taken over since the models were listed.
    #[serde(skip)]
    pub(crate) list_doubts_total: u64,
    /// Why the engine shows no models, if it refuses this replica's credentials.
    #[serde(skip)]
    pub(crate) locked_out: Option<String>,
    /// Number of consecutive failed metric scrapes.
    pub scrape_failures_in_row: u32,
    /// Why the engine's metrics could not be read; `None` if they could.
    pub metrics_detail: Option<String>,
    /// The engine's figures as of the last successful scrape.
    pub metrics: EngineMetrics,
    /// Kind of the engine, as last recognised by its metrics or models; `None` before.
    pub kind: Option<EngineKind>,
    /// Stage that the engine computes; `None` if it reports none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disaggregation: Option<DisaggregationFacts>,
    /// Model ids in the last model list; `None` before the first.
    pub models: Option<Vec<String>>,
    /// Whether the last list of models could not be read.
    #[serde(skip)]
    pub(crate) is_list_broken: bool,
    /// Entries of the last model list; `None` before the first.
    #[serde(skip)]
    pub listed: Option<Arc<[EngineModel]>>,
    /// Version that the engine reports; `None` if none is known.
    pub version: Option<String>,
    /// Facts last reported to the cluster by this replica; `None` if there were none.
    pub told: Option<EngineFacts>,
    /// Tokens per block of the model, if the engine's own block size does not fit it.
    pub unfit_block_size: Option<u32>,
    /// Adapters for which this replica sent requests and that the metrics need not list yet, with
    /// the number of scrapes until they must.
    #[serde(skip)]
    pub(crate) sent_adapters: Vec<(String, u8)>,
    /// Adapters for decisions, derived from `sent_adapters`, the metrics and the model list; `None`
    /// if the metrics report none.
    #[serde(skip)]
    pub(crate) adapters: Option<Arc<EngineAdapters>>,
}

/// Number of scrapes after which an adapter counts as in memory only if the engine reports it: one
/// scrape may have begun before the request arrived.
const SENT_SCRAPES: u8 = 2;

impl ProbeRecord {
    fn unprobed(id: &str) -> Self {
        Self {
            id: id.to_owned(),
            detail: Some("not probed yet".to_owned()),
            ..Self::default()
        }
    }

    /// Records a passed probe. One success makes the backend healthy, unless the engine refuses
    /// this replica's credentials or does no work.
    pub(crate) fn passed(&mut self) {
        self.probes_total += 1;
        self.list_doubts_total += u64::from(self.failures_in_row > 0);
        (self.fault, self.failures_in_row) = (None, 0);
        let standstill = || self.standstill.map(|why| why.to_string());
        self.detail = self.locked_out.clone().or_else(standstill);
        self.is_healthy = self.detail.is_none();
    }

    /// Records whether the engine refuses this replica's credentials, and why it is thought so. It
    /// becomes healthy again by the next passed probe.
    pub(crate) fn locked_out(&mut self, why: Option<String>) {
        if why.is_some() {
            self.is_healthy = false;
            self.detail.clone_from(&why);
        }
        self.locked_out = why;
    }

    /// Records why the engine does no work. Without a reason, the next probe makes it healthy.
    pub(crate) fn stands_still(&mut self, standstill: Option<Standstill>) {
        self.standstill = standstill;
        self.is_healthy &= standstill.is_none();
        self.detail = standstill.map_or(self.detail.take(), |why| Some(why.to_string()));
    }

    /// Records a failed probe.
    pub(crate) fn probe_failed(&mut self, fault: Fault, why: String) {
        self.probes_total += 1;
        self.refusals_total += u64::from(fault == Fault::Unreachable);
        self.fault = Some(fault);
        self.failed(why);
    }

    /// Records a failed probe, a probe that could not be sent, or a failed request.
    pub(crate) fn failed(&mut self, why: String) {
        self.failures_total += 1;
        self.failures_in_row = self.failures_in_row.saturating_add(1);
        if self.failures_in_row >= FAILURES_MAX {
            self.is_healthy = false;
        }
        self.detail = Some(why);
    }

    /// Records a successful scrape.
    pub(crate) fn scraped(&mut self, metrics: EngineMetrics) {
        self.scrape_failures_in_row = 0;
        self.metrics_detail = None;
        self.metrics = metrics;
        self.sent_adapters.retain_mut(|(_, scrapes)| {
            *scrapes -= 1;
            *scrapes > 0
        });
        self.combine_adapters();
    }

    /// Records a model list.
    pub(crate) fn listed(&mut self, models: Arc<[EngineModel]>) {
        self.models = Some(models.iter().map(|model| model.id.clone()).collect());
        self.listed = Some(models);
        self.is_list_broken = false;
        self.combine_adapters();
    }

    fn listed_adapters(&self) -> impl Iterator<Item = &String> {
        let listed = self.listed.iter().flat_map(|models| models.iter());
        listed.filter(|it| it.is_adapter()).map(|it| &it.id)
    }

    /// Records that a request for `model` was sent. If `model` is an adapter, the engine loads it.
    pub(crate) fn sent(&mut self, model: &str) {
        if self.listed_adapters().any(|listed| listed == model) {
            self.sent_adapters.retain(|(sent, _)| sent != model);
            self.sent_adapters.push((model.to_owned(), SENT_SCRAPES));
            self.combine_adapters();
        }
    }

    fn combine_adapters(&mut self) {
        let Some(told) = &self.metrics.adapters else {
            self.adapters = None;
            return;
        };
        let mut resident = told.resident.clone();
        resident.extend(self.sent_adapters.iter().map(|(sent, _)| sent.clone()));
        resident.sort_unstable();
        resident.dedup();
        self.adapters = Some(Arc::new(EngineAdapters {
            max: told.max,
            resident,
            listed: self.listed_adapters().cloned().collect(),
        }));
    }

    /// Records a failed scrape. After several in a row, drops the figures, which are out of date.
    pub(crate) fn scrape_failed(&mut self, why: String) {
        self.scrape_failures_in_row = self.scrape_failures_in_row.saturating_add(1);
        self.metrics_detail = Some(why);
        if self.scrape_failures_in_row >= SCRAPE_FAILURES_MAX {
            self.metrics = EngineMetrics::default();
            self.combine_adapters();
        }
    }

    /// Returns the part of the record that a decision needs.
    pub(crate) fn flags(&self) -> HealthFlags {
        HealthFlags {
            is_healthy: self.is_healthy,
            is_doubtful: !self.is_healthy
                && (self.fault == Some(Fault::Unwell) || self.standstill == Some(Standstill::Hung))
                && self.locked_out.is_none(),
            has_adapters: self.adapters.is_some(),
            knows_salts: (self.kind).is_some_and(|kind| kind.knows_salts(self.version.as_deref())),
            meets_in_rooms: self.kind == Some(EngineKind::Sglang)
                && (self.disaggregation.as_ref()).is_none_or(DisaggregationFacts::is_apart),
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
            adapters: self.adapters.clone(),
        }
    }
}

/// Identifies one occupant of a cell, so that a probe of an earlier occupant cannot write to the
/// cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct OccupancyId(u64);

#[derive(Default)]
struct Occupant {
    occupancy: OccupancyId,
    record: Option<ProbeRecord>,
}

/// Health record of one slot.
#[derive(Default)]
struct HealthCell {
    health: ArcSwapOption<Health>,
    occupant: Mutex<Occupant>,
    alarm: Notify,
    list_alarm: Notify,
}

/// The health records of all slots.
pub(crate) struct HealthTable {
    /// Packed [`HealthFlags`] by slot. They are separate from the cells, so that a decision among
    /// hundreds of backends reads few cache lines.
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

    /// Returns the flags of the backend in `slot`; `None` if the slot is empty.
    #[inline]
    pub(crate) fn flags(&self, slot: Slot) -> Option<HealthFlags> {
        let flags = self.glances.get(usize::from(slot.0))?;
        HealthFlags::unpack(flags.load(Ordering::Acquire))
    }

    pub(crate) fn health(&self, slot: Slot) -> Option<Arc<Health>> {
        self.cell(slot)?.health.load_full()
    }

    pub(crate) fn record(&self, slot: Slot) -> Option<ProbeRecord> {
        self.read(slot, ProbeRecord::clone)
    }

    pub(super) fn read<T>(&self, slot: Slot, of: impl FnOnce(&ProbeRecord) -> T) -> Option<T> {
        self.cell(slot)?.lock().record.as_ref().map(of)
    }

    /// Returns the signal that requests an immediate probe after the data plane saw a failure.
    ///
    /// # Panics
    /// Panics if the slot is outside the table.
    pub(crate) fn alarm(&self, slot: Slot) -> &Notify {
        &self.cells[usize::from(slot.0)].alarm
    }

    /// Returns the signal that requests the engine's reports at once.
    ///
    /// # Panics
    /// Panics if the slot is outside the table.
    pub(crate) fn list_alarm(&self, slot: Slot) -> &Notify {
        &self.cells[usize::from(slot.0)].list_alarm
    }

    /// Registers a backend with unknown health. Ignores a slot outside the table.
    pub(crate) fn register(&self, slot: Slot, id: &str) -> OccupancyId {
        self.replace(slot, Some(ProbeRecord::unprobed(id)))
    }

    /// Removes the backend from `slot`.
    pub(crate) fn unregister(&self, slot: Slot) {
        self.replace(slot, None);
    }

    fn replace(&self, slot: Slot, record: Option<ProbeRecord>) -> OccupancyId {
        let Some(cell) = self.cell(slot) else {
            return OccupancyId::default();
        };
        let mut occupant = cell.lock();
        occupant.occupancy.0 += 1;
        occupant.record = record;
        self.publish(slot, cell, &occupant);
        occupant.occupancy
    }

    /// Changes the record of occupant `occupancy`, or of the current one if `None`, unless it has
    /// been replaced. Returns the new health if it changed.
    pub(crate) fn update(
        &self,
        slot: Slot,
        occupancy: Option<OccupancyId>,
        change: impl FnOnce(&mut ProbeRecord),
    ) -> Option<bool> {
        let cell = self.cell(slot)?;
        let mut occupant = cell.lock();
        if occupancy.is_some_and(|occupancy| occupancy != occupant.occupancy) {
            return None;
        }
        let record = occupant.record.as_mut()?;
        let was_healthy = record.is_healthy;
        change(record);
        let turned = (record.is_healthy != was_healthy).then_some(record.is_healthy);
        self.publish(slot, cell, &occupant);
        turned
    }

    fn publish(&self, slot: Slot, cell: &HealthCell, occupant: &Occupant) {
        let record = occupant.record.as_ref();
        let word = record.map_or(0, |record| record.flags().pack());
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
        // A record is consistent between any two changes, so a panic elsewhere does not corrupt it.
        self.occupant.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::adapters::{AdapterPlace, LoraAdapters};
    use super::super::engine::read_models;
    use super::*;

    const S: Slot = Slot(0);

    #[test]
    fn two_failures_in_a_row_make_unhealthy_and_one_success_healthy() {
        let board = HealthTable::new(1);
        assert_eq!(board.flags(S), None);
        let occupancy = Some(board.register(S, "a"));
        assert!(!board.flags(S).unwrap().is_healthy);
        assert_eq!(board.update(S, occupancy, ProbeRecord::passed), Some(true));
        assert_eq!(board.update(S, occupancy, |r| r.failed("one".into())), None);
        assert_eq!(board.update(S, occupancy, ProbeRecord::passed), None);
        assert_eq!(board.update(S, occupancy, |r| r.failed("one".into())), None);
        assert!(board.health(S).unwrap().is_healthy);
        assert_eq!(
            board.update(S, None, |r| r.failed("two".into())),
            Some(false),
            "a report of the data plane counts like a probe"
        );
        assert_eq!(board.health(S).unwrap().detail.as_deref(), Some("two"));
        assert_eq!(board.update(S, occupancy, ProbeRecord::passed), Some(true));
        assert_eq!(board.record(S).unwrap().failures_total, 3);
    }

    #[test]
    fn only_unrefused_failed_probes_are_doubtful() {
        let board = HealthTable::new(1);
        let is_doubtful = || board.flags(S).unwrap().is_doubtful;
        let occupancy = Some(board.register(S, "a"));
        assert!(!is_doubtful(), "not probed yet");
        board.update(S, occupancy, ProbeRecord::passed);
        for _ in 0..FAILURES_MAX {
            assert!(!is_doubtful(), "it is healthy");
            board.update(S, occupancy, |r| {
                r.probe_failed(Fault::Unwell, "slow".into());
            });
        }
        assert!(is_doubtful());
        board.update(S, None, |r| r.failed("a request failed".into()));
        assert!(is_doubtful(), "a request tells nothing of probes");
        board.update(S, occupancy, |r| {
            r.probe_failed(Fault::Unreachable, "refused".into());
        });
        assert!(!is_doubtful());
        board.update(S, occupancy, ProbeRecord::passed);
        for _ in 0..FAILURES_MAX {
            board.update(S, None, |r| r.failed("a request failed".into()));
        }
        let flags = board.flags(S).unwrap();
        assert!(!flags.is_healthy && !flags.is_doubtful, "requests failed");
    }

    #[test]
    fn a_probe_of_a_replaced_backend_changes_nothing() {
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
    fn metrics_are_dropped_after_failed_scrapes() {
        let mut record = ProbeRecord::unprobed("a");
        record.scraped(EngineMetrics {
            waiting: Some(9),
            ..EngineMetrics::default()
        });
        for waiting in [9, 9, 0] {
            record.scrape_failed("no".into());
            assert_eq!(record.health().waiting, waiting);
        }
    }

    #[test]
    fn a_requested_adapter_counts_as_loaded_until_the_next_scrape() {
        let mut record = ProbeRecord::unprobed("a");
        let told = |resident: &[&str]| EngineMetrics {
            adapters: Some(LoraAdapters {
                max: 2,
                resident: resident.iter().map(ToString::to_string).collect(),
            }),
            ..EngineMetrics::default()
        };
        let place = |record: &ProbeRecord| record.adapters.as_ref().unwrap().place("x");
        let list = br#"{"data":[{"id":"x","parent":"base"},{"id":"base"}]}"#;
        record.listed(read_models(list).unwrap().into());
        record.sent("x");
        assert_eq!(record.adapters, None, "it tells of no adapters");
        record.scraped(told(&["b"]));
        record.sent("x");
        record.sent("base");
        assert_eq!(record.adapters.as_ref().unwrap().resident, ["b", "x"]);
        record.scraped(told(&["b"]));
        assert_eq!(place(&record), AdapterPlace::Resident);
        record.scraped(told(&["b"]));
        assert_eq!(place(&record), AdapterPlace::Room);
        record.scraped(told(&["b", "c"]));
        assert_eq!(place(&record), AdapterPlace::Other);
        assert!(record.flags().has_adapters);
    }

    proptest! {
        #[test]
        fn packed_health_flags_round_trip(
            is_healthy: bool,
            is_doubtful: bool,
            has_adapters: bool,
            knows_salts: bool,
            meets_in_rooms: bool,
            waiting: u32,
            running: u32,
            kv_usage_permille in 0u32..=1000,
        ) {
            let flags = HealthFlags {
                is_healthy, is_doubtful, has_adapters, knows_salts, meets_in_rooms,
                waiting, running, kv_usage_permille,
            };
            prop_assert_eq!(HealthFlags::unpack(flags.pack()).unwrap(), HealthFlags {
                waiting: waiting.min(HealthFlags::COUNT_MAX),
                running: running.min(HealthFlags::COUNT_MAX),
                ..flags
            });
        }
    }
}
