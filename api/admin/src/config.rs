//! `GET /admin/v1/config`: the configuration of this replica, and the settings in effect.

use std::collections::{BTreeMap, BTreeSet};

use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;
use state::Registry;
use state::ids::LogIndex;

use super::AdminState;
use super::answer::{Answer, QueryParams, ReadQuery, registry_at};
use api::error::Problem;
use api::settings;
use api::settings::{FileSettings, SettingKey};

#[derive(Serialize, JsonSchema)]
pub(super) struct ConfigResponse {
    index: LogIndex,
    /// Keys that this replica's config sets to another value than the cluster has.
    differences: BTreeSet<String>,
    keys: BTreeMap<String, KeyDetail>,
}

#[derive(Serialize, JsonSchema)]
struct KeyDetail {
    /// `cluster`: replicated, changed through this API; the config only sets it when the cluster is
    /// founded. `replica`: taken from this replica's config.
    scope: &'static str,
    /// Value in this replica's config; `null`: not set.
    file: Value,
    /// Value that the cluster has; `null`: none, or not replicated.
    cluster: Value,
    in_effect: Value,
}

pub(super) async fn show(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<ReadQuery>,
) -> Result<Answer<ConfigResponse>, Problem> {
    let (index, registry) = registry_at(&admin, query.read).await?;
    let file = admin.file.now();
    let differences = file.differences(&registry);
    let differences = differences.iter().map(|it| it.key.to_string());
    Ok(Answer(ConfigResponse {
        index,
        differences: differences.collect(),
        keys: keys(&file, &registry),
    }))
}

fn keys(file: &FileSettings, registry: &Registry) -> BTreeMap<String, KeyDetail> {
    let in_effect = settings::in_effect(registry);
    let all: BTreeSet<&SettingKey> = file.stated.keys().chain(in_effect.keys()).collect();
    let replicated = all.into_iter().map(|key| {
        let value = in_effect.get(key).cloned().unwrap_or_default();
        let detail = KeyDetail {
            scope: "cluster",
            file: file.stated.get(key).cloned().unwrap_or_default(),
            cluster: value.clone(),
            in_effect: value,
        };
        (key.to_string(), detail)
    });
    let local = file.local.iter().map(|(key, setting)| {
        let value = setting.value.clone();
        let detail = KeyDetail {
            scope: "replica",
            file: if setting.is_set {
                value.clone()
            } else {
                Value::Null
            },
            cluster: Value::Null,
            in_effect: value,
        };
        (key.clone(), detail)
    });
    replicated.chain(local).collect()
}
