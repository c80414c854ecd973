//! `/livez`, `/readyz` and `/metrics`, for orchestrators and Prometheus.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::header::CONTENT_TYPE;
use http::{HeaderValue, StatusCode};
use serde::Serialize;

use super::{AdminState, answer};

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

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

pub(super) async fn metrics(State(admin): State<AdminState>) -> Response {
    admin.decider.refresh_metrics(&admin.outbox.status());
    let text = admin.metrics.encode();
    (
        [(CONTENT_TYPE, HeaderValue::from_static(OPENMETRICS))],
        text,
    )
        .into_response()
}
