//! `/livez`, `/readyz` and `/metrics`, for orchestrators and Prometheus.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::header::{ACCEPT, CONTENT_TYPE, RETRY_AFTER, VARY};
use http::{HeaderMap, HeaderValue, StatusCode};
use schemars::JsonSchema;
use serde::Serialize;

use super::AdminState;
use super::answer::Answer;
use api::metrics::text::{OPENMETRICS, PROMETHEUS, prefers_openmetrics};
use api::readiness::Readiness;

#[derive(Serialize, JsonSchema)]
pub(super) struct Alive {
    /// Always `alive`.
    status: &'static str,
}

pub(super) async fn livez(_: State<AdminState>) -> Answer<Alive> {
    Answer(Alive { status: "alive" })
}

/// Response that states whether the replica accepts traffic.
pub(super) struct ReadinessAnswer(Readiness);

impl IntoResponse for ReadinessAnswer {
    fn into_response(self) -> Response {
        match self.0.is_fit() {
            true => Answer(self.0).into_response(),
            false => {
                let soon = [(RETRY_AFTER, HeaderValue::from_static("1"))];
                (StatusCode::SERVICE_UNAVAILABLE, soon, Answer(self.0)).into_response()
            }
        }
    }
}

pub(super) async fn readyz(State(admin): State<AdminState>) -> ReadinessAnswer {
    ReadinessAnswer(admin.readiness.readiness())
}

/// Response with all metrics, in one of two formats.
pub(super) struct MetricsAnswer {
    content_type: &'static str,
    text: String,
}

impl IntoResponse for MetricsAnswer {
    fn into_response(self) -> Response {
        let headers = [
            (CONTENT_TYPE, HeaderValue::from_static(self.content_type)),
            (VARY, HeaderValue::from_static("accept")),
        ];
        (headers, self.text).into_response()
    }
}

pub(super) async fn metrics(State(admin): State<AdminState>, headers: HeaderMap) -> MetricsAnswer {
    admin.decider.refresh_metrics(&admin.outbox.status());
    let accept = headers.get_all(ACCEPT).iter();
    let accept = accept.filter_map(|value| value.to_str().ok());
    let (content_type, text) = match prefers_openmetrics(accept) {
        true => (OPENMETRICS, admin.metrics.encode()),
        false => (PROMETHEUS, admin.metrics.encode_text()),
    };
    MetricsAnswer { content_type, text }
}
