//! Lets calls of the admin API through: who calls, and may it? Writes are noted with who and from
//! where.
//!
//! A call without a right token learns nothing but that: 401, whatever it asks for. With a right
//! token that may too little, the 403 names the role that is needed. Without a tokens file every
//! caller may do everything; such a listener belongs on loopback.

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
use super::answer::retry_after;
use super::calls::{AuditedCall, CallLog, WriteIndex, shown_path};
use super::failures::FailedTries;
use super::roles::{AdminRole, Permission};
use super::routes::permission;
use super::tokens::{AdminTokens, TokenHolder};
use crate::clock::Clock;
use crate::error::Problem;
use crate::proxy::client_of;
use crate::seldom::Seldom;

/// The log has so many lines about refused calls in [`REFUSALS_TOLD_EVERY`].
const REFUSALS_TOLD: u32 = 10;
const REFUSALS_TOLD_EVERY: Duration = Duration::from_secs(10);

/// Where a call comes from, as the listener sees it.
#[derive(Debug, Clone, Copy)]
pub(super) struct CallerAddress(pub(super) SocketAddr);

/// The gate of one listener.
#[derive(Clone)]
pub(super) struct Gate(Arc<GateState>);

struct GateState {
    /// `None`: everybody may do everything.
    tokens: Option<AdminTokens>,
    is_metrics_public: bool,
    tries: FailedTries,
    calls: Arc<CallLog>,
    clock: Clock,
    refused: Family<RefusalLabels, Counter>,
    told: Seldom,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RefusalLabels {
    reason: &'static str,
}

/// Why a call does not get through.
#[derive(Debug, PartialEq, Eq)]
enum CallRefusal {
    /// It has no token, or one that nobody has.
    Unauthorized,
    /// Its source has sent too many wrong tokens.
    Slowed(Duration),
    /// Its token's role does not suffice.
    Forbidden {
        holder: TokenHolder,
        needed: AdminRole,
    },
}

impl Gate {
    pub(super) fn new(admin: &Admin, calls: &Arc<CallLog>) -> Self {
        let refused = Family::default();
        admin.metrics.register(|registry| {
            registry.register(
                "quorate_admin_refused",
                "Calls of the admin API refused for their token: none or a wrong one, too weak a role, or too many wrong ones before",
                refused.clone(),
            );
        });
        Self(Arc::new(GateState {
            tokens: admin.tokens.clone(),
            is_metrics_public: admin.is_metrics_public,
            tries: FailedTries::default(),
            calls: Arc::clone(calls),
            clock: admin.clock.clone(),
            refused,
            told: Seldom::new(REFUSALS_TOLD, REFUSALS_TOLD_EVERY),
        }))
    }
}

/// Lets a call through, or answers why not.
pub(super) async fn guard(State(gate): State<Gate>, request: Request, next: Next) -> Response {
    let gate = gate.0;
    let path = request.extensions().get::<MatchedPath>();
    let needed = permission(path.map(MatchedPath::as_str), request.method());
    let address = request.extensions().get::<CallerAddress>();
    let from = address.map(|it| it.0.ip().to_canonical());
    let call = needed.is_audited().then(|| AuditedCall {
        at_ms: gate.clock.unix_ms(),
        who: None,
        role: None,
        from,
        method: request.method().to_string(),
        path: shown_path(request.uri()),
        status: 0,
        index: None,
    });
    match gate.admit(request.headers(), from, needed) {
        Ok(holder) => {
            let response = next.run(request).await;
            gate.note(call, holder, &response);
            response
        }
        Err(refusal) => {
            gate.tell(&refusal, from);
            let holder = refusal.holder();
            let response = refusal.into_response();
            // What nobody stands for is counted only, or strangers would fill the list.
            if holder.is_some() {
                gate.note(call, holder, &response);
            }
            response
        }
    }
}

impl GateState {
    /// Whose call this is; `None`: nobody has to say.
    fn admit(
        &self,
        headers: &HeaderMap,
        from: Option<IpAddr>,
        needed: Permission,
    ) -> Result<Option<TokenHolder>, CallRefusal> {
        let Some(tokens) = &self.tokens else {
            return Ok(None);
        };
        match needed {
            Permission::Open => return Ok(None),
            Permission::Scrape if self.is_metrics_public => return Ok(None),
            Permission::Scrape | Permission::Role(_) => {}
        }
        let secret = bearer(headers).ok_or(CallRefusal::Unauthorized)?;
        let source = client_of(from.unwrap_or(Ipv4Addr::UNSPECIFIED.into()));
        self.tries.may_try(source).map_err(CallRefusal::Slowed)?;
        let Some(holder) = tokens.holder(secret) else {
            self.tries.failed(source);
            return Err(CallRefusal::Unauthorized);
        };
        let needed = needed.role();
        match holder.role >= needed {
            true => Ok(Some(holder)),
            false => Err(CallRefusal::Forbidden { holder, needed }),
        }
    }

    fn note(&self, call: Option<AuditedCall>, holder: Option<TokenHolder>, response: &Response) {
        let is_call = response.status() != StatusCode::METHOD_NOT_ALLOWED;
        if let Some(mut call) = call.filter(|_| is_call) {
            call.role = holder.as_ref().map(|holder| holder.role);
            call.who = holder.map(|holder| holder.name);
            call.status = response.status().as_u16();
            let index = response.extensions().get::<WriteIndex>();
            call.index = index.map(|index| index.0);
            self.calls.note(call);
        }
    }

    fn tell(&self, refusal: &CallRefusal, from: Option<IpAddr>) {
        let reason = refusal.reason();
        self.refused.get_or_create(&RefusalLabels { reason }).inc();
        if let Some(suppressed) = self.told.may_say() {
            let from = from.map(tracing::field::display);
            tracing::warn!(reason, from, suppressed, "refused a call of the admin API");
        }
    }
}

impl CallRefusal {
    fn reason(&self) -> &'static str {
        match self {
            Self::Unauthorized => "token",
            Self::Slowed(_) => "slowed",
            Self::Forbidden { .. } => "role",
        }
    }

    fn holder(&self) -> Option<TokenHolder> {
        match self {
            Self::Unauthorized | Self::Slowed(_) => None,
            Self::Forbidden { holder, .. } => Some(holder.clone()),
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
                retry_after(problem, seconds.saturating_add(1))
            }
            Self::Forbidden { holder, needed } => Problem::new(
                StatusCode::FORBIDDEN,
                "role",
                "the token's role does not suffice",
            )
            .detail(format!("expected the role {needed}, found {}", holder.role))
            .member("needed_role", needed.name())
            .into_response(),
        }
    }
}

/// The token of a call; `None`: it has none, or does not say which.
fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let mut all = headers.get_all(AUTHORIZATION).iter();
    let (value, None) = (all.next()?.as_bytes(), all.next()) else {
        return None;
    };
    let (scheme, secret) = value.split_at_checked("bearer ".len())?;
    let secret = secret.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"bearer ") && !secret.is_empty()).then_some(secret)
}
