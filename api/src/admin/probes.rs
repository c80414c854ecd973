//! `/livez`, `/readyz` and `/metrics`: what orchestrators and Prometheus ask.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::header::CONTENT_TYPE;
use http::{HeaderValue, StatusCode};
use serde::Serialize;

use super::{Admin, Shared, answer};

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[derive(Serialize)]
struct Alive {
    status: &'static str,
}

/// Whether a replica takes traffic, and what speaks against it.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Readiness {
    /// `ready`, `degraded` (serves, but without a quorum or behind) or `not-ready`.
    status: &'static str,
    /// Why it is not `ready`.
    reasons: Vec<String>,
    /// Index applied here.
    applied_index: u64,
}

pub(super) async fn livez() -> Response {
    answer::json(&Alive { status: "alive" })
}

pub(super) async fn readyz(State(admin): State<Shared>) -> Response {
    let readiness = readiness(&admin);
    let status = match readiness.status {
        "not-ready" => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::OK,
    };
    (status, answer::json(&readiness)).into_response()
}

fn readiness(admin: &Admin) -> Readiness {
    let status = admin.cluster.status();
    let mut against = Vec::new();
    if admin.draining.has_begun() {
        against.push("draining".to_owned());
    }
    if let Some(fault) = &status.fault {
        against.push(format!("storage fault: {fault}"));
    }
    if !status.caught_up {
        against.push("not caught up with the cluster".to_owned());
    }
    if !has_healthy_backend(admin) {
        against.push("no healthy backend".to_owned());
    }
    let mut lacking = Vec::new();
    if !status.has_quorum {
        lacking.push("no quorum".to_owned());
    }
    if admin.router.outbox_status().is_degraded {
        lacking.push("what is learnt here does not get into the log".to_owned());
    }
    let name = match (against.is_empty(), lacking.is_empty()) {
        (true, true) => "ready",
        (true, false) => "degraded",
        (false, _) => "not-ready",
    };
    against.append(&mut lacking);
    Readiness {
        status: name,
        reasons: against,
        applied_index: status.applied_index,
    }
}

fn has_healthy_backend(admin: &Admin) -> bool {
    admin.view.registry().backends.iter().any(|backend| {
        let glance = admin.backends.glance(backend.handle.slot);
        !backend.draining && glance.is_some_and(|glance| glance.is_healthy)
    })
}

pub(super) async fn metrics(State(admin): State<Shared>) -> Response {
    admin.router.refresh_metrics();
    let text = admin.metrics.encode();
    (
        [(CONTENT_TYPE, HeaderValue::from_static(OPENMETRICS))],
        text,
    )
        .into_response()
}
