//! `GET /admin/v1/whoami`: the name and role of the caller. A client needs the role to offer only
//! the actions that are allowed.

use axum::extract::{Extension, State};
use schemars::JsonSchema;
use serde::Serialize;
use state::ids::ReplicaId;

use super::AdminState;
use super::answer::Answer;
use super::roles::{AdminRole, CallerProof, Operator};

/// The caller, as authenticated by the gate; `None` if no authentication is required.
#[derive(Clone)]
pub(super) struct Caller(pub(super) Option<Operator>);

#[derive(Serialize, JsonSchema)]
pub(super) struct WhoamiResponse {
    /// Replica that responds.
    replica: ReplicaId,
    /// Name of the token or certificate; `null`: this listener requires neither.
    name: Option<String>,
    /// Role of the caller.
    role: AdminRole,
    /// How the caller authenticated; `null`: this listener does not require it.
    by: Option<CallerProof>,
}

/// Handles `GET /admin/v1/whoami`.
pub(super) async fn show(
    State(admin): State<AdminState>,
    Extension(Caller(operator)): Extension<Caller>,
) -> Answer<WhoamiResponse> {
    Answer(WhoamiResponse {
        replica: admin.decisions.replica(),
        role: operator.as_ref().map_or(AdminRole::Admin, |it| it.role),
        by: operator.as_ref().map(|it| it.by),
        name: operator.map(|it| it.name.to_string()),
    })
}
