//! Rejections of requests, with vLLM's error messages.

use axum::Json;
use axum::extract::rejection::BytesRejection;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde::de::DeserializeOwned;

use super::answer::error_body;

/// Status and vLLM's error message of a rejected request.
#[derive(Debug)]
pub(super) struct RequestRejection {
    pub(super) status: StatusCode,
    pub(super) message: String,
    pub(super) param: Option<String>,
}

impl RequestRejection {
    pub(super) fn bad_request(message: impl Into<String>, param: Option<&str>) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            message: message.into(),
            param: param.map(str::to_owned),
        }
    }
}

impl From<BytesRejection> for RequestRejection {
    fn from(rejection: BytesRejection) -> Self {
        Self {
            status: rejection.status(),
            message: rejection.body_text(),
            param: None,
        }
    }
}

impl IntoResponse for RequestRejection {
    fn into_response(self) -> Response {
        let body = error_body(self.status.as_u16(), &self.message, self.param.as_deref());
        (self.status, Json(body)).into_response()
    }
}

/// Parses a JSON body.
///
/// # Errors
/// A rejection with status 400 that names `param`, if the body does not parse.
pub(super) fn read<T: DeserializeOwned>(
    body: &[u8],
    param: Option<&str>,
) -> Result<T, RequestRejection> {
    serde_json::from_slice(body)
        .map_err(|error| RequestRejection::bad_request(error.to_string(), param))
}
