//! Sends the request that continues a stream whose backend has failed.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http_body_util::{BodyExt, Collected};
use state::ids::Slot;
use tokio::time::Instant;

use super::request_context::ProxiedRequest;
use super::{Answered, Tries, Unanswered, content, exclude_engine, outgoing, respond};
use crate::engines::backends::AnswerForm;
use crate::engines::backends::pool::Segments;
use crate::proxy::Proxy;
use crate::proxy::record::metrics::RequestMetricsGuard;
use crate::proxy::request::dialect::Dialect;
use crate::proxy::request::usage_options::WantedUsage;
use crate::proxy::response::continuation::{
    ContinuedAnswer, Continuer, FailedAttempt, Obstacle, PendingContinuation, RelayedAnswer,
    continued_body,
};
use crate::proxy::response::engine_error::end_of_error;
use crate::proxy::response::response_body::{BodyKind, Continuation};
use crate::proxy::settings::StreamResume;
use crate::routing::{Attempt, AttemptEnd};

/// Share of `limits.max_held_bodies` that the bodies of streams may take in addition.
const KEPT_DIVISOR: u64 = 2;

/// Maximum number of streams that move at once. Each of them is a prompt for another engine.
const MOVES_MAX: u32 = 8;

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

/// Returns what a response to `proxied` needs to go on elsewhere; `None` if it cannot, or if too
/// many bytes of requests are kept already.
pub(super) fn continuation(
    proxy: &Arc<Proxy>,
    proxied: &Arc<ProxiedRequest>,
    tries: Tries,
) -> Option<Box<Continuation>> {
    let (streams, parsed) = (&proxy.settings.streams, &proxied.parsed);
    let path = proxied.head.uri.path();
    let is_chat = path == "/v1/chat/completions";
    let is_text = is_chat || path == "/v1/completions";
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
    let continuation = Continuation::new(Box::new(continuer), tokens_max, streams.stall);
    Some(Box::new(continuation))
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
    fn is_chat(&self) -> bool {
        self.is_chat
    }

    fn body(&self, relayed: &RelayedAnswer, moves: bool) -> Result<Bytes, Obstacle> {
        let (proxy, proxied) = (&self.proxy, &self.proxied);
        if (proxy.poison_requests).refuses(&proxied.body, &proxied.identity) {
            return Err(Obstacle::BreaksBackends);
        }
        let tries = self.tries.lock().unwrap_or_else(PoisonError::into_inner);
        if !moves && tries.count >= proxy.settings.retry.attempts {
            return Err(Obstacle::NoAttempts);
        }
        let (sending, _) = outgoing(proxy, proxied);
        continued_body(proxied.head.uri.path(), &whole(sending.body), relayed)
    }

    fn go_on(
        &mut self,
        failed: FailedAttempt,
        body: Bytes,
        relayed: &RelayedAnswer,
    ) -> PendingContinuation {
        let (proxy, proxied) = (Arc::clone(&self.proxy), Arc::clone(&self.proxied));
        let FailedAttempt { attempt, slot, end } = failed;
        proxied.hand_over(attempt, end);
        proxy.metrics.retries.inc();
        let shared = Arc::clone(&self.tries);
        let mut tries = shared
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        tries.excluded.push(slot);
        exclude_engine(&proxy, slot, &mut tries.excluded);
        let text = relayed.text().unwrap_or_default().to_owned();
        Box::pin(async move {
            let asked = ask(&proxy, &proxied, body, &mut tries, &text).await;
            *shared.lock().unwrap_or_else(PoisonError::into_inner) = tries;
            asked
        })
    }

    fn is_moving(&self, slot: Slot) -> bool {
        let registry = self.proxy.view.registry();
        let moves = registry.backend(slot).is_some_and(|it| it.moves_streams);
        moves && self.proxy.moving_streams.load(Relaxed) < MOVES_MAX
    }

    fn move_away(
        &mut self,
        (attempt, slot): (&mut Attempt, Slot),
        body: Bytes,
        relayed: &RelayedAnswer,
    ) -> Result<PendingContinuation, Obstacle> {
        let (proxy, proxied) = (Arc::clone(&self.proxy), Arc::clone(&self.proxied));
        let moving = MoveGuard::count(&proxy).ok_or(Obstacle::TooManyMoves)?;
        proxied.lend(attempt);
        let mut tries = Tries {
            excluded: vec![slot],
            count: 1,
        };
        exclude_engine(&proxy, slot, &mut tries.excluded);
        let text = relayed.text().unwrap_or_default().to_owned();
        Ok(Box::pin(async move {
            let asked = ask(&proxy, &proxied, body, &mut tries, &text).await;
            if asked.is_err() {
                proxied.take_back();
            }
            drop(moving);
            asked
        }))
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
    body: Bytes,
    tries: &mut Tries,
    text: &str,
) -> Result<ContinuedAnswer, Obstacle> {
    let (mut sending, _) = outgoing(proxy, proxied);
    sending.body = Segments::from(body);
    let answered = respond(proxy, proxied, &mut sending, tries, &mut Retry).await;
    let Answered {
        response,
        mut attempt,
        decision,
        ..
    } = answered.map_err(|unanswered| match unanswered {
        Unanswered::NotAdmitted(why) => {
            tracing::debug!(error = %why, "no backend for the rest of a stream");
            Obstacle::NoBackend
        }
        Unanswered::Failed(failure) => {
            tracing::debug!(error = failure.label(), "the rest of a stream failed");
            Obstacle::NoBackend
        }
    })?;
    let (head, body) = response.into_parts();
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
        return Err(Obstacle::Refused(head.status.as_u16()));
    }
    attempt.set_response_form(AnswerForm::of(path, true));
    attempt.set_hidden_output(None);
    proxied.goes_on(&mut attempt, text);
    Ok(ContinuedAnswer {
        body,
        attempt,
        slot: decision.backend.slot,
        watched: sending.watched,
    })
}

/// Returns a body in one piece.
fn whole(body: Segments) -> Bytes {
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
