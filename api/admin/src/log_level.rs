//! `GET` and `PUT /admin/v1/log`: the log level of this process, until it restarts.
//!
//! This crate does not know the logger: the code that set it up changes its filter.

use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::State;
use http::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::answer::{Answer, Json};
use super::problem::invalid;
use super::versions::{IfMatch, Version, Versioned};
use super::{Admin, AdminState};
use api::error::Problem;

type ShowLevel = dyn Fn() -> String + Send + Sync;
type SetLevel = dyn Fn(&str) -> Result<(), String> + Send + Sync;

/// Reads and changes the log level.
#[derive(Clone)]
pub struct LogLevelControl {
    show: Arc<ShowLevel>,
    set: Arc<SetLevel>,
    /// Lock held from checking the current level until it is changed.
    turn: Arc<Mutex<()>>,
}

impl LogLevelControl {
    /// Creates the control. `show` returns the current level or filter. `set` sets a value as for
    /// `log.level` in a config, or returns what it expected.
    #[must_use]
    pub fn new(
        show: impl Fn() -> String + Send + Sync + 'static,
        set: impl Fn(&str) -> Result<(), String> + Send + Sync + 'static,
    ) -> Self {
        Self {
            show: Arc::new(show),
            set: Arc::new(set),
            turn: Arc::default(),
        }
    }

    /// Sets `level` if `if_match` matches the current level. Needs no quorum, since it concerns
    /// only this process.
    fn replace(&self, if_match: &IfMatch, level: &str) -> Result<(), Problem> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        if_match.check(Some(Version::of(&(self.show)())))?;
        (self.set)(level).map_err(|expected| invalid("level", format!("expected {expected}")))
    }
}

impl std::fmt::Debug for LogLevelControl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LogLevelControl")
    }
}

/// A log level.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(example = json!({ "level": "debug" }))]
pub(super) struct LogLevelBody {
    /// Level, or a filter such as `info,raft=debug`, as in `log.level`.
    level: String,
}

#[derive(Serialize, JsonSchema)]
#[schemars(example = json!({ "level": "debug" }))]
pub(super) struct LogLevelResponse {
    /// Level in effect until a restart or a reload of a config that sets another one.
    level: String,
}

fn control(admin: &Admin) -> Result<&LogLevelControl, Problem> {
    let why = "this process cannot change its log level";
    let fixed = || Problem::new(StatusCode::NOT_IMPLEMENTED, "log-level-fixed", why);
    admin.log_level.as_ref().ok_or_else(fixed)
}

pub(super) async fn show(
    State(admin): State<AdminState>,
) -> Result<Versioned<LogLevelResponse>, Problem> {
    let level = (control(&admin)?.show)();
    Ok(Versioned {
        version: Version::of(&level),
        body: LogLevelResponse { level },
    })
}

pub(super) async fn put(
    State(admin): State<AdminState>,
    if_match: IfMatch,
    Json(body): Json<LogLevelBody>,
) -> Result<Answer<LogLevelResponse>, Problem> {
    let level = body.level;
    control(&admin)?.replace(&if_match, &level)?;
    tracing::info!(level, "log level changed until the next restart");
    Ok(Answer(LogLevelResponse { level }))
}
