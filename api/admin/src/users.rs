//! Users: what is set for them, their counters, windows, limits and waiting requests.

use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};
use state::budgets::{BudgetPeriod, BudgetStatus};
use state::command::{Command, UserSettings};
use state::ids::{LogIndex, UserKey};
use state::quotas::RemainingLimits;
use state::users::{UserUsage, UserView};

use super::answer::{
    Answer, ListQuery, PathParam, QueryParams, ReadQuery, Written, at_level, decode, name_of,
    submit,
};
use super::keys::{date, pattern_of};
use super::problem::{invalid, not_found, unfit};
use super::readback::{ReplacedSettings, WrittenSettings};
use super::user_defaults::check_group;
use super::versions::{IfMatch, Version, Versioned};
use super::{Admin, AdminState};
use api::error::Problem;
use api::settings::read_user;

/// A user as stored in the state.
#[derive(Serialize, JsonSchema)]
struct UserDetail {
    name: String,
    /// Hash of the name, 16 hex digits.
    key: String,
    /// What is set for this user, in the form that `PUT` takes. The defaults apply to the rest.
    config: UserSettings,
    /// Weight that applies.
    weight_milli: u32,
    counter_milli_tokens: u64,
    in_flight: u64,
    waiting: QueuedRequests,
    /// Remainder of the effective limits; `null`: unlimited.
    left: RemainingLimits,
    /// Usage of the budget that applies; absent: there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    budget_left: Option<BudgetsLeft>,
    total: UserUsage,
    window: UserUsage,
    last_charge_ms: u64,
}

/// Usage of a user's budget, and when its periods end.
#[derive(Serialize, JsonSchema)]
struct BudgetsLeft {
    day: Option<PeriodLeft>,
    month: Option<PeriodLeft>,
}

#[derive(Serialize, JsonSchema)]
struct PeriodLeft {
    used: u64,
    left: u64,
    resets_at: String,
}

impl BudgetsLeft {
    fn of(budget: &BudgetStatus, unix_ms: u64) -> Self {
        let left = |period| {
            let left = budget.left(period, unix_ms, 0)?;
            Some(PeriodLeft {
                used: left.used,
                left: left.tokens(),
                resets_at: date(left.resets_at_ms),
            })
        };
        Self {
            day: left(BudgetPeriod::Day),
            month: left(BudgetPeriod::Month),
        }
    }
}

/// Requests waiting for a backend with capacity.
#[derive(Serialize, JsonSchema)]
struct QueuedRequests {
    here: usize,
    cluster: u64,
}

impl UserDetail {
    fn of(user: &UserView, admin: &Admin, unix_ms: u64) -> Self {
        let counts = Some(user.budget).filter(|it| !it.budget.is_unbounded());
        Self {
            name: user.name.to_string(),
            key: key_text(user.key),
            config: user.own.clone(),
            weight_milli: user.weight_milli,
            counter_milli_tokens: user.counter_milli_tokens,
            in_flight: user.in_flight,
            waiting: QueuedRequests {
                here: admin.admission.waiting_of(user.key),
                cluster: user.waiting,
            },
            left: user.left,
            budget_left: counts.map(|it| BudgetsLeft::of(&it, unix_ms)),
            total: user.total,
            window: user.window,
            last_charge_ms: user.last_charge_ms,
        }
    }
}

#[derive(Serialize, JsonSchema)]
pub(super) struct UserList {
    index: LogIndex,
    /// Counter to which an arriving user is lifted.
    virtual_time_milli_tokens: u64,
    users: Vec<UserDetail>,
    /// Value of `cursor` for the next page; absent at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_cursor: Option<String>,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct UserResponse {
    index: LogIndex,
    #[serde(flatten)]
    user: UserDetail,
}

pub(super) async fn list(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<ListQuery>,
) -> Result<Answer<UserList>, Problem> {
    let limit = query.limit()?;
    let after = query.cursor.as_deref().map(key_of).transpose()?;
    at_level(&admin, query.read).await?;
    let mut answer = UserList {
        index: LogIndex(0),
        virtual_time_milli_tokens: 0,
        users: Vec::new(),
        next_cursor: None,
    };
    let mut users = Vec::new();
    admin.cluster.with_state(&mut |state| {
        answer.index = admin.view.applied();
        answer.virtual_time_milli_tokens = state.virtual_time_milli_tokens();
        // One more than requested shows whether there are more.
        users = state.users(after, limit + 1);
    });
    // Outside the closure, so that the queues' lock is not awaited while `apply` waits for this
    // reader.
    let now_ms = admin.clock.unix_ms();
    let shown = |user: &UserView| UserDetail::of(user, &admin, now_ms);
    answer.users = users.iter().map(shown).collect();
    if answer.users.len() > limit {
        answer.users.truncate(limit);
        answer.next_cursor = answer.users.last().map(|user| user.key.clone());
    }
    Ok(Answer(answer))
}

pub(super) async fn show(
    State(admin): State<AdminState>,
    PathParam(name): PathParam<String>,
    QueryParams(query): QueryParams<ReadQuery>,
) -> Result<Versioned<UserResponse>, Problem> {
    at_level(&admin, query.read).await?;
    let mut found = None;
    let mut index = LogIndex(0);
    admin.cluster.with_state(&mut |state| {
        index = admin.view.applied();
        found = state.user_named(&name);
    });
    let user = found.ok_or_else(|| not_found(format!("no user has the name {name:?}")))?;
    Ok(Versioned {
        version: Version::of(&user.own),
        body: UserResponse {
            index,
            user: UserDetail::of(&user, &admin, admin.clock.unix_ms()),
        },
    })
}

/// Returns the version of the settings of the user called `name`; `None` if there is no such user.
fn version_of(admin: &Admin, name: &str) -> Option<Version> {
    known(admin, name).map(|user| Version::of(&user.own))
}

/// Returns the user called `name` as this replica knows it.
fn known(admin: &Admin, name: &str) -> Option<UserView> {
    let mut found = None;
    admin
        .cluster
        .with_state(&mut |state| found = state.user_named(name));
    found
}

impl ReplacedSettings for UserSettings {
    const AROUND: &'static [&'static str] = &[
        "index",
        "name",
        "key",
        "weight_milli",
        "counter_milli_tokens",
        "in_flight",
        "waiting",
        "left",
        "budget_left",
        "total",
        "window",
        "last_charge_ms",
    ];

    fn example() -> Value {
        json!({ "weight_milli": 2000, "limits": { "requests": 50, "window": "1m" } })
    }
}

pub(super) async fn put(
    State(admin): State<AdminState>,
    PathParam(name): PathParam<String>,
    if_match: IfMatch,
    written: WrittenSettings<UserSettings>,
) -> Result<Written, Problem> {
    // A name chosen by a request can still be limited.
    if known(&admin, &name).is_none() {
        name_of("name", &name)?;
    }
    let settings = read(&written.config)?;
    let _turn = if_match.turn(&admin, || version_of(&admin, &name)).await?;
    submit(&admin, Command::configure_user(name, settings)).await
}

/// Reads settings of a user from a request body.
pub(super) fn read(body: &[u8]) -> Result<UserSettings, Problem> {
    let document: Value = decode(body)?;
    let settings = read_user(&document).map_err(|faults| unfit(&faults))?;
    for model in &settings.models {
        pattern_of("models", model)?;
    }
    settings.cache.as_ref().map_or(Ok(()), check_group)?;
    Ok(settings)
}

/// Deletes the user with its counters, weight and limits.
pub(super) async fn remove(
    State(admin): State<AdminState>,
    PathParam(name): PathParam<String>,
    if_match: IfMatch,
) -> Result<Written, Problem> {
    let _turn = if_match.turn(&admin, || version_of(&admin, &name)).await?;
    submit(&admin, Command::DeleteUser { name }).await
}

/// Resets the user's usage of its per-window limits and budgets.
pub(super) async fn forgive(
    State(admin): State<AdminState>,
    PathParam(name): PathParam<String>,
) -> Result<Written, Problem> {
    submit(&admin, Command::ForgiveUser { name }).await
}

pub(super) fn key_text(key: UserKey) -> String {
    format!("{:016x}", key.0)
}

pub(super) fn key_of(cursor: &str) -> Result<UserKey, Problem> {
    u64::from_str_radix(cursor, 16)
        .map(UserKey)
        .map_err(|_| invalid("cursor", format!("{cursor:?}, expected a next_cursor")))
}
