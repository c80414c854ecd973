//! `GET /admin/v1/openapi.json`: the API as an OpenAPI 3.1 document. `document` makes it.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::HeaderValue;
use http::header::CONTENT_TYPE;

use super::AdminState;
use super::answer::JSON;

/// The document.
pub(super) struct OpenApi(Bytes);

impl IntoResponse for OpenApi {
    fn into_response(self) -> Response {
        let content_type = [(CONTENT_TYPE, HeaderValue::from_static(JSON))];
        (content_type, self.0).into_response()
    }
}

pub(super) async fn show(State(admin): State<AdminState>) -> OpenApi {
    OpenApi(admin.document.clone())
}
