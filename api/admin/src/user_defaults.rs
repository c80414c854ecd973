//! Defaults of users: `GET` and `PUT /admin/v1/users/defaults` (ADR 0034). Keys and values are those
//! of `[users.defaults]` in a config file. They are replaced as a whole, and take effect on every
//! replica at one log index.

use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};
use state::caches::CacheScope;
use state::command::{Command, UserDefaults};
use state::ids::LogIndex;

use super::answer::{QueryParams, ReadQuery, Written, decode, name_of, registry_at, submit};
use super::problem::unfit;
use super::readback::{ReplacedSettings, WrittenSettings};
use super::versions::{IfMatch, Version, Versioned};
use super::{Admin, AdminState};
use api::error::Problem;
use api::settings::read_user_defaults;
use api::users::isolation::SaltedWork;

#[derive(Serialize, JsonSchema)]
#[schemars(example = json!({
    "index": 5120,
    "config": UserDefaults::default(),
    "users_with_own_cache": 3,
    "unsalted_backends": [],
}))]
pub(super) struct UserDefaultsResponse {
    index: LogIndex,
    /// Settings in the form that `PUT` takes.
    config: UserDefaults,
    /// Number of users with their own setting of `cache`.
    users_with_own_cache: usize,
    /// Backends whose engine does not isolate users, as far as this replica knows.
    unsalted_backends: Vec<String>,
}

impl ReplacedSettings for UserDefaults {
    const AROUND: &'static [&'static str] = &["index", "users_with_own_cache", "unsalted_backends"];

    fn example() -> Value {
        json!({ "limits": { "requests": 600, "tokens": 2_000_000, "window": "1m" } })
    }
}

pub(super) async fn show(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<ReadQuery>,
) -> Result<Versioned<UserDefaultsResponse>, Problem> {
    let (index, registry) = registry_at(&admin, query.read).await?;
    let backends = registry.backends.iter();
    let unsalted =
        backends.filter(|backend| !admin.backends.knows_salts(backend, SaltedWork::Generation));
    let config = registry.user_defaults.clone();
    Ok(Versioned {
        version: Version::of(&config),
        body: UserDefaultsResponse {
            index,
            config,
            users_with_own_cache: admin.view.users().scoped(),
            unsalted_backends: unsalted.map(|backend| backend.spec.id.clone()).collect(),
        },
    })
}

fn version(admin: &Admin) -> Option<Version> {
    Some(Version::of(&admin.view.registry().user_defaults))
}

pub(super) async fn put(
    State(admin): State<AdminState>,
    if_match: IfMatch,
    written: WrittenSettings<UserDefaults>,
) -> Result<Written, Problem> {
    let defaults = read(&written.config)?;
    let _turn = if_match.turn(&admin, || version(&admin)).await?;
    submit(&admin, Command::PutUserDefaults(Box::new(defaults))).await
}

/// Reads defaults of users from a request body.
pub(super) fn read(body: &[u8]) -> Result<UserDefaults, Problem> {
    let document: Value = decode(body)?;
    let defaults = read_user_defaults(&document).map_err(|faults| unfit(&faults))?;
    check_group(&defaults.cache)?;
    Ok(defaults)
}

/// Rejects a cache group whose name cannot be printed.
pub(super) fn check_group(cache: &CacheScope) -> Result<(), Problem> {
    match cache {
        CacheScope::Shared | CacheScope::Own => Ok(()),
        CacheScope::Group(name) => name_of("cache", name),
    }
}
