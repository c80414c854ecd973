//! Sends the request that continues a stream whose backend has failed.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::FutureExt;
use http::response;
use http_body_util::{BodyExt, Collected};
use state::ids::Slot;
use tokio::time::{Instant, timeout, timeout_at};

use super::attempt_error::AttemptError;
use super::request_context::ProxiedRequest;
use super::{
    Answered, OutgoingRequest, Tries, Unanswered, content, exclude_engine, outgoing, respond,
};
use crate::engines::backends::pool::{EngineBody, Segments};
use crate::engines::backends::{AnswerForm, EngineKind};
use crate::error::ProxyError;
use crate::proxy::Proxy;
use crate::proxy::record::metrics::RequestMetricsGuard;
use crate::proxy::request::dialect::Dialect;
use crate::proxy::request::usage_options::WantedUsage;
use crate::proxy::response::continuation::{
    COMPLETION_TOKENS, ContinueRejection, ContinuedAnswer, ContinuedBody, Continuer,
    PendingContinuation, PresentAttempt, RelayedText, Seam, continued_body,
};
use crate::proxy::response::engine_error::end_of_error;
use crate::proxy::response::response_body::{BodyKind, Continuation};
use crate::proxy::settings::StreamResume;
use crate::routing::{AttemptEnd, Decision};

/// Share of `limits.max_held_bodies` that the bodies of streams may take in addition.
const KEPT_DIVISOR: u64 = 2;

/// Maximum number of streams that move at once. Each of them is a prompt for another engine.
const MOVES_MAX: u32 = 8;

/// Maximum time in which another backend must go on with a stream whose own backend still has it.
const LENT_MAX: Duration = Duration::from_secs(30);

/// Metrics of a request that is tried on backends.
pub(super) trait TryMetrics {
    /// Records the first dispatch, after the request `waited` for admission.
    fn routed(&self, waited: Duration);

    /// Whether the retry budget allows another backend.
    fn may_retry(&mut self) -> bool;
}

impl TryMetrics for RequestMetricsGuard {
    fn routed(&self, waited: Duration) {
        self.routed(waited);
    }

    fn may_retry(&mut self) -> bool {
        self.may_retry()
    }
}

/// Metrics of a request that counts as a retry already.
struct Retry;

impl TryMetrics for Retry {
    fn routed(&self, _: Duration) {}

    fn may_retry(&mut self) -> bool {
        true
    }
}

/// Keeps the body of a request while its stream may go on elsewhere; `None` if it cannot, or if too
/// many bytes of requests are kept already.
pub(super) fn keep_body(proxy: &Proxy, proxied: &ProxiedRequest) -> Option<KeptBody> {
    let parsed = &proxied.parsed;
    let is_single = parsed.choices == 1 && parsed.batch.prompts == 0;
    let may_go_on = proxy.settings.streams.resume != StreamResume::Off
        && parsed.stream
        && is_single
        && is_text_path(proxied.head.uri.path());
    may_go_on.then(|| KeptBody::keep(proxy, proxied.body.len()))?
}

/// Returns what a response to `proxied` of the backend in `slot` needs to go on elsewhere.
pub(super) fn continuation(
    proxy: &Arc<Proxy>,
    proxied: &Arc<ProxiedRequest>,
    kept: KeptBody,
    (tries, slot): (Tries, Slot),
) -> Box<Continuation> {
    let streams = &proxy.settings.streams;
    let is_chat = proxied.head.uri.path() == "/v1/chat/completions";
    let continuer = StreamContinuer {
        _kept: kept,
        proxy: Arc::clone(proxy),
        proxied: Arc::clone(proxied),
        tries: Arc::new(Mutex::new(tries)),
        is_chat,
    };
    let tokens_max = streams.resume_max_tokens;
    let mut continuation = Continuation::new(Box::new(continuer), tokens_max, streams.stall);
    if let Some(mut ids) = proxied.event_ids(is_chat) {
        if proxy.backends.kind(slot) == Some(EngineKind::LlamaCpp) {
            ids.are_endless();
        }
        continuation.identify(ids);
    }
    Box::new(continuation)
}

/// Whether the streams of this endpoint can be continued.
pub(super) fn is_text_path(path: &str) -> bool {
    matches!(path, "/v1/chat/completions" | "/v1/completions")
}

/// Sends the request that continues a stream.
struct StreamContinuer {
    proxy: Arc<Proxy>,
    proxied: Arc<ProxiedRequest>,
    tries: Arc<Mutex<Tries>>,
    is_chat: bool,
    _kept: KeptBody,
}

impl Continuer for StreamContinuer {
    fn body(
        &self,
        relayed: &RelayedText,
        slot: Slot,
        moves: bool,
    ) -> Result<ContinuedBody, ContinueRejection> {
        let (proxy, proxied) = (&self.proxy, &self.proxied);
        if (proxy.poison_requests).refuses(&proxied.body, &proxied.identity) {
            return Err(ContinueRejection::BreaksBackends);
        }
        if !moves && self.lock_tries().count >= proxy.settings.retry.attempts {
            return Err(ContinueRejection::NoAttempts);
        }
        let (sending, _) = outgoing(proxy, proxied);
        let is_endless = proxy.backends.kind(slot) == Some(EngineKind::LlamaCpp);
        let tokens_max = (!is_endless).then_some(COMPLETION_TOKENS);
        let path = proxied.head.uri.path();
        continued_body(path, &whole(sending.body), relayed, tokens_max)
    }

    fn go_on(
        &mut self,
        (present, slot): (PresentAttempt<'_>, Slot),
        body: ContinuedBody,
        relayed: &RelayedText,
    ) -> Result<PendingContinuation, ContinueRejection> {
        let (proxy, proxied) = (Arc::clone(&self.proxy), Arc::clone(&self.proxied));
        let is_move = matches!(present, PresentAttempt::Moving(_));
        let moving = match is_move {
            true => Some(MoveGuard::count(&proxy).ok_or(ContinueRejection::TooManyMoves)?),
            false => None,
        };
        let is_lent = match present {
            PresentAttempt::Failed(attempt, end) => {
                proxied.earlier.hand_over(attempt, end, Instant::now());
                false
            }
            PresentAttempt::Pausing(attempt) | PresentAttempt::Moving(attempt) => {
                proxied.earlier.lend(attempt);
                true
            }
        };
        let mut tries = match is_move {
            true => Tries {
                excluded: Vec::new(),
                count: 1,
                is_move,
            },
            false => self.lock_tries().clone(),
        };
        tries.excluded.push(slot);
        exclude_engine(&proxy, slot, &mut tries.excluded);
        proxy.metrics.retries.inc();
        let begun = relayed.has_begun();
        let ContinuedBody {
            bytes,
            held_tokens_max,
        } = body;
        let seam = begun.then(|| Seam::behind(relayed, self.is_chat, held_tokens_max));
        let text = relayed.text().unwrap_or_default().to_owned();
        let shared = Arc::clone(&self.tries);
        Ok(Box::pin(async move {
            let asked = ask(&proxy, &proxied, (bytes, seam), &mut tries, &text);
            let asked = match is_lent {
                false => asked.await,
                // Meanwhile the client gets nothing of the backend that still has the stream.
                true => match timeout(LENT_MAX, asked).await {
                    Ok(asked) => asked,
                    Err(_) => Err(ContinueRejection::NoBackend),
                },
            };
            if is_lent && asked.is_err() {
                proxied.earlier.take_back();
            }
            if !is_move {
                *shared.lock().unwrap_or_else(PoisonError::into_inner) = tries;
            }
            drop(moving);
            asked
        }))
    }

    fn is_moving(&self, slot: Slot) -> bool {
        self.proxy.view.moves_streams(slot) && self.proxy.moving_streams.load(Relaxed) < MOVES_MAX
    }
}

impl StreamContinuer {
    fn lock_tries(&self) -> MutexGuard<'_, Tries> {
        self.tries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A stream that moves, until it is dropped.
struct MoveGuard(Arc<AtomicU32>);

impl MoveGuard {
    /// Counts a stream that moves; `None` if too many do.
    fn count(proxy: &Proxy) -> Option<Self> {
        let moving = Arc::clone(&proxy.moving_streams);
        let before = moving.fetch_add(1, Relaxed);
        let counted = Self(moving);
        (before < MOVES_MAX).then_some(counted)
    }
}

impl Drop for MoveGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// Sends `body`, which continues `text`, to backends until one goes on.
async fn ask(
    proxy: &Arc<Proxy>,
    proxied: &Arc<ProxiedRequest>,
    (body, seam): (Bytes, Option<Seam>),
    tries: &mut Tries,
    text: &str,
) -> Result<ContinuedAnswer, ContinueRejection> {
    let (mut sending, _) = outgoing(proxy, proxied);
    sending.body = Segments::from(body.clone());
    sending.continued = Some(body);
    let behind = (seam.as_ref(), text);
    let gone_on = respond_and_go_on(proxy, proxied, &mut sending, tries, &mut Retry, behind).await;
    let gone_on = gone_on.map_err(|fault| {
        match &fault {
            GoOnError::Obstacle(_) => {}
            GoOnError::NotAdmitted(why) => {
                tracing::debug!(error = %why, "no backend for the rest of a stream");
            }
            GoOnError::Failed(failure) => {
                tracing::debug!(error = failure.label(), "the rest of a stream failed");
            }
            GoOnError::Broke | GoOnError::Reported | GoOnError::TimedOut => {
                tracing::debug!("the rest of a stream did not begin");
            }
        }
        match fault {
            GoOnError::Obstacle(obstacle) => obstacle,
            _ => ContinueRejection::NoBackend,
        }
    })?;
    Ok(gone_on.answer)
}

/// A backend's response that continues an answer.
pub(super) struct GoneOn {
    pub(super) head: response::Parts,
    pub(super) decision: Decision,
    pub(super) answer: ContinuedAnswer,
}

/// Why no backend goes on with a stream.
pub(super) enum GoOnError {
    /// The answer cannot be continued.
    Obstacle(ContinueRejection),
    /// No backend could be tried.
    NotAdmitted(ProxyError),
    /// The last attempt failed.
    Failed(AttemptError),
    /// The last backend broke before it went on.
    Broke,
    /// The last backend reported an error before it went on.
    Reported,
    /// The last backend did not go on in time.
    TimedOut,
}

/// Sends a request that continues the answer which begins with the text behind the seam, to one backend
/// after another until one goes on.
pub(super) async fn respond_and_go_on(
    proxy: &Arc<Proxy>,
    proxied: &Arc<ProxiedRequest>,
    sending: &mut OutgoingRequest<'_>,
    tries: &mut Tries,
    metrics: &mut impl TryMetrics,
    (seam, text): (Option<&Seam>, &str),
) -> Result<GoneOn, GoOnError> {
    loop {
        let answered = respond(proxy, proxied, sending, tries, metrics).await;
        let answered = answered.map_err(|unanswered| match unanswered {
            Unanswered::NotAdmitted(why) => GoOnError::NotAdmitted(why),
            Unanswered::Failed(failure) => GoOnError::Failed(failure),
        })?;
        let slot = answered.decision.backend.slot;
        let fault = match go_on(proxy, sending, answered, seam.cloned(), text).await {
            Err(fault @ (GoOnError::Broke | GoOnError::Reported)) => fault,
            gone_on_or_not => return gone_on_or_not,
        };
        let is_last = tries.is_move || tries.count >= proxy.settings.retry.attempts;
        if is_last || (proxy.poison_requests).refuses(&proxied.body, &proxied.identity) {
            return Err(fault);
        }
        tries.excluded.push(slot);
        if let GoOnError::Broke = fault {
            exclude_engine(proxy, slot, &mut tries.excluded);
        } else if !metrics.may_retry() {
            proxy.metrics.retries_refused.inc();
            return Err(fault);
        }
        proxy.metrics.retries.inc();
    }
}

/// Returns the response of a backend that goes on behind the `seam` with the answer that begins with
/// `text`.
async fn go_on(
    proxy: &Arc<Proxy>,
    sending: &OutgoingRequest<'_>,
    answered: Answered,
    mut seam: Option<Seam>,
    text: &str,
) -> Result<GoneOn, GoOnError> {
    let proxied = sending.proxied;
    let Answered {
        response,
        mut attempt,
        decision,
        ..
    } = answered;
    let (head, mut body) = response.into_parts();
    let path = proxied.head.uri.path();
    let kind = content(
        head.status,
        &head.headers,
        Dialect::of(path),
        WantedUsage::ALL,
    );
    if !matches!(kind, BodyKind::Events { .. }) {
        let end = match head.status.is_success() {
            true => AttemptEnd::Broken,
            false => end_of_error(proxy, head.status),
        };
        attempt.end(end, Instant::now());
        let obstacle = ContinueRejection::Refused(head.status.as_u16());
        return Err(GoOnError::Obstacle(obstacle));
    }
    let slot = decision.backend.slot;
    let begun = begin(&mut body, seam.as_mut());
    let first = match timeout_at(sending.first_byte_by, begun).await {
        Ok(Ok(first)) => first,
        failed => {
            // Another attempt may go on with what this one owes.
            (proxied.earlier).hand_over(attempt, AttemptEnd::Broken, Instant::now());
            return Err(match failed {
                Ok(Err(BeginError::Obstacle(obstacle))) => GoOnError::Obstacle(obstacle),
                Ok(Err(BeginError::Error)) => GoOnError::Reported,
                Ok(Err(BeginError::Broke)) => {
                    proxy.backends.report_failure(slot);
                    sending.watched.broke();
                    GoOnError::Broke
                }
                _ => GoOnError::TimedOut,
            });
        }
    };
    attempt.set_response_form(AnswerForm::of(path, true));
    attempt.set_hidden_output(None);
    proxied.earlier.go_on(&mut attempt, text);
    let answer = ContinuedAnswer {
        body,
        attempt,
        slot,
        watched: sending.watched.clone(),
        seam,
        first,
    };
    Ok(GoneOn {
        head,
        decision,
        answer,
    })
}

/// How a stream fails before it continues the answer.
enum BeginError {
    Obstacle(ContinueRejection),
    /// The engine has reported an error.
    Error,
    /// The connection broke.
    Broke,
}

/// Reads a stream until it continues the answer.
async fn begin(body: &mut EngineBody, mut seam: Option<&mut Seam>) -> Result<Bytes, BeginError> {
    let mut passed = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|_| BeginError::Broke)?.into_data() else {
            continue;
        };
        let Some(seam) = &mut seam else {
            return Ok(data);
        };
        passed.extend_from_slice(&seam.push(&data).map_err(BeginError::Obstacle)?);
        match seam.has_begun() {
            Some(true) => return Ok(passed.freeze()),
            Some(false) => {}
            None => return Err(BeginError::Error),
        }
    }
    Err(BeginError::Broke)
}

/// Returns a body in one piece.
pub(super) fn whole(body: Segments) -> Bytes {
    let collected = body.collect().now_or_never().and_then(Result::ok);
    collected.map(Collected::to_bytes).unwrap_or_default()
}

/// Bytes of a request's body that is kept while its stream lasts.
pub(super) struct KeptBody {
    kept: Arc<AtomicU64>,
    bytes: u64,
}

impl KeptBody {
    /// Counts a body of this many bytes; `None` if there is no room.
    fn keep(proxy: &Proxy, bytes: usize) -> Option<Self> {
        let (kept, bytes) = (Arc::clone(&proxy.kept_bytes), bytes as u64);
        let bytes_max = proxy.limits.load().held_bytes() / KEPT_DIVISOR;
        let before = kept.fetch_add(bytes, Relaxed);
        let counted = Self { kept, bytes };
        (before.saturating_add(bytes) <= bytes_max).then_some(counted)
    }
}

impl Drop for KeptBody {
    fn drop(&mut self) {
        self.kept.fetch_sub(self.bytes, Relaxed);
    }
}
