//! Defaults of users: `GET` and `PUT /admin/v1/user-defaults` (ADR 0034). Keys and values are those
//! of `[users.defaults]` in a config file. They are replaced as a whole, and take effect on every
//! replica at one log index.

use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};
use state::command::Command;
use state::ids::LogIndex;

use super::answer::{
    QueryParams, ReadLevel, ReadQuery, Written, at_level, decode, name_of, registry_at, submit,
    unchanged,
};
use super::problem::unfit;
use super::readback::{ReplacedSettings, WrittenSettings};
use super::versions::{IfMatch, Version, Versioned};
use super::{Admin, AdminState};
use api::error::Problem;
use api::settings::UserDefaultsForm;

#[derive(Serialize, JsonSchema)]
#[schemars(
    example = json!({ "index": 5120, "is_set": false, "config": UserDefaultsForm::default() })
)]
pub(super) struct UserDefaultsResponse {
    index: LogIndex,
    /// Whether the defaults were ever set together; `false`: limits and cache may still have been
    /// set on their own.
    is_set: bool,
    /// Settings in the form that `PUT` takes.
    config: UserDefaultsForm,
}

impl ReplacedSettings for UserDefaultsForm {
    fn example() -> Value {
        json!({ "limits": { "requests": 600, "tokens": 2_000_000, "window": "1m" } })
    }
}

pub(super) async fn show(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<ReadQuery>,
) -> Result<Versioned<UserDefaultsResponse>, Problem> {
    let (index, registry) = registry_at(&admin, query.read).await?;
    let config = UserDefaultsForm::from(&registry.user_defaults);
    Ok(Versioned {
        version: Version::of(&config),
        body: UserDefaultsResponse {
            index,
            is_set: registry.are_user_defaults_set,
            config,
        },
    })
}

fn version(admin: &Admin) -> Option<Version> {
    let registry = admin.view.registry();
    let config = UserDefaultsForm::from(&registry.user_defaults);
    Some(Version::of(&config))
}

pub(super) async fn put(
    State(admin): State<AdminState>,
    if_match: IfMatch,
    written: WrittenSettings<UserDefaultsForm>,
) -> Result<Written, Problem> {
    let document: Value = decode(&written.config)?;
    let form = UserDefaultsForm::read(&document).map_err(|faults| unfit(&faults))?;
    if let Some(group) = &form.cache_group {
        name_of("cache_group", group)?;
    }
    let defaults = form.settings();
    let _turn = if_match.turn(&admin, || version(&admin)).await?;
    if written.is_read_as_unset {
        at_level(&admin, ReadLevel::Linearizable).await?;
        let registry = admin.view.registry();
        if !registry.are_user_defaults_set && registry.user_defaults == defaults {
            return Ok(unchanged(&admin));
        }
    }
    submit(&admin, Command::PutUserDefaults(Box::new(defaults))).await
}
