//! Responses to clients before the replica has a state to route by, and to health probes of load
//! balancers.
//!
//! A replica in no cluster knows no model. "Not found" would be final for every SDK, so the replica
//! reports that it is starting until it has applied what the cluster had committed (I82).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Method, Response, StatusCode};
use state::StateView;
use tokio::time::Instant;

use crate::error::ProxyError;
use crate::readiness::ReadinessCheck;

/// Time for which one readiness result is reused, because anyone may probe.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Cached knowledge whether this replica has a state to route by and is ready.
#[derive(Default)]
pub(in crate::proxy) struct ReadinessGate {
    /// Readiness check; `None` if only requests are served, as in benchmarks. The replica then
    /// counts as ready.
    readiness: Option<Arc<ReadinessCheck>>,
    /// Whether this replica knows that the cluster is founded. Changes only to true.
    is_founded: AtomicBool,
    /// Whether this replica has caught up with the cluster. Changes only to true.
    has_caught_up: AtomicBool,
    /// Time and result of the last readiness check.
    look: Mutex<Option<(Instant, bool)>>,
}

impl ReadinessGate {
    pub(in crate::proxy) fn new(readiness: Arc<ReadinessCheck>) -> Self {
        Self {
            readiness: Some(readiness),
            ..Self::default()
        }
    }

    /// Refuses all requests until this replica knows that the cluster is founded.
    pub(in crate::proxy) fn check(&self, view: &StateView) -> Result<(), ProxyError> {
        if self.is_founded.load(Ordering::Relaxed) {
            return Ok(());
        }
        if !view.registry().initialised {
            return Err(ProxyError::Starting);
        }
        self.is_founded.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the failure for the client. Until this replica has caught up, an unknown model
    /// becomes [`ProxyError::Starting`], because the cluster may know it.
    pub(in crate::proxy) fn doubt(&self, failure: ProxyError) -> ProxyError {
        match failure {
            ProxyError::UnknownModel { .. } if !self.has_caught_up() => ProxyError::Starting,
            failure => failure,
        }
    }

    /// Whether this replica knows what the cluster knew when it started.
    pub(in crate::proxy) fn has_caught_up(&self) -> bool {
        let Some(readiness) = &self.readiness else {
            return true;
        };
        let is_known = self.has_caught_up.load(Ordering::Relaxed);
        let has_caught_up = is_known || readiness.has_caught_up();
        if has_caught_up && !is_known {
            self.has_caught_up.store(true, Ordering::Relaxed);
        }
        has_caught_up
    }

    /// Responds to a load balancer's probe; `None` for any other request. A probe needs no key,
    /// counts for no user, and reveals no reasons, because anyone may send it.
    pub(in crate::proxy) fn probe(&self, method: &Method, path: &str) -> Option<Response<Bytes>> {
        let is_probe = matches!(path, "/health" | "/ping" | "/readyz" | "/livez");
        if !is_probe || !matches!(*method, Method::GET | Method::HEAD) {
            return None;
        }
        let (status, body) = match path {
            "/livez" => (StatusCode::OK, r#"{"status":"alive"}"#),
            _ if self.is_fit() => (StatusCode::OK, r#"{"status":"ready"}"#),
            _ => (StatusCode::SERVICE_UNAVAILABLE, r#"{"status":"not-ready"}"#),
        };
        let mut response = Response::new(Bytes::from_static(body.as_bytes()));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        Some(response)
    }

    /// Whether this replica should get traffic.
    pub(in crate::proxy) fn is_fit(&self) -> bool {
        let Some(readiness) = &self.readiness else {
            return true;
        };
        // Load balancers should learn of a drain before the cached result expires.
        if readiness.lifecycle.is_draining() {
            return false;
        }
        let now = Instant::now();
        let mut look = self.look.lock().unwrap_or_else(PoisonError::into_inner);
        match *look {
            Some((at, is_fit)) if now.duration_since(at) < LOOK_INTERVAL => is_fit,
            _ => {
                let is_fit = readiness.readiness().is_fit();
                *look = Some((now, is_fit));
                is_fit
            }
        }
    }
}
