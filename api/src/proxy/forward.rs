//! From a read request to the head of an engine's answer: decide, dispatch, send, and try the next
//! candidate where that is safe.
//!
//! A request goes to another backend only when the one before did not run it: no connection, or an
//! answer whose status says so. A connection that breaks after the request was sent is not
//! repeated elsewhere, because the engine may have computed on it, or have died of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, TRANSFER_ENCODING};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, Version};
use http_body_util::{BodyExt, Limited};
use state::ids::Slot;
use state::policy::PolicyConfig;
use tokio::time::{Instant, timeout, timeout_at};

use super::Proxy;
use super::headers::{Hop, add_decision, clean_answer, toward_engine};
use super::relay::{Content, ERROR_BYTES_MAX, Relay, Source, Waits};
use super::splice::splice;
use super::sse::{Events, Wanted};
use crate::backends::pool::{EngineBody, Segments, SendFailure};
use crate::error::Failure;
use crate::prompt::{Identity, Parsed};
use crate::routing::{Ask, Attempt, Decision, End, POLICY};

/// How long the rest of such an answer is waited for.
const HELD_ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// A request that is read and understood.
pub(super) struct Asked {
    pub(super) head: http::request::Parts,
    pub(super) body: Bytes,
    pub(super) parsed: Parsed,
    pub(super) identity: Identity,
    pub(super) user: String,
    pub(super) request_id: HeaderValue,
    /// The client's address.
    pub(super) peer: HeaderValue,
}

/// What the client gets.
pub(super) enum Forwarded {
    /// An engine's answer as it comes.
    Relayed(Response<Box<Relay>>),
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
}

pub(super) async fn forward(proxy: &Arc<Proxy>, asked: &Asked) -> Result<Forwarded, Failure> {
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
    let first_byte_by = Instant::now() + proxy.settings.timeouts.first_byte;
    let sending = Sending {
        asked,
        uri,
        body,
        first_byte_by,
    };
    let policy = asked_policy(proxy, asked)?;
    let mut excluded: Vec<Slot> = Vec::new();
    let mut last = Last::None;
    loop {
        let decision = match decide(proxy, asked, policy, &excluded) {
            Ok(decision) => decision,
            Err(failure) => return give_up(last, failure),
        };
        let is_last = excluded.len() + 1 >= proxy.settings.attempts_max;
        match attempt(proxy, &sending, &decision, is_last).await {
            Tried::Answered(response, attempt) => {
                let relayed = relay(proxy, &sending, &decision, response, attempt, wanted);
                return Ok(Forwarded::Relayed(relayed));
            }
            Tried::Lost(failure) => return Err(failure),
            Tried::NotRun(how) => last = how,
        }
        if is_last {
            return give_up(last, Failure::Unreachable);
        }
        proxy.metrics.retries.inc();
        excluded.push(decision.backend.slot);
    }
}

fn asked_policy<'a>(proxy: &'a Proxy, asked: &Asked) -> Result<Option<&'a PolicyConfig>, Failure> {
    let policy = proxy.router.asked_policy(&asked.head.headers);
    policy.map_err(|unknown| Failure::BadRequest {
        message: unknown.to_string(),
        param: Some(POLICY.to_string()),
    })
}

fn decide(
    proxy: &Proxy,
    asked: &Asked,
    policy: Option<&PolicyConfig>,
    excluded: &[Slot],
) -> Result<Decision, Failure> {
    use crate::routing::NoBackend;
    let ask = Ask {
        model: &asked.parsed.model,
        identity: &asked.identity,
        request_id: asked.request_id.to_str().unwrap_or_default(),
        user: &asked.user,
        headers: Some(&asked.head.headers),
        policy,
        excluded,
    };
    proxy.router.decide(&ask).map_err(|why| match why {
        NoBackend::UnknownModel => Failure::UnknownModel {
            model: shown(&asked.parsed.model),
        },
        NoBackend::NoneHealthy => Failure::NoneHealthy,
        NoBackend::AllTried => Failure::Unreachable,
    })
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
    is_last: bool,
) -> Tried {
    let asked = sending.asked;
    let attempt = proxy
        .router
        .dispatch(decision, &asked.identity, &asked.user);
    let pending = Pending::of(attempt);
    let send = send(proxy, sending, decision, &pending.is_sent);
    let sent = timeout_at(sending.first_byte_by, send).await;
    let (attempt, is_sent) = pending.over();
    let failure = match sent {
        Ok(Ok(response)) if response.status().is_informational() => {
            // Nobody asked for another protocol.
            SendFailure::Ended
        }
        Ok(Ok(response)) => {
            let is_refusal = proxy.settings.retry_statuses.contains(&response.status());
            if !is_refusal || is_last {
                return Tried::Answered(response, attempt);
            }
            attempt.end(End::NotRun);
            let held = hold(decision, response).await;
            return Tried::NotRun(held.map_or(Last::Failed(Failure::Refused), Last::Refused));
        }
        Ok(Err(failure)) => failure,
        Err(_) => {
            // It may have computed all the while.
            attempt.end(if is_sent { End::Broken } else { End::NotRun });
            return Tried::Lost(Failure::EngineTimeout);
        }
    };
    attempt.end(End::NotRun);
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
                End::ClientLeft
            } else {
                End::NotRun
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
    drop(registry);
    let hop = Hop {
        peer: &asked.peer,
        version: asked.head.version,
        request_id: &asked.request_id,
        forward_credentials: proxy.settings.forward_credentials,
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
async fn hold(decision: &Decision, response: Response<EngineBody>) -> Option<Response<Bytes>> {
    let (mut head, body) = response.into_parts();
    let bytes_max = usize::try_from(ERROR_BYTES_MAX).unwrap_or(usize::MAX);
    let body = timeout(HELD_ANSWER_TIMEOUT, Limited::new(body, bytes_max).collect());
    let body = body.await.ok()?.ok()?.to_bytes();
    clean_answer(&mut head.headers);
    head.headers.remove(CONTENT_LENGTH);
    head.version = Version::default();
    add_decision(&mut head.headers, decision);
    Some(Response::from_parts(head, body))
}

fn relay(
    proxy: &Arc<Proxy>,
    sending: &Sending<'_>,
    decision: &Decision,
    response: Response<EngineBody>,
    attempt: Attempt,
    wanted: Wanted,
) -> Response<Box<Relay>> {
    let asked = sending.asked;
    let (mut head, body) = response.into_parts();
    let content = content(head.status, &head.headers, asked.head.uri.path(), wanted);
    let attempt = if let Content::Error { .. } = content {
        attempt.end(End::NotRun);
        None
    } else {
        Some(attempt)
    };
    clean_answer(&mut head.headers);
    if let Content::Events { .. } = content {
        head.headers.remove(CONTENT_LENGTH);
    }
    // A hop's own: with an engine's HTTP/1.0 the client's stream would lose its framing.
    head.version = Version::default();
    add_decision(&mut head.headers, decision);
    let source = Source {
        backends: Arc::clone(&proxy.backends),
        slot: decision.backend.slot,
        name: Arc::clone(&decision.name),
        request_id: asked.request_id.clone(),
    };
    let waits = Waits {
        first_byte_by: sending.first_byte_by,
        answer_idle: proxy.settings.timeouts.answer_idle,
    };
    let relay = Relay::new(body, content, attempt, source, waits);
    Response::from_parts(head, Box::new(relay))
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
    let is_framed = headers.contains_key(TRANSFER_ENCODING) || headers.contains_key(CONTENT_LENGTH);
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
