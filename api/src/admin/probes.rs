//! `/livez`, `/readyz` and `/metrics`, for orchestrators and Prometheus.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::header::{ACCEPT, CONTENT_TYPE, VARY};
use http::{HeaderMap, HeaderValue, StatusCode};
use serde::Serialize;

use super::{AdminState, answer};
use crate::metrics::text::{OPENMETRICS, PROMETHEUS, prefers_openmetrics};

#[derive(Serialize)]
struct Alive {
    status: &'static str,
}

pub(super) async fn livez() -> Response {
    answer::json(&Alive { status: "alive" })
}

pub(super) async fn readyz(State(admin): State<AdminState>) -> Response {
    let readiness = admin.readiness.readiness();
    let status = match readiness.is_fit() {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    };
    (status, answer::json(&readiness)).into_response()
}

pub(super) async fn metrics(State(admin): State<AdminState>, headers: HeaderMap) -> Response {
    admin.decider.refresh_metrics(&admin.outbox.status());
    let accept = headers.get_all(ACCEPT).iter();
    let accept = accept.filter_map(|value| value.to_str().ok());
    let (content_type, text) = match prefers_openmetrics(accept) {
        true => (OPENMETRICS, admin.metrics.encode()),
        false => (PROMETHEUS, admin.metrics.encode_text()),
    };
    let headers = [
        (CONTENT_TYPE, HeaderValue::from_static(content_type)),
        (VARY, HeaderValue::from_static("accept")),
    ];
    (headers, text).into_response()
}
