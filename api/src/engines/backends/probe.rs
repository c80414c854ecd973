//! Runs the probes: one task per backend, which ends when the backend is removed.
//!
//! Each task runs two loops concurrently, each on its own connection: one for liveness, and one for
//! the engine's reports. A slow metrics page must not look like a dead engine.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use crate::sync::Notify;
use bytes::Bytes;
use http::StatusCode;
use state::command::BackendRole;
use state::{Backend, StateView};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::activity::Standstill;
use super::client::{ProbeClient, ProbeError, ProbeResponse};
use super::engine::{self, EngineKind, EngineMetrics};
use super::facts::{EngineReading, FactsMemory, ProbeRound};
use super::health::Fault;
use super::keys::EngineHeaders;
use super::modes::DisaggregationFacts;
use super::slot_table::{Occupancy, SlotTable, backend_at};
use super::standstill::StandstillWatch;
use super::{Backends, Hooks, ProbeSettings, prometheus_text};

/// Health paths, in the order in which they are tried. The first supported one is kept.
const HEALTH_PATHS: [&str; 3] = ["/ready", "/health", MODELS_PATH];
/// Maximum length of a response to a health probe, in bytes.
const HEALTH_BYTES_MAX: usize = 1 << 20;
/// Maximum length of a response to `GET /v1/models`, in bytes.
const MODELS_BYTES_MAX: usize = 1 << 20;
/// Maximum length of a response to `GET /server_info`, in bytes.
const SERVER_INFO_BYTES_MAX: usize = 1 << 20;
/// Path of the list of models.
const MODELS_PATH: &str = "/v1/models";
/// Minimum pause between two health probes, however many failures are reported.
const ALARM_GAP: Duration = Duration::from_millis(50);

/// The probe of one backend.
struct Probe {
    backends: Arc<Backends>,
    view: Arc<StateView>,
    hooks: Hooks,
    stay: Occupancy,
    id: String,
    url: String,
}

/// Runs one probe per registered backend until `stop`.
pub(super) async fn supervise(
    backends: &Arc<Backends>,
    view: &Arc<StateView>,
    hooks: &Hooks,
    stop: &CancellationToken,
) {
    let mut roster = SlotTable::new(Arc::clone(backends));
    let registry_interval = backends.settings.load().registry_interval;
    let mut ticks = tokio::time::interval(registry_interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            _ = ticks.tick() => {}
        }
        roster.follow(view.registry(), |stay, backend| {
            let probe = Probe {
                backends: Arc::clone(backends),
                view: Arc::clone(view),
                hooks: hooks.clone(),
                stay,
                id: backend.spec.id.clone(),
                url: backend.spec.url.clone(),
            };
            AbortOnDropHandle::new(tokio::spawn(probe.run()))
        });
    }
}

impl Probe {
    async fn run(self) {
        let (timeout, dialer) = (self.settings().timeout, self.backends.dialer());
        let client = || ProbeClient::new(&self.url, self.key(), (timeout, dialer));
        match (client(), client()) {
            (Ok(liveness), Ok(mut words)) => {
                self.ask_kind(&mut words).await;
                tokio::join!(self.watch_liveness(liveness), self.poll_reports(words));
            }
            (Err(failure), _) | (_, Err(failure)) => {
                self.stay
                    .update(|record| record.failed(failure.to_string()));
            }
        }
    }

    /// Queries the kind of an engine that computes only one stage, before it gets any request. The
    /// kind determines how it hands over prompts.
    async fn ask_kind(&self, client: &mut ProbeClient) {
        let registry = self.view.registry();
        let known = backend_at(&registry, self.stay.slot(), &self.url);
        if known.is_none_or(|known| known.spec.role == BackendRole::Both) {
            return;
        }
        drop(registry);
        self.ready(client, &self.settings());
        self.scrape(client, self.rank()).await;
        self.list_models(client).await;
        _ = self.ask_server_info(client).await;
    }

    /// Queries which stage an SGLang engine computes. Returns its response; `None` from other
    /// engines, or if it reports none.
    async fn ask_server_info(&self, client: &mut ProbeClient) -> Result<Option<Bytes>, ProbeError> {
        let record = self.backends.record(self.stay.slot());
        if record.is_none_or(|record| record.kind != Some(EngineKind::Sglang)) {
            return Ok(None);
        }
        let answer = client.get("/server_info", SERVER_INFO_BYTES_MAX).await;
        if let Err(why) = &answer {
            tracing::debug!(slot = self.stay.slot().0, %why, "mode is unknown");
        }
        let answer = answer?;
        if !answer.status.is_success() {
            return Ok(None);
        }
        let facts = DisaggregationFacts::read(&answer.body);
        self.stay.update(|record| record.disaggregation = facts);
        Ok(Some(answer.body))
    }

    /// Returns the current settings, which may be replaced while the engine is probed.
    fn settings(&self) -> Arc<ProbeSettings> {
        self.backends.settings.load_full()
    }

    /// Returns the current API key for probes, which may be replaced while the engine is probed.
    fn key(&self) -> Option<EngineHeaders> {
        self.backends.keys().of_probes(&self.id, &self.url)
    }

    /// Applies the current key and timeout to `client` before the next probe.
    fn ready(&self, client: &mut ProbeClient, settings: &ProbeSettings) {
        client.authorize(self.key());
        client.patience(settings.timeout);
    }

    async fn watch_liveness(&self, mut client: ProbeClient) {
        let mut path = HealthPath::new(self.settings().health_path.clone());
        loop {
            let settings = self.settings();
            self.ready(&mut client, &settings);
            path.follow(settings.health_path.as_deref());
            match path.probe(&mut client).await {
                Ok(()) if self.is_healthy() => self.stay.passed(),
                Ok(()) => {
                    // Another process may have taken over, or the engine may still refuse this
                    // replica's credentials.
                    self.list_models(&mut client).await;
                    self.stay.passed();
                    self.backends
                        .board
                        .list_alarm(self.stay.slot())
                        .notify_one();
                }
                Err(UnhealthyError::Engine(fault, why)) => {
                    self.stay.failed(fault, self.with_hint(why));
                }
                // The backend's state stays unchanged, because the probe was not sent.
                Err(UnhealthyError::Here(why)) => tracing::debug!(why, "could not probe backend"),
            }
            self.pause(
                settings.interval,
                self.backends.board.alarm(self.stay.slot()),
            )
            .await;
        }
    }

    async fn poll_reports(&self, mut client: ProbeClient) {
        let mut memory = FactsMemory::default();
        let mut models_due = Instant::now();
        let mut process = ProcessSigns::default();
        let mut is_described = false;
        let mut standstill = StandstillWatch::default();
        loop {
            let settings = self.settings();
            self.ready(&mut client, &settings);
            let rank = self.rank();
            let metrics = self.scrape(&mut client, rank).await;
            self.judge_work(&mut standstill, &mut client, &metrics)
                .await;
            let mut saw = EngineReading {
                models: None,
                cache_tokens: metrics.cache_tokens,
                started_at_s: metrics.started_at_s,
                prompt_tokens: metrics.prompt_tokens,
                block_size: metrics.block_size,
                speculates: None,
                refusals: 0,
            };
            let signs = self.signs(saw.started_at_s.or(process.started_at_s));
            saw.refusals = signs.refusals;
            if std::mem::replace(&mut process, signs) != signs {
                // Another process may run at the address by now.
                models_due = Instant::now();
                is_described = false;
                standstill.forget();
            }
            if models_due <= Instant::now() {
                saw.models = self.list_models(&mut client).await;
                let wait = match saw.models {
                    // Adapters come and go while the engine runs.
                    Some(_) if metrics.adapters.is_some() => settings.interval,
                    Some(_) => settings.models_interval,
                    None => settings.interval,
                };
                models_due = Instant::now() + wait;
            }
            if !is_described && saw.models.is_some() {
                is_described = self.describe(&mut client).await;
            }
            saw.speculates = match self.backends.kind(self.stay.slot()) {
                Some(EngineKind::Vllm) => {
                    (metrics.kind == Some(EngineKind::Vllm)).then_some(metrics.is_speculating)
                }
                other => other.map(|_| false),
            };
            self.report_changes(&mut memory, (&saw, rank));
            self.pause(
                settings.interval,
                self.backends.board.list_alarm(self.stay.slot()),
            )
            .await;
        }
    }

    /// Waits for about `interval`, or a little after `alarm`.
    async fn pause(&self, interval: Duration, alarm: &Notify) {
        let pause = jittered(interval);
        let gap = pause.min(ALARM_GAP);
        tokio::time::sleep(gap).await;
        tokio::select! {
            biased;
            () = tokio::time::sleep(pause - gap) => {}
            () = alarm.notified() => {}
        }
    }

    /// Adds a hint to the failure of a probe if the URL looks like a client's base URL.
    fn with_hint(&self, why: String) -> String {
        let is_base_url = self.url.trim_end_matches('/').ends_with("/v1");
        match is_base_url && why.ends_with("status 404") {
            true => format!("{why}; leave /v1 out of the backend's URL"),
            false => why,
        }
    }

    fn is_healthy(&self) -> bool {
        let flags = self.backends.board.flags(self.stay.slot());
        flags.is_some_and(|flags| flags.is_healthy)
    }

    /// Records whether the engine does any work.
    async fn judge_work(
        &self,
        watch: &mut StandstillWatch,
        client: &mut ProbeClient,
        metrics: &EngineMetrics,
    ) {
        let (slot, limit) = (self.stay.slot(), self.settings().hung_after);
        let record = self.backends.record(slot).unwrap_or_default();
        let is_asleep = watch.is_asleep(client, record.kind, metrics).await;
        let now = Instant::now();
        let silence = self.backends.output_times.silence(slot, now);
        let is_hung = watch.is_hung(metrics, silence, limit, now);
        let standstill = match (is_asleep, is_hung) {
            (true, _) => Some(Standstill::Asleep),
            (false, true) => Some(Standstill::Hung),
            (false, false) => None,
        };
        if standstill != record.standstill {
            self.stay.update(|record| record.stands_still(standstill));
        }
    }

    /// Returns the data-parallel rank that this backend stands for, if its engine has several.
    fn rank(&self) -> Option<u16> {
        let registry = self.view.registry();
        let known = backend_at(&registry, self.stay.slot(), &self.url);
        known.and_then(|known| registry.rank(known))
    }

    fn signs(&self, started_at_s: Option<u64>) -> ProcessSigns {
        let record = self.backends.record(self.stay.slot());
        let record = record.unwrap_or_default();
        ProcessSigns {
            refusals: record.refusals_total,
            list_doubts: record.list_doubts_total,
            started_at_s,
        }
    }

    async fn scrape(&self, client: &mut ProbeClient, rank: Option<u16>) -> EngineMetrics {
        let page = client
            .get("/metrics", prometheus_text::PAGE_BYTES_MAX)
            .await;
        let read = success(page).and_then(|answer| {
            EngineMetrics::read(&answer.body, rank).map_err(|fault| fault.to_string())
        });
        match read {
            Ok(metrics) => {
                let (mut is_healthy, mut recognised) = (true, None);
                self.stay.update(|record| {
                    recognised = record.recognised(metrics.kind);
                    record.scraped(metrics.clone());
                    is_healthy = record.is_healthy;
                });
                if let Some(engine) = recognised {
                    tracing::info!(backend = self.id, %engine, "engine recognised");
                }
                if !is_healthy {
                    // The engine responds again: probe at once instead of waiting for the next
                    // turn.
                    self.backends.board.alarm(self.stay.slot()).notify_one();
                }
                metrics
            }
            Err(why) => {
                self.stay.update(|record| record.scrape_failed(why));
                EngineMetrics::default()
            }
        }
    }

    async fn list_models(&self, client: &mut ProbeClient) -> Option<Vec<String>> {
        let list = client.get(MODELS_PATH, MODELS_BYTES_MAX).await;
        if let Ok(answer) = &list {
            let why = refuses_credentials(answer.status).then(|| {
                let status = answer.status.as_u16();
                format!("{MODELS_PATH}: status {status}; set api_key_file to the engine's key")
            });
            self.stay.update(|record| record.locked_out(why));
        }
        let has_none = list.as_ref().is_ok_and(|it| is_unknown_path(it.status));
        let read = success(list).and_then(|answer| {
            engine::read_models(&answer.body).map_err(|fault| fault.to_string())
        });
        match read {
            Ok(listed) => {
                let models = listed.iter().map(|model| model.id.clone()).collect();
                let owners = listed.iter().filter_map(|model| model.owned_by.as_deref());
                let owner = owners.filter_map(EngineKind::named).next();
                self.stay.update(|record| {
                    record.owned_by(owner);
                    record.listed(listed.into());
                });
                Some(models)
            }
            Err(why) => {
                tracing::debug!(slot = self.stay.slot().0, why, "model list is unknown");
                self.stay.update(|record| record.is_list_broken = !has_none);
                None
            }
        }
    }

    /// Queries the engine's version and the stage that it computes. Returns whether it responded;
    /// it may report no version.
    async fn describe(&self, client: &mut ProbeClient) -> bool {
        let Ok(answer) = client.get("/version", HEALTH_BYTES_MAX).await else {
            return false;
        };
        let Ok(info) = self.ask_server_info(client).await else {
            return false;
        };
        // SGLang reports its version beside its mode.
        let is_told = answer.status.is_success();
        let version = is_told.then(|| engine::read_version(&answer.body));
        let version = version.or_else(|| info.as_deref().map(engine::read_version));
        self.stay
            .update(|record| record.version = version.flatten());
        true
    }

    fn report_changes(&self, memory: &mut FactsMemory, (saw, rank): (&EngineReading, Option<u16>)) {
        let registry = self.view.registry();
        let Some(known) = backend_at(&registry, self.stay.slot(), &self.url) else {
            // The backend was removed or moved meanwhile, so this reading belongs to another
            // engine.
            return;
        };
        if registry.rank(known) != rank {
            // The figures combine other ranks than those of the next round.
            return;
        }
        let model = known
            .facts
            .models
            .iter()
            .flatten()
            .chain(saw.models.iter().flatten())
            .chain(known.spec.models.iter())
            .find(|model| *model != "*");
        let reports = &self.backends.cache_reports;
        let drops = known.facts.drops_last_block.unwrap_or(false);
        let round = ProbeRound {
            tokens_per_block: (self.hooks.tokens_per_block)(model.map_or("*", String::as_str)),
            is_leader: (self.hooks.is_leader)(),
            // A clock before 1970 yields no start time worth proposing.
            unix_s: self.hooks.clock.unix_ms() / 1000,
            now: Instant::now(),
            is_emptied: reports.is_emptied(known.handle),
            drops_last_block: reports.drops_last_block(known.handle, drops),
        };
        // The first rank reports the facts of the engine.
        let is_told = !known.is_further_rank();
        if let Some(facts) = memory.news(known, saw, &round).filter(|_| is_told) {
            self.stay.update(|record| record.told = Some(facts.clone()));
            (self.hooks.observe)(known.handle, facts);
        }
        let own = registry.block_sizes.of_engine(self.stay.slot());
        if let Some(tokens) = memory.new_block_size(own, saw.block_size, round.now) {
            (self.hooks.observe_block_size)(known.handle, tokens);
        }
        self.judge_block_size(known, model, saw.block_size);
    }

    /// Warns once while the engine's block size is not a multiple of its model's.
    fn judge_block_size(&self, known: &Backend, model: Option<&String>, engine: Option<u32>) {
        let Some((engine, model)) = engine.zip(model) else {
            return;
        };
        let router = (self.hooks.token_block_size)(model);
        let unfit = router.filter(|router| !engine.is_multiple_of(*router));
        let mut was_unfit = None;
        self.stay.update(|record| {
            was_unfit = std::mem::replace(&mut record.unfit_block_size, unfit);
        });
        if let Some(router) = unfit.filter(|_| unfit != was_unfit) {
            let backend = &*known.spec.id;
            tracing::warn!(backend, %model, engine, router, "block size does not fit the model's");
        }
    }
}

/// What differs if another process runs at the address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct ProcessSigns {
    /// Number of probes that were refused a connection.
    refusals: u64,
    /// Number of further times that the list of models may be another process's.
    list_doubts: u64,
    /// Start time that the engine reports, in Unix seconds.
    started_at_s: Option<u64>,
}

/// The path that liveness probes use.
struct HealthPath {
    /// Path from the config, or the first one that the engine supported; `None` until one is found.
    known: Option<Cow<'static, str>>,
    is_fixed: bool,
}

impl HealthPath {
    fn new(fixed: Option<String>) -> Self {
        Self {
            is_fixed: fixed.is_some(),
            known: fixed.map(Cow::Owned),
        }
    }

    /// Applies the path in the config, if it changed.
    fn follow(&mut self, fixed: Option<&str>) {
        let current = self.known.as_deref().filter(|_| self.is_fixed);
        if current != fixed {
            *self = Self::new(fixed.map(str::to_owned));
        }
    }

    /// Probes once, trying every candidate while no path is known.
    async fn probe(&mut self, client: &mut ProbeClient) -> Result<(), UnhealthyError> {
        let candidates = match self.known.clone() {
            Some(path) => vec![path],
            None => HEALTH_PATHS.map(Cow::Borrowed).to_vec(),
        };
        let mut why = String::new();
        for path in candidates {
            let answer = client
                .get(&path, HEALTH_BYTES_MAX)
                .await
                .map_err(|failure| UnhealthyError::of(&failure))?;
            if !is_unknown_path(answer.status) {
                let verdict = success(Ok(answer)).map(drop);
                let verdict = verdict.map_err(|why| {
                    let why = format!("{path}: {why}");
                    UnhealthyError::Engine(Fault::Unwell, why)
                });
                self.known = Some(path);
                return verdict;
            }
            why = format!("{path}: status {}", answer.status.as_u16());
        }
        if !self.is_fixed {
            self.known = None;
        }
        Err(UnhealthyError::Engine(Fault::Unwell, why))
    }
}

/// Reason why a liveness probe failed.
enum UnhealthyError {
    /// The engine is unhealthy, as far as is known.
    Engine(Fault, String),
    /// The probe could not be sent because this process lacks resources.
    Here(String),
}

impl UnhealthyError {
    fn of(failure: &ProbeError) -> Self {
        let why = failure.to_string();
        match failure {
            _ if failure.is_local() => Self::Here(why),
            ProbeError::Url(..) | ProbeError::Connect(_) => Self::Engine(Fault::Unreachable, why),
            ProbeError::Path(_)
            | ProbeError::Timeout(_)
            | ProbeError::Http(_)
            | ProbeError::TooLong(_) => Self::Engine(Fault::Unwell, why),
        }
    }
}

/// Whether `status` means that the engine refuses the credentials of the request.
pub(crate) fn refuses_credentials(status: StatusCode) -> bool {
    matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN)
}

fn is_unknown_path(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED
    )
}

fn success(answer: Result<ProbeResponse, ProbeError>) -> Result<ProbeResponse, String> {
    let answer = answer.map_err(|failure| failure.to_string())?;
    if answer.status.is_success() {
        Ok(answer)
    } else {
        Err(format!("status {}", answer.status.as_u16()))
    }
}

/// Returns `interval` less up to a tenth, so that the probes of replicas and backends do not
/// synchronise.
fn jittered(interval: Duration) -> Duration {
    interval.mul_f64(1.0 - rand::random::<f64>() / 10.0)
}
