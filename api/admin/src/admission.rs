//! Admission settings: `GET` and `PUT /admin/v1/admission`. They are replicated, replaced as a
//! whole, except that `usage_days` stays if it is absent: fewer days drop usage for good. They take
//! effect on every replica at one log index. Keys and values are those of
//! `[admission]` in a config file; docs/guide/admission.md explains each of them.

use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};
use state::admission::AdmissionSettings;
use state::command::Command;
use state::ids::LogIndex;

use super::answer::{QueryParams, ReadQuery, Written, decode, registry_at, submit};
use super::problem::unfit;
use super::readback::{ReplacedSettings, WrittenSettings};
use super::versions::{IfMatch, Version, Versioned};
use super::{Admin, AdminState};
use api::error::Problem;
use api::settings::read_admission;

#[derive(Serialize, JsonSchema)]
#[schemars(example = json!({ "index": 5120, "config": AdmissionSettings::default() }))]
pub(super) struct AdmissionResponse {
    index: LogIndex,
    /// Settings in the form that `PUT` takes.
    config: AdmissionSettings,
}

impl ReplacedSettings for AdmissionSettings {
    fn example() -> Value {
        json!({ "order": "vtc", "concurrency": "adaptive", "max_queue": 2000, "max_wait": "30s" })
    }
}

pub(super) async fn show(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<ReadQuery>,
) -> Result<Versioned<AdmissionResponse>, Problem> {
    let (index, registry) = registry_at(&admin, query.read).await?;
    let config = registry.admission.clone();
    Ok(Versioned {
        version: Version::of(&config),
        body: AdmissionResponse { index, config },
    })
}

fn version(admin: &Admin) -> Option<Version> {
    Some(Version::of(&admin.view.registry().admission))
}

/// Reads admission settings from a request body.
pub(super) fn read(body: &[u8]) -> Result<AdmissionSettings, Problem> {
    let document: Value = decode(body)?;
    read_admission(&document).map_err(|faults| unfit(&faults))
}

pub(super) async fn put(
    State(admin): State<AdminState>,
    if_match: IfMatch,
    written: WrittenSettings<AdmissionSettings>,
) -> Result<Written, Problem> {
    let mut settings = read(&written.config)?;
    let _turn = if_match.turn(&admin, || version(&admin)).await?;
    if decode::<Value>(&written.config)?
        .get("usage_days")
        .is_none()
    {
        settings.usage_days = admin.view.registry().admission.usage_days;
    }
    submit(&admin, Command::PutAdmission(settings)).await
}
