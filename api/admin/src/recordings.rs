//! `/admin/v1/recordings`: requests to this replica, as files without texts and users' names
//! (`api::files::recording`). Requests are kept as the data plane stores them; lines are generated
//! while a client fetches them, a chunk at a time and on another thread.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use http::header::{CONTENT_DISPOSITION, CONTENT_TYPE};
use http::{HeaderValue, StatusCode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use state::Registry;
use state::caches::CacheScope;
use state::ids::{BlockHash, ReplicaId};
use state::users::UsersView;
use tokio::sync::OwnedSemaphorePermit;

use super::answer::{Answer, MaybeJson, PathParam, QueryParams};
use super::problem::{invalid, not_found};
use super::{Admin, AdminState};
use api::error::Problem;
use api::files::recording::{
    FORMAT, RecordedAttempt, RecordedBackend, RecordedEnd, RecordedReport, RecordedRequest,
    RecordingHead, RecordingNames, RecordingWriter,
};
use api::prompt::BlockUnit;
use api::proxy::{
    DecidedAttempt, RecordingEnd, RecordingLimits, RecordingState, RequestRecord, TakenRequest,
};

/// Maximum number of recordings fetched concurrently.
pub(super) const FETCHES_MAX: usize = 2;
/// Maximum duration of a recording, in seconds.
const SECONDS_MAX: u32 = 24 * 60 * 60;
/// Maximum number of requests in a recording.
const REQUESTS_MAX: u32 = 1_000_000;
/// Range of a recording's memory limit, in bytes.
const BYTES: std::ops::RangeInclusive<u64> = 1024..=(96 << 20);
/// Number of requests converted to lines at a time.
const CHUNK: usize = 64;
/// Maximum length of a salt, in bytes.
const SALT_BYTES_MAX: usize = 64;

/// A recording to start.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(example = json!({ "seconds": 600, "requests": 50_000 }))]
pub(super) struct RecordingSpec {
    /// Maximum length of the recording, in seconds.
    #[schemars(range(min = 1, max = SECONDS_MAX))]
    seconds: u32,
    /// Maximum number of requests.
    #[schemars(range(min = 1, max = REQUESTS_MAX))]
    requests: u32,
    /// Maximum size in this replica's memory, in bytes.
    #[schemars(range(min = 1024, max = 100_663_296))]
    bytes: u64,
    /// Salt that names are hashed with. Recordings of several replicas can be merged if they have
    /// the same one. `null`: a unique one.
    #[schemars(regex(pattern = "^[A-Za-z0-9._-]{1,64}$"))]
    salt: Option<String>,
}

impl Default for RecordingSpec {
    fn default() -> Self {
        Self {
            seconds: 60,
            requests: 100_000,
            bytes: 64 << 20,
            salt: None,
        }
    }
}

/// Query parameters for the last decisions.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct LastQuery {
    /// Maximum number of requests; 1000 if absent.
    #[schemars(range(min = 1, max = REQUESTS_MAX))]
    limit: Option<u32>,
    /// Salt that names are hashed with; a unique one if absent.
    #[schemars(regex(pattern = "^[A-Za-z0-9._-]{1,64}$"))]
    salt: Option<String>,
}

/// Status and limits of a recording.
#[derive(Serialize, JsonSchema)]
#[schemars(example = RecordingInfo::example())]
pub(super) struct RecordingInfo {
    /// Id, unique during this run of the replica, from 1.
    id: u64,
    /// Replica that records.
    replica: ReplicaId,
    is_running: bool,
    /// What ended the recording: `seconds`, `requests`, `bytes` or `stopped`; `null`: it is
    /// running.
    ended_by: Option<&'static str>,
    /// When the recording started, in Unix milliseconds.
    from_ms: u64,
    /// When the recording ended, or will end at the latest, in Unix milliseconds.
    until_ms: u64,
    /// Number of recorded requests.
    requests: usize,
    requests_max: u32,
    /// Memory that the recording takes, in bytes.
    bytes: u64,
    bytes_max: u64,
    salt: String,
    /// Path to download the recording from.
    path: String,
}

#[derive(Serialize, JsonSchema)]
#[schemars(example = json!({ "recordings": [RecordingInfo::example()] }))]
pub(super) struct RecordingList {
    /// Recordings, newest first; at most three are kept.
    recordings: Vec<RecordingInfo>,
}

impl RecordingInfo {
    /// Returns an example of a running recording.
    fn example() -> Self {
        Self {
            id: 1,
            replica: ReplicaId(2),
            is_running: true,
            ended_by: None,
            from_ms: 1_790_000_000_000,
            until_ms: 1_790_000_600_000,
            requests: 812,
            requests_max: 50_000,
            bytes: 1_203_404,
            bytes_max: 64 << 20,
            salt: "5f3c9a1e".to_owned(),
            path: "/admin/v1/recordings/1".to_owned(),
        }
    }
}

/// Response with a recording as a file.
pub(super) struct RecordingFile {
    name: String,
    body: Body,
}

impl IntoResponse for RecordingFile {
    fn into_response(self) -> Response {
        let name = format!("attachment; filename=\"{}\"", self.name);
        let name = HeaderValue::try_from(name).expect("numbers within plain text");
        let content_type = HeaderValue::from_static("application/jsonl");
        let headers = [(CONTENT_TYPE, content_type), (CONTENT_DISPOSITION, name)];
        (headers, self.body).into_response()
    }
}

/// Handles `GET /admin/v1/recordings`.
pub(super) async fn list(State(admin): State<AdminState>) -> Answer<RecordingList> {
    let all = admin.decisions.recorder().list();
    let recordings = all.iter().map(|it| RecordingInfo::of(&admin, it));
    Answer(RecordingList {
        recordings: recordings.collect(),
    })
}

/// Handles `POST /admin/v1/recordings`.
pub(super) async fn start(
    State(admin): State<AdminState>,
    MaybeJson(spec): MaybeJson<RecordingSpec>,
) -> Result<Answer<RecordingInfo>, Problem> {
    let spec = spec.unwrap_or_default();
    within("seconds", spec.seconds.into(), 1..=SECONDS_MAX.into())?;
    within("requests", spec.requests.into(), 1..=REQUESTS_MAX.into())?;
    within("bytes", spec.bytes, BYTES)?;
    keeps_decisions(&admin)?;
    let now_ms = admin.clock.unix_ms();
    let salt = salt_of(&admin, spec.salt, now_ms)?;
    let limits = RecordingLimits {
        seconds: spec.seconds,
        requests: spec.requests,
        bytes: spec.bytes,
    };
    let started = admin.decisions.recorder().start(salt, limits, now_ms);
    let state = started.map_err(|running| {
        let title = "a recording is already running";
        Problem::new(StatusCode::CONFLICT, "recording-under-way", title).detail(format!(
            "recording {} of replica {} ends at Unix time {} s at the latest; \
             POST /admin/v1/recordings/{}/stop ends it",
            running.id,
            admin.decisions.replica(),
            running.until_ms / 1000,
            running.id,
        ))
    })?;
    Ok(Answer(RecordingInfo::of(&admin, &state)))
}

/// Handles `POST /admin/v1/recordings/{id}/stop`.
pub(super) async fn stop(
    State(admin): State<AdminState>,
    PathParam(id): PathParam<u64>,
) -> Result<Answer<RecordingInfo>, Problem> {
    let stopped = admin.decisions.recorder().stop(id, admin.clock.unix_ms());
    let state = stopped.ok_or_else(|| unknown(&admin, id))?;
    Ok(Answer(RecordingInfo::of(&admin, &state)))
}

/// Handles `DELETE /admin/v1/recordings/{id}`.
pub(super) async fn remove(
    State(admin): State<AdminState>,
    PathParam(id): PathParam<u64>,
) -> Result<Answer<RecordingInfo>, Problem> {
    let removed = admin.decisions.recorder().remove(id, admin.clock.unix_ms());
    let state = removed.ok_or_else(|| unknown(&admin, id))?;
    Ok(Answer(RecordingInfo::of(&admin, &state)))
}

/// Handles `GET /admin/v1/recordings/{id}`.
pub(super) async fn fetch(
    State(admin): State<AdminState>,
    PathParam(id): PathParam<u64>,
) -> Result<RecordingFile, Problem> {
    let permit = turn(&admin)?;
    let found = admin.decisions.recorder().get(id);
    let (state, taken) = found.ok_or_else(|| unknown(&admin, id))?;
    let ended_by = state.end.map_or("running", RecordingEnd::label);
    let until_ms = match state.end {
        Some(_) => state.until_ms,
        None => admin.clock.unix_ms().max(state.from_ms),
    };
    let head = head(&admin, &state.salt, (state.from_ms, until_ms), ended_by);
    let name = format!("quorate-{}-{id}.jsonl", admin.decisions.replica());
    Ok(file(&admin, name, &head, taken, permit))
}

/// Handles `GET /admin/v1/recordings/last`.
pub(super) async fn last(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<LastQuery>,
) -> Result<RecordingFile, Problem> {
    let limit = query.limit.unwrap_or(1000);
    within("limit", limit.into(), 1..=REQUESTS_MAX.into())?;
    keeps_decisions(&admin)?;
    let now_ms = admin.clock.unix_ms();
    let salt = salt_of(&admin, query.salt, now_ms)?;
    let permit = turn(&admin)?;
    let taken = admin.decisions.with_blocks(limit as usize);
    let from_ms = taken.first().map_or(now_ms, |first| first.record.at_ms);
    let head = head(&admin, &salt, (from_ms, now_ms.max(from_ms)), "decisions");
    let name = format!("quorate-{}-last.jsonl", admin.decisions.replica());
    Ok(file(&admin, name, &head, taken, permit))
}

fn within(field: &str, found: u64, range: std::ops::RangeInclusive<u64>) -> Result<(), Problem> {
    if range.contains(&found) {
        return Ok(());
    }
    let (least, most) = range.into_inner();
    Err(invalid(
        field,
        format!("{found}, expected {least} to {most}"),
    ))
}

/// Returns a problem if this replica keeps no decisions, of which recordings consist.
fn keeps_decisions(admin: &Admin) -> Result<(), Problem> {
    if admin.decisions.size().entries_max > 0 {
        return Ok(());
    }
    let title = "the replica keeps no decisions";
    Err(
        Problem::new(StatusCode::CONFLICT, "refused", title).detail(format!(
            "replica {}: recordings need decisions, and admin.decisions is 0",
            admin.decisions.replica()
        )),
    )
}

fn salt_of(admin: &Admin, given: Option<String>, now_ms: u64) -> Result<Arc<str>, Problem> {
    let Some(salt) = given else {
        return Ok(format!("{}-{now_ms}", admin.decisions.replica()).into());
    };
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if (1..=SALT_BYTES_MAX).contains(&salt.len()) && salt.bytes().all(is_plain) {
        return Ok(salt.into());
    }
    let expected = format!("expected 1 to {SALT_BYTES_MAX} letters, digits, '.', '_' and '-'");
    Err(invalid("salt", expected))
}

fn turn(admin: &AdminState) -> Result<OwnedSemaphorePermit, Problem> {
    let permit = Arc::clone(&admin.recordings).try_acquire_owned();
    permit.map_err(|_| {
        let (status, title) = (
            StatusCode::SERVICE_UNAVAILABLE,
            "too many recordings are being downloaded",
        );
        let problem = Problem::new(status, "limit", title);
        problem
            .detail(format!("at most {FETCHES_MAX}"))
            .retry_after(5)
    })
}

fn unknown(admin: &Admin, id: u64) -> Problem {
    let all = admin.decisions.recorder().list();
    let ids: Vec<String> = all.iter().map(|it| it.id.to_string()).collect();
    let replica = admin.decisions.replica();
    not_found(match ids.is_empty() {
        true => format!("replica {replica} has no recordings"),
        false => format!(
            "replica {replica} has no recording {id}, but {}",
            ids.join(", ")
        ),
    })
}

impl RecordingInfo {
    fn of(admin: &Admin, state: &RecordingState) -> Self {
        Self {
            id: state.id,
            replica: admin.decisions.replica(),
            is_running: state.end.is_none(),
            ended_by: state.end.map(RecordingEnd::label),
            from_ms: state.from_ms,
            until_ms: state.until_ms,
            requests: state.requests,
            requests_max: state.limits.requests,
            bytes: state.bytes,
            bytes_max: state.limits.bytes,
            salt: state.salt.to_string(),
            path: format!("/admin/v1/recordings/{}", state.id),
        }
    }
}

fn head(
    admin: &Admin,
    salt: &str,
    (from_ms, until_ms): (u64, u64),
    ended_by: &str,
) -> RecordingHead {
    let (registry, service) = (admin.view.registry(), admin.view.service());
    let backends = registry.backends.iter().map(|backend| RecordedBackend {
        id: backend.spec.id.clone(),
        models: backend.spec.models.clone(),
        capacity_blocks: service
            .get(backend.handle.slot)
            .and_then(|served| served.capacity_blocks)
            .or(backend.capacity_blocks()),
        limit: admin.view.limit(backend.handle.slot),
    });
    RecordingHead {
        quorate_recording: FORMAT,
        replicas: vec![admin.decisions.replica().0],
        salt: salt.to_owned(),
        from_ms,
        until_ms,
        ended_by: ended_by.to_owned(),
        policy: serde_json::to_value(&registry.policy).unwrap_or_default(),
        backends: backends.collect(),
    }
}

/// Converts recorded requests to the lines of a file.
struct Lines {
    writer: RecordingWriter,
    names: RecordingNames,
    registry: Arc<Registry>,
    users: Arc<UsersView>,
    replica: ReplicaId,
    taken: std::vec::IntoIter<TakenRequest>,
    /// First line of the file; `None` once it is sent.
    head: Option<String>,
    _permit: OwnedSemaphorePermit,
}

fn file(
    admin: &Admin,
    name: String,
    head: &RecordingHead,
    taken: Vec<TakenRequest>,
    permit: OwnedSemaphorePermit,
) -> RecordingFile {
    let registry = admin.view.registry();
    let writer = RecordingWriter::default();
    let lines = Lines {
        head: Some(writer.head(head)),
        writer,
        names: RecordingNames::new(&registry.hashing(), &head.salt),
        users: admin.view.users(),
        registry,
        replica: admin.decisions.replica(),
        taken: taken.into_iter(),
        _permit: permit,
    };
    let chunks = stream::try_unfold(lines, |mut lines| async move {
        // Long prompts have many blocks to hash.
        let made = tokio::task::spawn_blocking(move || (lines.chunk(), lines)).await;
        made.map(|(chunk, lines)| chunk.map(|chunk| (chunk, lines)))
    });
    RecordingFile {
        name,
        body: Body::from_stream(chunks),
    }
}

impl Lines {
    /// Returns the next chunk of lines, or `None` at the end.
    fn chunk(&mut self) -> Option<Bytes> {
        let mut text = self.head.take().unwrap_or_default();
        for TakenRequest { record, chain } in self.taken.by_ref().take(CHUNK) {
            let request = request(&record, &self.names, &self.registry, &self.users);
            let request = RecordedRequest {
                replica: self.replica.0,
                ..request
            };
            let chain: Vec<u64> = chain.iter().map(|block| block.0).collect();
            let name = |block| self.names.block(BlockHash(block));
            text.push_str(&self.writer.line(request, &chain, name));
        }
        (!text.is_empty()).then(|| text.into())
    }
}

/// Returns the line of a request without its blocks.
fn request(
    record: &RequestRecord,
    names: &RecordingNames,
    registry: &Registry,
    users: &UsersView,
) -> RecordedRequest {
    let user = record.user.as_str();
    let tenant = match users.scope(record.user.key(registry.hash_seed)) {
        CacheScope::Shared => None,
        CacheScope::Own => Some(names.tenant(&format!("user {user}"))),
        CacheScope::Group(name) => Some(names.tenant(&format!("group {name}"))),
    };
    let unit = match record.unit {
        BlockUnit::Tokens => "tokens",
        BlockUnit::Characters | BlockUnit::CharactersFor(_) => "characters",
    };
    let attempts = record.attempts();
    RecordedRequest {
        at_ms: record.at_ms,
        replica: 0,
        user: names.user(user),
        tenant,
        session: record.session.map(|it| names.session(it.key)),
        parent_session: record
            .session
            .and_then(|it| Some(names.session(it.parent?))),
        model: match registry.is_served(&record.model) {
            true => record.model.to_string(),
            // The client may have written anything there.
            false => names.model(&record.model),
        },
        unit: unit.to_owned(),
        tokens: record.tokens,
        block_tokens: record.tokens_per_block.max(1),
        matchable: record.matchable,
        stream: record.is_stream,
        tokens_max: record.tokens_max,
        priority: record.priority,
        after: None,
        blocks: Vec::new(),
        attempts: attempts.iter().map(attempt).collect(),
        end: record.end().map(|end| RecordedEnd {
            outcome: end.outcome.to_owned(),
            status: Some(end.status).filter(|status| *status != 0),
            after_ms: super::decisions::ms(end.after),
        }),
    }
}

fn attempt(attempt: &DecidedAttempt) -> RecordedAttempt {
    let decision = &attempt.decision;
    RecordedAttempt {
        after_ms: super::decisions::ms(attempt.after),
        waited_ms: super::decisions::ms(attempt.waited),
        index: decision.index.0,
        policy: decision.policy_name().to_owned(),
        candidates: decision.candidates(),
        backend: decision.name.to_string(),
        matched: decision.matched(),
        reason: decision.reason().label().to_owned(),
        status: decision.status(),
        report: decision.outcome().map(|report| {
            let [_, _, output] = report.charged;
            RecordedReport {
                end: report.end.label().to_owned(),
                prompt_tokens: report.usage.map(|usage| usage.prompt_tokens),
                cached_tokens: report.usage.and_then(|usage| usage.cached_tokens),
                output_tokens: report.usage.map_or(output, |usage| usage.completion_tokens),
                ttft_ms: report.first_token.map(super::decisions::ms),
                duration_ms: super::decisions::ms(report.duration),
            }
        }),
    }
}
