//! The routing policy and what routing follows beside it: replicated, replaced as a whole, in
//! effect on every replica from one log index on. docs/reference/policies.md has an example for
//! each.
//!
//! The policy of one model is a part of the routing settings; writing it reads these and writes
//! them back. Two who do so at the same moment may overwrite one another, as two who replace the
//! settings would.

use axum::extract::{FromRequest, Request, State};
use axum::response::Response;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use state::command::Command;
use state::ids::LogIndex;
use state::policy::{PolicyConfig, RoutingSettings};

use super::answer::{
    JSON, Json, QueryParams, ReadLevel, ReadQuery, at_level, decode, json, name_of, read_body,
    submit,
};
use super::origin::typed;
use super::problem::{invalid, not_found};
use super::{Admin, AdminState};
use crate::error::Problem;

#[derive(Serialize)]
struct PolicyResponse {
    index: LogIndex,
    /// Whether the model asked for has a policy of its own; absent when none was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    is_of_model: Option<bool>,
    /// What `PUT` takes.
    config: PolicyConfig,
}

#[derive(Serialize)]
struct RoutingResponse {
    index: LogIndex,
    /// Whether an operator or the first replica's config set it; `false`: the defaults.
    is_set: bool,
    /// What `PUT` takes.
    config: RoutingSettings,
}

/// Which policy is meant.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct PolicyQuery {
    read: ReadLevel,
    /// The policy that decides for this model; without it the live one.
    model: Option<String>,
}

pub(super) async fn show(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<PolicyQuery>,
) -> Result<Response, Problem> {
    at_level(&admin, query.read).await?;
    // The index first: the policy is at least as new as it.
    let index = admin.view.applied();
    let registry = admin.view.registry();
    let routing = registry.routing.as_ref();
    let of_model = |model: &String| routing.and_then(|routing| routing.models.get(model));
    let own = query.model.as_ref().map(of_model);
    Ok(json(&PolicyResponse {
        index,
        is_of_model: own.map(|own| own.is_some()),
        config: own.flatten().unwrap_or(&registry.policy).clone(),
    }))
}

/// A policy as a body, with faults as problems that name the setting.
pub(super) struct PolicyJson(PolicyConfig);

impl<S: Sync> FromRequest<S> for PolicyJson {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        typed(request.headers(), JSON)?;
        let body = read_body(request.into_body()).await?;
        let config = decode(&body).map_err(|problem| match setting_at_fault(&body) {
            Some((field, detail)) => invalid(&field, detail),
            None => problem,
        })?;
        Ok(Self(config))
    }
}

/// The first setting that its policy does not take. Which one it is gets lost where a type is told
/// by one of its own fields; so each is tried alone.
pub(super) fn setting_at_fault(body: &[u8]) -> Option<(String, String)> {
    let body: Map<String, Value> = serde_json::from_slice(body).ok()?;
    let policy = body.get("policy")?;
    PolicyConfig::deserialize(json!({"policy": policy})).ok()?;
    body.iter().find_map(|(field, setting)| {
        let alone = json!({"policy": policy, field.as_str(): setting});
        let fault = PolicyConfig::deserialize(alone).err()?;
        Some((field.clone(), fault.to_string()))
    })
}

pub(super) async fn put(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<PolicyQuery>,
    PolicyJson(config): PolicyJson,
) -> Result<Response, Problem> {
    let Some(model) = query.model else {
        return submit(&admin, Command::PutPolicy(config)).await;
    };
    name_of("model", &model)?;
    let mut routing = latest(&admin).await?;
    routing.models.insert(model, config);
    submit(&admin, Command::PutRouting(routing)).await
}

/// Takes a model's own policy away.
pub(super) async fn remove(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<PolicyQuery>,
) -> Result<Response, Problem> {
    let mut routing = latest(&admin).await?;
    let model = query.model.unwrap_or_default();
    if routing.models.remove(&model).is_none() {
        return Err(not_found(format!(
            "no model {model:?} has a policy of its own (?model=NAME)"
        )));
    }
    submit(&admin, Command::PutRouting(routing)).await
}

pub(super) async fn show_routing(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<ReadQuery>,
) -> Result<Response, Problem> {
    at_level(&admin, query.read).await?;
    let index = admin.view.applied();
    let set = admin.view.registry().routing.clone();
    Ok(json(&RoutingResponse {
        index,
        is_set: set.is_some(),
        config: set.unwrap_or_default(),
    }))
}

pub(super) async fn put_routing(
    State(admin): State<AdminState>,
    Json(config): Json<RoutingSettings>,
) -> Result<Response, Problem> {
    submit(&admin, Command::PutRouting(config)).await
}

/// The routing settings with everything committed so far.
async fn latest(admin: &Admin) -> Result<RoutingSettings, Problem> {
    at_level(admin, ReadLevel::Linearizable).await?;
    Ok(admin.view.registry().routing.clone().unwrap_or_default())
}
