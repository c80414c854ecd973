//! Reading ahead of a client that takes its answer slowly.
//!
//! While nothing can be written to the client, pieces of the answer are kept here, up to a bound,
//! so that the end of the engine's answer is seen when it comes: the request gives its place back
//! and is charged then, and only bytes wait. When the bound is reached the engine is not read any
//! further; how long a client may hold an engine's place that way is bounded over the whole answer.
//! How long the bytes of an engine that is done may wait follows from their number
//! ([`LEAST_BYTES_PER_S`]).

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

use super::piece::AnswerPiece;

/// A client that takes the rest of a finished answer more slowly than this is given up.
const LEAST_BYTES_PER_S: u64 = 4 * 1024;

/// How far answers are read ahead.
#[derive(Debug, Clone)]
pub(super) struct ReadAheadBounds {
    /// Bytes of one answer that are kept at most.
    pub(super) bytes_max: u64,
    /// Bytes kept of all answers, and of all requests' bodies.
    pub(super) held_bytes: Arc<AtomicU64>,
    /// Most of these.
    pub(super) held_bytes_max: u64,
    /// How long a client may keep an engine waiting, over the whole answer.
    pub(super) held_back: Duration,
    /// How long a client may take nothing.
    pub(super) untaken: Duration,
}

/// What is kept of one answer.
pub(super) struct ReadAhead {
    bounds: ReadAheadBounds,
    pieces: VecDeque<AnswerPiece>,
    bytes: u64,
    /// Of [`ReadAheadBounds::held_back`].
    left: Duration,
    /// Since when the engine is kept waiting, or the rest of the answer waits.
    since: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl ReadAhead {
    pub(super) fn new(bounds: ReadAheadBounds) -> Self {
        Self {
            left: bounds.held_back,
            bounds,
            pieces: VecDeque::new(),
            bytes: 0,
            since: None,
            timer: None,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Whether another piece may be kept.
    pub(super) fn has_room(&self) -> bool {
        let ReadAheadBounds {
            bytes_max,
            held_bytes,
            held_bytes_max,
            ..
        } = &self.bounds;
        self.bytes < *bytes_max && held_bytes.load(Relaxed) < *held_bytes_max
    }

    /// Keeps a piece.
    pub(super) fn push(&mut self, piece: AnswerPiece) {
        let bytes = length(&piece);
        self.bytes += bytes;
        self.bounds.held_bytes.fetch_add(bytes, Relaxed);
        self.pieces.push_back(piece);
    }

    /// The next piece for the client.
    pub(super) fn take(&mut self) -> Option<AnswerPiece> {
        let piece = self.pieces.pop_front()?;
        let bytes = length(&piece);
        self.bytes -= bytes;
        self.bounds.held_bytes.fetch_sub(bytes, Relaxed);
        Some(piece)
    }

    /// The engine is read again.
    pub(super) fn goes_on(&mut self) {
        if let Some(since) = self.since.take() {
            self.left = self.left.saturating_sub(since.elapsed());
        }
    }

    /// Ready when the engine was kept waiting for too long.
    pub(super) fn poll_held_back(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.poll_after(self.left, cx)
    }

    /// Ready when the rest of a finished answer has waited for too long.
    pub(super) fn poll_untaken(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.is_empty() {
            return Poll::Pending;
        }
        let at_least = Duration::from_secs(self.bounds.bytes_max / LEAST_BYTES_PER_S);
        self.poll_after(self.bounds.untaken + at_least, cx)
    }

    fn poll_after(&mut self, wait: Duration, cx: &mut Context<'_>) -> Poll<()> {
        let since = *self.since.get_or_insert_with(Instant::now);
        let deadline = since + wait;
        let timer = self
            .timer
            .get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        if timer.deadline() != deadline {
            timer.as_mut().reset(deadline);
        }
        ready!(timer.as_mut().poll(cx));
        Poll::Ready(())
    }
}

impl Drop for ReadAhead {
    fn drop(&mut self) {
        self.bounds.held_bytes.fetch_sub(self.bytes, Relaxed);
    }
}

fn length(piece: &AnswerPiece) -> u64 {
    piece.as_ref().map_or(0, |bytes| bytes.len() as u64)
}
