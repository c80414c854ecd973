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
use http::{Method, Request, Response, StatusCode, Uri, Version};
use http_body_util::{BodyExt, Limited};
use state::ids::{BackendRef, Slot};
use tokio::time::error::Elapsed;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

pub(in crate::proxy) use super::attempt_error::AttemptError;
use super::blame::{lacks_listed_model, refuses_router, report_status};
use super::discourage_retry;
use super::request_context::ProxiedRequest;
use crate::engines::backends::EngineHeaders;
use crate::engines::backends::pool::{EngineBody, Segments, SendError};
use crate::prompt::ReplyShape;
use crate::proxy::Proxy;
use crate::proxy::limits::poison_requests::WatchedRequest;
use crate::proxy::request::dialect::Dialect;
use crate::proxy::request::headers::{Hop, clean_answer, toward_engine};
use crate::proxy::response::engine_error::{EngineError, end_of_error};
use crate::proxy::response::opening::{Opening, begin, is_text};
use crate::proxy::response::response_body::ERROR_BYTES_MAX;
use crate::proxy::settings::StreamResume;
use crate::routing::{Attempt, AttemptEnd, Decision, Usage};
use crate::traces::TraceHeaders;

/// Maximum time for reading the body of a refusal.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(2);

/// A request as it is sent to backends. Its attempts share it.
pub(in crate::proxy) struct OutgoingRequest<'a> {
    pub(in crate::proxy) proxied: &'a ProxiedRequest,
    pub(in crate::proxy) uri: Uri,
    pub(in crate::proxy) body: Segments,
    /// The body that continues an answer; `None` if `body` is that of the client.
    pub(in crate::proxy) continued: Option<Bytes>,
    /// Body member that tells the decode engine where to get a prompt that another engine computed.
    pub(in crate::proxy) transfer: Option<Bytes>,
    /// Session of the two engines that run the request at once; `None` with any other handover.
    pub(super) bootstrap_session: Option<Arc<BootstrapSession>>,
    pub(in crate::proxy) first_byte_by: Instant,
    pub(in crate::proxy) watched: WatchedRequest,
}

impl OutgoingRequest<'_> {
    /// Returns the body for the engine that responds.
    pub(in crate::proxy) fn body(&self) -> Segments {
        let body = self.body.clone();
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
            body: sending.body(),
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
    if !status.is_success() {
        if take_status(proxy, sending, decision, &mut attempt, status) {
            // Read to the end, so that the connection can be reused.
            drop(read_refusal(response).await);
            let failure = AttemptError::RefusedCredentials;
            return Err(fail(proxy, sending, decision, attempt, failure));
        }
        if !is_last && is_refusal(proxy, sending, status) {
            return Err(refused(attempt, response).await);
        }
    }
    let error = match open(sending, &mut response).await {
        Ok(Opening::Answer) => {
            if status.is_success() {
                take_status(proxy, sending, decision, &mut attempt, status);
            }
            let begins = response.body().first();
            if lacks_listed_model(proxy, sending.proxied, backend, status, begins) {
                proxy.backends.doubt_list(backend.slot);
                if !is_last {
                    return Err(refused(attempt, response).await);
                }
            }
            return Ok((response, attempt));
        }
        Ok(Opening::Error(error)) => {
            if take_status(proxy, sending, decision, &mut attempt, error.status) {
                let failure = AttemptError::RefusedCredentials;
                return Err(fail(proxy, sending, decision, attempt, failure));
            }
            let failure = reported(proxy, sending, backend, response, &error);
            attempt.end(failure.end(), Instant::now());
            return Err(failure);
        }
        Err(error) => error,
    };
    if status.is_success() && !matches!(error, SendError::WithoutPrompt) {
        let user = Some(attempt.user());
        let now = Instant::now();
        proxy.backends.report_no_answer(decision.backend, user, now);
    }
    let failure = AttemptError::of(error, is_sent);
    Err(fail(proxy, sending, decision, attempt, failure))
}

/// Waits until the body of a response has begun, and judges it. A text in place of generated output
/// is a fault of the engine, or of a proxy before it.
async fn open(
    sending: &OutgoingRequest<'_>,
    response: &mut Response<EngineBody>,
) -> Result<Opening, SendError> {
    let begun = begin(response, sending.first_byte_by);
    let opening = sending.with_prompt(begun).await?;
    let generates = sending.proxied.parsed.reply != ReplyShape::None;
    if generates && response.status().is_success() && is_text(response.headers()) {
        let beginning = response.body().first().unwrap_or_default();
        if !beginning.trim_ascii_start().starts_with(b"{") {
            return Err(SendError::Ended);
        }
    }
    Ok(opening)
}

/// Reports a status, and returns whether it refuses credentials that are not the client's.
fn take_status(
    proxy: &Proxy,
    sending: &OutgoingRequest<'_>,
    decision: &Decision,
    attempt: &mut Attempt,
    status: StatusCode,
) -> bool {
    let backend = decision.backend;
    let refuses_router = refuses_router(proxy, sending.proxied, backend, status);
    report_status(proxy, (backend, attempt.user()), status, refuses_router);
    if let Some(record) = &decision.record {
        record.answered(status.as_u16());
    }
    if let Some(trace) = attempt.trace() {
        trace.answered(status.as_u16());
    }
    refuses_router
}

/// Whether a response with this status means that the backend did not run the request.
fn is_refusal(proxy: &Proxy, sending: &OutgoingRequest<'_>, status: StatusCode) -> bool {
    // Engines respond with such a status when they cannot fetch the prompt's blocks.
    let is_transfer_lost = sending.transfer.is_some() && status.is_server_error();
    is_transfer_lost || proxy.settings.retry.takes(status)
}

/// Ends an attempt that the backend refused with this response.
async fn refused(attempt: Attempt, response: Response<EngineBody>) -> AttemptError {
    attempt.end(AttemptEnd::NotRun, Instant::now());
    AttemptError::Refused(read_refusal(response).await.map(Box::new))
}

/// Treats an error in the content of a response like a response with its status.
fn reported(
    proxy: &Proxy,
    sending: &OutgoingRequest<'_>,
    backend: BackendRef,
    response: Response<EngineBody>,
    error: &EngineError,
) -> AttemptError {
    let (head, mut body) = response.into_parts();
    body.skip_arrived();
    let dialect = Dialect::of(sending.proxied.head.uri.path());
    let mut response = Box::new(error.response(head, dialect));
    let body = Some(&**response.body());
    let lacks_model = lacks_listed_model(proxy, sending.proxied, backend, error.status, body);
    if lacks_model {
        proxy.backends.doubt_list(backend.slot);
    }
    if lacks_model || is_refusal(proxy, sending, error.status) {
        return AttemptError::Refused(Some(response));
    }
    let end = end_of_error(proxy, error.status);
    if end == AttemptEnd::Failed {
        discourage_retry(response.headers_mut());
    }
    AttemptError::Reported(response, end)
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
pub(in crate::proxy) fn fail(
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
    match failure.may_have_begun() && begins_again(proxy, sending.proxied) {
        true => {
            let earlier = &sending.proxied.earlier;
            earlier.hand_over(attempt, failure.end(), Instant::now());
        }
        false => attempt.end(failure.end(), Instant::now()),
    }
    note(proxy, sending, (decision.backend, &decision.name), &failure);
    failure
}

/// Whether a request may be sent to another backend although one may have run it: a stream of which
/// the client has received nothing. What ends an engine does not travel far: a request that broke
/// two is refused.
pub(super) fn begins_again(proxy: &Proxy, proxied: &ProxiedRequest) -> bool {
    let parsed = &proxied.parsed;
    proxy.settings.streams.resume == StreamResume::Auto
        && parsed.stream
        && parsed.reply != ReplyShape::None
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
        | AttemptError::Refused(_)
        | AttemptError::Reported(..) => {}
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
    pub(in crate::proxy) body: Segments,
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
        let mut request = Request::new(post.body.clone());
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
