//! Users whose requests wait at this replica, longest wait first.

use std::collections::BTreeSet;

use axum::extract::State;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use state::ids::ReplicaId;

use super::AdminState;
use super::answer::{Answer, ListQuery, QueryParams};
use api::admission::WaitingUser;
use api::error::Problem;

/// Query parameters of the list.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct WaitingQuery {
    /// Maximum number of entries; 100 if absent.
    #[schemars(range(min = 1, max = super::PAGE_ENTRIES_MAX))]
    limit: Option<usize>,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct WaitingResponse {
    /// Replica at which the requests wait.
    replica: ReplicaId,
    /// Number of requests that wait here, over all users.
    requests: usize,
    /// Number of users with requests that wait here.
    users: usize,
    /// Users, longest wait first.
    waiting: Vec<WaitingDetail>,
}

#[derive(Serialize, JsonSchema)]
struct WaitingDetail {
    user: String,
    models: BTreeSet<String>,
    requests: usize,
    /// How long the user's oldest request has waited, in milliseconds.
    waited_ms: u64,
}

/// Handles `GET /admin/v1/waiting`.
pub(super) async fn list(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<WaitingQuery>,
) -> Result<Answer<WaitingResponse>, Problem> {
    let page = ListQuery {
        limit: query.limit,
        ..ListQuery::default()
    };
    let limit = page.limit()?;
    let all = admin.admission.all_waiting();
    let detail = |user: WaitingUser| WaitingDetail {
        user: user.user,
        models: user.models,
        requests: user.requests,
        waited_ms: u64::try_from(user.waited.as_millis()).unwrap_or(u64::MAX),
    };
    let waiting = admin.admission.waiting_users(limit).into_iter();
    Ok(Answer(WaitingResponse {
        replica: admin.decisions.replica(),
        requests: all.requests,
        users: all.users,
        waiting: waiting.map(detail).collect(),
    }))
}
