//! Makes one attempt: sends a request to the chosen backend and waits until the response begins.
//!
//! The response or the [`AttemptError`] alone determines what the backend's circuit breaker
//! records, how the attempt is charged ([`AttemptError::end`]), and whether another backend may be
//! tried ([`AttemptError::may_retry`]): only if this one certainly did not run the request, or if
//! the prefill engine that it depends on failed (`bootstrap_rooms.rs`).

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_LENGTH;
use http::{Method, Request, Response, Uri, Version};
use http_body_util::{BodyExt, Limited};
use state::Backend;
use state::ids::{BackendRef, Slot, UserKey};
use tokio::time::error::Elapsed;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::blame::{lacks_listed_model, refuses_router, report_status};
use super::request_context::ProxiedRequest;
use crate::engines::backends::EngineHeaders;
use crate::engines::backends::pool::{EngineBody, Segments, SendError};
use crate::error::ProxyError;
use crate::proxy::Proxy;
use crate::proxy::limits::poison_requests::WatchedRequest;
use crate::proxy::request::headers::{Hop, clean_answer, toward_engine};
use crate::proxy::response::first_byte::begin;
use crate::proxy::response::response_body::ERROR_BYTES_MAX;
use crate::routing::{Attempt, AttemptEnd, Decision, DecisionRecord, Usage};
use crate::traces::TraceHeaders;
use crate::users::isolation::CacheIsolation;

/// Maximum time for reading the body of a refusal.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(2);

/// A request as it is sent to backends. Its attempts share it.
pub(in crate::proxy) struct OutgoingRequest<'a> {
    pub(in crate::proxy) proxied: &'a ProxiedRequest,
    pub(in crate::proxy) uri: Uri,
    pub(in crate::proxy) body: Segments,
    /// Body for engines that support salts, if the user's cached blocks must be isolated.
    pub(in crate::proxy) salted: Option<Segments>,
    /// Body member that tells the decode engine where to get a prompt that another engine computed.
    pub(in crate::proxy) transfer: Option<Bytes>,
    /// Session of the two engines that run the request at once; `None` with any other handover.
    pub(super) bootstrap_session: Option<Arc<BootstrapSession>>,
    pub(in crate::proxy) first_byte_by: Instant,
    pub(in crate::proxy) watched: WatchedRequest,
}

impl OutgoingRequest<'_> {
    /// Returns the body for `backend`. Counts a request of an isolated user that is sent without
    /// salt.
    pub(in crate::proxy) fn body_for(&self, proxy: &Proxy, backend: &Backend) -> Segments {
        let is_salted = self.salts(proxy, backend);
        if !is_salted && self.proxied.identity.isolation != CacheIsolation::None {
            proxy.metrics.unsalted.inc();
        }
        let salted = self.salted.as_ref().filter(|_| is_salted);
        let body = salted.unwrap_or(&self.body).clone();
        match &self.transfer {
            None => body,
            Some(member) => body.with_inserted(self.proxied.parsed.insert_at, member.clone()),
        }
    }

    /// Runs `step`, but fails as soon as the prefill engine of the bootstrap session has failed.
    async fn with_prompt<T>(
        &self,
        step: impl Future<Output = Result<T, SendError>>,
    ) -> Result<T, SendError> {
        let Some(bootstrap_session) = &self.bootstrap_session else {
            return step.await;
        };
        tokio::select! {
            biased;
            () = bootstrap_session.failed.cancelled() => Err(SendError::WithoutPrompt),
            done = step => done,
        }
    }

    /// Whether `backend` receives the salt of the user's cached blocks.
    pub(in crate::proxy) fn salts(&self, proxy: &Proxy, backend: &Backend) -> bool {
        let is_required = self.proxied.identity.isolation == CacheIsolation::Required;
        self.salted.is_some() && (is_required || proxy.backends.knows_salts(backend))
    }
}

/// Response whose body has begun, with its attempt, or why there is none for the client.
pub(super) type AttemptResult = Result<(Response<EngineBody>, Attempt), AttemptError>;

/// Result of sending a request to the backend or pair of backends of one decision.
pub(super) struct SentRequest {
    pub(super) result: AttemptResult,
    /// Time at which the request was sent to the backend that responds.
    pub(super) at: Instant,
    /// Slot of a prefill backend that did not transfer the prompt, if any. It is excluded from now
    /// on.
    pub(super) failed_prefill: Option<Slot>,
    /// Slot of the backend at fault, if it is known and the request was not run.
    pub(super) at_fault: Option<Slot>,
    /// Whether trying another backend is pointless.
    pub(super) is_final: bool,
}

impl SentRequest {
    /// Returns the result of an attempt that began at `at`, and who is at fault if it was not run.
    pub(super) fn of(result: AttemptResult, at: Instant, at_fault: Option<Slot>) -> Self {
        Self {
            result,
            at,
            failed_prefill: None,
            at_fault,
            is_final: false,
        }
    }
}

/// Reason why an attempt yielded no response for the client.
#[derive(Debug)]
pub(in crate::proxy) enum AttemptError {
    /// The backend was removed or replaced after it was chosen.
    Gone,
    /// This replica had no descriptor or port for a connection.
    OutOfConnections(SendError),
    /// No connection could be made.
    Unreachable(SendError),
    /// The new connection broke before the request was sent.
    BrokeUnsent(SendError),
    /// The connection broke after the request was sent and before the response body began.
    Broke(SendError),
    /// The engine that computes the prompt for this backend failed before the response body began.
    WithoutPrompt,
    /// No connection was made by the deadline.
    TimedOutUnsent,
    /// The request was sent, but no response head arrived by the deadline.
    TimedOut,
    /// The backend responded with a redirect, which is not relayed: a client that followed it to the
    /// engine would not be counted.
    Redirected,
    /// The backend refused credentials that are not the client's.
    RefusedCredentials,
    /// The backend refused with this response. `None` if it was too long or too slow to pass on.
    Refused(Option<Box<Response<Bytes>>>),
}

impl AttemptError {
    pub(in crate::proxy) fn of(error: SendError, is_sent: bool) -> Self {
        match error {
            SendError::Gone => Self::Gone,
            SendError::WithoutPrompt => Self::WithoutPrompt,
            error if error.is_local() => Self::OutOfConnections(error),
            SendError::Url(..) | SendError::Connect(_) => Self::Unreachable(error),
            SendError::Broke(_) | SendError::Ended | SendError::Informational if is_sent => {
                Self::Broke(error)
            }
            SendError::Broke(_) | SendError::Ended | SendError::Informational => {
                Self::BrokeUnsent(error)
            }
        }
    }

    /// Returns the name of the error in the admin API, metrics and traces.
    pub(in crate::proxy) fn label(&self) -> &'static str {
        match self {
            Self::Gone => "backend-removed",
            Self::OutOfConnections(_) => "out-of-connections",
            Self::Unreachable(_) => "unreachable",
            Self::BrokeUnsent(_) => "broke-unsent",
            Self::Broke(_) => "broke",
            Self::WithoutPrompt => "without-prompt",
            Self::TimedOutUnsent => "timed-out-unsent",
            Self::TimedOut => "timed-out",
            Self::Redirected => "redirected",
            Self::RefusedCredentials => "refused-credentials",
            Self::Refused(_) => "refused",
        }
    }

    /// Records the failure in the decision's record.
    fn note(&self, record: &DecisionRecord) {
        match self {
            Self::OutOfConnections(error)
            | Self::Unreachable(error)
            | Self::BrokeUnsent(error)
            | Self::Broke(error) => record.failed_with(self.label(), error),
            Self::Gone
            | Self::WithoutPrompt
            | Self::TimedOutUnsent
            | Self::TimedOut
            | Self::Redirected
            | Self::RefusedCredentials
            | Self::Refused(_) => record.failed(self.label()),
        }
    }

    /// Reports the failure to the circuit breaker of `backend`. For a request that timed out after
    /// it was sent, the end of the attempt reports it; for a refusal, its status.
    pub(in crate::proxy) fn report(&self, proxy: &Proxy, backend: BackendRef, user: UserKey) {
        let (backends, now) = (&proxy.backends, Instant::now());
        match self {
            Self::Gone
            | Self::OutOfConnections(_)
            | Self::WithoutPrompt
            | Self::TimedOut
            | Self::RefusedCredentials
            | Self::Refused(_) => {}
            Self::Unreachable(_) | Self::TimedOutUnsent => {
                backends.report_no_answer(backend, None, now);
            }
            Self::BrokeUnsent(_) | Self::Broke(_) | Self::Redirected => {
                backends.report_no_answer(backend, Some(user), now);
            }
        }
    }

    /// Returns the end of the attempt, by which it is charged.
    pub(in crate::proxy) fn end(&self) -> AttemptEnd {
        match self {
            Self::Gone
            | Self::OutOfConnections(_)
            | Self::Unreachable(_)
            | Self::BrokeUnsent(_)
            | Self::WithoutPrompt
            | Self::TimedOutUnsent
            | Self::Redirected
            | Self::RefusedCredentials
            | Self::Refused(_) => AttemptEnd::NotRun,
            Self::Broke(_) => AttemptEnd::Failed,
            // The engine may have been computing until the timeout.
            Self::TimedOut => AttemptEnd::Broken,
        }
    }

    /// Whether another backend may be tried.
    pub(super) fn may_retry(&self) -> bool {
        match self {
            Self::Gone
            | Self::OutOfConnections(_)
            | Self::Unreachable(_)
            | Self::WithoutPrompt
            | Self::Redirected
            | Self::RefusedCredentials
            | Self::Refused(_) => true,
            Self::BrokeUnsent(_) | Self::Broke(_) | Self::TimedOutUnsent | Self::TimedOut => false,
        }
    }

    /// Whether the backend cannot be reached at all, so that a retry does not count against the
    /// retry budget.
    pub(super) fn is_unreachable(&self) -> bool {
        matches!(self, Self::Gone | Self::Unreachable(_))
    }

    /// Returns the refusal or the error that the client receives if no other backend is tried.
    pub(super) fn answer(self) -> Result<Response<Bytes>, ProxyError> {
        match self {
            Self::Gone | Self::Unreachable(_) => Err(ProxyError::Unreachable),
            Self::OutOfConnections(_) => Err(ProxyError::OutOfConnections),
            Self::BrokeUnsent(_) | Self::Broke(_) | Self::WithoutPrompt => {
                Err(ProxyError::EngineBroke)
            }
            Self::TimedOutUnsent | Self::TimedOut => Err(ProxyError::EngineTimeout),
            Self::Redirected => Err(ProxyError::Redirected),
            Self::RefusedCredentials => Err(ProxyError::RefusedCredentials),
            Self::Refused(refusal) => refusal.map(|it| *it).ok_or(ProxyError::Refused),
        }
    }
}

/// Sends the request to the backend of `decision` and waits until the body of the response has
/// begun, or the wait for it is over. With `is_last`, returns a refusal as a response.
pub(super) async fn attempt(
    proxy: &Arc<Proxy>,
    sending: &OutgoingRequest<'_>,
    decision: &Decision,
    mut attempt: Attempt,
    is_last: bool,
) -> AttemptResult {
    let trace = sending.proxied.trace_headers(attempt.trace());
    let pending = PendingAttempt::of(attempt).bootstrap_session(sending.bootstrap_session.as_ref());
    let sent = {
        let request = Post {
            body: &|backend: &Backend| sending.body_for(proxy, backend),
            trace: trace.as_ref(),
            sent: &|| pending.is_sent.store(true, Relaxed),
        };
        let (uri, to) = (&sending.uri, decision.backend);
        // Pinned here, because a function that takes and awaits a future by value stores it twice.
        let send = pin!(post(proxy, sending.proxied, uri, to, request));
        timeout_at(sending.first_byte_by, sending.with_prompt(send)).await
    };
    let (mut attempt, is_sent) = pending.over();
    let mut response = match head_of(sent, is_sent) {
        Ok(response) => response,
        Err(failure) => {
            failure.report(proxy, decision.backend, attempt.user());
            return Err(fail(proxy, sending, decision, attempt, failure));
        }
    };
    let (status, backend) = (response.status(), decision.backend);
    let refuses_router = refuses_router(proxy, sending.proxied, backend, status);
    report_status(proxy, (backend, attempt.user()), status, refuses_router);
    if let Some(record) = &decision.record {
        record.answered(status.as_u16());
    }
    if let Some(trace) = attempt.trace() {
        trace.answered(status.as_u16());
    }
    if refuses_router {
        // Read to the end, so that the connection can be reused.
        drop(read_refusal(response).await);
        let failure = AttemptError::RefusedCredentials;
        return Err(fail(proxy, sending, decision, attempt, failure));
    }
    // Engines respond with such a status when they cannot fetch the prompt's blocks.
    let is_transfer_lost = sending.transfer.is_some() && status.is_server_error();
    if !is_last && (is_transfer_lost || proxy.settings.retry.takes(status)) {
        attempt.end(AttemptEnd::NotRun, Instant::now());
        let refusal = read_refusal(response).await;
        return Err(AttemptError::Refused(refusal.map(Box::new)));
    }
    let begun = sending.with_prompt(begin(&mut response, sending.first_byte_by));
    let Err(error) = begun.await else {
        let begins = response.body().first();
        if lacks_listed_model(proxy, sending.proxied, backend, status, begins) {
            proxy.backends.doubt_list(backend.slot);
            if !is_last {
                attempt.end(AttemptEnd::NotRun, Instant::now());
                let refusal = read_refusal(response).await;
                return Err(AttemptError::Refused(refusal.map(Box::new)));
            }
        }
        return Ok((response, attempt));
    };
    if status.is_success() && !matches!(error, SendError::WithoutPrompt) {
        let user = Some(attempt.user());
        let now = Instant::now();
        proxy.backends.report_no_answer(decision.backend, user, now);
    }
    let failure = AttemptError::of(error, is_sent);
    Err(fail(proxy, sending, decision, attempt, failure))
}

/// Returns the response whose head has arrived, unless its status allows no relaying.
fn head_of(
    sent: Result<Result<Response<EngineBody>, SendError>, Elapsed>,
    is_sent: bool,
) -> Result<Response<EngineBody>, AttemptError> {
    match sent {
        // No client asked for a protocol upgrade.
        Ok(Ok(response)) if response.status().is_informational() => {
            Err(AttemptError::Broke(SendError::Ended))
        }
        Ok(Ok(response)) if response.status().is_redirection() => Err(AttemptError::Redirected),
        Ok(Ok(response)) => Ok(response),
        Ok(Err(error)) => Err(AttemptError::of(error, is_sent)),
        Err(_) if is_sent => Err(AttemptError::TimedOut),
        Err(_) => Err(AttemptError::TimedOutUnsent),
    }
}

/// Ends an attempt with this failure, and records it.
fn fail(
    proxy: &Proxy,
    sending: &OutgoingRequest<'_>,
    decision: &Decision,
    mut attempt: Attempt,
    failure: AttemptError,
) -> AttemptError {
    if let Some(record) = &decision.record {
        failure.note(record);
    }
    if let Some(trace) = attempt.trace() {
        trace.failed(failure.label());
    }
    attempt.end(failure.end(), Instant::now());
    note(proxy, sending, (decision.backend, &decision.name), &failure);
    failure
}

/// Logs a failed connection and applies its effects: reports the failure of the backend and, if the
/// request had been sent, the broken connection to the poison requests. If this replica ran out of
/// connections, closes idle ones instead. Does nothing after a timeout or a response.
pub(in crate::proxy) fn note(
    proxy: &Proxy,
    sending: &OutgoingRequest<'_>,
    (backend, name): (BackendRef, &str),
    failure: &AttemptError,
) {
    let proxied = sending.proxied;
    let request_id = proxied.request_id.to_str().unwrap_or_default();
    let trace_id = || proxied.trace_id().map(tracing::field::display);
    match failure {
        AttemptError::WithoutPrompt
        | AttemptError::TimedOutUnsent
        | AttemptError::TimedOut
        | AttemptError::Redirected
        | AttemptError::RefusedCredentials
        | AttemptError::Refused(_) => {}
        AttemptError::Gone => {
            let error = SendError::Gone;
            tracing::debug!(request_id, trace_id = trace_id(), backend = name, %error, "attempt failed");
        }
        AttemptError::OutOfConnections(error) => {
            tracing::debug!(request_id, trace_id = trace_id(), backend = name, %error, "could not query backend");
            proxy.pool.close_idle();
        }
        AttemptError::Unreachable(error)
        | AttemptError::BrokeUnsent(error)
        | AttemptError::Broke(error) => {
            if let AttemptError::Broke(_) = failure {
                sending.watched.broke();
            }
            proxy.backends.report_failure(backend.slot);
            tracing::debug!(request_id, trace_id = trace_id(), backend = name, %error, "attempt failed");
        }
    }
}

/// An attempt that waits for the response head. If the client leaves meanwhile, it pays only if its
/// request was sent.
pub(in crate::proxy) struct PendingAttempt {
    attempt: Option<Attempt>,
    pub(in crate::proxy) is_sent: AtomicBool,
    bootstrap_session: Option<Arc<BootstrapSession>>,
}

/// State of a request that two engines run at once, one of which transfers the KV cache to the
/// other.
#[derive(Debug, Default)]
pub(super) struct BootstrapSession {
    /// Cancelled when the prefill engine has failed.
    pub(in crate::proxy) failed: CancellationToken,
    /// Whether the request was sent to the prefill engine. A client that leaves after that pays for
    /// the prompt.
    pub(in crate::proxy) is_sent: AtomicBool,
    /// Time at which the prompt was computed, and its reported usage; empty until then.
    pub(in crate::proxy) computed: OnceLock<(Instant, Option<Usage>)>,
}

impl PendingAttempt {
    pub(in crate::proxy) fn of(attempt: Attempt) -> Self {
        Self {
            attempt: Some(attempt),
            is_sent: AtomicBool::new(false),
            bootstrap_session: None,
        }
    }

    /// Sets the session shared with the engine that computes the prompt at the same time, if any.
    fn bootstrap_session(mut self, bootstrap_session: Option<&Arc<BootstrapSession>>) -> Self {
        self.bootstrap_session = bootstrap_session.cloned();
        self
    }

    /// Ends the wait and returns the attempt and whether its request was sent.
    pub(in crate::proxy) fn over(mut self) -> (Attempt, bool) {
        let attempt = self.take();
        let is_sent = self.is_sent.load(Relaxed);
        (attempt.expect("it is taken here only"), is_sent)
    }

    /// Takes the attempt, after recording what is known about its prompt; `None` if it was taken
    /// before.
    fn take(&mut self) -> Option<Attempt> {
        let mut attempt = self.attempt.take()?;
        let bootstrap_session = self.bootstrap_session.as_ref();
        if let Some((at, usage)) =
            bootstrap_session.and_then(|bootstrap_session| bootstrap_session.computed.get())
        {
            attempt.prompt_computed(*usage, *at);
        }
        Some(attempt)
    }
}

impl Drop for PendingAttempt {
    fn drop(&mut self) {
        if let Some(attempt) = self.take() {
            let bootstrap_session = self.bootstrap_session.as_ref();
            let is_computed = bootstrap_session
                .is_some_and(|bootstrap_session| bootstrap_session.is_sent.load(Relaxed));
            let end = match self.is_sent.load(Relaxed) || is_computed {
                true => AttemptEnd::ClientLeft,
                false => AttemptEnd::NotRun,
            };
            attempt.end(end, Instant::now());
        }
    }
}

/// Parts of a request to a backend that depend on the caller.
pub(super) struct Post<'a> {
    /// Returns the body for a backend.
    pub(in crate::proxy) body: &'a (dyn Fn(&Backend) -> Segments + Sync),
    /// Trace headers for the engine; `None` to forward those of the client.
    pub(in crate::proxy) trace: Option<&'a TraceHeaders>,
    /// Called when the request is written to a connection.
    pub(in crate::proxy) sent: &'a (dyn Fn() + Sync),
}

/// Sends a client's request to the backend `to` and returns the response.
pub(super) async fn post(
    proxy: &Proxy,
    proxied: &ProxiedRequest,
    uri: &Uri,
    to: BackendRef,
    post: Post<'_>,
) -> Result<Response<EngineBody>, SendError> {
    let registry = proxy.view.registry();
    let backend = registry
        .backend(to.slot)
        .filter(|backend| backend.handle == to)
        .ok_or(SendError::Gone)?;
    let endpoint = proxy.pool.endpoint(to, backend.spec.url.as_str())?;
    let body = (post.body)(backend);
    let keys = proxy.backends.keys();
    let engine_key = keys.of_requests(&backend.spec.id, &backend.spec.url);
    let rank = registry.rank(backend);
    drop(registry);
    let hop = Hop {
        trace: post.trace,
        ..hop(proxy, proxied, engine_key.as_ref(), rank)
    };
    let build = || {
        (post.sent)();
        let mut request = Request::new(body.clone());
        *request.method_mut() = Method::POST;
        *request.uri_mut() = uri.clone();
        *request.headers_mut() = toward_engine(&proxied.head.headers, endpoint.host(), &hop);
        request
    };
    endpoint.send(&build).await
}

/// Returns the properties of a request's hop that headers to an engine depend on, without a trace.
pub(in crate::proxy) fn hop<'a>(
    proxy: &'a Proxy,
    proxied: &'a ProxiedRequest,
    engine_key: Option<&'a EngineHeaders>,
    rank: Option<u16>,
) -> Hop<'a> {
    Hop {
        rank,
        trace: None,
        peer: &proxied.peer,
        version: proxied.head.version,
        request_id: &proxied.engine_request_id,
        forward_credentials: proxy.settings.api_keys.is_none(),
        engine_key,
        strip: &proxy.settings.strip_headers,
    }
}

/// Reads a refusal so that it can be passed on if no other backend is tried. Returns `None` if its
/// body is too long, too slow or broken off.
pub(super) async fn read_refusal(response: Response<EngineBody>) -> Option<Response<Bytes>> {
    let (mut head, body) = response.into_parts();
    let bytes_max = usize::try_from(ERROR_BYTES_MAX).unwrap_or(usize::MAX);
    let body = timeout(REFUSAL_TIMEOUT, Limited::new(body, bytes_max).collect());
    let body = body.await.ok()?.ok()?.to_bytes();
    clean_answer(&mut head.headers);
    head.headers.remove(CONTENT_LENGTH);
    head.version = Version::default();
    Some(Response::from_parts(head, body))
}
