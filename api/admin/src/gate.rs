//! Authenticates and authorizes calls of the admin API, and records those that require more than
//! read access, with their callers (`calls`).
//!
//! A caller authenticates with a token in the call, or else with its connection's certificate. A
//! token takes precedence: it belongs to this call, while the certificate covers everything on the
//! connection. A path that is open to everyone needs neither. Elsewhere, a call without either or
//! with a wrong token gets a 401, and after many wrong tokens from its address a 429. If the role
//! is insufficient, the 403 names the required one. Without tokens and operators' authorities,
//! every caller may do anything; such a listener belongs on loopback.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderValue, StatusCode};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

use super::Admin;
use super::calls::{AuditedCall, CallLog, WriteIndex, shown_path};
use super::certified::{CallerCertificate, CertifiedOperators};
use super::failures::FailedTries;
use super::roles::{AdminRole, Operator, Permission};
use super::routes::permission;
use super::tokens::AdminTokens;
use super::whoami::Caller;
use api::base::clock::Clock;
use api::base::log_rate_limit::LogRateLimit;
use api::error::Problem;
use api::net::connections::client_of;

/// Maximum number of log lines about refused calls within [`REFUSALS_TOLD_EVERY`].
const REFUSALS_TOLD: u32 = 10;
const REFUSALS_TOLD_EVERY: Duration = Duration::from_secs(10);

/// Address of the caller, as seen by the listener.
#[derive(Debug, Clone, Copy)]
pub(super) struct CallerAddress(pub(super) SocketAddr);

/// Authenticates and authorizes the calls of one listener.
#[derive(Clone)]
pub(super) struct Gate(Arc<GateState>);

struct GateState {
    /// Accepted tokens. If this and `certified` are `None`, all calls are allowed.
    tokens: Option<AdminTokens>,
    certified: Option<CertifiedOperators>,
    is_metrics_public: bool,
    tries: FailedTries,
    calls: Arc<CallLog>,
    clock: Clock,
    refused: Family<RefusalLabels, Counter>,
    told: LogRateLimit,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RefusalLabels {
    reason: &'static str,
}

/// Reason why a call is rejected.
#[derive(Debug, PartialEq, Eq)]
enum CallRejection {
    /// The call has no token and no certificate, or an unknown token.
    Unauthorized,
    /// The call's source has sent too many wrong tokens.
    Slowed(Duration),
    /// The certificate comes from an operators' authority, but names no operator.
    NoOperator(String),
    /// The operator's role is insufficient.
    Forbidden {
        operator: Operator,
        needed: AdminRole,
    },
}

impl Gate {
    pub(super) fn new(admin: &Admin, calls: &Arc<CallLog>) -> Self {
        let refused = Family::default();
        admin.metrics.register(|registry| {
            registry.register(
                "quorate_admin_refused",
                "Calls of the admin API refused: no or a wrong token, a certificate of no operator, too weak a role, or too many wrong tokens before",
                refused.clone(),
            );
        });
        Self(Arc::new(GateState {
            tokens: admin.tokens.clone(),
            certified: admin.certified.clone(),
            is_metrics_public: admin.is_metrics_public,
            tries: FailedTries::default(),
            calls: Arc::clone(calls),
            clock: admin.clock.clone(),
            refused,
            told: LogRateLimit::new(REFUSALS_TOLD, REFUSALS_TOLD_EVERY),
        }))
    }
}

/// Admits a call, or responds with the reason why it is rejected.
pub(super) async fn guard(State(gate): State<Gate>, mut request: Request, next: Next) -> Response {
    let gate = gate.0;
    let path = request.extensions().get::<MatchedPath>();
    let needed = permission(path.map(MatchedPath::as_str), request.method());
    let address = request.extensions().get::<CallerAddress>();
    let from = address.map(|it| it.0.ip().to_canonical());
    let call = needed.is_audited().then(|| AuditedCall {
        number: 0,
        at_ms: gate.clock.unix_ms(),
        who: None,
        role: None,
        by: None,
        from,
        method: request.method().to_string(),
        path: shown_path(request.uri()),
        status: 0,
        index: None,
    });
    match gate.admit(&request, from, needed) {
        Ok(operator) => {
            request.extensions_mut().insert(Caller(operator.clone()));
            let response = next.run(request).await;
            gate.note(call, operator, &response);
            response
        }
        Err(refusal) => {
            gate.tell(&refusal, from);
            let operator = refusal.operator();
            let response = refusal.into_response();
            // Rejected unauthenticated calls are only counted, or strangers would fill the list.
            if operator.is_some() {
                gate.note(call, operator, &response);
            }
            response
        }
    }
}

impl GateState {
    /// Returns the operator that makes the call, or `None` if no authentication is required.
    fn admit(
        &self,
        request: &Request,
        from: Option<IpAddr>,
        needed: Permission,
    ) -> Result<Option<Operator>, CallRejection> {
        if self.tokens.is_none() && self.certified.is_none() {
            return Ok(None);
        }
        match needed {
            Permission::Open => return Ok(None),
            Permission::Scrape if self.is_metrics_public => return Ok(None),
            Permission::Scrape | Permission::Role(_) => {}
        }
        let operator = match request.headers().contains_key(AUTHORIZATION) {
            true => self.by_token(request.headers(), from)?,
            false => self.by_certificate(request.extensions().get())?,
        };
        let needed = needed.role();
        match operator.role >= needed {
            true => Ok(Some(operator)),
            false => Err(CallRejection::Forbidden { operator, needed }),
        }
    }

    fn by_token(
        &self,
        headers: &HeaderMap,
        from: Option<IpAddr>,
    ) -> Result<Operator, CallRejection> {
        let secret = bearer(headers).ok_or(CallRejection::Unauthorized)?;
        let source = client_of(from.unwrap_or(Ipv4Addr::UNSPECIFIED.into()));
        self.tries.may_try(source).map_err(CallRejection::Slowed)?;
        let holder = self.tokens.as_ref().and_then(|it| it.holder(secret));
        if holder.is_none() {
            self.tries.failed(source);
        }
        holder.ok_or(CallRejection::Unauthorized)
    }

    fn by_certificate(&self, shown: Option<&CallerCertificate>) -> Result<Operator, CallRejection> {
        let (Some(certified), Some(shown)) = (&self.certified, shown) else {
            return Err(CallRejection::Unauthorized);
        };
        let unix_s = i64::try_from(self.clock.unix_ms() / 1000).unwrap_or(i64::MAX);
        let operator = certified.operator(&shown.0, unix_s);
        operator.map_err(CallRejection::NoOperator)
    }

    fn note(&self, call: Option<AuditedCall>, operator: Option<Operator>, response: &Response) {
        let is_call = response.status() != StatusCode::METHOD_NOT_ALLOWED;
        if let Some(mut call) = call.filter(|_| is_call) {
            call.role = operator.as_ref().map(|operator| operator.role);
            call.by = operator.as_ref().map(|operator| operator.by);
            call.who = operator.map(|operator| operator.name);
            call.status = response.status().as_u16();
            let index = response.extensions().get::<WriteIndex>();
            call.index = index.map(|index| index.0);
            self.calls.note(call);
        }
    }

    fn tell(&self, refusal: &CallRejection, from: Option<IpAddr>) {
        let reason = refusal.reason();
        self.refused.get_or_create(&RefusalLabels { reason }).inc();
        if let Some(suppressed) = self.told.try_acquire() {
            let from = from.map(tracing::field::display);
            tracing::warn!(reason, from, suppressed, "refused a call to the admin API");
        }
    }
}

impl CallRejection {
    fn reason(&self) -> &'static str {
        match self {
            Self::Unauthorized => "token",
            Self::Slowed(_) => "slowed",
            Self::NoOperator(_) => "certificate",
            Self::Forbidden { .. } => "role",
        }
    }

    fn operator(&self) -> Option<Operator> {
        match self {
            Self::Unauthorized | Self::Slowed(_) | Self::NoOperator(_) => None,
            Self::Forbidden { operator, .. } => Some(operator.clone()),
        }
    }

    fn into_response(self) -> Response {
        match self {
            Self::Unauthorized => {
                let problem =
                    Problem::new(StatusCode::UNAUTHORIZED, "unauthorized", "unauthorized");
                let mut response = problem.into_response();
                let scheme = HeaderValue::from_static("Bearer");
                response.headers_mut().insert(WWW_AUTHENTICATE, scheme);
                response
            }
            Self::Slowed(wait) => {
                let problem = Problem::new(
                    StatusCode::TOO_MANY_REQUESTS,
                    "too-many-wrong-tokens",
                    "too many wrong tokens from this address",
                );
                let seconds = u32::try_from(wait.as_secs()).unwrap_or(u32::MAX);
                let seconds = seconds.saturating_add(1);
                problem.retry_after(seconds).into_response()
            }
            Self::NoOperator(why) => Problem::new(
                StatusCode::FORBIDDEN,
                "certificate",
                "the certificate does not name an operator",
            )
            .detail(why)
            .into_response(),
            Self::Forbidden { operator, needed } => {
                let title = "the caller's role is not sufficient";
                let problem = Problem::new(StatusCode::FORBIDDEN, "role", title);
                let found = operator.role;
                problem
                    .detail(format!("expected the role {needed}, found {found}"))
                    .member("needed_role", needed.name())
                    .into_response()
            }
        }
    }
}

/// Returns the bearer token of a call; `None` if it has none or several.
fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let mut all = headers.get_all(AUTHORIZATION).iter();
    let (value, None) = (all.next()?.as_bytes(), all.next()) else {
        return None;
    };
    let (scheme, secret) = value.split_at_checked("bearer ".len())?;
    let secret = secret.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"bearer ") && !secret.is_empty()).then_some(secret)
}
