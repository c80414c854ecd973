//! Sharing of cached blocks between users: the default, and the fields of a user's own setting (ADR
//! 0072).

use axum::extract::State;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use state::caches::CacheScope;
use state::command::Command;
use state::ids::LogIndex;

use super::answer::{QueryParams, ReadQuery, Written, at_level, name_of, submit};
use super::problem::invalid;
use super::readback::{ReadBack, ReadBackJson, with_shown};
use super::versions::{IfMatch, Version, Versioned};
use super::{Admin, AdminState};
use api::error::Problem;

/// Whether a user shares cached blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(super) enum CacheForm {
    /// As users without their own setting.
    Default,
    /// Shared with all users who share.
    Shared,
    /// Not shared, or only within a cache group.
    Isolated,
}

/// A cache scope.
#[derive(Serialize, JsonSchema)]
pub(super) struct ShownScope {
    cache: CacheForm,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_group: Option<String>,
}

impl From<&CacheScope> for ShownScope {
    fn from(scope: &CacheScope) -> Self {
        let (cache, group) = match scope {
            CacheScope::Shared => (CacheForm::Shared, None),
            CacheScope::Own => (CacheForm::Isolated, None),
            CacheScope::Group(name) => (CacheForm::Isolated, Some(name.clone())),
        };
        Self {
            cache,
            cache_group: group,
        }
    }
}

/// Parses `cache` and `cache_group` of a body: `None` if both are absent, otherwise the scope to
/// set, where `Some(None)` selects the default of all users.
pub(super) fn scope_of(
    cache: Option<CacheForm>,
    group: Option<&String>,
) -> Result<Option<Option<CacheScope>>, Problem> {
    match (cache, group) {
        (None, None) => Ok(None),
        (None | Some(CacheForm::Isolated), Some(group)) => {
            name_of("cache_group", group)?;
            Ok(Some(Some(CacheScope::Group(group.clone()))))
        }
        (Some(CacheForm::Isolated), None) => Ok(Some(Some(CacheScope::Own))),
        (Some(CacheForm::Shared), None) => Ok(Some(Some(CacheScope::Shared))),
        (Some(CacheForm::Default), None) => Ok(Some(None)),
        (Some(CacheForm::Shared | CacheForm::Default), Some(group)) => {
            let found = format!("{group:?}, expected none where cache is not \"isolated\"");
            Err(invalid("cache_group", found))
        }
    }
}

#[derive(Serialize, JsonSchema)]
pub(super) struct CacheSettings {
    index: LogIndex,
    /// Default of users without their own setting.
    #[serde(flatten)]
    scope: ShownScope,
    /// Number of users with their own setting.
    users: usize,
    /// Backends whose engine does not isolate users, as far as this replica knows.
    unsalted_backends: Vec<String>,
}

pub(super) async fn show(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<ReadQuery>,
) -> Result<Versioned<CacheSettings>, Problem> {
    at_level(&admin, query.read).await?;
    let index = admin.view.applied();
    let (registry, caches) = (admin.view.registry(), admin.view.caches());
    let backends = registry.backends.iter();
    let unsalted = backends.filter(|backend| !admin.backends.knows_salts(backend));
    let scope = ShownScope::from(caches.default_scope());
    Ok(Versioned {
        version: Version::of(&scope),
        body: CacheSettings {
            index,
            scope,
            users: caches.len(),
            unsalted_backends: unsalted.map(|backend| backend.spec.id.clone()).collect(),
        },
    })
}

fn version(admin: &Admin) -> Option<Version> {
    let scope = ShownScope::from(admin.view.caches().default_scope());
    Some(Version::of(&scope))
}

/// New default of users without their own setting.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(transform = with_shown::<PutCacheBody>, example = json!({ "cache": "isolated" }))]
pub(super) struct PutCacheBody {
    cache: Option<CacheForm>,
    cache_group: Option<String>,
}

impl ReadBack for PutCacheBody {
    const SHOWN: &'static [&'static str] = &["index", "users", "unsalted_backends"];
}

pub(super) async fn put(
    State(admin): State<AdminState>,
    if_match: IfMatch,
    ReadBackJson(body): ReadBackJson<PutCacheBody>,
) -> Result<Written, Problem> {
    let Some(scope) = scope_of(body.cache, body.cache_group.as_ref())? else {
        let expected = "neither cache nor cache_group".to_owned();
        return Err(invalid("body", expected));
    };
    let _turn = if_match.turn(&admin, || version(&admin)).await?;
    submit(&admin, Command::SetCacheScope { user: None, scope }).await
}
