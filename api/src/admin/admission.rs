//! Admission settings: `GET` and `PUT /admin/v1/admission`. They are replicated, replaced as a
//! whole, and take effect on every replica at one log index. docs/guide/admission.md explains each
//! of them.

use axum::extract::State;
use axum::response::Response;
use serde::Serialize;
use state::admission::AdmissionSettings;
use state::command::Command;
use state::ids::LogIndex;

use super::AdminState;
use super::answer::{Json, QueryParams, ReadQuery, at_level, json, submit};
use crate::error::Problem;

#[derive(Serialize)]
struct AdmissionResponse {
    index: LogIndex,
    /// Whether an operator or the first replica's config set it; `false`: the defaults apply.
    is_set: bool,
    /// Settings in the form that `PUT` takes.
    config: AdmissionSettings,
}

pub(super) async fn show(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<ReadQuery>,
) -> Result<Response, Problem> {
    at_level(&admin, query.read).await?;
    // The index is read first, so the settings are at least as new.
    let index = admin.view.applied();
    let set = admin.view.registry().admission.clone();
    Ok(json(&AdmissionResponse {
        index,
        is_set: set.is_some(),
        config: set.unwrap_or_default(),
    }))
}

pub(super) async fn put(
    State(admin): State<AdminState>,
    Json(config): Json<AdmissionSettings>,
) -> Result<Response, Problem> {
    submit(&admin, Command::PutAdmission(config)).await
}
