//! The registry of backends: replicated writes, and this replica's view of each backend.

use std::collections::BTreeMap;

use axum::extract::State;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use state::Backend;
use state::command::{BackendRole, BackendSpec, Command, EngineFacts};
use state::discovery::DiscoveredBackend;
use state::ids::{Incarnation, LogIndex, ReplicaId, Slot};
use state::kv_events::{KvMode, KvStatus};
use state::service::BackendServiceView;
use tokio::time::Instant;

use super::answer::{
    Answer, ListQuery, PathName, QueryParams, ReadQuery, Written, registry_at, submit,
};
use super::problem::{invalid, not_found};
use super::readback::{ReadBack, ReadBackJson, with_shown};
use super::versions::{IfMatch, Version, Versioned};
use super::{Admin, AdminState};
use api::base::printable::{escaped, is_obeyed};
use api::engines::backends::{
    AnswerCount, CircuitView, EngineKind, EngineMetrics, EnginePlace, EngineUrl, EngineUrlError,
    ProbeRecord,
};
use api::engines::kv_transport::endpoint;
use api::error::Problem;
use api::kv_events::stream_status::BackendStreams;

/// A backend, with everything known about it.
#[derive(Serialize, JsonSchema)]
struct BackendDetail {
    id: String,
    url: String,
    models: Vec<String>,
    labels: BTreeMap<String, String>,
    /// Configured capacity of the engine's cache, in blocks; `null`: not configured.
    capacity_blocks: Option<u32>,
    kv_events: Option<String>,
    kv_replay: Option<String>,
    role: BackendRole,
    capacity: CapacityDetail,
    state: BackendCondition,
    in_flight: InFlightCounts,
    owned_blocks: u64,
    /// Limit, learned prices and accuracy, as replicated; `null` until they are published.
    service: Option<BackendServiceView>,
    /// State of the backend's circuit breaker at this replica.
    circuit: CircuitView,
    ownership: OwnershipDetail,
    /// The source that registered it, and since when it is lost; `null`: registered by an operator
    /// or the config.
    discovered: Option<DiscoveredBackend>,
    slot: Slot,
    incarnation: Incarnation,
    /// Facts about the engine that the cluster has agreed on.
    facts: EngineFacts,
    /// Metrics that the engine last reported to this replica.
    engine: EngineMetrics,
    /// Kind, version and models of the engine, as it reported them to this replica.
    engine_info: EngineInfo,
    probes: ProbeDetail,
    /// Responses of the engine to this replica's requests, since this replica started.
    answers: AnswerCount,
}

/// Kind, version and models of an engine.
#[derive(Serialize, JsonSchema)]
struct EngineInfo {
    /// Kind of the engine, by its metrics or else by its model list; `null`: not known.
    kind: Option<EngineKind>,
    version: Option<String>,
    /// Whether the engine's responses have reported how much of a prompt was cached.
    tells_cached_tokens: bool,
    /// Number of the engine's data-parallel ranks, each of which is a backend here; `null`: not
    /// reported.
    ranks: Option<u16>,
    /// Rank that this backend is; `null`: the engine has only one.
    rank: Option<u16>,
    models: Vec<EngineInfoModel>,
}

/// A model that an engine lists.
#[derive(Serialize, JsonSchema)]
struct EngineInfoModel {
    id: String,
    /// Base model, if the model is an adapter.
    parent: Option<String>,
    max_model_len: Option<u64>,
}

impl EngineInfo {
    fn of(admin: &Admin, backend: &Backend, record: &ProbeRecord) -> Self {
        let listed = record.listed.as_deref().unwrap_or_default();
        let mut owners = listed.iter().filter_map(|model| model.owned_by.as_deref());
        Self {
            kind: record.kind.or_else(|| owners.find_map(EngineKind::named)),
            version: record.version.clone(),
            tells_cached_tokens: admin.backends.reports_cached_in_any_form(backend.handle),
            ranks: record.metrics.ranks,
            rank: admin.view.registry().rank(backend),
            models: listed
                .iter()
                .map(|model| EngineInfoModel {
                    id: model.id.clone(),
                    parent: model.parent.clone(),
                    max_model_len: model.max_model_len,
                })
                .collect(),
        }
    }
}

/// State of a backend's ownership.
#[derive(Serialize, JsonSchema)]
struct OwnershipDetail {
    mode: KvMode,
    /// Why ownership is not exact; also given for a backend without KV events.
    reason: Option<String>,
    /// Replica that reads the backend's KV events; `null`: none.
    reader: Option<ReplicaId>,
    /// Replicated status of the KV events; `null`: none have been reported.
    events: Option<KvStatus>,
    /// Streams of KV events, if this replica is the reader.
    reading: Option<BackendStreams>,
}

impl OwnershipDetail {
    fn of(admin: &Admin, backend: &Backend, events: Option<KvStatus>) -> Self {
        let slot = backend.handle.slot;
        let condition = events.as_ref().map(|events| events.condition);
        let reason = match condition {
            Some(condition) => condition.reason.map(|reason| reason.to_string()),
            None if backend.spec.kv_events.is_none() => Some("kv_events is not set".to_owned()),
            None => Some("its KV events are not read yet".to_owned()),
        };
        Self {
            mode: condition.map_or(KvMode::Lease, |condition| condition.mode),
            reason,
            reader: admin.view.registry().reader(slot),
            events,
            reading: admin.kv_board.standing(slot),
        }
    }
}

/// Capacity of the engine's cache. `null` means unknown, which counts as unlimited.
#[derive(Serialize, JsonSchema)]
struct CapacityDetail {
    /// Effective value: the configured one, else the reported one, corrected by what responses
    /// reveal.
    blocks: Option<u32>,
    configured_blocks: Option<u32>,
    engine_blocks: Option<u32>,
    engine_tokens: Option<u64>,
}

#[derive(Serialize, JsonSchema)]
struct BackendCondition {
    /// `healthy`, `unhealthy` or `draining`, as seen by this replica.
    name: &'static str,
    is_healthy: bool,
    is_draining: bool,
    /// Whether its streams go on at other backends.
    moves_streams: bool,
    detail: Option<String>,
}

/// Requests that were dispatched and have not ended.
#[derive(Serialize, JsonSchema)]
struct InFlightCounts {
    here: u32,
    cluster: u32,
    pending_prefill_tokens: u64,
    /// Number of places within the backend's limit that this replica owns; `null`: no limit.
    share: Option<u32>,
}

#[derive(Serialize, JsonSchema)]
struct ProbeDetail {
    total: u64,
    failures_total: u64,
    failures_in_row: u32,
    /// Time since the engine last passed a probe of this replica, in milliseconds; `null`: never.
    seen_ms_ago: Option<u64>,
    /// Why the last scrape of the engine's metrics failed; `null`: it did not fail.
    metrics_detail: Option<String>,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct BackendList {
    index: LogIndex,
    backends: Vec<BackendDetail>,
    /// Value of `cursor` for the next page; absent at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_cursor: Option<String>,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct BackendResponse {
    index: LogIndex,
    #[serde(flatten)]
    backend: BackendDetail,
}

pub(super) async fn list(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<ListQuery>,
) -> Result<Answer<BackendList>, Problem> {
    let limit = query.limit()?;
    let (index, registry) = registry_at(&admin, query.read).await?;
    let after = query.cursor.as_deref().unwrap_or("");
    let mut page: Vec<&Backend> = registry
        .backends
        .iter()
        .filter(|backend| backend.spec.id.as_str() > after)
        .collect();
    page.sort_unstable_by(|a, b| a.spec.id.cmp(&b.spec.id));
    let is_more = page.len() > limit;
    page.truncate(limit);
    let next_cursor = page
        .last()
        .filter(|_| is_more)
        .map(|backend| backend.spec.id.clone());
    let backends = shown(&admin, &page);
    Ok(Answer(BackendList {
        index,
        backends,
        next_cursor,
    }))
}

pub(super) async fn show(
    State(admin): State<AdminState>,
    PathName(id): PathName,
    QueryParams(query): QueryParams<ReadQuery>,
) -> Result<Versioned<BackendResponse>, Problem> {
    let (index, registry) = registry_at(&admin, query.read).await?;
    let found = registry.backends.iter().find(|b| b.spec.id == id);
    let found = found.ok_or_else(|| not_found(format!("no backend has the id {id:?}")))?;
    let backend = shown(&admin, &[found]).remove(0);
    Ok(Versioned {
        version: Version::of(&found.spec),
        body: BackendResponse { index, backend },
    })
}

fn version(admin: &Admin, id: &str) -> Option<Version> {
    let registry = admin.view.registry();
    let found = registry.backends.iter().find(|b| b.spec.id == id)?;
    Some(Version::of(&found.spec))
}

fn shown(admin: &Admin, page: &[&Backend]) -> Vec<BackendDetail> {
    let mut owned = Vec::with_capacity(page.len());
    admin.cluster.with_state(&mut |state| {
        let slots = page.iter().map(|backend| backend.handle.slot);
        owned = slots
            .map(|slot| (state.owned_blocks(slot), state.kv_status(slot)))
            .collect();
    });
    let now = Instant::now();
    let registry = admin.view.registry();
    page.iter()
        .zip(owned)
        .map(|(backend, (owned_blocks, events))| {
            let record = admin.backends.record(backend.handle.slot);
            let record = record.unwrap_or_default();
            let here = admin.load.here(backend.handle);
            let cluster = admin.load.cluster(backend.handle, now);
            let places = |limit| admin.load.places(backend.handle, limit);
            let places = admin.view.limit(backend.handle.slot).and_then(places);
            let in_flight = InFlightCounts {
                share: places.map(|(_, all)| all),
                here: here.running,
                cluster: cluster.running,
                pending_prefill_tokens: cluster.pending_prefill_tokens,
            };
            BackendContext {
                engine_info: EngineInfo::of(admin, backend, &record),
                record,
                in_flight,
                owned_blocks,
                ownership: OwnershipDetail::of(admin, backend, events),
                service: admin.view.service().get(backend.handle.slot).copied(),
                circuit: admin.backends.circuit(backend.handle, now),
                discovered: registry.discovered.get(&backend.handle.slot).cloned(),
                answers: admin.backends.answer_count(backend.handle.slot),
            }
            .show(backend)
        })
        .collect()
}

/// Data about a backend from sources other than the registry.
struct BackendContext {
    record: ProbeRecord,
    engine_info: EngineInfo,
    in_flight: InFlightCounts,
    owned_blocks: u64,
    ownership: OwnershipDetail,
    service: Option<BackendServiceView>,
    circuit: CircuitView,
    discovered: Option<DiscoveredBackend>,
    answers: AnswerCount,
}

impl BackendContext {
    fn show(self, backend: &Backend) -> BackendDetail {
        let Self {
            record,
            engine_info,
            in_flight,
            owned_blocks,
            ownership,
            service,
            circuit,
            discovered,
            answers,
        } = self;
        let spec = backend.spec.clone();
        BackendDetail {
            service,
            circuit,
            capacity: CapacityDetail {
                blocks: service.and_then(|service| service.capacity_blocks),
                configured_blocks: spec.capacity_blocks,
                engine_blocks: backend.facts.capacity_blocks,
                engine_tokens: record.metrics.cache_tokens,
            },
            state: BackendCondition {
                name: match (backend.draining, record.is_healthy) {
                    (true, _) => "draining",
                    (false, true) => "healthy",
                    (false, false) => "unhealthy",
                },
                is_healthy: record.is_healthy,
                is_draining: backend.draining,
                moves_streams: backend.moves_streams,
                detail: record.detail,
            },
            id: spec.id,
            url: spec.url,
            models: spec.models,
            labels: spec.labels,
            capacity_blocks: spec.capacity_blocks,
            kv_events: spec.kv_events,
            kv_replay: spec.kv_replay,
            role: spec.role,
            in_flight,
            owned_blocks,
            ownership,
            discovered,
            slot: backend.handle.slot,
            incarnation: backend.handle.incarnation,
            facts: backend.facts.clone(),
            engine: record.metrics,
            engine_info,
            answers,
            probes: ProbeDetail {
                total: record.probes_total,
                failures_total: record.failures_total,
                failures_in_row: record.failures_in_row,
                seen_ms_ago: record.passed_at.map(ms_since),
                metrics_detail: record.metrics_detail,
            },
        }
    }
}

/// Returns the time since `at`, in milliseconds.
fn ms_since(at: Instant) -> u64 {
    u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// A backend; its id is in the path.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(
    transform = with_shown::<PutBackendBody>,
    example = json!({ "url": "http://10.0.1.1:8000", "models": ["*"], "labels": { "zone": "a" } })
)]
pub(super) struct PutBackendBody {
    /// The id in the path, repeated.
    id: Option<String>,
    url: String,
    models: Option<Vec<String>>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    capacity_blocks: Option<u32>,
    kv_events: Option<String>,
    kv_replay: Option<String>,
    #[serde(default)]
    role: BackendRole,
}

impl ReadBack for PutBackendBody {
    const SHOWN: &'static [&'static str] = &[
        "index",
        "capacity",
        "state",
        "in_flight",
        "owned_blocks",
        "service",
        "circuit",
        "ownership",
        "discovered",
        "slot",
        "incarnation",
        "facts",
        "engine",
        "engine_info",
        "probes",
        "answers",
    ];
}

pub(super) async fn put(
    State(admin): State<AdminState>,
    PathName(id): PathName,
    if_match: IfMatch,
    ReadBackJson(body): ReadBackJson<PutBackendBody>,
) -> Result<Written, Problem> {
    if let Some(other) = body.id.filter(|other| *other != id) {
        return Err(invalid(
            "id",
            format!("{other:?}, expected {id:?} as in the path"),
        ));
    }
    let url = match EngineUrl::parse(&body.url) {
        Ok(url) => {
            allowed(&admin, "url", &EnginePlace::Host(url.host().to_owned()))?;
            is_free(&admin, &id, url.as_str())?;
            url.as_str().to_owned()
        }
        // The cluster reports what is wrong with the value.
        Err(EngineUrlError) => body.url,
    };
    for (field, place) in endpoint::places(body.kv_events.as_deref(), body.kv_replay.as_deref()) {
        allowed(&admin, field, &place)?;
    }
    let spec = BackendSpec {
        id,
        url,
        models: body.models.unwrap_or_else(|| vec!["*".to_owned()]),
        labels: body.labels,
        capacity_blocks: body.capacity_blocks,
        kv_events: body.kv_events,
        kv_replay: body.kv_replay,
        role: body.role,
    };
    let labels = spec.labels.iter().flat_map(|(name, value)| [name, value]);
    for text in spec.models.iter().chain(labels) {
        if text.contains(is_obeyed) {
            let found = format!(
                "{:?}, expected no control or invisible characters",
                escaped(text)
            );
            return Err(invalid("body", found));
        }
    }
    endpoint::check(spec.kv_events.as_deref(), spec.kv_replay.as_deref())
        .map_err(|(field, expected)| invalid(field, expected))?;
    let _turn = if_match.turn(&admin, || version(&admin, &spec.id)).await?;
    submit(&admin, Command::PutBackend(spec)).await
}

/// Returns a problem if `url` is that of another engine, which would get twice its share of requests
/// and whose cache two backends would own.
fn is_free(admin: &Admin, id: &str, url: &str) -> Result<(), Problem> {
    let registry = admin.view.registry();
    // The ranks of an engine share its URL.
    let is_other = |it: &&Backend| state::engine_of(&it.spec.id) != state::engine_of(id);
    let mut others = registry.backends.iter().filter(is_other);
    match others.find(|it| it.spec.url == url) {
        None => Ok(()),
        Some(other) => Err(invalid(
            "url",
            format!(
                "{url} is that of the backend {:?}, expected another one",
                other.spec.id
            ),
        )),
    }
}

/// Returns a problem if this replica would not connect to `place`.
fn allowed(admin: &Admin, field: &'static str, place: &EnginePlace) -> Result<(), Problem> {
    let judged = admin.backends.check_place(place);
    judged.map_err(|refused| {
        invalid(
            field,
            format!("{refused}, expected an engine that admin.backends_allow has"),
        )
    })
}

pub(super) async fn remove(
    State(admin): State<AdminState>,
    PathName(name): PathName,
    if_match: IfMatch,
) -> Result<Written, Problem> {
    let _turn = if_match.turn(&admin, || version(&admin, &name)).await?;
    submit(&admin, Command::DeleteBackend { name }).await
}

/// Query parameters of draining.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct DrainQuery {
    /// Whether the backend's streams go on at other backends, as far as they can. The last call
    /// counts: without it, streams that an earlier call would still move stay.
    move_streams: bool,
}

pub(super) async fn drain(
    State(admin): State<AdminState>,
    PathName(name): PathName,
    QueryParams(query): QueryParams<DrainQuery>,
) -> Result<Written, Problem> {
    let command = Command::SetDraining {
        name,
        draining: true,
        moves_streams: query.move_streams,
    };
    submit(&admin, command).await
}

pub(super) async fn undrain(
    State(admin): State<AdminState>,
    PathName(name): PathName,
) -> Result<Written, Problem> {
    let command = Command::SetDraining {
        name,
        draining: false,
        moves_streams: false,
    };
    submit(&admin, command).await
}
