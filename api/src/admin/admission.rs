//! Admission settings: `GET` and `PUT /admin/v1/admission`. They are replicated, replaced as a
//! whole, and take effect on every replica at one log index. Keys and values are those of
//! `[admission]` in a config file; docs/guide/admission.md explains each of them.

use axum::extract::{FromRequest, Request, State};
use axum::response::Response;
use http::{HeaderName, HeaderValue};
use serde::Serialize;
use serde_json::Value;
use state::admission::AdmissionSettings;
use state::command::Command;
use state::ids::LogIndex;

use super::AdminState;
use super::answer::{JSON, QueryParams, ReadQuery, at_level, decode, json, read_body, submit};
use super::origin::typed;
use super::problem::unfit;
use crate::error::Problem;
use crate::settings::{AdmissionForm, is_former};

/// Since when the former names are deprecated (RFC 9745).
pub(super) const DEPRECATION: (HeaderName, HeaderValue) = (
    HeaderName::from_static("deprecation"),
    HeaderValue::from_static("@1795305600"),
);
/// What to write in their place.
pub(super) const WARNING: (HeaderName, HeaderValue) = (
    HeaderName::from_static("warning"),
    HeaderValue::from_static(
        "299 quorate \"these names of settings are deprecated: use those of [admission] in a config \
         file, which GET answers\"",
    ),
);

#[derive(Serialize)]
struct AdmissionResponse {
    index: LogIndex,
    /// Whether the founding replica's config or an operator set it; `false`: the defaults apply.
    is_set: bool,
    /// Settings in the form that `PUT` takes.
    config: AdmissionForm,
}

pub(super) async fn show(
    State(admin): State<AdminState>,
    QueryParams(query): QueryParams<ReadQuery>,
) -> Result<Response, Problem> {
    at_level(&admin, query.read).await?;
    // The index is read first, so the settings are at least as new.
    let index = admin.view.applied();
    let registry = admin.view.registry();
    let set = registry.admission.as_ref();
    Ok(json(&AdmissionResponse {
        index,
        is_set: set.is_some(),
        config: set.map(AdmissionForm::from).unwrap_or_default(),
    }))
}

/// Admission settings as a body.
pub(super) struct AdmissionJson {
    pub(super) settings: AdmissionSettings,
    /// Whether they had names that are no longer in use elsewhere.
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

impl<S: Sync> FromRequest<S> for AdmissionJson {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        typed(request.headers(), JSON)?;
        Self::read(&read_body(request.into_body()).await?)
    }
}

pub(super) async fn put(
    State(admin): State<AdminState>,
    body: AdmissionJson,
) -> Result<Response, Problem> {
    let mut answer = submit(&admin, Command::PutAdmission(body.settings)).await?;
    if body.is_former {
        answer.headers_mut().extend([DEPRECATION, WARNING]);
    }
    Ok(answer)
}
