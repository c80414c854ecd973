//! `GET /admin/v1/decisions`: past decisions of all replicas. A record shows what was decided, with
//! the figures at that time, not what would be decided now (I72).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use http::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use state::ids::{LogIndex, ReplicaId};
use state::policy::Reason;

use super::answer::{Answer, ListQuery, PathParam, QueryParams};
use super::problem::{invalid, not_found};
use super::users::key_text;
use super::{Admin, AdminState};
use api::error::Problem;
use api::files::ring::RingPosition;
use api::prompt::BlockUnit;
use api::proxy::{DecidedAttempt, DecisionCursor, DecisionFilter, RequestEnd, RequestRecord};
use api::routing::{AttemptReport, DecisionView, Usage};
use api::sessions::NamedSession;

/// Query parameters of the list.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct DecisionQuery {
    /// Only requests of this user, by name.
    user: Option<String>,
    /// Only requests with an attempt at this backend.
    backend: Option<String>,
    /// Only requests for this model.
    model: Option<String>,
    /// Only requests that failed: no engine served them, or its answer was an error or broke off.
    failed: bool,
    /// Only requests that were answered with this HTTP status.
    status: Option<u16>,
    /// Only requests that took longer from the end of parsing to their end, or already take longer,
    /// such as `2s` or `500ms`.
    slower_than: Option<String>,
    /// Maximum number of entries; 100 if absent.
    #[schemars(range(min = 1, max = super::PAGE_ENTRIES_MAX))]
    limit: Option<usize>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct DecisionList {
    /// Replica that answers.
    replica: ReplicaId,
    /// Number of its own requests that it keeps in memory.
    kept: usize,
    /// Maximum number of requests in memory.
    kept_max: usize,
    /// Memory that these requests take, in bytes.
    kept_bytes: usize,
    /// Arrival of the oldest request in memory, in Unix milliseconds; `null`: there is none.
    oldest_ms: Option<u64>,
    /// What this replica keeps on disk, of all replicas; `null`: nothing.
    disk: Option<DiskView>,
    /// First this replica's requests that are not on disk, such as those in flight, then those on
    /// disk in the reverse order of their ends.
    decisions: Vec<DecisionSummary>,
    /// Value of `cursor` for the next page; absent at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_cursor: Option<String>,
}

/// Decisions on disk.
#[derive(Serialize, JsonSchema)]
struct DiskView {
    /// Size of the files, in bytes.
    bytes: u64,
    /// Maximum size of the files, in bytes.
    bytes_max: u64,
    /// Why the last access to the disk failed; `null`: it did not.
    fault: Option<String>,
}

/// A request and its outcome.
#[derive(Serialize, JsonSchema)]
struct DecisionSummary {
    request_id: String,
    /// Replica that decided.
    replica: ReplicaId,
    /// When the request had been parsed, in Unix milliseconds by the clock of its replica.
    at_ms: u64,
    path: String,
    model: String,
    /// Name that the request gives; absent: the model's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    requested_model: Option<String>,
    /// User, as named by `GET /admin/v1/users`.
    user: String,
    user_key: String,
    user_source: String,
    /// Session of which the request was a turn; `null`: it named none.
    session: Option<TurnView>,
    stream: bool,
    /// Whether the request went on with a stream of another replica.
    resumed: bool,
    /// Number of prompt tokens, as far as known.
    tokens: u32,
    /// Number of full blocks of the prompt.
    blocks_total: u32,
    /// Number of attempts so far.
    attempts: usize,
    /// Decision of the last attempt; `null`: no backend was chosen.
    last: Option<LastDecision>,
    /// How the request ended; `null`: it is in progress.
    end: Option<EndView>,
}

/// The session of a request.
#[derive(Serialize, JsonSchema)]
struct TurnView {
    /// Id of the session, 16 hex digits.
    id: String,
    /// Id of the session that started it; `null`: it was a root.
    parent: Option<String>,
    /// Whether the turn was the last one of the session.
    #[serde(rename = "final")]
    is_final: bool,
    /// Where the names came from, `header:NAME` or `body:FIELD`.
    source: &'static str,
}

impl TurnView {
    fn of(named: &NamedSession) -> Self {
        Self {
            id: named.key.to_string(),
            parent: named.parent.map(|parent| parent.to_string()),
            is_final: named.is_final,
            source: named.source,
        }
    }
}

/// Summary of the last decision.
#[derive(Serialize, JsonSchema)]
struct LastDecision {
    index: LogIndex,
    policy: &'static str,
    backend: String,
    /// Backend that computes the prompt, if another one than `backend`.
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill: Option<String>,
    matched: u32,
    reason: Reason,
    waited_ms: f64,
    status: Option<u16>,
    failure: Option<&'static str>,
    #[serde(flatten)]
    outcome: Option<ReportView>,
}

/// How a request ended.
#[derive(Serialize, JsonSchema)]
struct EndView {
    /// Outcome, as counted by `quorate_proxy_requests_total`.
    outcome: &'static str,
    /// Status sent to the client; `null`: the client left before.
    status: Option<u16>,
    /// Code of the error sent to the client; `null`: none was sent.
    code: Option<&'static str>,
    duration_ms: f64,
}

/// Result of an attempt.
#[derive(Serialize, JsonSchema)]
struct ReportView {
    end: &'static str,
    /// Usage that the engine reported; `null`: none.
    usage: Option<UsageView>,
    /// Charged tokens: those reported, or an estimate if none were.
    charged: ChargedView,
    /// Time from the dispatch to the first output of a stream, in milliseconds; `null`: there was
    /// none, or the response was no stream.
    ttft_ms: Option<f64>,
    /// Time from the dispatch to the end, in milliseconds.
    duration_ms: f64,
}

#[derive(Serialize, JsonSchema)]
struct UsageView {
    prompt_tokens: u64,
    cached_tokens: Option<u64>,
    completion_tokens: u64,
}

#[derive(Serialize, JsonSchema)]
struct ChargedView {
    input_uncached: u64,
    input_cached: u64,
    output: u64,
}

/// A request with all its decisions.
#[derive(Serialize, JsonSchema)]
pub(super) struct DecisionDetail {
    #[serde(flatten)]
    summary: DecisionSummary,
    priority: i16,
    deadline_ms: Option<f64>,
    max_tokens: Option<u32>,
    /// Labels that the request selected backends by.
    labels: BTreeMap<String, String>,
    unit: BlockUnit,
    decisions: Vec<AttemptView>,
}

/// An attempt: its decision and its result.
#[derive(Serialize, JsonSchema)]
struct AttemptView {
    /// Time from the end of parsing to the dispatch, in milliseconds.
    after_ms: f64,
    /// Part of `after_ms` that the request spent in the queue, in milliseconds.
    waited_ms: f64,
    #[serde(flatten)]
    decision: DecisionView,
    /// Outcome of the prefill, if another backend computes the prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill_outcome: Option<&'static str>,
    /// Status of the engine's response; `null`: none has arrived.
    status: Option<u16>,
    /// Why there was no response; `null`: there was one, or it is still expected.
    failure: Option<&'static str>,
    /// Result; `null`: the attempt is in progress.
    outcome: Option<ReportView>,
}

pub(super) async fn list(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<DecisionQuery>,
) -> Result<Answer<DecisionList>, Problem> {
    let page = ListQuery {
        limit: query.limit,
        ..ListQuery::default()
    };
    let limit = page.limit()?;
    let cursor = query.cursor.as_deref().map(parse_cursor).transpose()?;
    let slower_than = query.slower_than.as_deref().map(parse_span).transpose()?;
    let filter = DecisionFilter {
        user: query.user,
        backend: query.backend,
        model: query.model,
        is_failed: query.failed,
        status: query.status,
        slower_than,
    };
    let log = Arc::clone(&admin.decisions);
    let reading = move || (log.page(cursor, limit, &filter), log.archive_size());
    let read = tokio::task::spawn_blocking(reading).await;
    let (page, disk) = read.map_err(|_| {
        let title = "the replica is stopping";
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "stopping", title).retry_after(1)
    })?;
    let size = admin.decisions.size();
    let summaries = page.records.iter();
    Ok(Answer(DecisionList {
        replica: admin.decisions.replica(),
        kept: size.entries,
        kept_max: size.entries_max,
        kept_bytes: size.bytes,
        oldest_ms: size.oldest_ms,
        disk: disk.map(|disk| DiskView {
            bytes: disk.bytes,
            bytes_max: disk.bytes_max,
            fault: disk.fault,
        }),
        next_cursor: page.next.map(cursor_text),
        decisions: summaries
            .map(|it| DecisionSummary::of(&admin, it))
            .collect(),
    }))
}

fn parse_span(text: &str) -> Result<Duration, Problem> {
    let wrong = |_| {
        invalid(
            "slower_than",
            format!("{text:?}, expected a duration, such as 2s"),
        )
    };
    humantime::parse_duration(text).map_err(wrong)
}

/// Prefix of cursors in the archive.
const ARCHIVE_CURSOR: &str = "disk-";

fn cursor_text(cursor: DecisionCursor) -> String {
    match cursor {
        DecisionCursor::Memory(number) => number.to_string(),
        DecisionCursor::Archive(place) => format!("{ARCHIVE_CURSOR}{}", place.0),
    }
}

fn parse_cursor(text: &str) -> Result<DecisionCursor, Problem> {
    let parsed = match text.strip_prefix(ARCHIVE_CURSOR) {
        None => text.parse().map(DecisionCursor::Memory),
        Some(place) => (place.parse()).map(|place| DecisionCursor::Archive(RingPosition(place))),
    };
    parsed.map_err(|_| invalid("cursor", format!("{text:?}, expected a next_cursor")))
}

pub(super) async fn show(
    State(admin): State<AdminState>,
    PathParam(id): PathParam<String>,
) -> Result<Answer<DecisionDetail>, Problem> {
    let found = admin.decisions.find_anywhere(&id, &*admin.cluster).await;
    let record = found.map_err(|failures| unknown(&admin, &failures))?;
    let names = |backend| admin.decider.name_of(backend);
    let decisions = record.attempts().clone();
    let view = |attempt: &DecidedAttempt| AttemptView {
        after_ms: ms(attempt.after),
        waited_ms: ms(attempt.waited),
        decision: attempt.decision.view(names),
        prefill_outcome: attempt.decision.prefill_outcome(),
        status: attempt.decision.status(),
        failure: attempt.decision.failure(),
        outcome: attempt.decision.outcome().map(ReportView::of),
    };
    Ok(Answer(DecisionDetail {
        priority: record.priority,
        deadline_ms: record.deadline.map(ms),
        max_tokens: record.tokens_max,
        labels: record.labels.iter().cloned().collect(),
        unit: record.unit,
        decisions: decisions.iter().map(view).collect(),
        summary: DecisionSummary::of(&admin, &record),
    }))
}

/// Returns the problem for a request id without a recorded decision. `failures` are the peers that
/// could not be asked.
fn unknown(admin: &Admin, failures: &[(ReplicaId, String)]) -> Problem {
    let (replica, size) = (admin.decisions.replica(), admin.decisions.size());
    let mut what = match size.entries_max {
        0 => format!("replica {replica} keeps no decisions: admin.decisions is 0"),
        _ => format!("replica {replica} has no request with this id"),
    };
    match failures {
        [] => what.push_str(", nor has any peer"),
        failures => {
            let each = failures.iter();
            let each = each.map(|(peer, why)| format!("replica {peer} did not answer: {why}"));
            what = [what]
                .into_iter()
                .chain(each)
                .collect::<Vec<_>>()
                .join("; ");
        }
    }
    not_found(what).member("replica", replica.0)
}

impl DecisionSummary {
    fn of(admin: &Admin, record: &RequestRecord) -> Self {
        let hash_seed = admin.view.registry().hash_seed;
        let attempts = record.attempts();
        Self {
            request_id: record.id.to_string(),
            replica: record.replica,
            at_ms: record.at_ms,
            path: record.path.to_string(),
            model: record.model.to_string(),
            requested_model: record.requested.as_deref().map(ToOwned::to_owned),
            user: record.user.as_str().to_owned(),
            user_key: key_text(record.user.key(hash_seed)),
            user_source: record.user_source.text(),
            session: record.session.as_ref().map(TurnView::of),
            stream: record.is_stream,
            resumed: record.is_resumed,
            tokens: record.tokens,
            blocks_total: record.blocks,
            attempts: attempts.len(),
            last: attempts.last().map(LastDecision::of),
            end: record.end().map(EndView::of),
        }
    }
}

impl LastDecision {
    fn of(attempt: &DecidedAttempt) -> Self {
        let decision: &Arc<_> = &attempt.decision;
        Self {
            index: decision.index,
            policy: decision.policy_name(),
            backend: decision.name.to_string(),
            prefill: decision.prefill_name().map(ToString::to_string),
            matched: decision.matched(),
            reason: decision.reason(),
            waited_ms: ms(attempt.waited),
            status: decision.status(),
            failure: decision.failure(),
            outcome: decision.outcome().map(ReportView::of),
        }
    }
}

impl EndView {
    fn of(end: &RequestEnd) -> Self {
        Self {
            outcome: end.outcome,
            status: Some(end.status).filter(|status| *status != 0),
            code: end.code,
            duration_ms: ms(end.after),
        }
    }
}

impl ReportView {
    fn of(report: &AttemptReport) -> Self {
        let [input_uncached, input_cached, output] = report.charged;
        let usage = |usage: Usage| UsageView {
            prompt_tokens: usage.prompt_tokens,
            cached_tokens: usage.cached_tokens,
            completion_tokens: usage.completion_tokens,
        };
        Self {
            end: report.end.label(),
            usage: report.usage.map(usage),
            charged: ChargedView {
                input_uncached,
                input_cached,
                output,
            },
            ttft_ms: report.first_token.map(ms),
            duration_ms: ms(report.duration),
        }
    }
}

/// Converts to milliseconds, with microsecond precision.
pub(super) fn ms(time: Duration) -> f64 {
    let us = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
    f64::from(us) / 1000.0
}
