//! The replicas of the cluster side by side, as the asked one knows them: what it sees of each, and
//! the figures that each sends to the others once a second.

use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;
use state::ids::ReplicaId;
use tokio::time::Instant;

use super::answer::{Answer, QueryParams, ReadQuery, at_level};
use super::users::key_text;
use super::{Admin, AdminState};
use crate::error::Problem;
use crate::figures::{RecentRates, ReplicaFigures, WINDOW};
use crate::ports::{ClusterStatus, MemberStatus};

#[derive(Serialize, JsonSchema)]
pub(super) struct ReplicasResponse {
    /// The replica that answers.
    asked: ReplicaId,
    /// The leader that it follows.
    leader: Option<ReplicaId>,
    term: u64,
    /// Whether a quorum responds, as far as it can tell.
    has_quorum: bool,
    /// Seconds that rates, times and tokens are of.
    window_s: u64,
    /// By id.
    replicas: Vec<ReplicaDetail>,
}

/// A replica as the asked one knows it.
#[derive(Serialize, JsonSchema)]
struct ReplicaDetail {
    id: ReplicaId,
    is_asked: bool,
    is_leader: bool,
    is_voter: bool,
    /// Whether it is connected to the asked replica; true of itself.
    is_connected: bool,
    /// Whether nothing listens at its address: its process is gone.
    is_refusing: bool,
    /// Host and port of its peer listener.
    peer: String,
    /// URL of its admin listener.
    admin: Option<String>,
    /// URL of its data plane.
    data: Option<String>,
    version: Option<String>,
    /// Entries that it lags behind; `null`: not heard.
    lag: Option<u64>,
    clock_skew_ms: Option<i64>,
    /// The last comparison of its state with that of the asked replica; `null`: none yet, or the
    /// asked replica itself.
    digest: Option<DigestComparison>,
    /// How old the figures are; `null`: there are none.
    heard_ms_ago: Option<u64>,
    /// What it tells of itself; `null`: it has not told, or is of an earlier build.
    figures: Option<FiguresDetail>,
}

#[derive(Serialize, JsonSchema)]
struct DigestComparison {
    /// Log index of the comparison.
    index: u64,
    is_equal: bool,
}

/// What a replica tells of itself.
#[derive(Serialize, JsonSchema)]
struct FiguresDetail {
    role: Option<&'static str>,
    term: u64,
    committed_index: u64,
    applied_index: u64,
    snapshot_index: Option<u64>,
    has_quorum: bool,
    has_fault: bool,
    /// Whether its log waits, for example for disk space.
    is_log_waiting: bool,
    /// Whether most voters hold another state than it.
    is_minority: bool,
    is_ready: bool,
    digest_mismatches: u64,
    requests_per_s: f64,
    failed_per_s: f64,
    /// Half of the times to the first token were shorter; `null`: there were none.
    ttft_p50_ms: Option<f64>,
    ttft_p99_ms: Option<f64>,
    /// What routing added to a request before it was sent, waiting left out.
    routing_p50_ms: Option<f64>,
    routing_p99_ms: Option<f64>,
    /// Prompt tokens of requests whose engine told how many were cached.
    prompt_tokens: u64,
    cached_tokens: u64,
    predicted_tokens: u64,
    in_flight: u64,
    waiting: u64,
    waiting_users: u64,
    /// Who has waited longest there; `null`: nobody waits.
    longest: Option<LongestWaitDetail>,
    disk_free_bytes: Option<u64>,
    disk_size_bytes: Option<u64>,
    /// Items that the log does not have yet.
    outbox_items: u64,
    uptime_s: u64,
}

/// Who has waited longest at a replica.
#[derive(Serialize, JsonSchema)]
pub(super) struct LongestWaitDetail {
    /// `null`: a user that is not known here yet.
    user: Option<String>,
    user_key: String,
    waited_ms: u64,
}

/// Handles `GET /admin/v1/replicas`.
pub(super) async fn show(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<ReadQuery>,
) -> Result<Answer<ReplicasResponse>, Problem> {
    at_level(&admin, query.read).await?;
    let (status, now) = (admin.cluster.status(), Instant::now());
    let members = status.members.iter();
    let replicas = members.map(|(&id, member)| detail(&admin, &status, (id, member), now));
    Ok(Answer(ReplicasResponse {
        asked: status.id,
        leader: status.leader,
        term: status.term,
        has_quorum: status.has_quorum,
        window_s: WINDOW.as_secs(),
        replicas: replicas.collect(),
    }))
}

fn detail(
    admin: &Admin,
    status: &ClusterStatus,
    (id, member): (ReplicaId, &MemberStatus),
    now: Instant,
) -> ReplicaDetail {
    let is_asked = id == status.id;
    let told = match is_asked {
        true => admin.figures.own().map(|own| (now, own)),
        false => admin.figures.heard(id),
    };
    let age = told.map(|(at, _)| now.saturating_duration_since(at).as_millis());
    let compared = admin.digests.compared_with(id).filter(|_| !is_asked);
    let label = |name: &str| member.labels.get(name).cloned();
    ReplicaDetail {
        id,
        is_asked,
        is_leader: status.leader == Some(id),
        is_voter: member.is_voter,
        is_connected: member.is_connected || is_asked,
        is_refusing: member.is_refusing,
        peer: member.peer.clone(),
        admin: label("admin"),
        data: label("data"),
        version: label("version"),
        lag: member.lag,
        clock_skew_ms: member.clock_skew_ms,
        digest: compared.map(|(index, is_equal)| DigestComparison { index, is_equal }),
        heard_ms_ago: age.map(|ms| u64::try_from(ms).unwrap_or(u64::MAX)),
        figures: told.map(|(_, figures)| FiguresDetail::of(admin, &figures)),
    }
}

impl FiguresDetail {
    fn of(admin: &Admin, figures: &ReplicaFigures) -> Self {
        let RecentRates {
            requests_milli_per_s,
            failed_milli_per_s,
            ttft_p50_us,
            ttft_p99_us,
            routing_p50_us,
            routing_p99_us,
            prompt_tokens,
            cached_tokens,
            predicted_tokens,
        } = figures.recent;
        let time = |us| Some(us).filter(|us| *us > 0).map(thousandths);
        Self {
            role: figures.role,
            term: figures.term,
            committed_index: figures.committed_index,
            applied_index: figures.applied_index,
            snapshot_index: figures.snapshot_index,
            has_quorum: figures.has_quorum,
            has_fault: figures.has_fault,
            is_log_waiting: figures.is_waiting,
            is_minority: figures.is_minority,
            is_ready: figures.is_ready,
            digest_mismatches: figures.digest_mismatches,
            requests_per_s: thousandths(requests_milli_per_s),
            failed_per_s: thousandths(failed_milli_per_s),
            ttft_p50_ms: time(ttft_p50_us),
            ttft_p99_ms: time(ttft_p99_us),
            routing_p50_ms: time(routing_p50_us),
            routing_p99_ms: time(routing_p99_us),
            prompt_tokens,
            cached_tokens,
            predicted_tokens,
            in_flight: figures.in_flight,
            waiting: figures.waiting,
            waiting_users: figures.waiting_users,
            longest: figures.longest.map(|longest| {
                let mut user = None;
                admin.cluster.with_state(&mut |state| {
                    user = state.user(longest.user).map(|it| it.name.to_string());
                });
                LongestWaitDetail {
                    user,
                    user_key: key_text(longest.user),
                    waited_ms: longest.waited_ms,
                }
            }),
            disk_free_bytes: figures.disk.map(|(free, _)| free),
            disk_size_bytes: figures.disk.map(|(_, size)| size),
            outbox_items: figures.outbox_items,
            uptime_s: figures.uptime_s,
        }
    }
}

/// Converts thousandths to a decimal number.
fn thousandths(number: u64) -> f64 {
    f64::from(u32::try_from(number).unwrap_or(u32::MAX)) / 1000.0
}
