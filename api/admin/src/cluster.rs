//! The cluster itself: status, members, leadership, snapshots, digests.

use std::time::Duration;

use axum::extract::State;
use http::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use state::ids::ReplicaId;

use super::answer::{
    Answer, Changed, Json, MaybeJson, PathParam, QueryParams, ReadLevel, ReadQuery, WriteResponse,
    at_level, changed, not_changed,
};
use super::problem::invalid;
use super::{Admin, AdminState};
use api::cluster::divergence::hex;
use api::error::Problem;
use api::ports::ClusterStatus;

/// Maximum time that `GET /admin/v1/digest?index=N` waits until N is applied.
const DIGEST_TIMEOUT: Duration = Duration::from_secs(2);

pub(super) async fn show(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<ReadQuery>,
) -> Result<Answer<ClusterResponse>, Problem> {
    at_level(&admin, query.read).await?;
    let status = admin.cluster.status();
    Ok(Answer(ClusterResponse {
        failures_survived: status.failures_survived(),
        status,
    }))
}

#[derive(Serialize, JsonSchema)]
pub(super) struct ClusterResponse {
    #[serde(flatten)]
    status: ClusterStatus,
    /// Number of connected voters that may still fail before the quorum is lost. `null`: there is
    /// none.
    failures_survived: Option<usize>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(example = json!({ "id": 4, "address": "10.0.0.4:8082" }))]
pub(super) struct NewMember {
    /// `node.id` of the replica, never used before.
    #[schemars(range(min = 1))]
    id: u8,
    /// Host and port of the replica's peer listener.
    #[schemars(regex(pattern = r"^[^:].*:[0-9]{1,5}$"))]
    address: String,
}

pub(super) async fn add(
    State(admin): State<AdminState>,
    Json(member): Json<NewMember>,
) -> Result<Changed<WriteResponse>, Problem> {
    let id = replica(member.id, "id")?;
    let port = member.address.rsplit_once(':').map(|(_, port)| port);
    let is_address = port.is_some_and(|port| port.parse::<u16>().is_ok_and(|port| port > 0));
    if !is_address || member.address.starts_with(':') {
        return Err(invalid(
            "address",
            format!("{:?}, expected host:port", member.address),
        ));
    }
    changed(admin.cluster.add_member(id, member.address).await)
}

pub(super) async fn remove(
    State(admin): State<AdminState>,
    PathParam(id): PathParam<u8>,
) -> Result<Changed<WriteResponse>, Problem> {
    changed(admin.cluster.remove_member(replica(id, "path")?).await)
}

pub(super) async fn promote(
    State(admin): State<AdminState>,
    PathParam(id): PathParam<u8>,
) -> Result<Changed<WriteResponse>, Problem> {
    changed(admin.cluster.promote_member(replica(id, "path")?).await)
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(example = json!({ "to": 2 }))]
pub(super) struct TransferBody {
    /// New leader; absent: the most up-to-date voter.
    #[schemars(range(min = 1))]
    #[serde(default)]
    to: Option<u8>,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct TransferResponse {
    leader: ReplicaId,
    outcome: &'static str,
}

pub(super) async fn transfer(
    State(admin): State<AdminState>,
    MaybeJson(body): MaybeJson<TransferBody>,
) -> Result<Changed<TransferResponse>, Problem> {
    let to = body.unwrap_or_default().to;
    let to = to.map(|id| replica(id, "to")).transpose()?;
    match admin.cluster.transfer_leader(to).await {
        Ok(leader) => Ok(Changed::told(TransferResponse {
            leader,
            outcome: "committed",
        })),
        Err(failure) => Err(not_changed(failure)),
    }
}

pub(super) async fn snapshot(
    State(admin): State<AdminState>,
) -> Result<Changed<WriteResponse>, Problem> {
    changed(admin.cluster.snapshot().await)
}

fn replica(id: u8, field: &str) -> Result<ReplicaId, Problem> {
    if id == 0 {
        return Err(invalid(field, "0, expected a replica id from 1 to 255"));
    }
    Ok(ReplicaId(id))
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct DigestQuery {
    /// Applied index whose digest to return; the current one if absent.
    index: Option<u64>,
    /// State to answer from: `local`, as applied here, or `linearizable`, with everything that was
    /// committed before.
    read: ReadLevel,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct DigestResponse {
    index: u64,
    digest: String,
}

/// Handles `GET /admin/v1/digest`: the digest at the applied index, or at `?index=N`. Waits up to
/// [`DIGEST_TIMEOUT`] for a later index (409 if it is not reached). Returns an earlier one while it
/// is kept (404 otherwise, with the nearest lower one).
pub(super) async fn digest(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<DigestQuery>,
) -> Result<Answer<DigestResponse>, Problem> {
    at_level(&admin, query.read).await?;
    let Some(index) = query.index else {
        let (index, digest) = digest_now(&admin);
        return Ok(answer(index, digest));
    };
    if let Some(digest) = digest_at(&admin, index).await? {
        return Ok(answer(index, digest));
    }
    let applied = admin.view.applied().0;
    if applied < index {
        let problem = Problem::new(
            StatusCode::CONFLICT,
            "not-applied",
            "this replica has not applied the index yet",
        );
        let problem = problem
            .detail(format!("applied up to {applied}, requested {index}"))
            .member("applied_index", applied);
        return Err(problem.retry_after(1));
    }
    let problem = Problem::new(
        StatusCode::NOT_FOUND,
        "digest-not-kept",
        "the digest at this index is no longer kept",
    )
    .member("applied_index", applied);
    Err(match admin.digests.nearest(index) {
        Some(nearest) => problem.member("nearest_index", nearest),
        None => problem,
    })
}

fn answer(index: u64, digest: u128) -> Answer<DigestResponse> {
    Answer(DigestResponse {
        index,
        digest: hex(digest),
    })
}

/// Returns the applied index with its digest, and records it.
fn digest_now(admin: &Admin) -> (u64, u128) {
    let mut now = (0, 0);
    admin.cluster.with_state(&mut |state| {
        // Nothing is applied while the state is read, so index and digest belong together.
        now = (admin.view.applied().0, state.digest());
    });
    admin.digests.record(now.0, now.1);
    now
}

async fn digest_at(admin: &Admin, index: u64) -> Result<Option<u128>, Problem> {
    if let Some(digest) = admin.digests.get(index) {
        return Ok(Some(digest));
    }
    let mut now = None;
    let mut wanted = None;
    admin.cluster.with_state(&mut |state| {
        let applied = admin.view.applied().0;
        if applied == index {
            now = Some(state.digest());
        } else if applied < index {
            // The wait is registered before the next apply, so that it cannot miss that.
            wanted = Some(admin.digests.want(index));
        }
    });
    if let Some(digest) = now {
        admin.digests.record(index, digest);
        return Ok(now);
    }
    match wanted {
        None => Ok(None),
        Some(Ok(())) => Ok(admin.digests.wait(index, DIGEST_TIMEOUT).await),
        Some(Err(limit)) => Err(Problem::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "limit",
            "too many calls are waiting for digests",
        )
        .detail(limit.to_string())),
    }
}
