//! `/livez`, `/readyz` and `/metrics`, for orchestrators and Prometheus.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::header::CONTENT_TYPE;
use http::{HeaderValue, StatusCode};
use serde::Serialize;

use super::{Admin, AdminState, answer};

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Difference of a member's clock above which a warning is shown, in milliseconds.
const CLOCK_SKEW_MS_MAX: u64 = 1000;

#[derive(Serialize)]
struct Alive {
    status: &'static str,
}

/// Whether a replica takes traffic, and the reasons if it does not.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Readiness {
    /// `ready`, `degraded` (serves what it knows, but nothing can be committed) or `not-ready`.
    status: &'static str,
    /// Why it is not `ready`.
    reasons: Vec<String>,
    /// Conditions that do not prevent `ready` but need attention.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
    /// Index applied here.
    applied_index: u64,
}

pub(super) async fn livez() -> Response {
    answer::json(&Alive { status: "alive" })
}

pub(super) async fn readyz(State(admin): State<AdminState>) -> Response {
    let readiness = readiness(&admin);
    let status = match readiness.status {
        "not-ready" => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::OK,
    };
    (status, answer::json(&readiness)).into_response()
}

/// Determines readiness. docs/guide/runbook.md gives the remedy for each reason.
fn readiness(admin: &Admin) -> Readiness {
    let status = admin.cluster.status();
    let (mut against, mut lacking) = (Vec::new(), Vec::new());
    if admin.lifecycle.is_draining() {
        against.push("draining".to_owned());
    } else if !admin.lifecycle.is_serving() {
        against.push("warming up".to_owned());
    }
    if status.is_removed {
        against.push("removed from the cluster".to_owned());
    }
    if let Some(fault) = &status.fault {
        against.push(format!("storage fault: {fault}"));
    }
    if let Some(why) = &status.waiting {
        against.push(format!("storage: waiting for disk space: {why}"));
    }
    if let Some(minority) = admin.digests.minority() {
        against.push(format!(
            "state differs from that of {} other replicas at log index {} and is being replaced",
            minority.holders.len(),
            minority.index
        ));
    }
    if !has_healthy_backend(admin) {
        against.push("no healthy backend".to_owned());
    }
    if !status.has_quorum {
        lacking.push("no quorum".to_owned());
    }
    match (status.caught_up, status.has_quorum) {
        (true, _) => {}
        // After a restart without a quorum, nobody knows how far the cluster was. The state from
        // disk is served: it is better than no answer, and perhaps nobody has more.
        (false, false) if admin.view.registry().initialised => {
            lacking.push("not known to be caught up: serving the state it was stopped with".into());
        }
        (false, _) => against.push(match &status.unjoined {
            Some(why) => format!("not in a cluster: {why}"),
            None => "not caught up with the cluster".to_owned(),
        }),
    }
    if admin.outbox.status().is_degraded {
        lacking.push("local updates have not been committed for over a second".to_owned());
    }
    let mut warnings = Vec::new();
    for (id, member) in &status.members {
        let skew_ms = member.clock_skew_ms.unwrap_or(0);
        if skew_ms.unsigned_abs() > CLOCK_SKEW_MS_MAX {
            warnings.push(format!(
                "the clock of replica {id} differs from this one's by {skew_ms} ms"
            ));
        }
    }
    for model in admin.backends.panicking(&admin.view.registry()) {
        warnings.push(format!(
            "panic mode for model {model}: probes fail while requests are answered"
        ));
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
        warnings,
        applied_index: status.applied_index,
    }
}

fn has_healthy_backend(admin: &Admin) -> bool {
    let registry = admin.view.registry();
    let mut serving = registry.backends.iter().filter(|it| !it.draining);
    serving.any(|backend| admin.backends.is_up(&registry, backend))
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
