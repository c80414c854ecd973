//! The probes at work: one task per backend, which ends with it.
//!
//! Each task runs two loops side by side on a connection of their own: liveness, and what the
//! engine says of itself. A metrics page that takes its time must not look like a dead engine.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use http::StatusCode;
use state::ids::Slot;
use state::{Backend, Registry, View};
use tokio::task::AbortHandle;
use tokio_util::sync::CancellationToken;

use super::client::{Answer, ProbeClient, ProbeFailure};
use super::engine::{self, EngineMetrics};
use super::facts::{Memory, Round, Saw};
use super::health::{Record, Tenancy};
use super::{Backends, Hooks, text};

/// Health paths in the order they are tried; the first the engine knows is kept.
const HEALTH_PATHS: [&str; 3] = ["/ready", "/health", "/v1/models"];
/// Longest answer to a health probe, in bytes.
const HEALTH_BYTES_MAX: usize = 1 << 20;
/// Longest model list, in bytes.
const MODELS_BYTES_MAX: usize = 1 << 20;
/// Passes at least between two probes, however many failures are reported.
const ALARM_GAP: Duration = Duration::from_millis(50);

/// A backend under probe.
struct Probe {
    backends: Arc<Backends>,
    view: Arc<View>,
    hooks: Hooks,
    slot: Slot,
    url: String,
    tenancy: Tenancy,
}

/// A running probe task; dropping it ends the task.
struct Running {
    id: String,
    url: String,
    task: AbortHandle,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Keeps one probe per registered backend until `stop`.
pub(super) async fn supervise(
    backends: &Arc<Backends>,
    view: &Arc<View>,
    hooks: &Hooks,
    stop: &CancellationToken,
) {
    let mut running: BTreeMap<Slot, Running> = BTreeMap::new();
    let mut seen: Option<Arc<Registry>> = None;
    let mut ticks = tokio::time::interval(backends.settings.registry_interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = ticks.tick() => {}
        }
        let registry = view.registry();
        if seen
            .as_ref()
            .is_some_and(|seen| Arc::ptr_eq(seen, &registry))
        {
            continue;
        }
        running.retain(|slot, probe| {
            let known = backend_at(&registry, *slot, &probe.url);
            let is_there = known.is_some_and(|backend| backend.spec.id == probe.id);
            if !is_there {
                backends.board.move_out(*slot);
                backends.changes.send_modify(|changes| *changes += 1);
            }
            is_there
        });
        for backend in &registry.backends {
            running
                .entry(backend.handle.slot)
                .or_insert_with(|| start(backends, view, hooks, backend));
        }
        seen = Some(registry);
    }
}

/// The backend in `slot`, if it is the one at `url`.
fn backend_at<'a>(registry: &'a Registry, slot: Slot, url: &str) -> Option<&'a Backend> {
    let place = registry
        .backends
        .binary_search_by_key(&slot, |backend| backend.handle.slot)
        .ok()?;
    Some(&registry.backends[place]).filter(|backend| backend.spec.url == url)
}

fn start(backends: &Arc<Backends>, view: &Arc<View>, hooks: &Hooks, backend: &Backend) -> Running {
    let slot = backend.handle.slot;
    let probe = Probe {
        backends: Arc::clone(backends),
        view: Arc::clone(view),
        hooks: hooks.clone(),
        slot,
        url: backend.spec.url.clone(),
        tenancy: backends.board.move_in(slot, &backend.spec.id),
    };
    Running {
        id: backend.spec.id.clone(),
        url: probe.url.clone(),
        task: tokio::spawn(probe.run()).abort_handle(),
    }
}

impl Probe {
    async fn run(self) {
        let settings = &self.backends.settings;
        let client =
            || ProbeClient::new(&self.url, settings.authorization.clone(), settings.timeout);
        match (client(), client()) {
            (Ok(liveness), Ok(words)) => {
                tokio::join!(self.watch_liveness(liveness), self.watch_words(words));
            }
            (Err(failure), _) | (_, Err(failure)) => {
                self.update(|record| record.failed(failure.to_string()));
            }
        }
    }

    fn update(&self, change: impl FnOnce(&mut Record)) {
        let board = &self.backends.board;
        let turned = board.update(self.slot, Some(self.tenancy), change);
        self.backends.changes.send_modify(|changes| *changes += 1);
        if let Some(is_healthy) = turned {
            self.backends.tell(self.slot, is_healthy);
        }
    }

    async fn watch_liveness(&self, mut client: ProbeClient) {
        let mut path = Path::new(self.backends.settings.health_path.clone());
        loop {
            match path.probe(&mut client).await {
                Ok(()) => self.update(Record::passed),
                Err(why) => self.update(|record| {
                    record.probes_total += 1;
                    record.failed(why);
                }),
            }
            let pause = jittered(self.backends.settings.interval);
            let gap = pause.min(ALARM_GAP);
            tokio::time::sleep(gap).await;
            tokio::select! {
                () = tokio::time::sleep(pause - gap) => {}
                () = self.backends.board.alarm(self.slot).notified() => {}
            }
        }
    }

    async fn watch_words(&self, mut client: ProbeClient) {
        let mut memory = Memory::default();
        let mut models_due = Instant::now();
        loop {
            let metrics = self.scrape(&mut client).await;
            let mut saw = Saw {
                models: None,
                cache_tokens: metrics.cache_tokens,
                started_at_s: metrics.started_at_s,
                prompt_tokens: metrics.prompt_tokens,
            };
            if models_due <= Instant::now() {
                saw.models = self.list_models(&mut client).await;
                let wait = match saw.models {
                    Some(_) => self.backends.settings.models_interval,
                    None => self.backends.settings.interval,
                };
                models_due = Instant::now() + wait;
            }
            self.tell_news(&mut memory, &saw);
            tokio::time::sleep(jittered(self.backends.settings.interval)).await;
        }
    }

    async fn scrape(&self, client: &mut ProbeClient) -> EngineMetrics {
        let page = client.get("/metrics", text::PAGE_BYTES_MAX).await;
        let read = success(page).and_then(|answer| {
            EngineMetrics::read(&answer.body).map_err(|fault| fault.to_string())
        });
        match read {
            Ok(metrics) => {
                let mut is_healthy = true;
                self.update(|record| {
                    record.scraped(metrics);
                    is_healthy = record.is_healthy;
                });
                if !is_healthy {
                    // It answers again: do not leave it out until its next turn.
                    self.backends.board.alarm(self.slot).notify_one();
                }
                metrics
            }
            Err(why) => {
                self.update(|record| record.scrape_failed(why));
                EngineMetrics::default()
            }
        }
    }

    async fn list_models(&self, client: &mut ProbeClient) -> Option<Vec<String>> {
        let list = client.get("/v1/models", MODELS_BYTES_MAX).await;
        let read = success(list).and_then(|answer| {
            engine::read_models(&answer.body).map_err(|fault| fault.to_string())
        });
        match read {
            Ok(models) => {
                self.update(|record| record.models = Some(models.clone()));
                Some(models)
            }
            Err(why) => {
                tracing::debug!(slot = self.slot.0, why, "model list is not known");
                None
            }
        }
    }

    fn tell_news(&self, memory: &mut Memory, saw: &Saw) {
        let registry = self.view.registry();
        let Some(known) = backend_at(&registry, self.slot, &self.url) else {
            // Removed or moved meanwhile: these words are about another engine.
            return;
        };
        let model = known
            .facts
            .models
            .iter()
            .flatten()
            .chain(saw.models.iter().flatten())
            .chain(known.spec.models.iter())
            .find(|model| *model != "*");
        let round = Round {
            tokens_per_block: (self.hooks.tokens_per_block)(model.map_or("*", String::as_str)),
            is_leader: (self.hooks.is_leader)(),
            unix_s: unix_s(),
            now: Instant::now(),
        };
        if let Some(facts) = memory.news(known, saw, &round) {
            self.update(|record| record.told = Some(facts.clone()));
            (self.hooks.observe)(known.handle, facts);
        }
    }
}

/// Which path tells liveness.
struct Path {
    /// Fixed by the settings, or found out.
    known: Option<Cow<'static, str>>,
    is_fixed: bool,
}

impl Path {
    fn new(fixed: Option<String>) -> Self {
        Self {
            is_fixed: fixed.is_some(),
            known: fixed.map(Cow::Owned),
        }
    }

    /// Asks once; while no path is known, every candidate.
    async fn probe(&mut self, client: &mut ProbeClient) -> Result<(), String> {
        let candidates = match self.known.clone() {
            Some(path) => vec![path],
            None => HEALTH_PATHS.map(Cow::Borrowed).to_vec(),
        };
        let mut why = String::new();
        for path in candidates {
            let answer = client
                .get(&path, HEALTH_BYTES_MAX)
                .await
                .map_err(|failure| failure.to_string())?;
            if !is_unknown_path(answer.status) {
                let verdict = success(Ok(answer)).map(drop);
                let verdict = verdict.map_err(|why| format!("{path}: {why}"));
                self.known = Some(path);
                return verdict;
            }
            why = format!("{path}: status {}", answer.status.as_u16());
        }
        if !self.is_fixed {
            self.known = None;
        }
        Err(why)
    }
}

fn is_unknown_path(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED
    )
}

fn success(answer: Result<Answer, ProbeFailure>) -> Result<Answer, String> {
    let answer = answer.map_err(|failure| failure.to_string())?;
    if answer.status.is_success() {
        Ok(answer)
    } else {
        Err(format!("status {}", answer.status.as_u16()))
    }
}

/// `interval` less up to a tenth, so that replicas and backends fall out of step.
fn jittered(interval: Duration) -> Duration {
    interval.mul_f64(1.0 - rand::random::<f64>() / 10.0)
}

fn unix_s() -> u64 {
    // A clock before 1970 tells no start time worth proposing.
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}
