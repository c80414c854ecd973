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
use super::ahead::ReadAheadBounds;
use super::beginning::{begin, is_framed};
use super::headers::{Hop, clean_answer, toward_engine};
use super::metrics::RequestMetricsGuard;
use super::proxied::ProxiedRequest;
use super::relay::{
    BodyKind, ERROR_BYTES_MAX, RespondingBackend, ResponseBody, ResponseTimeouts,
    SharedResponseBody,
};
use super::splice::splice;
use super::sse::{SseStream, WantedUsage};
use super::suspects::WatchedRequest;
use crate::admission::AdmissionRejection;
use crate::backends::pool::{EngineBody, Segments, SendError};
use crate::error::{ProxyError, SHOULD_RETRY};
use crate::prompt::{ParsedBody, ReplyShape};
use crate::routing::{
    Attempt, AttemptEnd, Decision, HiddenOutput, POLICY, RoutingRejection, SELECT,
};

/// How long the rest of such an answer is waited for.
const HELD_ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Least and most time after which a refused client is asked to come back, before jitter.
const RETRY_AFTER_MS_LEAST: u64 = 1000;
const RETRY_AFTER_MS_MAX: u64 = 60_000;

/// What the client gets.
pub(super) enum ForwardResult {
    /// An engine's answer as it comes.
    Relayed(Response<SharedResponseBody>),
    /// An engine's refusal, after which no other backend could be tried.
    Held(Response<Bytes>),
}

/// How the last attempt went, for when there is no further one.
enum LastAttempt {
    None,
    Failed(ProxyError),
    Refused(Response<Bytes>),
}

/// How one attempt went.
#[expect(
    clippy::large_enum_variant,
    reason = "made once a request and taken apart at once"
)]
enum AttemptResult {
    Answered(Response<EngineBody>, Attempt),
    /// The next candidate may be tried.
    NotRun(LastAttempt),
    /// It may have run: nobody else is asked.
    Lost(ProxyError),
}

/// The request as every attempt sends it.
struct OutgoingRequest<'a> {
    asked: &'a ProxiedRequest,
    uri: Uri,
    body: Segments,
    first_byte_by: Instant,
    watched: WatchedRequest,
}

pub(super) async fn forward(
    proxy: &Arc<Proxy>,
    asked: &Arc<ProxiedRequest>,
    ledger: &mut RequestMetricsGuard,
) -> Result<ForwardResult, ProxyError> {
    if proxy.suspects.refuses(asked) {
        proxy.metrics.suspects_refused.inc();
        return Err(ProxyError::BreaksBackends);
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
    let mut sending = OutgoingRequest {
        asked,
        uri,
        body,
        first_byte_by: Instant::now(),
        watched: proxy.suspects.watch(asked),
    };
    check_policy(proxy, asked)?;
    check_select(proxy, asked)?;
    let mut excluded: Vec<Slot> = Vec::new();
    let mut last = LastAttempt::None;
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
            AttemptResult::Answered(response, attempt) => {
                let relayed = relay(proxy, &sending, &decision, response, attempt, wanted);
                return Ok(ForwardResult::Relayed(relayed));
            }
            AttemptResult::Lost(failure) => return Err(failure),
            AttemptResult::NotRun(how) => last = how,
        }
        // A connection that could not be made was no load.
        let is_refusal = !matches!(last, LastAttempt::Failed(ProxyError::Unreachable));
        let is_spent = !is_last && is_refusal && !ledger.may_retry();
        if is_spent {
            proxy.metrics.retries_refused.inc();
        }
        if is_last || is_spent {
            return give_up(last, ProxyError::Unreachable);
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

fn check_policy(proxy: &Proxy, asked: &ProxiedRequest) -> Result<(), ProxyError> {
    let policy = proxy.router.asked_policy(&asked.head.headers);
    policy
        .map(|_| ())
        .map_err(|unknown| ProxyError::BadRequest {
            message: unknown.to_string(),
            param: Some(POLICY.to_string()),
        })
}

fn check_select(proxy: &Proxy, asked: &ProxiedRequest) -> Result<(), ProxyError> {
    let checked = proxy.router.check_select(&asked.head.headers);
    checked.map_err(|bad| ProxyError::BadRequest {
        message: bad.to_string(),
        param: Some(SELECT.to_string()),
    })
}

/// Why a request was not admitted, as its client is told.
fn refusal(why: AdmissionRejection, asked: &ProxiedRequest) -> ProxyError {
    match why {
        AdmissionRejection::NoBackend(RoutingRejection::UnknownModel) => ProxyError::UnknownModel {
            model: shown(&asked.parsed.model),
        },
        AdmissionRejection::NoBackend(RoutingRejection::NoneHealthy) => ProxyError::NoneHealthy,
        AdmissionRejection::NoBackend(RoutingRejection::NoneSelected) => ProxyError::NoneSelected,
        AdmissionRejection::NoBackend(RoutingRejection::AllTried) => ProxyError::Unreachable,
        AdmissionRejection::NoBackend(RoutingRejection::TooLarge) => ProxyError::BadRequest {
            message: "the prompt is larger than the cache of any backend".to_owned(),
            param: None,
        },
        AdmissionRejection::NoBackend(RoutingRejection::AtLimit) => ProxyError::Overloaded,
        AdmissionRejection::OverLimit(over) => ProxyError::OverLimit {
            limit: match over.limit {
                LimitKind::Requests => "requests per window",
                LimitKind::Tokens => "tokens per window",
                LimitKind::Concurrent => "requests at once",
            },
            retry_after_ms: over.retry_after_ms,
        },
        AdmissionRejection::QueueFull { retry_after_ms } => ProxyError::QueueFull {
            retry_after_ms: jittered(retry_after_ms, asked),
        },
        AdmissionRejection::TooLate {
            wait_ms,
            wait_ms_max,
        } => ProxyError::TooLate {
            wait_ms,
            wait_ms_max,
            retry_after_ms: jittered(wait_ms, asked),
        },
        AdmissionRejection::WaitedTooLong { retry_after_ms } => ProxyError::WaitedTooLong {
            retry_after_ms: jittered(retry_after_ms, asked),
        },
        AdmissionRejection::Leaving => ProxyError::Leaving,
    }
}

/// When a refused client should ask again: up to half as much later than after `wait_ms`, by its
/// request, so that those who were refused together do not come back together.
fn jittered(wait_ms: u64, asked: &ProxiedRequest) -> u64 {
    let wait_ms = wait_ms.clamp(RETRY_AFTER_MS_LEAST, RETRY_AFTER_MS_MAX);
    wait_ms + xxh3_64(asked.request_id.as_bytes()) % (wait_ms / 2)
}

/// A model's name as an error repeats it.
pub(super) fn shown(model: &str) -> String {
    model[..model.floor_char_boundary(state::command::NAME_BYTES_MAX)].to_owned()
}

fn give_up(last: LastAttempt, otherwise: ProxyError) -> Result<ForwardResult, ProxyError> {
    match last {
        LastAttempt::None => Err(otherwise),
        LastAttempt::Failed(failure) => Err(failure),
        LastAttempt::Refused(response) => Ok(ForwardResult::Held(response)),
    }
}

async fn attempt(
    proxy: &Arc<Proxy>,
    sending: &OutgoingRequest<'_>,
    decision: &Decision,
    attempt: Attempt,
    is_last: bool,
) -> AttemptResult {
    let pending = PendingAttempt::of(attempt);
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
            SendError::Ended
        }
        Ok(Ok(response)) if response.status().is_redirection() => {
            // Where to is the engine's own address space; the answer there would not be counted.
            attempt.end(AttemptEnd::NotRun);
            return AttemptResult::NotRun(LastAttempt::Failed(ProxyError::Redirected));
        }
        Ok(Ok(mut response)) => {
            let is_refusal = proxy.settings.retry_statuses.contains(&response.status());
            if is_refusal && !is_last {
                attempt.end(AttemptEnd::NotRun);
                let held = hold(response).await;
                return AttemptResult::NotRun(held.map_or(
                    LastAttempt::Failed(ProxyError::Refused),
                    LastAttempt::Refused,
                ));
            }
            let failure = match begin(&mut response, sending.first_byte_by).await {
                Ok(()) => return AttemptResult::Answered(response, attempt),
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
            return AttemptResult::Lost(ProxyError::EngineTimeout);
        }
    };
    let may_have_run = is_sent && matches!(failure, SendError::Broke(_) | SendError::Ended);
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
fn failed(proxy: &Proxy, decision: &Decision, failure: &SendError) -> AttemptResult {
    if failure.is_local() {
        tracing::debug!(backend = &*decision.name, error = %failure, "could not query backend");
        proxy.pool.close_idle();
        return AttemptResult::NotRun(LastAttempt::Failed(ProxyError::OutOfConnections));
    }
    if !matches!(failure, SendError::Gone) {
        proxy.backends.report_failure(decision.backend.slot);
    }
    tracing::debug!(backend = &*decision.name, error = %failure, "attempt failed");
    match failure {
        SendError::Url(_) | SendError::Gone | SendError::Connect(_) => {
            AttemptResult::NotRun(LastAttempt::Failed(ProxyError::Unreachable))
        }
        SendError::Broke(_) | SendError::Ended => AttemptResult::Lost(ProxyError::EngineBroke),
    }
}

/// What the backend's circuit hears of a head, or of none. A success is one once its body begins; a
/// timeout after the request was sent is told by the attempt's end.
fn judge(
    proxy: &Proxy,
    backend: BackendRef,
    user: UserKey,
    sent: &Result<Response<EngineBody>, SendError>,
) {
    match sent {
        Ok(response) if response.status().is_success() => {}
        Ok(response) if response.status().is_client_error() => {
            proxy.backends.report_answer(backend, user);
        }
        Err(SendError::Gone) => {}
        Err(failure) if failure.is_local() => {}
        Err(SendError::Url(_) | SendError::Connect(_)) => {
            proxy.backends.report_no_answer(backend, None);
        }
        Ok(_) | Err(_) => proxy.backends.report_no_answer(backend, Some(user)),
    }
}

/// An attempt while its answer's head is waited for. A client that leaves then pays only if its
/// request was sent.
struct PendingAttempt {
    attempt: Option<Attempt>,
    is_sent: AtomicBool,
}

impl PendingAttempt {
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

impl Drop for PendingAttempt {
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
    sending: &OutgoingRequest<'_>,
    decision: &Decision,
    is_sent: &AtomicBool,
) -> Result<Response<EngineBody>, SendError> {
    let asked = sending.asked;
    let registry = proxy.view.registry();
    let backend = registry
        .backends
        .binary_search_by_key(&decision.backend.slot, |backend| backend.handle.slot)
        .map(|at| &registry.backends[at])
        .ok()
        .filter(|backend| backend.handle == decision.backend)
        .ok_or(SendError::Gone)?;
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
    sending: &OutgoingRequest<'_>,
    decision: &Decision,
    response: Response<EngineBody>,
    mut attempt: Attempt,
    wanted: WantedUsage,
) -> Response<SharedResponseBody> {
    let asked = sending.asked;
    let (mut head, body) = response.into_parts();
    let content = content(head.status, &head.headers, asked.head.uri.path(), wanted);
    let attempt = match content {
        BodyKind::Error { .. } => {
            attempt.end(end_of_error(proxy, head.status));
            None
        }
        BodyKind::Events { .. } => {
            attempt.hides(None);
            Some(attempt)
        }
        BodyKind::Document { .. } | BodyKind::Opaque => {
            let is_whole_at_once = matches!(content, BodyKind::Document { .. });
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
    if let BodyKind::Events { .. } = content {
        head.headers.remove(CONTENT_LENGTH);
    }
    // A hop's own: with an engine's HTTP/1.0 the client's stream would lose its framing.
    head.version = Version::default();
    let expose = proxy.settings.expose;
    expose.decision(&mut head.headers, head.status, decision);
    let source = RespondingBackend {
        proxy: Arc::clone(proxy),
        slot: decision.backend.slot,
        name: Arc::clone(&decision.name),
        request_id: asked.request_id.clone(),
        watched: sending.watched.clone(),
    };
    let waits = ResponseTimeouts {
        first_byte_by: sending.first_byte_by,
        answer_idle: proxy.settings.timeouts.answer_idle,
        ahead: ReadAheadBounds {
            bytes_max: proxy.settings.limits.read_ahead_bytes_max,
            held_bytes: Arc::clone(&proxy.held_bytes),
            held_bytes_max: proxy.settings.limits.held_bytes_max,
            held_back: proxy.settings.timeouts.held_back,
            untaken: proxy.settings.timeouts.untaken,
        },
    };
    let relay = ResponseBody::new(body, content, attempt, source, waits);
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
fn content(status: StatusCode, headers: &HeaderMap, path: &str, wanted: WantedUsage) -> BodyKind {
    if !status.is_success() {
        return BodyKind::error();
    }
    let is_encoded = headers
        .get(CONTENT_ENCODING)
        .is_some_and(|coding| coding != "identity");
    let media_type = headers
        .get(CONTENT_TYPE)
        .map_or(&b""[..], HeaderValue::as_bytes);
    let is_framed = is_framed(headers);
    if is_encoded {
        BodyKind::Opaque
    } else if starts_with(media_type, b"text/event-stream") {
        let is_named = matches!(path, "/v1/messages" | "/v1/responses");
        BodyKind::Events {
            events: SseStream::new(wanted),
            // Named streams have no common last event.
            has_clear_end: is_framed || is_named,
            is_named,
        }
    } else if starts_with(media_type, b"application/json") {
        BodyKind::document(is_framed)
    } else {
        BodyKind::Opaque
    }
}

fn starts_with(value: &[u8], prefix: &[u8]) -> bool {
    value
        .get(..prefix.len())
        .is_some_and(|start| start.eq_ignore_ascii_case(prefix))
}
