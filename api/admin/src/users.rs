//! Users: counters, weights, windows, limits and waiting requests.

use axum::extract::State;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use state::budgets::{Budget, BudgetPeriod, BudgetStatus};
use state::caches::CacheScope;
use state::command::{Command, UserChanges, UserSpec};
use state::ids::{LogIndex, UserKey};
use state::quotas::{RemainingLimits, UserLimits};
use state::users::{UserUsage, UserView};

use super::answer::{
    Answer, ListQuery, PathParam, QueryParams, ReadLevel, ReadQuery, Written, at_level, name_of,
    submit, unchanged,
};
use super::caches::{CacheForm, ShownScope, scope_of};
use super::keys::{date, pattern_of};
use super::problem::{invalid, not_found, unfit};
use super::readback::{ReadBack, ReadBackJson, with_shown};
use super::versions::{IfMatch, Version, Versioned};
use super::{Admin, AdminState};
use api::error::Problem;
use api::settings::{SettingError, read_budget, read_limits};

/// A user as stored in the state.
#[derive(Serialize, JsonSchema)]
struct UserDetail {
    name: String,
    /// Hash of the name, 16 hex digits.
    key: String,
    weight_milli: u32,
    is_configured: bool,
    counter_milli_tokens: u64,
    in_flight: u64,
    waiting: QueuedRequests,
    /// Limits set for this user; if absent, the limits for all users apply.
    #[serde(skip_serializing_if = "Option::is_none")]
    limits: Option<UserLimits>,
    /// With whom the user shares cached blocks, if set for this user.
    #[serde(flatten)]
    scope: Option<ShownScope>,
    /// Remainder of the effective limits; `null`: unlimited.
    left: RemainingLimits,
    /// Tokens per day and month (UTC) set for this user; absent: the default applies.
    #[serde(skip_serializing_if = "Option::is_none")]
    budget: Option<Budget>,
    /// Usage of the budget that applies; absent: there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    budget_left: Option<BudgetsLeft>,
    /// Models that the user may use; absent: all.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    models: Vec<String>,
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
            scope: admin.view.caches().own(user.key).map(ShownScope::from),
            name: user.name.to_string(),
            key: key_text(user.key),
            weight_milli: user.weight_milli,
            is_configured: user.is_configured,
            counter_milli_tokens: user.counter_milli_tokens,
            in_flight: user.in_flight,
            waiting: QueuedRequests {
                here: admin.admission.waiting_of(user.key),
                cluster: user.waiting,
            },
            limits: user.limits,
            left: user.left,
            budget: user.own_budget,
            budget_left: counts.map(|it| BudgetsLeft::of(&it, unix_ms)),
            models: user.models.clone(),
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
        version: version(&admin, &user),
        body: UserResponse {
            index,
            user: UserDetail::of(&user, &admin, admin.clock.unix_ms()),
        },
    })
}

/// Returns the version of a user's settings.
fn version(admin: &Admin, user: &UserView) -> Version {
    let scope = admin.view.caches().own(user.key).map(ShownScope::from);
    let (limits, budget) = (&user.limits, &user.own_budget);
    Version::of(&(user.weight_milli, limits, budget, &user.models, scope))
}

/// Returns the version of the settings of the user called `name`; `None` if there is no such user.
fn version_of(admin: &Admin, name: &str) -> Option<Version> {
    let mut found = None;
    admin
        .cluster
        .with_state(&mut |state| found = state.user_named(name));
    found.map(|user| version(admin, &user))
}

/// Changes to a user. Absent fields stay as they are.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(
    transform = with_shown::<PutUserBody>,
    example = json!({ "weight_milli": 2000, "limits": { "requests": 50, "window": "1m" } })
)]
pub(super) struct PutUserBody {
    /// The name in the path, repeated.
    name: Option<String>,
    /// As returned by `GET`: writing back an unconfigured user with `false` leaves it unconfigured.
    is_configured: Option<bool>,
    weight_milli: Option<u32>,
    /// Limits of the user, as in `[users.defaults.limits]`. Without any bound, the user's own limits
    /// are removed and the default ones apply.
    #[schemars(with = "Option<UserLimits>")]
    limits: Option<Value>,
    /// Tokens per `day` and `month`. Without any, the user's budget is removed.
    #[schemars(with = "Option<Budget>")]
    budget: Option<Value>,
    /// Models that the user may use; empty: all.
    models: Option<Vec<String>>,
    /// Whether the user shares cached blocks.
    cache: Option<CacheForm>,
    /// Group within which the user shares them.
    cache_group: Option<String>,
}

impl ReadBack for PutUserBody {
    const SHOWN: &'static [&'static str] = &[
        "index",
        "key",
        "counter_milli_tokens",
        "in_flight",
        "waiting",
        "left",
        "budget_left",
        "total",
        "window",
        "last_charge_ms",
    ];
}

impl PutUserBody {
    pub(super) fn limits(&self) -> Result<Option<UserLimits>, Problem> {
        let read = self.limits.as_ref().map(read_limits).transpose();
        read.map_err(|faults| unfit(&within("limits", faults)))
    }

    fn budget(&self) -> Result<Option<Budget>, Problem> {
        let read = self.budget.as_ref().map(read_budget).transpose();
        read.map_err(|faults| unfit(&within("budget", faults)))
    }

    /// Returns the command for the fields in the body, with its limits and cache scope as parsed,
    /// if it has any. Prefers the command that most builds support.
    fn command(
        self,
        name: String,
        limits: Option<UserLimits>,
        cache: Option<Option<CacheScope>>,
    ) -> Result<Command, Problem> {
        let budget = self.budget()?;
        let weight_milli = self.weight_milli;
        for model in self.models.iter().flatten() {
            pattern_of("models", model)?;
        }
        if budget.is_some() || self.models.is_some() || cache.is_some() {
            return Ok(Command::ConfigureUser(Box::new(UserChanges {
                name,
                weight_milli,
                limits,
                budget,
                models: self.models,
                cache,
            })));
        }
        match (weight_milli, limits) {
            (None, None) => Err(invalid(
                "body",
                "neither weight_milli, limits, budget, models, cache nor cache_group".to_owned(),
            )),
            (Some(weight_milli), None) => Ok(Command::PutUser(UserSpec { name, weight_milli })),
            (None, Some(limits)) => Ok(Command::PutUserLimits { name, limits }),
            (Some(weight_milli), Some(limits)) => Ok(Command::SetUser {
                user: UserSpec { name, weight_milli },
                limits,
            }),
        }
    }

    /// Drops the weight from a body that was read from a user without its own weight, if the body
    /// sets anything else. Writing it back must not give the user a weight.
    fn forget_shown_weight(&mut self, shown_milli: u32) {
        let has_scope = self.cache.is_some() || self.cache_group.is_some();
        let has_more =
            self.limits.is_some() || self.budget.is_some() || self.models.is_some() || has_scope;
        if self.is_configured == Some(false) && has_more && self.weight_milli == Some(shown_milli) {
            self.weight_milli = None;
        }
    }

    /// Whether the body was read from an unconfigured user and sets neither limits, budget nor
    /// models.
    fn is_as_unconfigured(&self) -> bool {
        self.is_configured == Some(false)
            && self.limits.is_none()
            && self.budget.is_none()
            && self.models.is_none()
    }
}

/// Prefixes each fault's key with `field`, the field of the body that contains it.
fn within(field: &str, mut faults: Vec<SettingError>) -> Vec<SettingError> {
    for fault in &mut faults {
        fault.key = match fault.key.as_str() {
            "" => field.to_owned(),
            key => format!("{field}.{key}"),
        };
    }
    faults
}

pub(super) async fn put(
    State(admin): State<AdminState>,
    PathParam(name): PathParam<String>,
    if_match: IfMatch,
    ReadBackJson(mut body): ReadBackJson<PutUserBody>,
) -> Result<Written, Problem> {
    if let Err(problem) = name_of("name", &name) {
        // A name chosen by a request can still be limited.
        let mut is_there = false;
        admin
            .cluster
            .with_state(&mut |state| is_there = state.user_named(&name).is_some());
        if !is_there {
            return Err(problem);
        }
    }
    if let Some(other) = body.name.as_ref().filter(|other| **other != name) {
        let found = format!("{other:?}, expected {name:?} as in the path");
        return Err(invalid("name", found));
    }
    let scope = scope_of(body.cache, body.cache_group.as_ref())?;
    let _turn = if_match.turn(&admin, || version_of(&admin, &name)).await?;
    body.forget_shown_weight(admin.view.registry().user_defaults.weight_milli);
    if body.is_as_unconfigured() && scope.is_none() {
        at_level(&admin, ReadLevel::Linearizable).await?;
        let mut known = None;
        let read = &mut |state: &state::RouterState| known = state.user_named(&name);
        admin.cluster.with_state(read);
        let is_as_read = |user: &UserView| {
            !user.is_configured && body.weight_milli.is_none_or(|it| it == user.weight_milli)
        };
        if known.as_ref().is_some_and(is_as_read) {
            return Ok(unchanged(&admin));
        }
    }
    let limits = body.limits()?;
    let command = body.command(name, limits, scope)?;
    submit(&admin, command).await
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
