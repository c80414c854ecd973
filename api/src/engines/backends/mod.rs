//! Clients of the engines: connection pools, circuit breakers, health probes, metrics and
//! discovery.
//!
//! Every replica probes every registered backend: whether it responds (`/ready`, `/health`), its
//! load (`/metrics`) and its models (`/v1/models`). Health stays local, because it depends on the
//! path from this replica to the engine. Facts about the engine itself (models, cache size, start
//! time) are reported to the cluster when they differ from the replicated registry.
//!
//! A backend starts unhealthy and is probed at once. One success makes it healthy, two consecutive
//! failures make it unhealthy, as does an engine that answers but does no work. The data plane reads
//! health without waiting.

mod activity;
mod adapters;
mod addresses;
mod answer_counts;
mod bootstrap_rooms;
mod cache_reports;
mod circuit;
mod client;
mod dialer;
mod engine;
mod engine_kind;
mod facts;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod health;
mod idle_connections;
mod informational;
mod keys;
mod local_failure;
mod modes;
mod output_times;
mod panic;
pub mod pool;
mod pooled_connection;
mod probe;
pub mod prometheus_text;
mod recognition;
mod segments;
mod send_error;
mod slot_table;
mod standstill;
mod url;

#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arc_swap::ArcSwap;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use http::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use state::command::{BACKENDS_MAX, EngineFacts};
use state::form::{As, AsOption, Span};
use state::ids::{BackendRef, Slot, UserKey};
use state::{Backend, StateView};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub use activity::Standstill;
pub use adapters::{AdapterPlace, EngineAdapters, LoraAdapters};
pub use addresses::{
    AllowedEngines, AllowedEnginesError, EngineAddressError, EngineAddressRules, EnginePlace,
};
pub use answer_counts::AnswerCount;
pub use bootstrap_rooms::BOOTSTRAP_PORT_LABEL;
pub use cache_reports::AnswerForm;
pub(crate) use cache_reports::FoundTokens;
pub(crate) use circuit::{BreakerState, HalfOpenProbe};
pub use circuit::{CircuitSettings, CircuitView};
pub(crate) use client::ProbeClient;
pub use dialer::{EngineDialer, engine_files};
pub use engine::{EngineKind, EngineMetrics, EngineModel, MODELS_PER_ENGINE_MAX};
pub use facts::REPEAT_AFTER;
pub use health::{FAILURES_MAX, Fault, Health, HealthFlags, ProbeRecord, SCRAPE_FAILURES_MAX};
pub use keys::{EngineHeaders, EngineKeys};
pub use modes::DisaggregationFacts;
pub(crate) use panic::Doubt;
pub use slot_table::{Occupancy, SlotTable};
pub use url::{EngineUrl, EngineUrlError};

use answer_counts::AnswerCounts;
use cache_reports::CacheReports;
use circuit::CircuitBreakers;
use health::HealthTable;
use output_times::OutputTimes;
pub(crate) use probe::refuses_credentials;

use crate::base::clock::Clock;
use crate::cluster::events::{ClusterEvent, EventBus};
use crate::settings::UrlPath;
use crate::users::isolation::{CACHE_SALT_LABEL, SaltedWork};

/// Health and engine metrics of the registered backends, as one replica knows them.
pub struct Backends {
    board: HealthTable,
    settings: ArcSwap<ProbeSettings>,
    keys: EngineKeys,
    dialer: EngineDialer,
    events: OnceLock<EventBus>,
    changes: watch::Sender<u64>,
    circuits: Arc<CircuitBreakers>,
    output_times: OutputTimes,
    cache_reports: CacheReports,
    answers: AnswerCounts,
    queueing_threshold_lora: u32,
}

/// Default of the maximum queue length at which an engine with the adapter in memory is preferred.
/// The Gateway API's endpoint picker has the same default.
pub const QUEUEING_THRESHOLD_LORA: u32 = 50;

/// Keys of `[probes]`: how often engines are probed, and what counts as healthy.
#[derive(Debug, Clone, PartialEq, SmartDefault, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ProbeSettings {
    /// Pause between two health probes of a backend. Two failures in a row make it unhealthy, one
    /// success makes it healthy. A probe fails after 2 s without an answer.
    #[serde(with = "As::<Span>")]
    #[default(Duration::from_secs(1))]
    pub interval: Duration,
    /// Timeout of a probe. Engines under full load answer far sooner.
    #[serde(skip)]
    #[default(Duration::from_secs(2))]
    pub timeout: Duration,
    /// Path to probe. Default: the first of `/ready`, `/health` and `/v1/models` that the engine
    /// serves.
    // SGLang's `/health` generates a token when idle, which is why it is not first.
    #[serde(with = "AsOption::<UrlPath>")]
    pub health_path: Option<String>,
    /// Panic threshold, as in Envoy: when the share of healthy backends of a model, in percent, is
    /// below this, those that served a request recently are used even if their probes time out or
    /// get bad responses; if there were no requests recently, those that once did are tried with
    /// single requests. Backends that refuse connections are never used. 0 disables it.
    #[schemars(range(max = 100))]
    #[default(50)]
    pub panic_threshold_percent: u32,
    /// File with an API key for probes, sent as `authorization: Bearer KEY` to the backends in the
    /// config that have no `api_key_file` themselves. Default: none is sent.
    pub api_key_file: Option<PathBuf>,
    /// Interval between reads of the model list.
    #[serde(skip)]
    #[default(Duration::from_secs(10))]
    pub models_interval: Duration,
    /// Time for which the figures of an engine with running requests stand still until it counts as
    /// hung. A step of a live engine takes far less.
    #[serde(skip)]
    #[default(Duration::from_secs(15))]
    pub hung_after: Duration,
    /// Interval at which the registry is checked for new and removed backends. For this long, a
    /// backend in a reused slot can be mistaken for the previous one.
    #[serde(skip)]
    #[default(Duration::from_millis(10))]
    pub registry_interval: Duration,
}

/// Maximum age of a connection to a host name. Then the name is resolved again.
const NAME_HOLDS_FOR: Duration = Duration::from_secs(30);

/// In panic mode, time for which a backend that stopped answering still gets requests after its
/// probes have made it unhealthy.
const DOUBTED_FOR: Duration = Duration::from_secs(10);

/// Function that returns the tokens per block of a model's prompts; `None` if they are split by
/// bytes.
pub type BlockSizeOf = dyn Fn(&str) -> Option<u32> + Send + Sync;

/// Callbacks through which the probes use the rest of the replica.
#[derive(Clone)]
pub struct Hooks {
    /// Returns the tokens per router block of a model, or of model `"*"` if none is known.
    pub tokens_per_block: Arc<dyn Fn(&str) -> f64 + Send + Sync>,
    /// Returns the tokens per block of a model's prompts; `None` if they are split by bytes.
    pub token_block_size: Arc<BlockSizeOf>,
    /// Receives an engine's block size if it differs from the replicated one.
    pub observe_block_size: Arc<dyn Fn(BackendRef, u32) + Send + Sync>,
    /// Receives the facts reported by an engine that differ from the replicated registry.
    pub observe: Arc<dyn Fn(BackendRef, EngineFacts) + Send + Sync>,
    /// Returns whether this replica is the leader. Only the leader refines a known capacity.
    pub is_leader: Arc<dyn Fn() -> bool + Send + Sync>,
    /// Clock that dates the restarts of engines without a reported start time.
    pub clock: Clock,
}

impl Backends {
    /// Creates an instance in which all backends are unknown until [`Backends::run`] probes them.
    #[must_use]
    pub fn new(settings: ProbeSettings) -> Self {
        Self {
            board: HealthTable::new(BACKENDS_MAX),
            keys: EngineKeys::default(),
            dialer: EngineDialer::default(),
            settings: ArcSwap::from_pointee(settings),
            events: OnceLock::new(),
            changes: watch::Sender::new(0),
            circuits: Arc::new(CircuitBreakers::new(CircuitSettings::default())),
            output_times: OutputTimes::new(BACKENDS_MAX),
            cache_reports: CacheReports::default(),
            answers: AnswerCounts::new(BACKENDS_MAX),
            queueing_threshold_lora: QUEUEING_THRESHOLD_LORA,
        }
    }

    /// Sets the maximum queue length at which an engine with the adapter in memory is preferred.
    #[must_use]
    pub fn preferring_adapters(mut self, queueing_threshold_lora: u32) -> Self {
        self.queueing_threshold_lora = queueing_threshold_lora;
        self
    }

    /// Sets the API keys of the engines that require one, and the dialer for connections to engines.
    #[must_use]
    pub fn dialing(mut self, keys: EngineKeys, dialer: EngineDialer) -> Self {
        (self.keys, self.dialer) = (keys, dialer);
        self
    }

    /// Sets the circuit breaker settings.
    #[must_use]
    pub fn breaking(mut self, circuit: CircuitSettings) -> Self {
        self.circuits = Arc::new(CircuitBreakers::new(circuit));
        self
    }

    /// Replaces the settings, which each backend's next probe uses.
    /// [`ProbeSettings::registry_interval`] stays that of the first settings.
    pub fn replace_settings(&self, settings: ProbeSettings) {
        self.settings.store(Arc::new(settings));
    }

    /// Returns the API keys of engines that require one.
    pub(crate) fn keys(&self) -> &EngineKeys {
        &self.keys
    }

    /// Returns the dialer for connections to engines.
    pub fn dialer(&self) -> &EngineDialer {
        &self.dialer
    }

    /// Checks whether the address rules allow `place`, the location of an engine.
    pub fn check_place(&self, place: &EnginePlace) -> Result<(), EngineAddressError> {
        self.dialer.check_place(place)
    }

    /// Sets the bus that receives health changes. Only the first call has an effect.
    pub fn announce(&self, events: EventBus) {
        // A second sink would be a wiring fault; ignoring it does not affect requests.
        drop(self.events.set(events));
    }

    /// Probes every backend in `view`'s registry until `stop`. Probes of a removed backend end and
    /// close their connections within [`ProbeSettings::registry_interval`].
    #[must_use]
    pub fn run(
        self: Arc<Self>,
        view: Arc<StateView>,
        hooks: Hooks,
        stop: CancellationToken,
    ) -> BoxFuture<'static, ()> {
        async move { probe::supervise(&self, &view, &hooks, &stop).await }.boxed()
    }

    /// Returns the health of the backend in `slot`; `None` if the slot is empty. Never blocks.
    #[must_use]
    pub fn health(&self, slot: Slot) -> Option<Arc<Health>> {
        self.board.health(slot)
    }

    /// Returns whether the engine in `slot` has, or has room for, the adapter `model`.
    #[must_use]
    pub fn adapter_place(&self, slot: Slot, model: &str) -> AdapterPlace {
        let health = self.health(slot);
        let adapters = health.as_ref().and_then(|health| health.adapters.as_ref());
        adapters.map_or(AdapterPlace::Other, |adapters| adapters.place(model))
    }

    /// Returns the maximum queue length at which an engine with the adapter in memory is preferred.
    pub(crate) fn queueing_threshold_lora(&self) -> u32 {
        self.queueing_threshold_lora
    }

    /// Records that a request for `model` was sent to the engine in `slot`, which loads it if it is
    /// an adapter. Costs one load if the engine reports no adapters.
    pub(crate) fn sent(&self, slot: Slot, model: &str) {
        let has_adapters = self
            .health_flags(slot)
            .is_some_and(|flags| flags.has_adapters);
        if has_adapters && self.adapter_place(slot, model) != AdapterPlace::Resident {
            self.board.update(slot, None, |record| record.sent(model));
        }
    }

    /// Returns the part of [`Backends::health`] that a decision needs, with one atomic load and no
    /// shared write. `None` if `slot` is empty.
    #[inline]
    #[must_use]
    pub fn health_flags(&self, slot: Slot) -> Option<HealthFlags> {
        self.board.flags(slot)
    }

    /// Whether the engine of `backend` separates cached blocks of `work` by `cache_salt`: according
    /// to its label, or else to the default of its kind.
    #[must_use]
    pub fn knows_salts(&self, backend: &Backend, work: SaltedWork) -> bool {
        match backend
            .spec
            .labels
            .get(CACHE_SALT_LABEL)
            .map(String::as_str)
        {
            Some("true") => true,
            Some("false") => false,
            _ => {
                let flags = self.health_flags(backend.handle.slot);
                let is_pooled = work == SaltedWork::Pooling;
                flags.is_some_and(|flags| flags.knows_salts)
                    && !(is_pooled && self.kind(backend.handle.slot) == Some(EngineKind::Sglang))
            }
        }
    }

    /// Returns all that is known about the backend in `slot`, for display; `None` if the slot is
    /// empty.
    #[must_use]
    pub fn record(&self, slot: Slot) -> Option<ProbeRecord> {
        self.board.record(slot)
    }

    /// Returns the kind of the engine in `slot`; `None` if the slot is empty or the kind unknown.
    #[must_use]
    pub fn kind(&self, slot: Slot) -> Option<EngineKind> {
        self.board.read(slot, |record| record.kind).flatten()
    }

    /// Returns the entry for a model in the list of the engine in `slot`; `None` if not listed.
    pub(crate) fn listed(&self, slot: Slot, model: &str) -> Option<EngineModel> {
        let listed = self.board.record(slot)?.listed?;
        listed.iter().find(|it| it.id == model).cloned()
    }

    /// Returns a receiver that is notified of changes, for waiting until a backend is healthy or
    /// gone.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Records that a request failed to connect or was cut off. Counts as a failed probe, so that a
    /// dead engine is skipped before the next probe, which follows at once.
    pub fn report_failure(&self, slot: Slot) {
        if self.health_flags(slot).is_none() {
            return;
        }
        let turned = self.board.update(slot, None, |record| {
            record.failed("a request failed".to_owned());
        });
        self.changed();
        self.board.alarm(slot).notify_one();
        if turned.is_some() {
            self.tell(slot, false);
        }
    }

    /// Requests the model list of the engine in `slot` at once: a request failed as if another
    /// engine, or one with another key, had taken over.
    pub(crate) fn doubt_list(&self, slot: Slot) {
        if self.health_flags(slot).is_some() {
            self.board
                .update(slot, None, |record| record.list_doubts_total += 1);
            self.board.list_alarm(slot).notify_one();
        }
    }

    /// Counts a response of the engine in `slot` by its status.
    pub(crate) fn count_answer(&self, slot: Slot, status: StatusCode) {
        self.answers.count(slot, status);
    }

    /// Returns how many responses the engine in `slot` has sent to this replica's requests.
    #[must_use]
    pub fn answer_count(&self, slot: Slot) -> AnswerCount {
        self.answers.of(slot)
    }

    /// Whether `backend` answered a request recently and has been reachable since, so that its
    /// probes may be wrong.
    pub(crate) fn answered_lately(&self, backend: BackendRef, now: Instant) -> bool {
        let ProbeSettings {
            interval, timeout, ..
        } = **self.settings.load();
        let until_unhealthy = (interval + timeout) * FAILURES_MAX;
        let lately = until_unhealthy + DOUBTED_FOR;
        self.circuits.answered_within(backend, lately, now)
    }

    /// Whether `backend` has ever answered a request and has been reachable since.
    pub(crate) fn has_answered(&self, backend: BackendRef) -> bool {
        self.circuits.has_answered(backend)
    }

    /// Whether panic mode applies: `healthy`, the number of a model's healthy backends, is too low
    /// compared with `doubtful`, the number of those that only probes consider unhealthy.
    pub(crate) fn are_below_threshold(&self, healthy: usize, doubtful: usize) -> bool {
        let percent = usize::try_from(self.settings.load().panic_threshold_percent).unwrap_or(100);
        healthy * 100 < (healthy + doubtful) * percent
    }

    /// Whether the circuit of `backend` admits a request of `user` at `now`. Costs one load while
    /// all circuits are closed.
    #[must_use]
    pub fn is_let_through(
        &self,
        backend: BackendRef,
        user: impl FnOnce() -> UserKey,
        now: Instant,
    ) -> bool {
        self.circuits.allows(backend, user, now)
    }

    /// Returns when the circuit of `backend` last opened, in an unspecified unit.
    pub(crate) fn opened_at(&self, backend: BackendRef) -> u64 {
        self.circuits.opened_us(backend)
    }

    /// Returns how many of a model's backends may be skipped because of their circuits.
    pub(crate) fn ejected_max(&self, backends: usize) -> usize {
        self.circuits.ejected_max(backends)
    }

    /// Returns the circuit of `backend`, for display.
    #[must_use]
    pub fn circuit(&self, backend: BackendRef, now: Instant) -> CircuitView {
        self.circuits.view(backend, now)
    }

    /// Asks the circuit of `backend` to admit a request of `user`.
    pub(crate) fn enter(
        &self,
        backend: BackendRef,
        user: impl FnOnce() -> UserKey,
        now: Instant,
    ) -> BreakerState {
        self.circuits.enter(backend, user, now)
    }

    /// Asks the circuit of `backend` to admit a request although probes consider the backend
    /// unhealthy.
    pub(crate) fn enter_doubted(
        &self,
        backend: BackendRef,
        user: impl FnOnce() -> UserKey,
        now: Instant,
    ) -> BreakerState {
        self.circuits.enter_doubted(backend, user, now)
    }

    /// Records a response to a request of `user`. Any response except a server error counts as a
    /// success.
    pub fn report_answer(&self, backend: BackendRef, user: UserKey, now: Instant) {
        if self.circuits.passed(backend, user, now) {
            let id = self.name_of(backend);
            tracing::info!(backend = id, "circuit closed");
            self.announce_circuit(id, false);
        }
    }

    /// Records a request that failed before its response began, or got a server error. `user` may
    /// be at fault; `None` if the request was not sent.
    pub fn report_no_answer(&self, backend: BackendRef, user: Option<UserKey>, now: Instant) {
        self.opened_if(self.circuits.failed(backend, user, now), backend, now);
    }

    /// Records that a response to `user` that had begun ended with an error of the engine. It then
    /// counts as a failure and no longer as a success.
    pub fn report_late_failure(&self, backend: BackendRef, user: UserKey, now: Instant) {
        self.opened_if(self.circuits.failed_late(backend, user, now), backend, now);
    }

    /// Records that output of the engine in `slot` arrived, for any request.
    pub(crate) fn note_output(&self, slot: Slot, now: Instant) {
        self.output_times.note(slot, now);
    }

    /// Whether the engine in `slot` has had no output since `since`, and another one has.
    pub(crate) fn is_outdone(&self, slot: Slot, since: Instant) -> bool {
        self.output_times.is_outdone(slot, since)
    }

    /// Announces the circuit of `backend` if it has just opened.
    fn opened_if(&self, has_opened: bool, backend: BackendRef, now: Instant) {
        if has_opened {
            let id = self.name_of(backend);
            let openings = self.circuit(backend, now).openings_in_row;
            tracing::warn!(backend = id, openings, "circuit opened");
            if openings == 1 {
                self.announce_circuit(id, true);
            }
        }
    }

    /// Records that a response in this form reported cached tokens.
    pub(crate) fn note_cached_report(&self, backend: BackendRef, form: AnswerForm) {
        self.cache_reports.told(backend, form);
    }

    /// Whether responses in this form have reported cached tokens. If so, a response without a
    /// count means zero.
    pub(crate) fn reports_cached(&self, backend: BackendRef, form: AnswerForm) -> bool {
        self.cache_reports.tells(backend, form)
    }

    /// Whether responses in any form have reported cached tokens.
    pub fn reports_cached_in_any_form(&self, backend: BackendRef) -> bool {
        self.cache_reports.tells_any(backend)
    }

    /// Records how many of the predicted tokens a response found cached.
    pub(crate) fn found_cached(&self, backend: BackendRef, found: FoundTokens) {
        let block = self
            .board
            .read(backend.slot, |record| record.metrics.block_size);
        self.cache_reports.found(backend, found, block.flatten());
    }

    fn announce_circuit(&self, id: String, is_open: bool) {
        if let Some(events) = self.events.get() {
            events.send(ClusterEvent::BackendCircuit { id, is_open });
        }
    }

    fn name_of(&self, backend: BackendRef) -> String {
        self.record(backend.slot)
            .map_or_else(String::new, |it| it.id)
    }

    /// Sets the health of `slot` without probing, for simulations and tests.
    pub fn assume(&self, slot: Slot, health: &Health) {
        let occupancy = self.board.register(slot, &format!("slot-{slot}"));
        self.board.update(slot, Some(occupancy), |record| {
            record.is_healthy = health.is_healthy;
            record.detail.clone_from(&health.detail);
            record.metrics.waiting = Some(health.waiting);
            record.metrics.running = Some(health.running);
            record.metrics.kv_usage_permille = Some(health.kv_usage_permille);
            record.adapters.clone_from(&health.adapters);
        });
        self.changed();
    }

    /// Sets the kind of the engine in `slot`, for tests.
    #[cfg(test)]
    pub(crate) fn assume_kind(&self, slot: Slot, kind: EngineKind) {
        let set = |record: &mut ProbeRecord| record.kind = Some(kind);
        self.board.update(slot, None, set);
    }

    fn changed(&self) {
        self.changes.send_modify(|changes| *changes += 1);
    }

    /// Announces that the backend in `slot` became healthy or unhealthy.
    fn tell(&self, slot: Slot, is_healthy: bool) {
        let Some(record) = self.record(slot) else {
            return;
        };
        if is_healthy {
            tracing::info!(backend = record.id, "backend is healthy");
        } else {
            tracing::warn!(
                backend = record.id,
                detail = record.detail,
                "backend is unhealthy"
            );
        }
        if let Some(events) = self.events.get() {
            events.send(ClusterEvent::BackendHealth {
                id: record.id,
                is_healthy,
                detail: record.detail,
            });
        }
    }
}
