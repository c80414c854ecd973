//! One attempt: sends a request to the backend that was chosen for it and waits until the answer
//! begins.
//!
//! The result is an outcome ([`Outcome`], [`AttemptError`]), which alone determines what the
//! backend's circuit learns, how the attempt is charged, and whether another backend may be tried:
//! only when this one surely did not run the request.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_LENGTH;
use http::{Method, Request, Response, StatusCode, Uri, Version};
use http_body_util::{BodyExt, Limited};
use state::Backend;
use state::ids::{BackendRef, UserKey};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::Proxy;
use super::first_byte::begin;
use super::headers::{Hop, clean_answer, toward_engine};
use super::proxied::ProxiedRequest;
use super::response_body::ERROR_BYTES_MAX;
use super::suspects::WatchedRequest;
use crate::backends::EngineHeaders;
use crate::backends::pool::{EngineBody, Segments, SendError};
use crate::error::ProxyError;
use crate::isolation::CacheIsolation;
use crate::routing::{Attempt, AttemptEnd, Decision, DecisionRecord, Usage};
use crate::traces::{AttemptTrace, TraceHeaders};

/// How long the rest of a refusal is waited for.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(2);

/// The request as every attempt sends it.
pub(super) struct OutgoingRequest<'a> {
    pub(super) asked: &'a ProxiedRequest,
    pub(super) uri: Uri,
    pub(super) body: Segments,
    /// The body for engines that know salts, of a user whose cached blocks are kept apart.
    pub(super) salted: Option<Segments>,
    /// What the engine that answers is told of a prompt that another has computed.
    pub(super) transfer: Option<Bytes>,
    /// Where the engine that answers meets the one that computes the prompt; `None`: nowhere.
    pub(super) meeting: Option<Arc<BootstrapSession>>,
    pub(super) first_byte_by: Instant,
    pub(super) watched: WatchedRequest,
}

impl OutgoingRequest<'_> {
    /// The body for the engine of `backend`.
    pub(super) fn body_for(&self, proxy: &Proxy, backend: &Backend) -> Segments {
        let is_salted = self.salts(proxy, backend);
        if !is_salted && self.asked.identity.isolation != CacheIsolation::None {
            proxy.metrics.unsalted.inc();
        }
        let salted = self.salted.as_ref().filter(|_| is_salted);
        let body = salted.unwrap_or(&self.body).clone();
        match &self.transfer {
            None => body,
            Some(member) => body.with_inserted(self.asked.parsed.insert_at, member.clone()),
        }
    }

    /// Waits for `step` as long as its engine can get the prompt.
    async fn with_prompt<T>(
        &self,
        step: impl Future<Output = Result<T, SendError>>,
    ) -> Result<T, SendError> {
        let Some(meeting) = &self.meeting else {
            return step.await;
        };
        tokio::select! {
            biased;
            () = meeting.failed.cancelled() => Err(SendError::WithoutPrompt),
            done = step => done,
        }
    }

    /// Whether the engine of `backend` gets the salt of the user's cached blocks.
    pub(super) fn salts(&self, proxy: &Proxy, backend: &Backend) -> bool {
        let is_required = self.asked.identity.isolation == CacheIsolation::Required;
        self.salted.is_some() && (is_required || proxy.backends.knows_salts(backend))
    }
}

/// How an attempt went, for the request.
pub(super) enum AttemptResult {
    /// The engine's answer, whose body has begun or is awaited no longer.
    Answered(Response<EngineBody>, Attempt),
    /// The engine did not run the request: another may be tried.
    NotRun(NotRun),
    /// The engine may have run the request: no other is tried.
    Lost(ProxyError),
}

/// Why an engine did not run a request.
pub(super) enum NotRun {
    /// There was no connection to it, or the backend was removed.
    Unreachable,
    /// This replica had no descriptor or port left for a connection.
    OutOfConnections,
    /// It answered with a redirection.
    Redirected,
    /// The engine that computes the prompt for it failed.
    WithoutPrompt,
    /// It refused. `None`: the refusal was too long or took too long to be passed on.
    Refused(Option<Response<Bytes>>),
}

impl NotRun {
    /// Whether the attempt cost the engine anything, so that a retry counts against the budget.
    pub(super) fn was_load(&self) -> bool {
        match self {
            Self::Unreachable => false,
            Self::OutOfConnections | Self::Redirected | Self::WithoutPrompt | Self::Refused(_) => {
                true
            }
        }
    }

    /// What the client is told when no other backend is tried: the engine's refusal, or an error.
    pub(super) fn answer(self) -> Result<Response<Bytes>, ProxyError> {
        match self {
            Self::Unreachable => Err(ProxyError::Unreachable),
            Self::OutOfConnections => Err(ProxyError::OutOfConnections),
            Self::Redirected => Err(ProxyError::Redirected),
            Self::WithoutPrompt => Err(ProxyError::EngineBroke),
            Self::Refused(refusal) => refusal.ok_or(ProxyError::Refused),
        }
    }
}

/// What came of sending a request.
enum Outcome {
    /// An answer to pass on.
    Answer(Response<EngineBody>),
    /// An answer whose status says that the engine did not run the request.
    Refusal(Response<EngineBody>),
    /// An answer that points to the engine's own address space; what answers there would not be
    /// counted.
    Redirection,
    Failure(AttemptError),
}

/// Why an attempt has no answer.
#[derive(Debug)]
pub(super) enum AttemptError {
    /// The backend was removed, or replaced by another, since it was chosen.
    Gone,
    /// This replica had no descriptor or port left for a connection.
    OutOfConnections(SendError),
    /// No connection could be made.
    Unreachable(SendError),
    /// The new connection broke before the request went over it.
    BrokeUnsent(SendError),
    /// The connection broke after the request was sent, before the answer's body began.
    Broke(SendError),
    /// The engine that computes the prompt for this one failed; nothing was answered.
    WithoutPrompt,
    /// There was no connection by the deadline.
    TimedOutUnsent,
    /// The request was sent, and no head came by the deadline.
    TimedOut,
}

impl AttemptError {
    pub(super) fn of(error: SendError, is_sent: bool) -> Self {
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

    /// As the admin API names it.
    pub(super) fn label(&self) -> &'static str {
        match self {
            Self::Gone => "backend-removed",
            Self::OutOfConnections(_) => "out-of-connections",
            Self::Unreachable(_) => "unreachable",
            Self::BrokeUnsent(_) => "broke-unsent",
            Self::Broke(_) => "broke",
            Self::WithoutPrompt => "without-prompt",
            Self::TimedOutUnsent => "timed-out-unsent",
            Self::TimedOut => "timed-out",
        }
    }

    /// Tells the decision's record.
    fn note(&self, record: &DecisionRecord) {
        match self {
            Self::OutOfConnections(error)
            | Self::Unreachable(error)
            | Self::BrokeUnsent(error)
            | Self::Broke(error) => record.failed_with(self.label(), error),
            Self::Gone | Self::WithoutPrompt | Self::TimedOutUnsent | Self::TimedOut => {
                record.failed(self.label());
            }
        }
    }

    /// Tells the circuit of `backend`. It hears of a request that timed out after it was sent by the
    /// end of the attempt.
    pub(super) fn report(&self, proxy: &Proxy, backend: BackendRef, user: UserKey) {
        let (backends, now) = (&proxy.backends, Instant::now());
        match self {
            Self::Gone | Self::OutOfConnections(_) | Self::WithoutPrompt | Self::TimedOut => {}
            Self::Unreachable(_) | Self::TimedOutUnsent => {
                backends.report_no_answer(backend, None, now);
            }
            Self::BrokeUnsent(_) | Self::Broke(_) => {
                backends.report_no_answer(backend, Some(user), now);
            }
        }
    }

    pub(super) fn end(&self) -> AttemptEnd {
        match self {
            Self::Gone
            | Self::OutOfConnections(_)
            | Self::Unreachable(_)
            | Self::BrokeUnsent(_)
            | Self::WithoutPrompt
            | Self::TimedOutUnsent => AttemptEnd::NotRun,
            Self::Broke(_) => AttemptEnd::Failed,
            // It may have computed all the while.
            Self::TimedOut => AttemptEnd::Broken,
        }
    }

    pub(super) fn result(&self) -> AttemptResult {
        match self {
            Self::WithoutPrompt => AttemptResult::NotRun(NotRun::WithoutPrompt),
            Self::Gone | Self::Unreachable(_) => AttemptResult::NotRun(NotRun::Unreachable),
            Self::OutOfConnections(_) => AttemptResult::NotRun(NotRun::OutOfConnections),
            Self::BrokeUnsent(_) | Self::Broke(_) => AttemptResult::Lost(ProxyError::EngineBroke),
            Self::TimedOutUnsent | Self::TimedOut => AttemptResult::Lost(ProxyError::EngineTimeout),
        }
    }
}

impl Outcome {
    fn of(response: Response<EngineBody>, is_refusal: bool) -> Self {
        let status = response.status();
        if status.is_informational() {
            // No client asked for another protocol.
            Self::Failure(AttemptError::Broke(SendError::Ended))
        } else if status.is_redirection() {
            Self::Redirection
        } else if is_refusal {
            Self::Refusal(response)
        } else {
            Self::Answer(response)
        }
    }

    /// Tells the decision's record.
    fn note(&self, record: &DecisionRecord) {
        match self {
            Self::Answer(response) | Self::Refusal(response) => {
                record.answered(response.status().as_u16());
            }
            Self::Redirection => record.failed("redirected"),
            Self::Failure(failure) => failure.note(record),
        }
    }

    /// Tells the span.
    fn trace(&self, trace: &mut AttemptTrace) {
        match self {
            Self::Answer(response) | Self::Refusal(response) => {
                trace.answered(response.status().as_u16());
            }
            Self::Redirection => trace.failed("redirected"),
            Self::Failure(failure) => trace.failed(failure.label()),
        }
    }

    /// Tells the backend's circuit. It hears of a successful answer once its body begins.
    fn report(&self, proxy: &Proxy, decision: &Decision, user: UserKey) {
        let backend = decision.backend;
        match self {
            Self::Answer(response) | Self::Refusal(response) => {
                report_status(proxy, backend, user, response.status());
            }
            Self::Redirection => {
                report_status(proxy, backend, user, StatusCode::TEMPORARY_REDIRECT);
            }
            Self::Failure(failure) => failure.report(proxy, backend, user),
        }
    }
}

/// Tells a backend's circuit of an answer with this status. It hears of a successful one once its
/// body begins.
pub(super) fn report_status(proxy: &Proxy, backend: BackendRef, user: UserKey, status: StatusCode) {
    let now = Instant::now();
    if status.is_client_error() {
        proxy.backends.report_answer(backend, user, now);
    } else if !status.is_success() {
        proxy.backends.report_no_answer(backend, Some(user), now);
    }
}

/// Sends the request to the decided backend. With `is_last` a refusal is an answer like any other.
pub(super) async fn attempt(
    proxy: &Arc<Proxy>,
    sending: &OutgoingRequest<'_>,
    decision: &Decision,
    mut attempt: Attempt,
    is_last: bool,
) -> AttemptResult {
    let asked = sending.asked;
    let trace = asked.trace_headers(attempt.trace());
    let pending = PendingAttempt::of(attempt).meeting(sending.meeting.as_ref());
    let sent = {
        let request = Post {
            body: &|backend: &Backend| sending.body_for(proxy, backend),
            trace: trace.as_ref(),
            sent: &|| pending.is_sent.store(true, Relaxed),
        };
        let (uri, to) = (&sending.uri, decision.backend);
        // Pinned here: what takes a future by value and awaits it keeps it twice.
        let send = pin!(post(proxy, sending.asked, uri, to, request));
        timeout_at(sending.first_byte_by, sending.with_prompt(send)).await
    };
    let (mut attempt, is_sent) = pending.over();
    let outcome = match sent {
        Ok(Ok(response)) => {
            let status = response.status();
            // Engines answer so when they cannot fetch the prompt's blocks.
            let is_transfer_lost = sending.transfer.is_some() && status.is_server_error();
            let is_refusal = is_transfer_lost || proxy.settings.retry_statuses.contains(&status);
            Outcome::of(response, is_refusal && !is_last)
        }
        Ok(Err(error)) => Outcome::Failure(AttemptError::of(error, is_sent)),
        Err(_) if is_sent => Outcome::Failure(AttemptError::TimedOut),
        Err(_) => Outcome::Failure(AttemptError::TimedOutUnsent),
    };
    outcome.report(proxy, decision, attempt.user());
    if let Some(record) = &decision.record {
        outcome.note(record);
    }
    if let Some(trace) = attempt.trace() {
        outcome.trace(trace);
    }
    let failure = match outcome {
        Outcome::Answer(mut response) => {
            let begun = sending.with_prompt(begin(&mut response, sending.first_byte_by));
            let Err(error) = begun.await else {
                return AttemptResult::Answered(response, attempt);
            };
            if response.status().is_success() && !matches!(error, SendError::WithoutPrompt) {
                let user = Some(attempt.user());
                let now = Instant::now();
                proxy.backends.report_no_answer(decision.backend, user, now);
            }
            let failure = AttemptError::of(error, is_sent);
            if let Some(record) = &decision.record {
                failure.note(record);
            }
            if let Some(trace) = attempt.trace() {
                trace.failed(failure.label());
            }
            failure
        }
        Outcome::Refusal(response) => {
            attempt.end(AttemptEnd::NotRun, Instant::now());
            return AttemptResult::NotRun(NotRun::Refused(read_refusal(response).await));
        }
        Outcome::Redirection => {
            attempt.end(AttemptEnd::NotRun, Instant::now());
            return AttemptResult::NotRun(NotRun::Redirected);
        }
        Outcome::Failure(failure) => failure,
    };
    attempt.end(failure.end(), Instant::now());
    note(proxy, sending, (decision.backend, &decision.name), &failure);
    failure.result()
}

/// What else follows from a failure: for the backend's health, the connections and the suspects.
pub(super) fn note(
    proxy: &Proxy,
    sending: &OutgoingRequest<'_>,
    (backend, name): (BackendRef, &str),
    failure: &AttemptError,
) {
    let asked = sending.asked;
    let request_id = asked.request_id.to_str().unwrap_or_default();
    let trace_id = || asked.trace_id().map(tracing::field::display);
    match failure {
        AttemptError::WithoutPrompt | AttemptError::TimedOutUnsent | AttemptError::TimedOut => {}
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

/// An attempt while its answer's head is waited for. A client that leaves then pays only if its
/// request was sent.
pub(super) struct PendingAttempt {
    attempt: Option<Attempt>,
    pub(super) is_sent: AtomicBool,
    meeting: Option<Arc<BootstrapSession>>,
}

/// Two engines that got a request at once, and meet over its prompt.
#[derive(Debug, Default)]
pub(super) struct BootstrapSession {
    /// The one that computes the prompt has failed.
    pub(super) failed: CancellationToken,
    /// It was sent the request: a client that leaves pays for the prompt.
    pub(super) is_sent: AtomicBool,
    /// When the prompt was computed, and what was said of it.
    pub(super) computed: OnceLock<(Instant, Option<Usage>)>,
}

impl PendingAttempt {
    pub(super) fn of(attempt: Attempt) -> Self {
        Self {
            attempt: Some(attempt),
            is_sent: AtomicBool::new(false),
            meeting: None,
        }
    }

    /// The same of an attempt whose prompt another engine computes at the same time.
    fn meeting(mut self, meeting: Option<&Arc<BootstrapSession>>) -> Self {
        self.meeting = meeting.cloned();
        self
    }

    /// The wait is over: the attempt, and whether its request was sent.
    pub(super) fn over(mut self) -> (Attempt, bool) {
        let attempt = self.take();
        let is_sent = self.is_sent.load(Relaxed);
        (attempt.expect("it is taken here only"), is_sent)
    }

    /// The attempt, with what is known of its prompt.
    fn take(&mut self) -> Option<Attempt> {
        let mut attempt = self.attempt.take()?;
        let meeting = self.meeting.as_ref();
        if let Some((at, usage)) = meeting.and_then(|meeting| meeting.computed.get()) {
            attempt.prompt_computed(*usage, *at);
        }
        Some(attempt)
    }
}

impl Drop for PendingAttempt {
    fn drop(&mut self) {
        if let Some(attempt) = self.take() {
            let meeting = self.meeting.as_ref();
            let is_computed = meeting.is_some_and(|meeting| meeting.is_sent.load(Relaxed));
            let end = match self.is_sent.load(Relaxed) || is_computed {
                true => AttemptEnd::ClientLeft,
                false => AttemptEnd::NotRun,
            };
            attempt.end(end, Instant::now());
        }
    }
}

/// What goes to an engine.
pub(super) struct Post<'a> {
    /// The body for the engine of a backend.
    pub(super) body: &'a (dyn Fn(&Backend) -> Segments + Sync),
    /// What the engine is told of the trace; `None`: what the client said.
    pub(super) trace: Option<&'a TraceHeaders>,
    /// Called when it goes over a connection.
    pub(super) sent: &'a (dyn Fn() + Sync),
}

/// Sends a client's request to the engine of `to`.
pub(super) async fn post(
    proxy: &Proxy,
    asked: &ProxiedRequest,
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
        ..hop(proxy, asked, engine_key.as_ref(), rank)
    };
    let build = || {
        (post.sent)();
        let mut request = Request::new(body.clone());
        *request.method_mut() = Method::POST;
        *request.uri_mut() = uri.clone();
        *request.headers_mut() = toward_engine(&asked.head.headers, endpoint.host(), &hop);
        request
    };
    endpoint.send(&build).await
}

/// What an engine is told about the way of a request.
pub(super) fn hop<'a>(
    proxy: &'a Proxy,
    asked: &'a ProxiedRequest,
    engine_key: Option<&'a EngineHeaders>,
    rank: Option<u16>,
) -> Hop<'a> {
    Hop {
        rank,
        trace: None,
        peer: &asked.peer,
        version: asked.head.version,
        request_id: &asked.request_id,
        forward_credentials: proxy.settings.api_keys.is_none(),
        engine_key,
        strip: &proxy.settings.strip_headers,
    }
}

/// Reads a refusal, so that it can be passed on if no other backend is tried. `None`: it is too
/// long, or does not come in time.
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
