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

use super::request_context::ProxiedRequest;
use super::{
    Answered, OutgoingRequest, Tries, Unanswered, content, exclude_engine, outgoing, respond,
};
use crate::engines::backends::pool::{EngineBody, Segments};
use crate::engines::backends::{AnswerForm, EngineKind};
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
use crate::routing::AttemptEnd;

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

/// Returns what a response to `proxied` of the backend in `slot` needs to go on elsewhere; `None` if it cannot, or if too
/// many bytes of requests are kept already.
pub(super) fn continuation(
    proxy: &Arc<Proxy>,
    proxied: &Arc<ProxiedRequest>,
    (tries, slot): (Tries, Slot),
) -> Option<Box<Continuation>> {
    let (streams, parsed) = (&proxy.settings.streams, &proxied.parsed);
    let path = proxied.head.uri.path();
    let is_chat = path == "/v1/chat/completions";
    let is_text = is_text_path(path);
    let is_single = parsed.choices == 1 && parsed.batch.prompts == 0;
    if streams.resume == StreamResume::Off || !parsed.stream || !is_text || !is_single {
        return None;
    }
    let continuer = StreamContinuer {
        _kept: KeptBody::keep(proxy, proxied.body.len())?,
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
    Some(Box::new(continuation))
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
    let answered = respond(proxy, proxied, &mut sending, tries, &mut Retry).await;
    let answered = answered.map_err(|unanswered| match unanswered {
        Unanswered::NotAdmitted(why) => {
            tracing::debug!(error = %why, "no backend for the rest of a stream");
            ContinueRejection::NoBackend
        }
        Unanswered::Failed(failure) => {
            tracing::debug!(error = failure.label(), "the rest of a stream failed");
            ContinueRejection::NoBackend
        }
    })?;
    let (_, continued) = go_on(proxy, &sending, answered, seam, text).await?;
    Ok(continued)
}

/// Returns the response of a backend that goes on behind the `seam` with the answer that begins with
/// `text`, and the head of its response.
pub(super) async fn go_on(
    proxy: &Arc<Proxy>,
    sending: &OutgoingRequest<'_>,
    answered: Answered,
    mut seam: Option<Seam>,
    text: &str,
) -> Result<(response::Parts, ContinuedAnswer), ContinueRejection> {
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
        return Err(ContinueRejection::Refused(head.status.as_u16()));
    }
    let slot = decision.backend.slot;
    let begun = begin(&mut body, seam.as_mut());
    let first = match timeout_at(sending.first_byte_by, begun).await {
        Ok(Ok(first)) => first,
        failed => {
            attempt.end(AttemptEnd::Broken, Instant::now());
            return Err(match failed {
                Ok(Err(Some(obstacle))) => obstacle,
                Ok(Err(None)) => {
                    proxy.backends.report_failure(slot);
                    sending.watched.broke();
                    ContinueRejection::NoBackend
                }
                _ => ContinueRejection::NoBackend,
            });
        }
    };
    attempt.set_response_form(AnswerForm::of(path, true));
    attempt.set_hidden_output(None);
    proxied.earlier.go_on(&mut attempt, text);
    let continued = ContinuedAnswer {
        body,
        attempt,
        slot,
        watched: sending.watched.clone(),
        seam,
        first,
    };
    Ok((head, continued))
}

/// Reads a stream until it continues the answer. Fails with the obstacle, or with
/// `None` if the connection breaks.
async fn begin(
    body: &mut EngineBody,
    mut seam: Option<&mut Seam>,
) -> Result<Bytes, Option<ContinueRejection>> {
    let mut passed = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|_| None)?.into_data() else {
            continue;
        };
        let Some(seam) = &mut seam else {
            return Ok(data);
        };
        passed.extend_from_slice(&seam.push(&data).map_err(Some)?);
        match seam.has_begun() {
            Some(true) => return Ok(passed.freeze()),
            Some(false) => {}
            None => return Err(Some(ContinueRejection::NoBackend)),
        }
    }
    Err(None)
}

/// Returns a body in one piece.
pub(super) fn whole(body: Segments) -> Bytes {
    let collected = body.collect().now_or_never().and_then(Result::ok);
    collected.map(Collected::to_bytes).unwrap_or_default()
}

/// Bytes of a request's body that is kept while its stream lasts.
struct KeptBody {
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
