//! Forwards a parsed request: admits it, tries backends one after another as long as that is safe,
//! and relays the response. [`crate::admission`] does the queueing; `attempt.rs` makes a single
//! attempt.
//!
//! A request goes to another backend only if the previous one did not run it: there was no
//! connection, or the status of its response says so, or an error in place of its output
//! (`response/opening.rs`). After a connection broke with the request sent, it is not retried: the
//! engine may have computed it or crashed because of it. There are two exceptions. A prefill engine
//! is replaced even then (`bootstrap_rooms.rs`), because no output exists without it. And a stream
//! begins again, or goes on from where it broke (`continuation.rs`), unless it has broken two
//! engines.

pub(super) mod attempt;
mod attempt_error;
pub(super) mod blame;
pub(super) mod bootstrap_rooms;
mod continuation;
pub(super) mod disaggregate;
pub(super) mod log_order;
pub(super) mod request_context;
mod resume;
pub(super) mod stored;

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_LENGTH};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, Uri, Version, response};
use state::ids::Slot;
use state::policy::Handover;
use tokio::time::Instant;

use self::attempt::{AttemptError, OutgoingRequest, SentRequest, attempt, begins_again};
use self::bootstrap_rooms::run_pair;
use self::continuation::{TryMetrics, continuation, keep_body};
use self::disaggregate::disaggregate;
use self::log_order::known_at;
use self::request_context::ProxiedRequest;
use self::resume::resume;
use self::stored::without_previous_response;
use super::Proxy;
use super::record::metrics::RequestMetricsGuard;
use super::request::dialect::Dialect;
use super::request::headers::{RESUMABLE, clean_answer};
use super::request::usage_options::{WantedUsage, salted, splice};
use super::response::answer_source::AnswerSource;
use super::response::durable_charge::WithheldEnd;
use super::response::engine_error::end_of_error;
use super::response::opening::{AnswerMedia, is_framed};
use super::response::read_ahead::ReadAheadBounds;
use super::response::response_body::{
    BodyKind, Continuation, ERROR_BYTES_MAX, RespondingBackend, ResponseBody, ResponseTimeouts,
    SharedResponseBody, lock,
};
use super::response::sse::SseStream;
use crate::admission::{AdmissionTry, DecisionTimes};
use crate::engines::backends::AnswerForm;
use crate::engines::backends::pool::EngineBody;
use crate::error::{ProxyError, SHOULD_RETRY, rescue};
use crate::prompt::{ParsedBody, ReplyShape};
use crate::routing::{Attempt, AttemptEnd, Decision, HiddenOutput};
use crate::traces::{AttemptTrace, TracedDecision, WaitTrace};

/// Header that controls whether nginx buffers a response.
const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Response that the client receives.
pub(super) enum ForwardResult {
    /// A backend's response, relayed as it arrives.
    Relayed(Response<SharedResponseBody>),
    /// A whole response: a backend's refusal, after which no other backend could be tried, or one
    /// of the router itself.
    Held(Response<Bytes>),
}

impl ForwardResult {
    /// Returns the response to `HEAD`: that to `GET` without its body.
    pub(super) fn without_body(self) -> Self {
        let head_of = |mut head: response::Parts, length: Option<u64>| {
            if let (false, Some(length)) = (head.headers.contains_key(CONTENT_LENGTH), length) {
                head.headers
                    .insert(CONTENT_LENGTH, HeaderValue::from(length));
            }
            Self::Held(Response::from_parts(head, Bytes::new()))
        };
        match self {
            Self::Relayed(response) => head_of(response.into_parts().0, None),
            Self::Held(response) => {
                let (head, body) = response.into_parts();
                head_of(head, Some(body.len() as u64))
            }
        }
    }
}

pub(super) async fn forward(
    proxy: &Arc<Proxy>,
    proxied: &Arc<ProxiedRequest>,
    request_metrics: &mut RequestMetricsGuard,
) -> Result<ForwardResult, ProxyError> {
    if let Some(claim) = &proxied.claim {
        // Large and rare, so it should not be part of every request's future.
        return Box::pin(resume(proxy, proxied, claim, request_metrics)).await;
    }
    let (mut sending, wanted) = prepare(proxy, proxied, request_metrics)?;
    let mut tries = Tries {
        excluded: excluded_at_first(proxy, proxied).await?,
        count: 0,
        is_move: false,
    };
    let answered = respond(proxy, proxied, &mut sending, &mut tries, request_metrics).await;
    let Answered {
        response,
        mut attempt,
        decision,
        at,
    } = match answered {
        Ok(answered) => answered,
        Err(Unanswered::NotAdmitted(why)) => return Err(why),
        Err(Unanswered::Failed(failure)) => return give_up(failure),
    };
    if sending.transfer.is_some() {
        proxy.metrics.stages.decoded(at.elapsed());
    }
    proxied.earlier.go_on(&mut attempt, "");
    let parts = AnswerParts {
        response: response.map(AnswerSource::Engine),
        attempt,
        continuation: keep_body(proxy, proxied).map(|kept| {
            let from = (tries, decision.backend.slot);
            continuation(proxy, proxied, kept, from)
        }),
        decision,
    };
    Ok(relay_parts(proxy, &sending, parts, wanted).await)
}

/// A backend's response with what is needed to relay it.
struct AnswerParts {
    response: Response<AnswerSource>,
    attempt: Attempt,
    decision: Decision,
    continuation: Option<Box<Continuation>>,
}

/// Relays a backend's response with the headers that say what its client may do with it.
async fn relay_parts(
    proxy: &Arc<Proxy>,
    sending: &OutgoingRequest<'_>,
    parts: AnswerParts,
    wanted: WantedUsage,
) -> ForwardResult {
    let AnswerParts {
        response,
        attempt,
        decision,
        continuation,
    } = parts;
    let known_at = known_at(proxy, sending.proxied, &decision, &attempt).await;
    let answer = (response, attempt, continuation);
    let mut relayed = relay(proxy, sending, &decision, answer, wanted);
    if lock(relayed.body()).has_ids() {
        let headers = relayed.headers_mut();
        headers.insert(RESUMABLE, HeaderValue::from_static("1"));
    }
    let (head, expose) = (relayed.status(), proxy.settings.expose);
    expose.index(relayed.headers_mut(), head, known_at);
    ForwardResult::Relayed(relayed)
}

/// Backends that a request was tried on.
#[derive(Clone)]
pub(super) struct Tries {
    /// Slots of backends that are not tried, or not again.
    excluded: Vec<Slot>,
    /// Number of backends that were tried.
    count: u32,
    /// Whether the stream moves: it does not wait for another backend.
    is_move: bool,
}

/// A response whose body has begun.
struct Answered {
    response: Response<EngineBody>,
    attempt: Attempt,
    decision: Decision,
    /// Time at which the request was sent to the backend.
    at: Instant,
}

/// Why no backend responds.
enum Unanswered {
    /// No backend could be tried.
    NotAdmitted(ProxyError),
    /// The last attempt failed.
    Failed(AttemptError),
}

/// Tries one backend after another, as long as that is safe, until one responds.
async fn respond(
    proxy: &Arc<Proxy>,
    proxied: &Arc<ProxiedRequest>,
    sending: &mut OutgoingRequest<'_>,
    tries: &mut Tries,
    metrics: &mut impl TryMetrics,
) -> Result<Answered, Unanswered> {
    let mut last = None;
    loop {
        let arrived = Instant::now();
        let which = match tries.count {
            0 => AdmissionTry::First,
            _ if tries.is_move => AdmissionTry::Now,
            _ => AdmissionTry::Again,
        };
        let (decision, taken) = match admit(proxy, proxied, (&tries.excluded, which)).await {
            Ok(admitted) => admitted,
            Err(why) => return Err(last.map_or(Unanswered::NotAdmitted(why), Unanswered::Failed)),
        };
        if tries.count == 0 {
            metrics.routed(arrived.elapsed());
        }
        tries.count += 1;
        sending.first_byte_by = Instant::now() + proxy.settings.timeouts.first_byte;
        sending.watched.sent();
        let is_last = tries.count >= proxy.settings.retry.attempts;
        let sent = send(proxy, sending, &decision, taken, is_last).await;
        let sent = sent.map_err(Unanswered::NotAdmitted)?;
        tries.excluded.extend(sent.failed_prefill);
        let failure = match sent.result {
            Ok((response, attempt)) => {
                return Ok(Answered {
                    response,
                    attempt,
                    decision,
                    at: sent.at,
                });
            }
            Err(failure) => failure,
        };
        if !may_retry(proxy, proxied, &failure) || is_last || sent.is_final {
            return Err(Unanswered::Failed(failure));
        }
        let is_gone = failure.is_unreachable() || failure.may_have_begun();
        if !is_gone && !metrics.may_retry() {
            proxy.metrics.retries_refused.inc();
            return Err(Unanswered::Failed(failure));
        }
        proxy.metrics.retries.inc();
        let at_fault = sent.at_fault;
        let at_fault = at_fault.unwrap_or_else(|| fault(&decision, sending, &failure));
        exclude(proxy, at_fault, &failure, &mut tries.excluded);
        last = Some(failure);
    }
}

/// Whether another backend may be tried after this failure.
fn may_retry(proxy: &Proxy, proxied: &ProxiedRequest, failure: &AttemptError) -> bool {
    let begins_again = || {
        failure.may_have_begun()
            && begins_again(proxy, proxied)
            && !(proxy.poison_requests).refuses(&proxied.body, &proxied.identity)
    };
    failure.may_retry() || begins_again()
}

/// Returns the slots of the backends that cannot run a request, whatever their state.
pub(super) async fn excluded_at_first(
    proxy: &Proxy,
    proxied: &ProxiedRequest,
) -> Result<Vec<Slot>, ProxyError> {
    match proxied.parsed.previous_response {
        None => Ok(Vec::new()),
        // Boxed: large, and not needed by most requests.
        Some(_) => Box::pin(without_previous_response(proxy, proxied)).await,
    }
}

/// Returns the request as backends receive it, and which usage reports its client requested. Fails
/// if the request has broken two backends.
pub(super) fn prepare<'a>(
    proxy: &Arc<Proxy>,
    proxied: &'a ProxiedRequest,
    request_metrics: &mut RequestMetricsGuard,
) -> Result<(OutgoingRequest<'a>, WantedUsage), ProxyError> {
    if proxy
        .poison_requests
        .refuses(&proxied.body, &proxied.identity)
    {
        proxy.metrics.suspects_refused.inc();
        return Err(ProxyError::BreaksBackends);
    }
    request_metrics.spends(proxy.budget.begin(&proxied.parsed.model));
    Ok(outgoing(proxy, proxied))
}

/// Waits for a backend and records the result in the request's record and spans.
pub(super) async fn admit(
    proxy: &Proxy,
    proxied: &Arc<ProxiedRequest>,
    from: (&[Slot], AdmissionTry),
) -> Result<(Decision, Attempt), ProxyError> {
    let arrived = Instant::now();
    let waits = proxied.trace.as_ref().and_then(|trace| trace.waits());
    let admitted = match proxy.admission.admit(proxied, from).await {
        Ok(admitted) => admitted,
        Err(why) => {
            let id = proxied.request_id.as_bytes();
            let why = proxy.requests.refusal(why, proxied, id);
            if let Some(waits) = waits {
                waits.refused(rescue(&why).code);
            }
            return Err(why);
        }
    };
    let waited = arrived.elapsed();
    let decided = admitted.decided();
    let (decision, mut attempt) = admitted.into_parts();
    attempt.traces(trace(proxied, &decision, waits.zip(decided)));
    if let Some(record) = &proxied.record {
        proxy.decisions.decided(record, &decision, waited);
    }
    Ok((decision, attempt))
}

/// Writes the decision's span and returns the span of the attempt that follows; `None` if the
/// request is not traced.
fn trace(
    proxied: &ProxiedRequest,
    decision: &Decision,
    admitted: Option<(WaitTrace, DecisionTimes)>,
) -> Option<AttemptTrace> {
    let trace = proxied.trace.as_ref()?;
    let (waits, DecisionTimes { began, ended }) = admitted?;
    waits.admitted(began);
    trace.decided(&TracedDecision {
        began,
        ended,
        backend: &decision.name,
        policy: decision.policy,
        reason: decision.reason.label(),
        matched: decision.matched,
        total: decision.total,
        index: decision.index.0,
    });
    trace.attempts(&decision.name, "answer")
}

/// Sends the request to the backends of `decision`: a single one, two in turn, or two at once.
async fn send(
    proxy: &Arc<Proxy>,
    sending: &mut OutgoingRequest<'_>,
    decision: &Decision,
    mut taken: Attempt,
    is_last: bool,
) -> Result<SentRequest, ProxyError> {
    let parsed = &sending.proxied.parsed;
    let hidden = hidden(parsed).filter(|_| !parsed.stream);
    (sending.transfer, sending.bootstrap_session) = (None, None);
    let prefill = decision.prefill.as_ref();
    if let Some(chosen) = prefill.filter(|chosen| chosen.handover == Handover::Room) {
        taken.set_hidden_output(hidden);
        // Large and rare, so it should not be part of every request's future.
        return Box::pin(run_pair(proxy, sending, (decision, chosen), taken, is_last)).await;
    }
    let (mut taken, transfer) = match prefill {
        None => (taken, None),
        Some(_) => Box::pin(disaggregate(proxy, sending, decision, taken)).await?,
    };
    let failed_prefill = prefill.filter(|_| transfer.is_none());
    sending.transfer = transfer;
    taken.set_hidden_output(hidden);
    sending.watched.sent();
    let at = Instant::now();
    let result = attempt(proxy, sending, decision, taken, is_last).await;
    Ok(SentRequest {
        failed_prefill: failed_prefill.map(|prefill| prefill.backend.slot),
        ..SentRequest::of(result, at, None)
    })
}

/// Returns the request as backends receive it, and which usage reports its client requested.
fn outgoing<'a>(
    proxy: &Arc<Proxy>,
    proxied: &'a ProxiedRequest,
) -> (OutgoingRequest<'a>, WantedUsage) {
    let path = proxied.head.uri.path();
    let (body, wanted) = splice(
        proxy.settings.usage_splice,
        path,
        &proxied.parsed,
        &proxied.body,
    );
    let uri = proxied
        .head
        .uri
        .path_and_query()
        .cloned()
        .map_or_else(Uri::default, Uri::from);
    let sending = OutgoingRequest {
        proxied,
        uri,
        body: salted(proxied.salt(), &proxied.parsed, body),
        continued: None,
        transfer: None,
        bootstrap_session: None,
        first_byte_by: Instant::now(),
        watched: proxy
            .poison_requests
            .watch(&proxied.body, &proxied.identity),
    };
    (sending, wanted)
}

/// Returns the slot to exclude after this failure.
fn fault(decision: &Decision, sending: &OutgoingRequest<'_>, failure: &AttemptError) -> Slot {
    match (failure, &decision.prefill) {
        // The transfer may be at fault. The same backend may still compute the prompt itself.
        (AttemptError::Refused(_), Some(prefill)) if sending.transfer.is_some() => {
            prefill.backend.slot
        }
        (_, _) => decision.backend.slot,
    }
}

/// Excludes the backend at fault, or all ranks of its engine if that is unreachable or has stopped.
fn exclude(proxy: &Proxy, slot: Slot, failure: &AttemptError, excluded: &mut Vec<Slot>) {
    excluded.push(slot);
    if failure.is_unreachable() || failure.may_have_begun() {
        exclude_engine(proxy, slot, excluded);
    }
}

/// Excludes all ranks of an engine.
fn exclude_engine(proxy: &Proxy, slot: Slot, excluded: &mut Vec<Slot>) {
    excluded.extend_from_slice(proxy.view.registry().ranks.slots_of_engine(slot));
}

/// Returns the output that a response other than a stream hides until its end; `None` if the
/// request generates none.
pub(super) fn hidden(parsed: &ParsedBody) -> Option<HiddenOutput> {
    (parsed.reply != ReplyShape::None).then_some(HiddenOutput {
        choices: parsed.choices,
        tokens_max: parsed.max_tokens,
        is_whole_at_once: true,
    })
}

/// Returns the response to a request for which no other backend is tried.
fn give_up(last: AttemptError) -> Result<ForwardResult, ProxyError> {
    last.answer().map(ForwardResult::Held)
}

/// Relays a backend's response and accounts for it until it ends.
pub(super) fn relay(
    proxy: &Arc<Proxy>,
    sending: &OutgoingRequest<'_>,
    decision: &Decision,
    (response, mut attempt, continuation): (
        Response<AnswerSource>,
        Attempt,
        Option<Box<Continuation>>,
    ),
    wanted: WantedUsage,
) -> Response<SharedResponseBody> {
    let proxied = sending.proxied;
    let (mut head, body) = response.into_parts();
    let dialect = Dialect::of(proxied.head.uri.path());
    let content = content(head.status, &head.headers, dialect, wanted);
    let is_stream = matches!(content, BodyKind::Events { .. });
    attempt.set_response_form(AnswerForm::of(proxied.head.uri.path(), is_stream));
    let attempt = match content {
        BodyKind::Error { .. } => {
            attempt.end(end_of_error(proxy, head.status), Instant::now());
            None
        }
        BodyKind::Events { .. } => {
            attempt.set_hidden_output(None);
            Some(attempt)
        }
        BodyKind::Document { .. } | BodyKind::Opaque => {
            let is_whole_at_once = matches!(content, BodyKind::Document { .. });
            attempt.set_hidden_output(hidden(&proxied.parsed).map(|hidden| HiddenOutput {
                is_whole_at_once,
                ..hidden
            }));
            Some(attempt)
        }
    };
    clean_head(&mut head, &content);
    if !head.status.is_success() && end_of_error(proxy, head.status) == AttemptEnd::Failed {
        discourage_retry(&mut head.headers);
    }
    let expose = proxy.settings.expose;
    expose.decision(&mut head.headers, head.status, decision);
    expose.model(&mut head.headers, proxied.resolved.as_deref());
    let source = RespondingBackend {
        proxy: Arc::clone(proxy),
        slot: decision.backend.slot,
        watched: Some(sending.watched.clone()),
    };
    let waits = timeouts(proxy, sending.first_byte_by);
    let continuation = continuation.filter(|_| is_stream);
    let relay = ResponseBody::new(body, content, attempt, source, waits, continuation);
    Response::from_parts(head, Arc::new(Mutex::new(relay)))
}

/// Asks clients not to repeat a request that the backend may have run.
fn discourage_retry(headers: &mut HeaderMap) {
    let told = headers.entry(SHOULD_RETRY);
    told.or_insert(HeaderValue::from_static("false"));
}

/// Prepares the head of a backend's response for the client.
pub(super) fn clean_head(head: &mut response::Parts, content: &BodyKind) {
    clean_answer(&mut head.headers);
    if let BodyKind::Error { .. } = content {
        let length = head.headers.get(CONTENT_LENGTH);
        let length = length.and_then(|it| it.to_str().ok()?.parse().ok());
        if length.is_some_and(|length: u64| length > ERROR_BYTES_MAX) {
            head.headers.remove(CONTENT_LENGTH);
        }
    }
    if let BodyKind::Events { .. } = content {
        head.headers.remove(CONTENT_LENGTH);
        // Proxies in front of this replica must neither cache nor buffer the stream.
        let caching = head.headers.entry(CACHE_CONTROL);
        caching.or_insert(HeaderValue::from_static("no-cache"));
        let buffering = head.headers.entry(ACCEL_BUFFERING);
        buffering.or_insert(HeaderValue::from_static("no"));
    }
    // The version belongs to one hop: with an engine's HTTP/1.0, the client's stream would lack
    // framing.
    head.version = Version::default();
}

/// Returns the timeouts and buffer limits of a response.
pub(super) fn timeouts(proxy: &Proxy, first_byte_by: Instant) -> ResponseTimeouts {
    ResponseTimeouts {
        first_byte_by,
        answer_idle: proxy.settings.timeouts.answer_idle,
        withheld: WithheldEnd::new(proxy.settings.charges),
        ahead: ReadAheadBounds {
            bytes_max: proxy.limits.load().read_ahead_bytes_max,
            held_bytes: Arc::clone(&proxy.held_bytes),
            held_bytes_max: proxy.limits.load().held_bytes(),
            held_back: proxy.settings.timeouts.held_back,
            untaken: proxy.settings.timeouts.untaken,
        },
    }
}

/// Returns how to parse the body of a response with this head.
pub(super) fn content(
    status: StatusCode,
    headers: &HeaderMap,
    dialect: Dialect,
    wanted: WantedUsage,
) -> BodyKind {
    if !status.is_success() {
        return BodyKind::error();
    }
    let is_framed = is_framed(headers);
    match AnswerMedia::of(headers) {
        AnswerMedia::Events => BodyKind::Events {
            events: SseStream::new(wanted),
            has_clear_end: is_framed || dialect.has_named_events(),
            dialect,
        },
        AnswerMedia::Json => BodyKind::document(is_framed),
        AnswerMedia::Other => BodyKind::Opaque,
    }
}
