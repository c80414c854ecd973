//! The replicas of the cluster side by side, as one of them knows them: their state as it appears
//! to that replica, and the figures that each replica sends to the others once a second.

use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;
use state::ids::ReplicaId;
use tokio::time::Instant;

use super::answer::{Answer, QueryParams, ReadQuery, at_level};
use super::users::key_text;
use super::{Admin, AdminState};
use api::cluster::figures::{RecentRates, ReplicaFigures, WINDOW};
use api::error::Problem;
use api::ports::{ClusterStatus, MemberStatus};
use api::readiness::Readiness;

#[derive(Serialize, JsonSchema)]
pub(super) struct ReplicasResponse {
    /// Replica that responds.
    asked: ReplicaId,
    /// Leader that the responding replica follows; `null`: none is known.
    leader: Option<ReplicaId>,
    term: u64,
    /// Whether a quorum responds, as far as the responding replica can tell.
    has_quorum: bool,
    /// Whether the responding replica should get traffic, as `/readyz` tells.
    readiness: Readiness,
    /// Length of the window that rates, times and token counts cover, in seconds.
    window_s: u64,
    /// Replicas, by id.
    replicas: Vec<ReplicaDetail>,
}

/// A replica as seen by the responding one.
#[derive(Serialize, JsonSchema)]
struct ReplicaDetail {
    id: ReplicaId,
    is_asked: bool,
    is_leader: bool,
    is_voter: bool,
    /// Whether the replica is connected to the responding one; `true` for that replica itself.
    is_connected: bool,
    /// Whether the replica's host refuses connections at its address, which means that its process
    /// is gone.
    is_refusing: bool,
    /// Time since the responding replica noticed that the replica is not connected, in
    /// milliseconds; `null`: it is.
    silent_ms: Option<u64>,
    /// Host and port of the replica's peer listener.
    peer: String,
    /// URL of the replica's admin listener; `null`: it announced none.
    admin: Option<String>,
    /// URL of the replica's data plane; `null`: it announced none.
    data: Option<String>,
    version: Option<String>,
    /// Number of entries that the replica lags behind; `null` if it is not heard.
    lag: Option<u64>,
    clock_skew_ms: Option<i64>,
    /// Last comparison of its state with that of the responding replica; `null`: none yet, not
    /// connected, or the responding replica itself.
    digest: Option<DigestComparison>,
    /// Age of the figures, in milliseconds; `null`: there are none.
    heard_ms_ago: Option<u64>,
    /// Figures that the replica reports about itself; `null`: none yet, or it runs an earlier
    /// build.
    figures: Option<FiguresDetail>,
}

#[derive(Serialize, JsonSchema)]
struct DigestComparison {
    /// Log index of the comparison.
    index: u64,
    is_equal: bool,
}

/// Figures that a replica reports about itself.
#[derive(Serialize, JsonSchema)]
struct FiguresDetail {
    role: Option<&'static str>,
    term: u64,
    committed_index: u64,
    applied_index: u64,
    snapshot_index: Option<u64>,
    has_quorum: bool,
    has_fault: bool,
    /// Whether the replica's log is waiting, for example for disk space.
    is_log_waiting: bool,
    /// Whether most voters hold a state that differs from the replica's.
    is_minority: bool,
    is_ready: bool,
    digest_mismatches: u64,
    requests_per_s: f64,
    failed_per_s: f64,
    /// Median time to the first output of a stream, in milliseconds; `null` if there were none.
    ttft_p50_ms: Option<f64>,
    ttft_p99_ms: Option<f64>,
    /// Median time that routing added to a request, without its time in the queue, in milliseconds.
    routing_p50_ms: Option<f64>,
    routing_p99_ms: Option<f64>,
    /// Prompt tokens of requests whose engine reported how many were cached.
    prompt_tokens: u64,
    cached_tokens: u64,
    predicted_tokens: u64,
    /// Part of `predicted_tokens` that the replica knew from peers or from before its restart.
    shared_tokens: u64,
    in_flight: u64,
    waiting: u64,
    waiting_users: u64,
    /// User whose request has waited longest there; `null`: nothing waits.
    longest: Option<LongestWaitDetail>,
    disk_free_bytes: Option<u64>,
    disk_size_bytes: Option<u64>,
    /// Number of items that are not in the log yet.
    outbox_items: u64,
    uptime_s: u64,
    /// Number of streams since its start that went on after their engine or router had failed.
    streams_continued: u64,
    /// Number of streams since its start that ended because their engine or router had failed.
    streams_lost: u64,
}

/// The user whose request has waited longest at a replica.
#[derive(Serialize, JsonSchema)]
pub(super) struct LongestWaitDetail {
    /// Name of the user; `null` if the responding replica does not know the name yet.
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
        readiness: admin.readiness.readiness(),
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
    let compared = admin
        .digests
        .compared_with(id)
        .filter(|_| !is_asked && member.is_connected);
    let label = |name: &str| member.labels.get(name).cloned();
    ReplicaDetail {
        id,
        is_asked,
        is_leader: status.leader == Some(id),
        is_voter: member.is_voter,
        is_connected: member.is_connected || is_asked,
        is_refusing: member.is_refusing,
        silent_ms: member.silent_ms,
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
            shared_tokens,
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
            shared_tokens,
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
            streams_continued: figures.streams_continued,
            streams_lost: figures.streams_lost,
        }
    }
}

/// Converts thousandths to a decimal number.
fn thousandths(number: u64) -> f64 {
    f64::from(u32::try_from(number).unwrap_or(u32::MAX)) / 1000.0
}
