//! Admission settings: `GET` and `PUT /admin/v1/admission`. They are replicated, replaced as a
//! whole, and take effect on every replica at one log index. Keys and values are those of
//! `[admission]` in a config file; docs/guide/admission.md explains each of them.

use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};
use state::admission::AdmissionSettings;
use state::command::Command;
use state::ids::LogIndex;

use super::answer::{
    QueryParams, ReadLevel, ReadQuery, Written, at_level, decode, registry_at, submit, unchanged,
};
use super::problem::unfit;
use super::readback::{ReplacedSettings, WrittenSettings};
use super::versions::{IfMatch, Version, Versioned};
use super::{Admin, AdminState};
use api::error::Problem;
use api::settings::read_admission;

#[derive(Serialize, JsonSchema)]
#[schemars(
    example = json!({ "index": 5120, "is_set": false, "config": AdmissionSettings::default() })
)]
pub(super) struct AdmissionResponse {
    index: LogIndex,
    /// Whether the founding replica's config or an operator has set it; `false`: the defaults
    /// apply.
    is_set: bool,
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
    let set = registry.admission.as_ref();
    let config = set.cloned().unwrap_or_default();
    Ok(Versioned {
        version: Version::of(&config),
        body: AdmissionResponse {
            index,
            is_set: set.is_some(),
            config,
        },
    })
}

fn version(admin: &Admin) -> Option<Version> {
    let registry = admin.view.registry();
    let set = registry.admission.as_ref();
    let config = set.cloned().unwrap_or_default();
    Some(Version::of(&config))
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
    if written.is_read_as_unset && settings == AdmissionSettings::default() {
        at_level(&admin, ReadLevel::Linearizable).await?;
        if admin.view.registry().admission.is_none() {
            return Ok(unchanged(&admin));
        }
    }
    // The limits of users without their own belong to their defaults.
    settings.user_limits = admin.view.registry().user_defaults.limits;
    submit(&admin, Command::PutAdmission(settings)).await
}
