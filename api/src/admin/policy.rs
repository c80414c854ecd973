//! The routing policy: replicated, replaced as a whole, in effect on every replica from one log
//! index on. docs/POLICIES.md has an example for each.

use axum::extract::State;
use axum::response::Response;
use serde::Serialize;
use state::command::Command;
use state::ids::LogIndex;
use state::policy::PolicyConfig;

use super::Shared;
use super::answer::{Json, Params, ReadQuery, at_level, json, written};
use crate::error::Problem;

#[derive(Serialize)]
struct Policy {
    index: LogIndex,
    /// What `PUT` takes.
    config: PolicyConfig,
}

pub(super) async fn show(
    State(admin): State<Shared>,
    Params(query): Params<ReadQuery>,
) -> Result<Response, Problem> {
    at_level(&admin, query.read).await?;
    // The index first: the policy is at least as new as it.
    let index = admin.view.applied();
    let config = admin.view.registry().policy.clone();
    Ok(json(&Policy { index, config }))
}

pub(super) async fn put(
    State(admin): State<Shared>,
    Json(config): Json<PolicyConfig>,
) -> Result<Response, Problem> {
    written(admin.cluster.submit(Command::PutPolicy(config)).await)
}
