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
use crate::error::Problem;
use crate::settings::{AdmissionForm, is_former};

#[derive(Serialize, JsonSchema)]
#[schemars(
    example = json!({ "index": 5120, "is_set": false, "config": AdmissionForm::default() })
)]
pub(super) struct AdmissionResponse {
    index: LogIndex,
    /// Whether the founding replica's config or an operator has set it; `false`: the defaults
    /// apply.
    is_set: bool,
    /// Settings in the form that `PUT` takes.
    config: AdmissionForm,
}

impl ReplacedSettings for AdmissionForm {
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
    let config = set.map(AdmissionForm::from).unwrap_or_default();
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
    let config = set.map(AdmissionForm::from).unwrap_or_default();
    Some(Version::of(&config))
}

/// Admission settings from a request body.
pub(super) struct AdmissionJson {
    pub(super) settings: AdmissionSettings,
    /// Whether the body used the deprecated field names.
    is_former: bool,
}

impl AdmissionJson {
    pub(super) fn read(body: &[u8]) -> Result<Self, Problem> {
        let document: Value = decode(body)?;
        let is_former = is_former(&document);
        let settings = if is_former {
            decode(body)?
        } else {
            let form = AdmissionForm::read(&document).map_err(|faults| unfit(&faults))?;
            form.settings()
        };
        Ok(Self {
            settings,
            is_former,
        })
    }
}

pub(super) async fn put(
    State(admin): State<AdminState>,
    if_match: IfMatch,
    written: WrittenSettings<AdmissionForm>,
) -> Result<Written, Problem> {
    let body = AdmissionJson::read(&written.config)?;
    let _turn = if_match.turn(&admin, || version(&admin)).await?;
    if written.is_read_as_unset && body.settings == AdmissionSettings::default() {
        at_level(&admin, ReadLevel::Linearizable).await?;
        if admin.view.registry().admission.is_none() {
            return Ok(unchanged(&admin));
        }
    }
    let mut answer = submit(&admin, Command::PutAdmission(body.settings)).await?;
    answer.is_former = body.is_former;
    Ok(answer)
}
