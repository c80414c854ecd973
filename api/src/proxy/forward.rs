//! Forwards a parsed request: admits it, sends it, and retries on the next candidate where that is
//! safe, until the head of an answer arrives. Queueing is [`crate::admission`]'s part.
//!
//! A request goes to another backend only when the one before did not run it: no connection, or an
//! answer whose status says so. A connection that breaks after the request was sent is not
//! repeated elsewhere, because the engine may have computed on it, or have died of it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, Version};
use http_body_util::{BodyExt, Limited};
use state::ids::{BackendRef, Slot, UserKey};
use state::quotas::LimitKind;
use tokio::time::{Instant, timeout, timeout_at};
use xxhash_rust::xxh3::xxh3_64;

use super::Proxy;
use super::ahead::Bounds;
use super::beginning::{begin, is_framed};
use super::deadline;
use super::headers::{Hop, clean_answer, toward_engine};
use super::metrics::Ledger;
use super::relay::{Content, ERROR_BYTES_MAX, Relay, SharedRelay, Source, Waits};
use super::splice::splice;
use super::sse::{Events, Wanted};
use super::suspects::Watched;
use crate::admission::{AdmissionRejection, AdmissionRequest};
use crate::backends::pool::{EngineBody, Segments, SendFailure};
use crate::error::{Failure, SHOULD_RETRY};
use crate::prompt::ReplyShape;
use crate::prompt::{ParsedBody, PromptIdentity};
use crate::routing::{
    Attempt, AttemptEnd, Decision, HiddenOutput, POLICY, Router, RoutingRejection, RoutingRequest,
    SELECT,
};

/// How long the rest of such an answer is waited for.
const HELD_ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Least and most time after which a refused client is asked to come back, before jitter.
const RETRY_AFTER_MS_LEAST: u64 = 1000;
const RETRY_AFTER_MS_MAX: u64 = 60_000;

/// A request that is read and understood.
pub(super) struct Asked {
    pub(super) head: http::request::Parts,
    pub(super) body: Bytes,
    pub(super) parsed: ParsedBody,
    pub(super) identity: PromptIdentity,
    pub(super) user: String,
    pub(super) request_id: HeaderValue,
    /// The client's address.
    pub(super) peer: HeaderValue,
    /// Among requests that wait.
    pub(super) priority: i16,
    /// How long its client waits, as it tells.
    pub(super) deadline: Option<Duration>,
}

impl AdmissionRequest for Asked {
    fn ask<'a>(&'a self, router: &'a Router, excluded: &'a [Slot]) -> RoutingRequest<'a> {
        RoutingRequest {
            model: &self.parsed.model,
            identity: &self.identity,
            request_id: self.request_id.to_str().unwrap_or_default(),
            user: &self.user,
            headers: Some(&self.head.headers),
            // An unknown one was refused before.
            policy: router.asked_policy(&self.head.headers).ok().flatten(),
            excluded,
        }
    }

    fn priority(&self) -> i16 {
        self.priority
    }

    fn tokens_max(&self) -> Option<u32> {
        self.parsed.max_tokens
    }

    fn is_selective(&self) -> bool {
        self.head.headers.contains_key(SELECT)
    }

    fn wait_max(&self, service: Duration) -> Option<Duration> {
        let deadline = self.deadline?;
        Some(deadline::wait_max(deadline, service, self.parsed.stream))
    }
}

/// What the client gets.
pub(super) enum Forwarded {
    /// An engine's answer as it comes.
    Relayed(Response<SharedRelay>),
    /// An engine's refusal, after which no other backend could be tried.
    Held(Response<Bytes>),
}

/// How the last attempt went, for when there is no further one.
enum Last {
    None,
    Failed(Failure),
    Refused(Response<Bytes>),
}

/// How one attempt went.
#[expect(
    clippy::large_enum_variant,
    reason = "made once a request and taken apart at once"
)]
enum Tried {
    Answered(Response<EngineBody>, Attempt),
    /// The next candidate may be tried.
    NotRun(Last),
    /// It may have run: nobody else is asked.
    Lost(Failure),
}

/// The request as every attempt sends it.
struct Sending<'a> {
    asked: &'a Asked,
    uri: Uri,
    body: Segments,
    first_byte_by: Instant,
    watched: Watched,
}

pub(super) async fn forward(
    proxy: &Arc<Proxy>,
    asked: &Arc<Asked>,
    ledger: &mut Ledger,
) -> Result<Forwarded, Failure> {
    if proxy.suspects.refuses(asked) {
        proxy.metrics.suspects_refused.inc();
        return Err(Failure::BreaksBackends);
    }
    ledger.spends(proxy.budget.begin(&asked.parsed.model));
    let path = asked.head.uri.path();
    let (body, wanted) = splice(
        proxy.settings.usage_splice,
        path,
        &asked.parsed,
        &asked.body,
    );
    let uri = asked
        .head
        .uri
        .path_and_query()
        .cloned()
        .map_or_else(Uri::default, Uri::from);
    let mut sending = Sending {
        asked,
        uri,
        body,
        first_byte_by: Instant::now(),
        watched: proxy.suspects.watch(asked),
    };
    check_policy(proxy, asked)?;
    check_select(proxy, asked)?;
    let mut excluded: Vec<Slot> = Vec::new();
    let mut last = Last::None;
    loop {
        let admitted = match proxy.admission.admit(asked, &excluded).await {
            Ok(admitted) => admitted,
            Err(why) => return give_up(last, refusal(why, asked)),
        };
        let (decision, mut taken) = admitted.into_parts();
        taken.hides(hidden(&asked.parsed).filter(|_| !asked.parsed.stream));
        sending.first_byte_by = Instant::now() + proxy.settings.timeouts.first_byte;
        sending.watched.sent();
        let is_last = excluded.len() + 1 >= proxy.settings.attempts_max;
        match attempt(proxy, &sending, &decision, taken, is_last).await {
            Tried::Answered(response, attempt) => {
                let relayed = relay(proxy, &sending, &decision, response, attempt, wanted);
                return Ok(Forwarded::Relayed(relayed));
            }
            Tried::Lost(failure) => return Err(failure),
            Tried::NotRun(how) => last = how,
        }
        // A connection that could not be made was no load.
        let is_refusal = !matches!(last, Last::Failed(Failure::Unreachable));
        let is_spent = !is_last && is_refusal && !ledger.may_retry();
        if is_spent {
            proxy.metrics.retries_refused.inc();
        }
        if is_last || is_spent {
            return give_up(last, Failure::Unreachable);
        }
        proxy.metrics.retries.inc();
        excluded.push(decision.backend.slot);
    }
}

/// What an answer leaves unseen until its end, were it not a stream; `None`: nothing is made for it.
fn hidden(parsed: &ParsedBody) -> Option<HiddenOutput> {
    (parsed.reply != ReplyShape::None).then_some(HiddenOutput {
        choices: parsed.choices,
        tokens_max: parsed.max_tokens,
        is_whole_at_once: true,
    })
}

fn check_policy(proxy: &Proxy, asked: &Asked) -> Result<(), Failure> {
    let policy = proxy.router.asked_policy(&asked.head.headers);
    policy.map(|_| ()).map_err(|unknown| Failure::BadRequest {
        message: unknown.to_string(),
        param: Some(POLICY.to_string()),
    })
}

fn check_select(proxy: &Proxy, asked: &Asked) -> Result<(), Failure> {
    let checked = proxy.router.check_select(&asked.head.headers);
    checked.map_err(|bad| Failure::BadRequest {
        message: bad.to_string(),
        param: Some(SELECT.to_string()),
    })
}

/// Why a request was not admitted, as its client is told.
fn refusal(why: AdmissionRejection, asked: &Asked) -> Failure {
    match why {
        AdmissionRejection::NoBackend(RoutingRejection::UnknownModel) => Failure::UnknownModel {
            model: shown(&asked.parsed.model),
        },
        AdmissionRejection::NoBackend(RoutingRejection::NoneHealthy) => Failure::NoneHealthy,
        AdmissionRejection::NoBackend(RoutingRejection::NoneSelected) => Failure::NoneSelected,
        AdmissionRejection::NoBackend(RoutingRejection::AllTried) => Failure::Unreachable,
        AdmissionRejection::NoBackend(RoutingRejection::TooLarge) => Failure::BadRequest {
            message: "the prompt is larger than the cache of any backend".to_owned(),
            param: None,
        },
        AdmissionRejection::NoBackend(RoutingRejection::AtLimit) => Failure::Overloaded,
        AdmissionRejection::OverLimit(over) => Failure::OverLimit {
            limit: match over.limit {
                LimitKind::Requests => "requests per window",
                LimitKind::Tokens => "tokens per window",
                LimitKind::Concurrent => "requests at once",
            },
            retry_after_ms: over.retry_after_ms,
        },
        AdmissionRejection::QueueFull { retry_after_ms } => Failure::QueueFull {
            retry_after_ms: jittered(retry_after_ms, asked),
        },
        AdmissionRejection::TooLate {
            wait_ms,
            wait_ms_max,
        } => Failure::TooLate {
            wait_ms,
            wait_ms_max,
            retry_after_ms: jittered(wait_ms, asked),
        },
        AdmissionRejection::WaitedTooLong { retry_after_ms } => Failure::WaitedTooLong {
            retry_after_ms: jittered(retry_after_ms, asked),
        },
        AdmissionRejection::Leaving => Failure::Leaving,
    }
}

/// When a refused client should ask again: up to half as much later than after `wait_ms`, by its
/// request, so that those who were refused together do not come back together.
fn jittered(wait_ms: u64, asked: &Asked) -> u64 {
    let wait_ms = wait_ms.clamp(RETRY_AFTER_MS_LEAST, RETRY_AFTER_MS_MAX);
    wait_ms + xxh3_64(asked.request_id.as_bytes()) % (wait_ms / 2)
}

/// A model's name as an error repeats it.
pub(super) fn shown(model: &str) -> String {
    model[..model.floor_char_boundary(state::command::NAME_BYTES_MAX)].to_owned()
}

fn give_up(last: Last, otherwise: Failure) -> Result<Forwarded, Failure> {
    match last {
        Last::None => Err(otherwise),
        Last::Failed(failure) => Err(failure),
        Last::Refused(response) => Ok(Forwarded::Held(response)),
    }
}

async fn attempt(
    proxy: &Arc<Proxy>,
    sending: &Sending<'_>,
    decision: &Decision,
    attempt: Attempt,
    is_last: bool,
) -> Tried {
    let pending = Pending::of(attempt);
    let send = send(proxy, sending, decision, &pending.is_sent);
    let sent = timeout_at(sending.first_byte_by, send).await;
    let (attempt, is_sent) = pending.over();
    if let Ok(sent) = &sent {
        judge(proxy, decision.backend, attempt.user(), sent);
    } else if !is_sent {
        proxy.backends.report_no_answer(decision.backend, None);
    }
    let failure = match sent {
        Ok(Ok(response)) if response.status().is_informational() => {
            // Nobody asked for another protocol.
            SendFailure::Ended
        }
        Ok(Ok(response)) if response.status().is_redirection() => {
            // Where to is the engine's own address space; the answer there would not be counted.
            attempt.end(AttemptEnd::NotRun);
            return Tried::NotRun(Last::Failed(Failure::Redirected));
        }
        Ok(Ok(mut response)) => {
            let is_refusal = proxy.settings.retry_statuses.contains(&response.status());
            if is_refusal && !is_last {
                attempt.end(AttemptEnd::NotRun);
                let held = hold(response).await;
                return Tried::NotRun(held.map_or(Last::Failed(Failure::Refused), Last::Refused));
            }
            let failure = match begin(&mut response, sending.first_byte_by).await {
                Ok(()) => return Tried::Answered(response, attempt),
                Err(failure) => failure,
            };
            if response.status().is_success() {
                // Of other heads the circuit has heard.
                let user = Some(attempt.user());
                proxy.backends.report_no_answer(decision.backend, user);
            }
            failure
        }
        Ok(Err(failure)) => failure,
        Err(_) => {
            // It may have computed all the while.
            attempt.end(if is_sent {
                AttemptEnd::Broken
            } else {
                AttemptEnd::NotRun
            });
            return Tried::Lost(Failure::EngineTimeout);
        }
    };
    let may_have_run = is_sent && matches!(failure, SendFailure::Broke(_) | SendFailure::Ended);
    if may_have_run {
        sending.watched.broke();
    }
    attempt.end(if may_have_run {
        AttemptEnd::Failed
    } else {
        AttemptEnd::NotRun
    });
    failed(proxy, decision, &failure)
}

/// What follows from an attempt that failed before the first byte of its answer's body.
fn failed(proxy: &Proxy, decision: &Decision, failure: &SendFailure) -> Tried {
    if failure.is_local() {
        tracing::debug!(backend = &*decision.name, error = %failure, "could not query backend");
        proxy.pool.close_idle();
        return Tried::NotRun(Last::Failed(Failure::OutOfConnections));
    }
    if !matches!(failure, SendFailure::Gone) {
        proxy.backends.report_failure(decision.backend.slot);
    }
    tracing::debug!(backend = &*decision.name, error = %failure, "attempt failed");
    match failure {
        SendFailure::Url(_) | SendFailure::Gone | SendFailure::Connect(_) => {
            Tried::NotRun(Last::Failed(Failure::Unreachable))
        }
        SendFailure::Broke(_) | SendFailure::Ended => Tried::Lost(Failure::EngineBroke),
    }
}

/// What the backend's circuit hears of a head, or of none. A success is one once its body begins; a
/// timeout after the request was sent is told by the attempt's end.
fn judge(
    proxy: &Proxy,
    backend: BackendRef,
    user: UserKey,
    sent: &Result<Response<EngineBody>, SendFailure>,
) {
    match sent {
        Ok(response) if response.status().is_success() => {}
        Ok(response) if response.status().is_client_error() => {
            proxy.backends.report_answer(backend, user);
        }
        Err(SendFailure::Gone) => {}
        Err(failure) if failure.is_local() => {}
        Err(SendFailure::Url(_) | SendFailure::Connect(_)) => {
            proxy.backends.report_no_answer(backend, None);
        }
        Ok(_) | Err(_) => proxy.backends.report_no_answer(backend, Some(user)),
    }
}

/// An attempt while its answer's head is waited for. A client that leaves then pays only if its
/// request was sent.
struct Pending {
    attempt: Option<Attempt>,
    is_sent: AtomicBool,
}

impl Pending {
    fn of(attempt: Attempt) -> Self {
        Self {
            attempt: Some(attempt),
            is_sent: AtomicBool::new(false),
        }
    }

    /// The wait is over: the attempt, and whether its request was sent.
    fn over(mut self) -> (Attempt, bool) {
        let attempt = self.attempt.take();
        let is_sent = self.is_sent.load(Ordering::Relaxed);
        (attempt.expect("it is taken here only"), is_sent)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(attempt) = self.attempt.take() {
            let is_sent = self.is_sent.load(Ordering::Relaxed);
            attempt.end(if is_sent {
                AttemptEnd::ClientLeft
            } else {
                AttemptEnd::NotRun
            });
        }
    }
}

async fn send(
    proxy: &Proxy,
    sending: &Sending<'_>,
    decision: &Decision,
    is_sent: &AtomicBool,
) -> Result<Response<EngineBody>, SendFailure> {
    let asked = sending.asked;
    let registry = proxy.view.registry();
    let backend = registry
        .backends
        .binary_search_by_key(&decision.backend.slot, |backend| backend.handle.slot)
        .map(|at| &registry.backends[at])
        .ok()
        .filter(|backend| backend.handle == decision.backend)
        .ok_or(SendFailure::Gone)?;
    let endpoint = proxy
        .pool
        .endpoint(decision.backend, backend.spec.url.as_str())?;
    let keys = proxy.backends.keys();
    let engine_key = keys.of_requests(&backend.spec.id, &backend.spec.url);
    drop(registry);
    let hop = Hop {
        peer: &asked.peer,
        version: asked.head.version,
        request_id: &asked.request_id,
        forward_credentials: proxy.settings.api_keys.is_none(),
        engine_key,
        strip: &proxy.settings.strip_headers,
    };
    let build = || {
        is_sent.store(true, Ordering::Relaxed);
        let mut request = Request::new(sending.body.clone());
        *request.method_mut() = Method::POST;
        *request.uri_mut() = sending.uri.clone();
        *request.headers_mut() = toward_engine(&asked.head.headers, endpoint.host(), &hop);
        request
    };
    endpoint.send(&build).await
}

/// Reads a refusal, so that it can be passed on should nobody else be found. `None` when it is too
/// long or does not come.
async fn hold(response: Response<EngineBody>) -> Option<Response<Bytes>> {
    let (mut head, body) = response.into_parts();
    let bytes_max = usize::try_from(ERROR_BYTES_MAX).unwrap_or(usize::MAX);
    let body = timeout(HELD_ANSWER_TIMEOUT, Limited::new(body, bytes_max).collect());
    let body = body.await.ok()?.ok()?.to_bytes();
    clean_answer(&mut head.headers);
    head.headers.remove(CONTENT_LENGTH);
    head.version = Version::default();
    Some(Response::from_parts(head, body))
}

fn relay(
    proxy: &Arc<Proxy>,
    sending: &Sending<'_>,
    decision: &Decision,
    response: Response<EngineBody>,
    mut attempt: Attempt,
    wanted: Wanted,
) -> Response<SharedRelay> {
    let asked = sending.asked;
    let (mut head, body) = response.into_parts();
    let content = content(head.status, &head.headers, asked.head.uri.path(), wanted);
    let attempt = match content {
        Content::Error { .. } => {
            attempt.end(end_of_error(proxy, head.status));
            None
        }
        Content::Events { .. } => {
            attempt.hides(None);
            Some(attempt)
        }
        Content::Document { .. } | Content::Opaque => {
            let is_whole_at_once = matches!(content, Content::Document { .. });
            attempt.hides(hidden(&asked.parsed).map(|hidden| HiddenOutput {
                is_whole_at_once,
                ..hidden
            }));
            Some(attempt)
        }
    };
    clean_answer(&mut head.headers);
    if !head.status.is_success() && end_of_error(proxy, head.status) == AttemptEnd::Failed {
        let told = head.headers.entry(SHOULD_RETRY);
        told.or_insert(HeaderValue::from_static("false"));
    }
    if let Content::Events { .. } = content {
        head.headers.remove(CONTENT_LENGTH);
    }
    // A hop's own: with an engine's HTTP/1.0 the client's stream would lose its framing.
    head.version = Version::default();
    let expose = proxy.settings.expose;
    expose.decision(&mut head.headers, head.status, decision);
    let source = Source {
        proxy: Arc::clone(proxy),
        slot: decision.backend.slot,
        name: Arc::clone(&decision.name),
        request_id: asked.request_id.clone(),
        watched: sending.watched.clone(),
    };
    let waits = Waits {
        first_byte_by: sending.first_byte_by,
        answer_idle: proxy.settings.timeouts.answer_idle,
        ahead: Bounds {
            bytes_max: proxy.settings.limits.read_ahead_bytes_max,
            held_bytes: Arc::clone(&proxy.held_bytes),
            held_bytes_max: proxy.settings.limits.held_bytes_max,
            held_back: proxy.settings.timeouts.held_back,
            untaken: proxy.settings.timeouts.untaken,
        },
    };
    let relay = Relay::new(body, content, attempt, source, waits);
    Response::from_parts(head, Arc::new(Mutex::new(relay)))
}

/// How an attempt ends that an engine answered with no success: a server's error may come after it
/// computed, a refusal does not.
fn end_of_error(proxy: &Proxy, status: StatusCode) -> AttemptEnd {
    let is_refusal = proxy.settings.retry_statuses.contains(&status)
        || status == StatusCode::NOT_IMPLEMENTED
        || status == StatusCode::SERVICE_UNAVAILABLE;
    if status.is_server_error() && !is_refusal {
        AttemptEnd::Failed
    } else {
        AttemptEnd::NotRun
    }
}

/// How the body of an answer is read.
fn content(status: StatusCode, headers: &HeaderMap, path: &str, wanted: Wanted) -> Content {
    if !status.is_success() {
        return Content::error();
    }
    let is_encoded = headers
        .get(CONTENT_ENCODING)
        .is_some_and(|coding| coding != "identity");
    let media_type = headers
        .get(CONTENT_TYPE)
        .map_or(&b""[..], HeaderValue::as_bytes);
    let is_framed = is_framed(headers);
    if is_encoded {
        Content::Opaque
    } else if starts_with(media_type, b"text/event-stream") {
        let is_named = matches!(path, "/v1/messages" | "/v1/responses");
        Content::Events {
            events: Events::new(wanted),
            // Named streams have no common last event.
            has_clear_end: is_framed || is_named,
            is_named,
        }
    } else if starts_with(media_type, b"application/json") {
        Content::document(is_framed)
    } else {
        Content::Opaque
    }
}

fn starts_with(value: &[u8], prefix: &[u8]) -> bool {
    value
        .get(..prefix.len())
        .is_some_and(|start| start.eq_ignore_ascii_case(prefix))
}
