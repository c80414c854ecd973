//! `POST /admin/v1/config/reload`: makes this replica reload its config, as SIGHUP does, and
//! returns the result.
//!
//! This crate does not know the config: the code that read it at startup reads it again.

use axum::extract::State;
use http::StatusCode;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};

use super::AdminState;
use super::answer::Answer;
use api::error::Problem;

/// Maximum number of queued reload requests; further callers wait for a place.
const WAITING_MAX: usize = 8;

/// A config key whose value changed.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct ReloadedKey {
    /// Key, such as `log.level`.
    pub key: String,
    /// Previous value; `null`: it was not set.
    pub before: Value,
    /// New value; `null`: it is no longer set.
    pub after: Value,
}

/// Result of reloading a valid config.
#[derive(Debug, Clone, Default, PartialEq, Serialize, JsonSchema)]
pub struct ReloadReport {
    /// Changes that took effect.
    pub taken: Vec<ReloadedKey>,
    /// Changes that take effect after a restart.
    pub need_restart: Vec<ReloadedKey>,
    /// Replicated settings, for which the cluster keeps its own value.
    pub cluster_keeps: Vec<ReloadedKey>,
    /// Files besides the config that could not be reloaded, such as an expired certificate; the
    /// previous ones stay in use.
    pub faults: Vec<String>,
}

/// A fault in a config.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "ReloadFault")]
pub struct ReloadError {
    /// The key and its value.
    pub message: String,
    /// What was expected.
    pub expected: String,
    /// File, line and column, or the variable or flag.
    pub place: String,
}

/// Result of reloading a config. If the config has any fault, nothing changes.
pub type ReloadResult = Result<ReloadReport, Vec<ReloadError>>;

/// Sender of reload requests.
#[derive(Debug, Clone)]
pub struct ReloadRequests(mpsc::Sender<oneshot::Sender<ReloadResult>>);

impl ReloadRequests {
    /// Creates the channel. The receiver's owner reloads the config for each request and responds.
    #[must_use]
    pub fn channel() -> (Self, mpsc::Receiver<oneshot::Sender<ReloadResult>>) {
        let (asking, asked) = mpsc::channel(WAITING_MAX);
        (Self(asking), asked)
    }

    /// Requests a reload and returns its result; `None` if no task handles requests any more.
    async fn ask(&self) -> Option<ReloadResult> {
        let (answer, answered) = oneshot::channel();
        self.0.send(answer).await.ok()?;
        answered.await.ok()
    }
}

pub(super) async fn reload(
    State(admin): State<AdminState>,
) -> Result<Answer<ReloadReport>, Problem> {
    let Some(requests) = &admin.reload else {
        let title = "this process cannot reload its config";
        return Err(Problem::new(
            StatusCode::NOT_IMPLEMENTED,
            "not-reloadable",
            title,
        ));
    };
    match requests.ask().await {
        Some(Ok(report)) => Ok(Answer(report)),
        Some(Err(faults)) => Err(faulty(&faults)),
        None => Err(Problem::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "stopping",
            "replica is stopping",
        )),
    }
}

fn faulty(faults: &[ReloadError]) -> Problem {
    let each = faults.iter().map(|fault| {
        let ReloadError {
            message,
            expected,
            place,
        } = fault;
        format!("{place}: {message} (expected {expected})")
    });
    let faults = serde_json::to_value(faults).expect("texts serialise");
    Problem::new(
        StatusCode::UNPROCESSABLE_ENTITY,
        "config-faults",
        "the config has faults; nothing was changed",
    )
    .detail(each.collect::<Vec<_>>().join("; "))
    .member("faults", faults)
}
