//! Users: counters, weights, windows.

use axum::extract::State;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use state::command::{Command, UserSpec};
use state::ids::{LogIndex, UserKey};
use state::users::{UserUsage, UserView};

use super::Shared;
use super::answer::{
    At, Json, ListQuery, Params, ReadQuery, at_level, invalid, json, not_found, written,
};
use crate::error::Problem;

/// A user as the state keeps one.
#[derive(Serialize)]
struct Shown {
    name: String,
    /// Hash of the name, 16 hex digits.
    key: String,
    weight_milli: u32,
    is_configured: bool,
    counter_milli_tokens: u64,
    in_flight: u64,
    total: UserUsage,
    window: UserUsage,
    last_charge_ms: u64,
}

impl From<UserView> for Shown {
    fn from(user: UserView) -> Self {
        Self {
            name: user.name.to_string(),
            key: key_text(user.key),
            weight_milli: user.weight_milli,
            is_configured: user.is_configured,
            counter_milli_tokens: user.counter_milli_tokens,
            in_flight: user.in_flight,
            total: user.total,
            window: user.window,
            last_charge_ms: user.last_charge_ms,
        }
    }
}

#[derive(Serialize)]
struct List {
    index: LogIndex,
    /// Least counter of a user with requests in flight.
    virtual_time_milli_tokens: u64,
    users: Vec<Shown>,
    /// Give it as `cursor` for what follows; absent at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_cursor: Option<String>,
}

#[derive(Serialize)]
struct One {
    index: LogIndex,
    #[serde(flatten)]
    user: Shown,
}

pub(super) async fn list(
    State(admin): State<Shared>,
    Params(query): Params<ListQuery>,
) -> Result<Response, Problem> {
    let limit = query.limit()?;
    let after = query.cursor.as_deref().map(key_of).transpose()?;
    at_level(&admin, query.read).await?;
    let mut answer = List {
        index: LogIndex(0),
        virtual_time_milli_tokens: 0,
        users: Vec::new(),
        next_cursor: None,
    };
    admin.cluster.with_state(&mut |state| {
        answer.index = admin.view.applied();
        answer.virtual_time_milli_tokens = state.virtual_time_milli_tokens();
        // One more than asked for tells whether there is more.
        let users = state.users(after, limit + 1);
        answer.users = users.into_iter().map(Shown::from).collect();
    });
    if answer.users.len() > limit {
        answer.users.truncate(limit);
        answer.next_cursor = answer.users.last().map(|user| user.key.clone());
    }
    Ok(json(&answer))
}

pub(super) async fn show(
    State(admin): State<Shared>,
    At(name): At<String>,
    Params(query): Params<ReadQuery>,
) -> Result<Response, Problem> {
    at_level(&admin, query.read).await?;
    let mut found = None;
    let mut index = LogIndex(0);
    admin.cluster.with_state(&mut |state| {
        index = admin.view.applied();
        found = state.user_named(&name);
    });
    let user = found.ok_or_else(|| not_found(format!("no user has the name {name:?}")))?;
    Ok(json(&One {
        index,
        user: user.into(),
    }))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PutBody {
    weight_milli: u32,
}

pub(super) async fn put(
    State(admin): State<Shared>,
    At(name): At<String>,
    Json(body): Json<PutBody>,
) -> Result<Response, Problem> {
    let spec = UserSpec {
        name,
        weight_milli: body.weight_milli,
    };
    written(admin.cluster.submit(Command::PutUser(spec)).await)
}

fn key_text(key: UserKey) -> String {
    format!("{:016x}", key.0)
}

fn key_of(cursor: &str) -> Result<UserKey, Problem> {
    u64::from_str_radix(cursor, 16)
        .map(UserKey)
        .map_err(|_| invalid("cursor", format!("{cursor:?}, expected a next_cursor")))
}
