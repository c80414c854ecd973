//! A stream that goes on at another engine after its own has failed.

use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::{BodyKind, ResponseBody};
use crate::proxy::record::broken_streams::{BreakLabels, BreakResult, StreamBreak};
use crate::proxy::record::metrics::RequestMetricsGuard;
use crate::proxy::response::answer_source::AnswerSource;
use crate::proxy::response::answer_usage::AnswerDelta;
use crate::proxy::response::continuation::{
    ContinueRejection, ContinuedAnswer, Continuer, EventIds, PendingContinuation, PresentAttempt,
    RelayedText, Seam,
};
use crate::proxy::response::engine_error::end_of_error;
use crate::proxy::response::response_chunk::{AnswerPiece, ResponseBodyError};
use crate::routing::AttemptEnd;

/// What is needed to go on with a stream at another engine.
pub(in crate::proxy) struct Continuation {
    pub(super) relayed: RelayedText,
    /// Ids of the events; `None` if the client does not go on at another replica.
    ids: Option<EventIds>,
    continuer: Box<dyn Continuer>,
    /// Longest pause after which the stream goes on elsewhere; `None` for that of all responses.
    pub(super) stall: Option<Duration>,
    /// Seam behind the last engine that failed; `None` before the first failure.
    pub(super) seam: Option<Seam>,
    /// First events of the next engine, already joined.
    pub(super) first: Option<Bytes>,
    /// Whether the stream stays at a backend that drains, because it cannot move.
    stays: bool,
    /// The request that continues the stream, and why it was sent; `None` while an engine responds.
    pending: Option<(PendingContinuation, ResponseBodyError)>,
}

impl Continuation {
    pub(in crate::proxy) fn new(
        continuer: Box<dyn Continuer>,
        tokens_max: u32,
        stall: Option<Duration>,
    ) -> Self {
        Self {
            relayed: RelayedText::new(tokens_max),
            ids: None,
            continuer,
            stall,
            seam: None,
            first: None,
            stays: false,
            pending: None,
        }
    }

    /// Gives events ids, with which the client can go on at another replica.
    pub(in crate::proxy) fn identify(&mut self, ids: EventIds) {
        self.ids = Some(ids);
    }

    pub(super) fn has_ids(&self) -> bool {
        self.ids.is_some()
    }

    /// Goes on with the stream of another replica, of which the client has `relayed`, with the
    /// `first` events of the engine behind the seam.
    pub(in crate::proxy) fn follow(&mut self, relayed: RelayedText, seam: Seam, first: Bytes) {
        self.relayed = relayed;
        self.seam = Some(seam);
        self.first = Some(first);
    }

    /// Notes an event that the client receives, and returns the line with its id, if any.
    pub(super) fn note(&mut self, event: &AnswerDelta<'_>) -> Option<Bytes> {
        self.relayed.note(event);
        self.ids.as_mut()?.line(&self.relayed, event)
    }
}

/// Result of a failure of the engine.
pub(super) enum AfterFailure {
    /// The stream goes on: another engine was asked, or its engine may still answer.
    GoesOn,
    /// The client gets this piece.
    Piece(AnswerPiece),
}

impl ResponseBody {
    /// Goes on with the stream elsewhere after a failure of its engine, or ends it.
    pub(super) fn after_failure(&mut self, why: ResponseBodyError) -> AfterFailure {
        self.blame(&why);
        let moves = matches!(why, ResponseBodyError::Moved);
        let Some(continuation) = self.continuation.as_mut() else {
            return AfterFailure::Piece(self.break_off(why, None));
        };
        if matches!(why, ResponseBodyError::NotContinued) {
            return AfterFailure::Piece(self.give_up(why, &ContinueRejection::NotContinued));
        }
        // What an unframed body held back at its end is lost.
        let is_lost = matches!(why, ResponseBodyError::Unfinished);
        if continuation.relayed.is_complete() && is_lost {
            return AfterFailure::Piece(self.break_off(why, None));
        }
        if continuation.relayed.is_complete() && !moves {
            self.count_break(&why, BreakResult::COMPLETED);
            return match self.complete() {
                Some(last) => AfterFailure::Piece(Ok(last)),
                None => AfterFailure::GoesOn,
            };
        }
        match self.ask_another(&why) {
            Ok(pending) => {
                if let Some(continuation) = &mut self.continuation {
                    continuation.pending = Some((pending, why));
                }
                AfterFailure::GoesOn
            }
            Err(obstacle) => self.without_another(why, &obstacle),
        }
    }

    /// Returns the request that continues the stream at another engine.
    fn ask_another(
        &mut self,
        why: &ResponseBodyError,
    ) -> Result<PendingContinuation, ContinueRejection> {
        let BodyKind::Events { events, .. } = &mut self.content else {
            return Err(ContinueRejection::OtherOutput);
        };
        if events.is_within_event() {
            return Err(ContinueRejection::IncompleteEvent);
        }
        let continuation = self
            .continuation
            .as_mut()
            .ok_or(ContinueRejection::NoAttempts)?;
        let moves = matches!(why, ResponseBodyError::Moved);
        let slot = self.source.slot;
        let Continuation {
            continuer, relayed, ..
        } = &mut **continuation;
        let body = continuer.body(relayed, slot, moves)?;
        let is_alive = matches!(why, ResponseBodyError::Reported | ResponseBodyError::Silent);
        let metrics = &mut self.accounting.request_metrics;
        let may_retry = |metrics: &mut RequestMetricsGuard| metrics.may_retry();
        // An engine that is gone leaves its load to others, once. One that is not may refuse it
        // again and again.
        if is_alive && !metrics.as_mut().is_none_or(may_retry) {
            return Err(ContinueRejection::NoAttempts);
        }
        tracing::debug!(error = %why, "a stream goes on at another backend");
        let error = self.accounting.error();
        let end = match error.filter(|_| !self.accounting.has_output()) {
            Some(status) => end_of_error(&self.source.proxy, status),
            None => AttemptEnd::Broken,
        };
        let accounting = &mut self.accounting;
        let present = match why {
            ResponseBodyError::Moved => accounting.attempt().map(PresentAttempt::Moving),
            ResponseBodyError::Silent => accounting.attempt().map(PresentAttempt::Pausing),
            _ => (accounting.take_attempt()).map(|it| PresentAttempt::Failed(it, end)),
        };
        let present = present.ok_or(ContinueRejection::NoAttempts)?;
        continuer.go_on((present, slot), body, relayed)
    }

    /// Handles a failure after which no other backend can be asked.
    fn without_another(
        &mut self,
        why: ResponseBodyError,
        obstacle: &ContinueRejection,
    ) -> AfterFailure {
        if matches!(why, ResponseBodyError::Moved) {
            self.stay(&why, obstacle);
            return AfterFailure::GoesOn;
        }
        let stall = self.continuation.as_mut().and_then(|it| it.stall.take());
        if let (ResponseBodyError::Silent, Some(stall)) = (&why, stall)
            && stall < self.answer_idle
        {
            // Only a stream that can go on elsewhere must not pause for so long.
            self.count_break(&why, BreakResult::from(obstacle));
            self.idle_timeout.restart(self.answer_idle - stall);
            return AfterFailure::GoesOn;
        }
        AfterFailure::Piece(self.give_up(why, obstacle))
    }

    /// Lets a stream that cannot move go on where it is.
    fn stay(&mut self, why: &ResponseBodyError, obstacle: &ContinueRejection) {
        self.idle_timeout.restart(self.pause_max());
        if *obstacle == ContinueRejection::TooManyMoves {
            // The next event tries again.
            return;
        }
        self.count_break(why, BreakResult::from(obstacle));
        if let Some(continuation) = &mut self.continuation {
            continuation.stays = true;
        }
    }

    /// Whether the backend drains and the stream is to move.
    pub(super) fn is_moving(&self) -> bool {
        let Some(continuation) = &self.continuation else {
            return false;
        };
        let relayed = &continuation.relayed;
        let may_move = !continuation.stays
            && self.accounting.has_output()
            && relayed.ends_in_a_word()
            && !relayed.is_complete()
            && !self.content.is_done();
        may_move && continuation.continuer.is_moving(self.source.slot)
    }

    /// Ends a stream that goes on nowhere. An error that its engine reported passes, as if it had
    /// not been held back.
    fn give_up(&mut self, why: ResponseBodyError, obstacle: &ContinueRejection) -> AnswerPiece {
        self.count_break(&why, BreakResult::from(obstacle));
        if let (ResponseBodyError::Reported, BodyKind::Events { events, .. }) =
            (&why, &mut self.content)
        {
            events.hold_errors(false);
            self.continuation = None;
            let error = events.take_error().unwrap_or_default();
            let accounting = &mut self.accounting;
            let passed = events.push(error, &mut |findings| accounting.note_event(findings));
            return Ok(passed.unwrap_or_default());
        }
        self.break_off(why, Some(obstacle))
    }

    /// Ends a stream that lacks nothing but its end.
    fn complete(&mut self) -> Option<Bytes> {
        self.is_engine_read = true;
        self.accounting.forgives();
        let mut last = b"data: [DONE]\n\n".to_vec();
        if let BodyKind::Events { events, .. } = &mut self.content {
            drop((events.take_error(), events.abandon()));
            let waiting = events.take_waiting().unwrap_or_default();
            last.splice(..0, waiting);
        }
        if self.withheld.is_on() {
            let passed = self.withhold(Some(last.into()));
            self.is_over = !self.withheld.is_waiting();
            return passed;
        }
        let (end, outcome) = self.result();
        self.accounting.end(end, outcome);
        self.is_over = true;
        Some(last.into())
    }

    /// Waits for the engine that continues the stream, if one was asked. Returns a piece if none
    /// does.
    pub(super) fn poll_continuation(&mut self, cx: &mut Context<'_>) -> Poll<Option<AnswerPiece>> {
        let Some(continuation) = &mut self.continuation else {
            return Poll::Ready(None);
        };
        let Some((pending, _)) = &mut continuation.pending else {
            return Poll::Ready(None);
        };
        let asked = ready!(pending.as_mut().poll(cx));
        let Some((_, why)) = continuation.pending.take() else {
            return Poll::Ready(None);
        };
        match asked {
            Ok(continued) => {
                self.count_break(&why, BreakResult::CONTINUED);
                let end = match why {
                    ResponseBodyError::Moved => AttemptEnd::Moved,
                    _ => AttemptEnd::Broken,
                };
                self.continue_with(continued, end);
                Poll::Ready(None)
            }
            Err(obstacle) => match self.without_another(why, &obstacle) {
                AfterFailure::GoesOn => Poll::Ready(None),
                AfterFailure::Piece(piece) => Poll::Ready(Some(piece)),
            },
        }
    }

    /// Goes on with the stream of the next engine. If the present attempt still runs, it ends thus.
    fn continue_with(&mut self, continued: ContinuedAnswer, end: AttemptEnd) {
        let ContinuedAnswer {
            body,
            mut attempt,
            slot,
            watched,
            seam,
            first,
        } = continued;
        if let Some(before) = self.accounting.take_attempt() {
            attempt.replaces(before, end, Instant::now());
        }
        if let Some(continuation) = &mut self.continuation {
            continuation.seam = seam;
            continuation.first = Some(first);
        }
        if let BodyKind::Events { events, .. } = &mut self.content {
            drop((events.take_error(), events.take_waiting(), events.abandon()));
        }
        self.engine = AnswerSource::Engine(body);
        self.accounting.continues(attempt);
        self.source.slot = slot;
        self.source.watched = Some(watched);
        self.idle_timeout.restart(self.pause_max());
    }

    /// Ends a stream that another request has taken over. Its client is hardly there any more.
    pub(super) fn leave(&mut self) -> AnswerPiece {
        self.break_off(ResponseBodyError::TakenOver, None)
    }

    fn count_break(&self, why: &ResponseBodyError, result: BreakResult) {
        let cause = match why {
            ResponseBodyError::Reported => StreamBreak::Error,
            ResponseBodyError::Silent => StreamBreak::Stalled,
            ResponseBodyError::Moved => StreamBreak::Moved,
            _ => StreamBreak::Broke,
        };
        let metrics = &self.source.proxy.metrics;
        metrics.stream_broke(&BreakLabels { cause, result });
    }
}
