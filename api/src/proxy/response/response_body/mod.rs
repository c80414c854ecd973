//! An engine's response on its way to the client. Frames pass as they arrive, at the pace of the
//! client. Their usage and text go to the accounting, which is completed however the response ends.

mod continuing;

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use state::ids::Slot;
use tokio::time::Instant;

use self::continuing::AfterFailure;
pub(in crate::proxy) use self::continuing::Continuation;
use crate::error::ProxyError;
use crate::proxy::Proxy;
use crate::proxy::limits::poison_requests::WatchedRequest;
use crate::proxy::record::metrics::{RequestMetricsGuard, RequestOutcome};
use crate::proxy::request::dialect::Dialect;
use crate::proxy::response::accounting::RequestAccounting;
use crate::proxy::response::answer_source::AnswerSource;
use crate::proxy::response::answer_usage::AnswerDelta;
use crate::proxy::response::continuation::{ContinueRejection, Seam};
use crate::proxy::response::durable_charge::WithheldEnd;
use crate::proxy::response::engine_error::end_of_error;
use crate::proxy::response::idle_timeout::IdleTimeout;
use crate::proxy::response::json_answer::Document;
use crate::proxy::response::opening::may_be_error;
use crate::proxy::response::read_ahead::{ReadAhead, ReadAheadBounds};
use crate::proxy::response::response_chunk::{AnswerPiece, ResponseBodyError};
use crate::proxy::response::sse::SseStream;
use crate::routing::{Attempt, AttemptEnd};

/// Maximum length of an engine's error response that is relayed, in bytes. A longer one ends there.
pub(in crate::proxy) const ERROR_BYTES_MAX: u64 = 1024 * 1024;

/// Kind of a response body, with the state for reading it.
pub(in crate::proxy) enum BodyKind {
    /// Stream of server-sent events.
    Events {
        events: SseStream,
        /// Whether the end of the body is unambiguous, see [`ResponseBodyError::Unfinished`].
        has_clear_end: bool,
        /// Format of the event that reports a broken stream.
        dialect: Dialect,
    },
    /// One JSON document whose end is kept.
    Document {
        document: Document,
        /// Whether the end of the body is unambiguous, see [`ResponseBodyError::Unfinished`].
        has_clear_end: bool,
    },
    /// Any other body, which is relayed unread.
    Opaque,
    /// An engine's own error, or another response without success.
    Error {
        /// Number of bytes that may still pass.
        bytes_left: u64,
    },
}

impl BodyKind {
    pub(in crate::proxy) fn document(has_clear_end: bool) -> Self {
        Self::Document {
            document: Document::default(),
            has_clear_end,
        }
    }

    /// Whether a stream has announced its end.
    fn is_done(&self) -> bool {
        match self {
            Self::Events { events, .. } => events.is_done(),
            Self::Document { .. } | Self::Opaque | Self::Error { .. } => false,
        }
    }

    /// Whether the rest of an error is left out, so that the body ends here.
    fn is_cut(&self) -> bool {
        matches!(self, Self::Error { bytes_left: 0 })
    }

    pub(in crate::proxy) fn error() -> Self {
        Self::Error {
            bytes_left: ERROR_BYTES_MAX,
        }
    }
}

/// Backend that responds, which is blamed if its response breaks off.
pub(in crate::proxy) struct RespondingBackend {
    pub(in crate::proxy) proxy: Arc<Proxy>,
    pub(in crate::proxy) slot: Slot,
    /// Watched request; `None` for requests that run nothing that could break an engine.
    pub(in crate::proxy) watched: Option<WatchedRequest>,
}

/// A response body shared with its connection, which reads it ahead when it cannot write.
pub(in crate::proxy) type SharedResponseBody = Arc<Mutex<ResponseBody>>;

/// Locks the body. The lock is never contended, because one task holds both sides.
pub(in crate::proxy) fn lock(relay: &SharedResponseBody) -> MutexGuard<'_, ResponseBody> {
    relay.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Body of a relayed response.
pub(in crate::proxy) struct ResponseBody {
    engine: AnswerSource,
    content: BodyKind,
    accounting: RequestAccounting,
    source: RespondingBackend,
    idle_timeout: IdleTimeout,
    answer_idle: Duration,
    withheld: WithheldEnd,
    /// Whether the engine's body was read to its end.
    is_engine_read: bool,
    /// Whether the engine's part is over. Pieces may still wait.
    is_over: bool,
    /// Pieces that were read while the client received nothing.
    ahead: ReadAhead,
    /// What is needed to go on with a stream at another engine; `None` if it cannot go on.
    continuation: Option<Box<Continuation>>,
}

impl ResponseBody {
    /// Creates a body. `attempt` is `None` for an engine's error, which has ended the attempt.
    pub(in crate::proxy) fn new(
        engine: AnswerSource,
        content: BodyKind,
        attempt: Option<Attempt>,
        source: RespondingBackend,
        waits: ResponseTimeouts,
        continuation: Option<Box<Continuation>>,
    ) -> Self {
        let mut content = content;
        if let (BodyKind::Events { events, .. }, Some(_)) = (&mut content, &continuation) {
            events.hold_errors(true);
        }
        Self {
            engine,
            content,
            accounting: RequestAccounting::new(attempt),
            source,
            idle_timeout: IdleTimeout::until(waits.first_byte_by),
            answer_idle: waits.answer_idle,
            withheld: waits.withheld,
            is_engine_read: false,
            is_over: false,
            ahead: ReadAhead::new(waits.ahead),
            continuation,
        }
    }

    /// Reads the engine's response while the client receives nothing. Becomes ready when the client
    /// should be disconnected.
    pub(in crate::proxy) fn read_ahead(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while !self.is_over {
            if !self.ahead.has_room() {
                return self.ahead.poll_held_back(cx);
            }
            self.ahead.goes_on();
            if let Some(piece) = ready!(self.poll_engine(cx)) {
                self.ahead.push(piece);
            }
        }
        self.ahead.poll_untaken(cx)
    }

    /// Whether the events have ids, with which the client can go on at another replica.
    pub(in crate::proxy) fn has_ids(&self) -> bool {
        self.continuation.as_ref().is_some_and(|it| it.has_ids())
    }

    /// Whether a stream whose last event waits for its charge has sent that event.
    pub(in crate::proxy) fn is_withholding(&self) -> bool {
        self.withheld.is_on() && !self.is_over && self.content.is_done()
    }

    /// Attaches the request's metrics guard. A response without a body ends here.
    pub(in crate::proxy) fn account(&mut self, request_metrics: RequestMetricsGuard) {
        self.accounting.request_metrics = Some(request_metrics);
        if self.engine.is_end_stream() {
            self.accounting.begins();
            let (end, outcome) = self.result();
            self.accounting.end(end, outcome);
            self.accounting.settle();
            self.is_over = true;
        }
    }

    /// Returns how the attempt and the request end, of a response that is complete.
    fn result(&mut self) -> (AttemptEnd, RequestOutcome) {
        if matches!(self.content, BodyKind::Events { .. }) {
            self.accounting.stream_ends();
        }
        // Nothing goes on after the end. This frees the request.
        self.continuation = None;
        let outcome = match (&self.content, self.accounting.error()) {
            (BodyKind::Error { .. }, _) => {
                return (AttemptEnd::Finished, RequestOutcome::EngineError);
            }
            (_, None) => {
                self.source
                    .watched
                    .iter()
                    .for_each(WatchedRequest::succeeded);
                return (AttemptEnd::Finished, RequestOutcome::Finished);
            }
            (_, Some(_)) if self.accounting.has_output() => AttemptEnd::Broken,
            // Like a response with this status.
            (_, Some(status)) => end_of_error(&self.source.proxy, status),
        };
        (outcome, RequestOutcome::EngineError)
    }

    /// Accepts a frame and returns the bytes that the client receives now, if any.
    fn take_in(&mut self, data: Bytes) -> Result<Option<Bytes>, ResponseBodyError> {
        let (accounting, continuation) = (&mut self.accounting, &mut self.continuation);
        let (passed, has_progress) = match &mut self.content {
            BodyKind::Events { events, .. } => {
                let passed = events.push(data, &mut |findings| {
                    accounting.note_event(findings);
                    continuation.as_mut().and_then(|it| it.note(findings))
                });
                (passed, events.take_progress())
            }
            BodyKind::Document { document, .. } => {
                // White space before a document keeps connections alive, like comments.
                let is_blank = document.is_empty() && data.trim_ascii_start().is_empty();
                if !is_blank {
                    document.push(data.clone());
                    if !may_be_error(&data) {
                        accounting.is_answered();
                    }
                }
                (Some(data), !is_blank)
            }
            BodyKind::Opaque => {
                accounting.is_answered();
                (Some(data), true)
            }
            BodyKind::Error { bytes_left } => {
                let mut data = data;
                data.truncate(usize::try_from(*bytes_left).unwrap_or(usize::MAX));
                *bytes_left -= data.len() as u64;
                (Some(data), true)
            }
        };
        if has_progress {
            self.goes_on();
        }
        let accounting = &self.accounting;
        if let (Some(passed), Some(request_metrics)) = (&passed, &accounting.request_metrics) {
            request_metrics
                .metrics()
                .answer_bytes
                .inc_by(passed.len() as u64);
        }
        if self.holds_error() {
            return Ok(passed);
        }
        let is_last = self.engine.is_end_stream() || self.content.is_cut();
        if !is_last {
            return Ok(match self.withheld.is_on() && self.content.is_done() {
                true => self.withhold(passed),
                false => passed,
            });
        }
        if self.withheld.is_on() {
            self.withheld.push(passed);
            return self.finish();
        }
        // A client that reads by the announced length does not poll again.
        Ok(joined(passed, self.finish()?))
    }

    /// Records that data has arrived, and moves the deadline. Before the first output, the deadline
    /// of the first byte holds as well.
    fn goes_on(&mut self) {
        self.accounting.begins();
        let is_stream = matches!(self.content, BodyKind::Events { .. });
        match is_stream && !self.accounting.has_output() {
            true => self.idle_timeout.extend(self.answer_idle),
            false => self.idle_timeout.restart(self.pause_max()),
        }
    }

    /// Returns the longest pause within the output.
    fn pause_max(&self) -> Duration {
        let stall = self.continuation.as_ref().and_then(|it| it.stall);
        stall.map_or(self.answer_idle, |stall| stall.min(self.answer_idle))
    }

    /// Whether an error of the engine is held back, because the stream may go on elsewhere.
    fn holds_error(&self) -> bool {
        matches!(&self.content, BodyKind::Events { events, .. } if events.holds_error())
    }

    /// Handles the end of the engine's body and returns the last bytes for the client, if any.
    fn finish(&mut self) -> Result<Option<Bytes>, ResponseBodyError> {
        let rest = match &mut self.content {
            BodyKind::Events {
                events,
                has_clear_end,
                ..
            } => {
                let (accounting, continuation) = (&mut self.accounting, &mut self.continuation);
                // Nothing goes on after this.
                let seam = continuation.as_mut().and_then(|it| it.seam.as_mut());
                let held = seam.map(Seam::finish);
                let mut note = |findings: &AnswerDelta<'_>| accounting.note_event(findings);
                let held = held.and_then(|held| events.push(held, &mut note));
                let rest = joined(held, events.finish(&mut note));
                if !*has_clear_end && !events.is_done() {
                    return Err(ResponseBodyError::Unfinished);
                }
                rest
            }
            BodyKind::Document {
                document,
                has_clear_end,
            } => {
                let read = document.read(|findings| self.accounting.note(findings));
                if !*has_clear_end && !read.is_whole {
                    return Err(ResponseBodyError::Unfinished);
                }
                if read.is_all {
                    self.accounting.is_all_seen();
                }
                None
            }
            BodyKind::Opaque | BodyKind::Error { .. } => None,
        };
        self.is_engine_read = true;
        if self.withheld.is_on() {
            let passed = self.withhold(rest);
            self.is_over = !self.withheld.is_waiting();
            return Ok(passed);
        }
        let (end, outcome) = self.result();
        self.accounting.end(end, outcome);
        self.is_over = true;
        Ok(rest)
    }

    /// Ends the accounting and withholds `end`, with what is withheld already, until the charge is
    /// committed. If there is nothing to commit, returns it at once. What follows the last event of
    /// a stream comes here too, and passes.
    fn withhold(&mut self, end: Option<Bytes>) -> Option<Bytes> {
        self.withheld.push(end);
        let (end, outcome) = self.result();
        let Some(commit) = self.accounting.end_durably(end, outcome) else {
            return self.withheld.take();
        };
        self.withheld.wait(commit);
        None
    }

    /// Returns what is withheld once its charge is committed or the wait is over.
    fn poll_withheld(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let released = ready!(self.withheld.poll_released(cx));
        if !released.is_confirmed {
            let request_metrics = self.accounting.request_metrics.iter();
            request_metrics.for_each(|request_metrics| {
                request_metrics.metrics().charges_unconfirmed.inc();
            });
        }
        self.is_over = self.is_engine_read;
        self.idle_timeout.restart(self.answer_idle);
        Poll::Ready(released.piece)
    }

    /// Records that the engine has failed.
    fn blame(&self, why: &ResponseBodyError) {
        if matches!(why, ResponseBodyError::Engine(_)) {
            let RespondingBackend {
                proxy,
                slot,
                watched,
            } = &self.source;
            proxy.backends.report_failure(*slot);
            watched.iter().for_each(WatchedRequest::broke);
        }
    }

    /// Completes the accounting of a broken response. A stream of events gets a final error event.
    fn break_off(
        &mut self,
        why: ResponseBodyError,
        obstacle: Option<&ContinueRejection>,
    ) -> Result<Bytes, ResponseBodyError> {
        self.is_over = true;
        if let Some(request_metrics) = &mut self.accounting.request_metrics {
            request_metrics.fails_because(why.to_string());
        }
        let (end, outcome) = match why {
            ResponseBodyError::TakenOver => (AttemptEnd::Moved, RequestOutcome::ClientLeft),
            _ => (AttemptEnd::Broken, RequestOutcome::BrokenOff),
        };
        self.accounting.end(end, outcome);
        let relayed = self.continuation.take().map(|it| it.relayed);
        match &mut self.content {
            BodyKind::Events {
                events, dialect, ..
            } => {
                let failure = match why {
                    ResponseBodyError::Silent => ProxyError::EngineTimeout,
                    ResponseBodyError::TakenOver => ProxyError::TakenOver,
                    _ => ProxyError::EngineBrokeOff {
                        tokens: relayed.map(|relayed| relayed.tokens()),
                        obstacle: obstacle.map(ToString::to_string),
                    },
                };
                let waiting = events.take_waiting();
                let last = dialect.last_event(&failure, events.abandon());
                Ok(match waiting {
                    Some(waiting) => [waiting, last].concat().into(),
                    None => last,
                })
            }
            _ => Err(why),
        }
    }
}

/// Joins two pieces that follow each other.
fn joined(first: Option<Bytes>, second: Option<Bytes>) -> Option<Bytes> {
    match (first, second) {
        (Some(first), Some(second)) => Some([first, second].concat().into()),
        (first, second) => first.or(second),
    }
}

impl Drop for ResponseBody {
    /// A client that hangs up after the stream's last event has a complete response, although the
    /// end of the engine's body did not pass.
    fn drop(&mut self) {
        if !self.is_over && !self.withheld.is_waiting() && self.content.is_done() {
            let (end, outcome) = self.result();
            self.accounting.end(end, outcome);
            if self.ahead.is_empty() {
                self.accounting.settle();
            }
        }
    }
}

impl ResponseBody {
    /// Returns the next piece of the response for the client.
    fn poll_engine(&mut self, cx: &mut Context<'_>) -> Poll<Option<AnswerPiece>> {
        let mut may_move = true;
        while !self.is_over {
            if let Some(piece) = ready!(self.poll_continuation(cx)) {
                return Poll::Ready(Some(piece));
            }
            if self
                .accounting
                .attempt()
                .is_some_and(Attempt::is_taken_over)
            {
                return Poll::Ready(Some(self.leave()));
            }
            // Once per call: a stream that cannot move goes on where it is.
            let why = match std::mem::take(&mut may_move) && self.is_moving() {
                true => ResponseBodyError::Moved,
                false => match ready!(self.poll_one_engine(cx)) {
                    Ok(piece) => return Poll::Ready(piece.map(Ok)),
                    Err(why) => why,
                },
            };
            if let AfterFailure::Piece(piece) = self.after_failure(why) {
                return Poll::Ready(Some(piece));
            }
        }
        Poll::Ready(None)
    }

    /// Returns the next data of the engine. That of an engine that goes on continues the stream.
    fn poll_arrival(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, ResponseBodyError>>> {
        let continuation = self.continuation.as_mut();
        if let Some(first) = continuation.and_then(|it| it.first.take()) {
            return Poll::Ready(Some(Ok(first)));
        }
        loop {
            let data = match ready!(Pin::new(&mut self.engine).poll_frame(cx)) {
                // Trailers concern the engine's connection.
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => data,
                    Err(_) => continue,
                },
                Some(Err(error)) => return Poll::Ready(Some(Err(error.into()))),
                None => return Poll::Ready(None),
            };
            let seam = self.continuation.as_mut().and_then(|it| it.seam.as_mut());
            return Poll::Ready(Some(match seam {
                Some(seam) => seam
                    .push(&data)
                    .map_err(|_| ResponseBodyError::NotContinued),
                None => Ok(data),
            }));
        }
    }

    /// Returns the next piece of the present engine's response, or why it has failed.
    fn poll_one_engine(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<Bytes>, ResponseBodyError>> {
        let broken = loop {
            if self.holds_error() {
                break ResponseBodyError::Reported;
            }
            if self.withheld.is_waiting() {
                let released = ready!(self.poll_withheld(cx));
                if released.is_some() || self.is_over {
                    return Poll::Ready(Ok(released));
                }
            }
            match self.poll_arrival(cx) {
                Poll::Ready(Some(Ok(data))) => match self.take_in(data) {
                    Ok(None) if self.is_over => return Poll::Ready(Ok(None)),
                    Ok(None) => continue,
                    Ok(Some(passed)) => return Poll::Ready(Ok(Some(passed))),
                    Err(why) => break why,
                },
                Poll::Ready(Some(Err(error))) if !self.content.is_done() => break error,
                Poll::Ready(Some(Err(_)) | None) => {}
                Poll::Pending => {
                    ready!(self.idle_timeout.poll_lost(cx));
                    if !self.content.is_done() {
                        break ResponseBodyError::Silent;
                    }
                }
            }
            match self.finish() {
                Ok(None) if !self.is_over => {}
                Ok(rest) => return Poll::Ready(Ok(rest)),
                Err(why) => break why,
            }
        };
        Poll::Ready(Err(broken))
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = ResponseBodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ResponseBodyError>>> {
        let this = &mut *self;
        let piece = match this.ahead.take() {
            Some(piece) => Some(piece),
            None => ready!(this.poll_engine(cx)),
        };
        if this.is_over && this.ahead.is_empty() {
            this.accounting.settle();
        }
        Poll::Ready(piece.map(|piece| piece.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        self.is_over && self.ahead.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        match self.content {
            BodyKind::Events { .. } => SizeHint::default(),
            BodyKind::Document { .. } | BodyKind::Opaque => self.engine.size_hint(),
            BodyKind::Error { bytes_left } => {
                let hint = self.engine.size_hint();
                let is_cut = hint.upper().is_none_or(|upper| upper > bytes_left);
                if is_cut { SizeHint::default() } else { hint }
            }
        }
    }
}

/// Timeouts and buffer limits of a response.
pub(in crate::proxy) struct ResponseTimeouts {
    /// Deadline of the first byte of the body.
    pub(in crate::proxy) first_byte_by: Instant,
    /// Maximum time between two pieces of the body.
    pub(in crate::proxy) answer_idle: Duration,
    /// Withheld end, which waits for its charge.
    pub(in crate::proxy) withheld: WithheldEnd,
    /// Bounds for a client that receives slowly.
    pub(in crate::proxy) ahead: ReadAheadBounds,
}
