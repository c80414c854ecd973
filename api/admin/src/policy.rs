//! The routing policy and the other routing settings: replicated, replaced as a whole, and in
//! effect on every replica from one log index on. docs/reference/policies.md has an example of
//! each.
//!
//! The policy of one model is part of the routing settings. Writing it reads the settings and
//! writes them back. Writes through one replica take turns. Of concurrent writes through several
//! replicas, the last one wins, as for the settings as a whole.

use axum::extract::State;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use state::Registry;
use state::command::Command;
use state::ids::LogIndex;
use state::policy::{PolicyConfig, RoutingSettings};

use super::answer::{
    QueryParams, ReadLevel, ReadQuery, Written, at_level, decode, name_of, registry_at, submit,
    unchanged,
};
use super::problem::{invalid, not_found};
use super::readback::{ReplacedSettings, WrittenSettings};
use super::versions::{IfMatch, Version, Versioned};
use super::{Admin, AdminState};
use api::error::Problem;

#[derive(Serialize, JsonSchema)]
#[schemars(example = json!({ "index": 5120, "config": PolicyConfig::LeastRequest }))]
pub(super) struct PolicyResponse {
    index: LogIndex,
    /// Whether the requested model has its own policy; absent if no model was requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    is_of_model: Option<bool>,
    /// Policy in the form that `PUT` takes.
    config: PolicyConfig,
}

#[derive(Serialize, JsonSchema)]
#[schemars(example = json!({ "index": 5120, "config": RoutingSettings::default() }))]
pub(super) struct RoutingResponse {
    index: LogIndex,
    /// Settings in the form that `PUT` takes.
    config: RoutingSettings,
}

impl ReplacedSettings for PolicyConfig {
    const AROUND: &'static [&'static str] = &["index", "is_of_model"];

    fn example() -> Value {
        json!({ "policy": "prefix-cache", "imbalance_abs_count": 32 })
    }
}

impl ReplacedSettings for RoutingSettings {
    fn example() -> Value {
        let models = json!({ "small-chat": { "policy": "least-request" } });
        json!({ "models": models, "learn": true, "prediction_off_permille": 150 })
    }
}

/// Selects a policy.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct PolicyQuery {
    /// State to answer from: `local`, as applied here, or `linearizable`, with everything that was
    /// committed before.
    read: ReadLevel,
    /// Model whose effective policy is meant; the live policy if absent.
    model: Option<String>,
}

pub(super) async fn show(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<PolicyQuery>,
) -> Result<Versioned<PolicyResponse>, Problem> {
    let (index, registry) = registry_at(&admin, query.read).await?;
    let (is_of_model, config) = effective(&registry, query.model.as_ref());
    Ok(Versioned {
        version: Version::of(config),
        body: PolicyResponse {
            index,
            is_of_model,
            config: config.clone(),
        },
    })
}

/// Returns the policy in effect for `model`, and whether it is the model's own. Without a model,
/// returns the live policy.
fn effective<'a>(
    registry: &'a Registry,
    model: Option<&String>,
) -> (Option<bool>, &'a PolicyConfig) {
    let own = model.map(|model| registry.routing.models.get(model));
    let config = own.flatten().unwrap_or(&registry.policy);
    (own.map(|own| own.is_some()), config)
}

fn version(admin: &Admin, model: Option<&String>) -> Option<Version> {
    let registry = admin.view.registry();
    Some(Version::of(effective(&registry, model).1))
}

fn routing_version(admin: &Admin) -> Option<Version> {
    Some(Version::of(&admin.view.registry().routing))
}

/// Parses a policy. A problem names the setting at fault.
fn policy_in(body: &[u8]) -> Result<PolicyConfig, Problem> {
    decode(body).map_err(|problem| match setting_at_fault(body) {
        Some((field, detail)) => invalid(&field, detail),
        None => problem,
    })
}

/// Returns the first setting that its policy rejects, with the reason. Serde loses the field of a
/// fault in an internally tagged enum, so each setting is tried alone.
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
    if_match: IfMatch,
    written: WrittenSettings<PolicyConfig>,
) -> Result<Written, Problem> {
    let config = policy_in(&written.config)?;
    let now = || version(&admin, query.model.as_ref());
    let _turn = if_match.turn(&admin, now).await?;
    let Some(model) = query.model else {
        return submit(&admin, Command::PutPolicy(config)).await;
    };
    name_of("model", &model)?;
    let mut routing = latest(&admin).await?;
    let is_general = config == admin.view.registry().policy;
    if written.is_of_model == Some(false) && is_general && !routing.models.contains_key(&model) {
        return Ok(unchanged(&admin));
    }
    routing.models.insert(model, config);
    submit(&admin, Command::PutRouting(routing)).await
}

/// Removes a model's own policy.
pub(super) async fn remove(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<PolicyQuery>,
    if_match: IfMatch,
) -> Result<Written, Problem> {
    let now = || version(&admin, query.model.as_ref());
    let _turn = if_match.turn(&admin, now).await?;
    let mut routing = latest(&admin).await?;
    let model = query.model.unwrap_or_default();
    if routing.models.remove(&model).is_none() {
        return Err(not_found(format!(
            "the model {model:?} has no policy of its own (?model=NAME)"
        )));
    }
    submit(&admin, Command::PutRouting(routing)).await
}

pub(super) async fn show_routing(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<ReadQuery>,
) -> Result<Versioned<RoutingResponse>, Problem> {
    let (index, registry) = registry_at(&admin, query.read).await?;
    let config = registry.routing.clone();
    Ok(Versioned {
        version: Version::of(&config),
        body: RoutingResponse { index, config },
    })
}

pub(super) async fn put_routing(
    State(admin): State<AdminState>,
    if_match: IfMatch,
    written: WrittenSettings<RoutingSettings>,
) -> Result<Written, Problem> {
    let config: RoutingSettings = decode(&written.config)?;
    let _turn = if_match.turn(&admin, || routing_version(&admin)).await?;
    submit(&admin, Command::PutRouting(config)).await
}

/// Returns the routing settings after a read barrier.
async fn latest(admin: &Admin) -> Result<RoutingSettings, Problem> {
    at_level(admin, ReadLevel::Linearizable).await?;
    Ok(admin.view.registry().routing.clone())
}
