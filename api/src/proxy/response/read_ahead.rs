//! Reads ahead of a client that receives its response slowly.
//!
//! While nothing can be written to the client, pieces of the response are buffered up to a bound.
//! The end of the engine's response is then seen when it arrives: the request frees its place and
//! is charged, and only bytes wait. At the bound, the engine is not read any further. The total
//! time for which a client may block an engine's place this way is bounded too. Once the engine is
//! done, the time for which its bytes may wait depends on the buffer's size
//! ([`LEAST_BYTES_PER_S`]).

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

use super::response_chunk::AnswerPiece;

/// Minimum rate at which a client must receive the rest of a finished response.
const LEAST_BYTES_PER_S: u64 = 4 * 1024;

/// Bounds for reading ahead of clients.
#[derive(Debug, Clone)]
pub(in crate::proxy) struct ReadAheadBounds {
    /// Maximum number of bytes kept of one response.
    pub(in crate::proxy) bytes_max: u64,
    /// Number of bytes kept of all responses and all request bodies.
    pub(in crate::proxy) held_bytes: Arc<AtomicU64>,
    /// Maximum of `held_bytes`.
    pub(in crate::proxy) held_bytes_max: u64,
    /// Maximum time for which a client may block an engine, summed over the whole response.
    pub(in crate::proxy) held_back: Duration,
    /// Maximum time for which a client may receive nothing.
    pub(in crate::proxy) untaken: Duration,
}

/// Buffer for the pieces of one response.
pub(super) struct ReadAhead {
    bounds: ReadAheadBounds,
    pieces: VecDeque<AnswerPiece>,
    bytes: u64,
    /// Rest of [`ReadAheadBounds::held_back`].
    left: Duration,
    /// Start of the present wait: of a blocked engine, or of the rest of a finished response.
    /// `None` if neither waits.
    since: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl ReadAhead {
    pub(in crate::proxy) fn new(bounds: ReadAheadBounds) -> Self {
        Self {
            left: bounds.held_back,
            bounds,
            pieces: VecDeque::new(),
            bytes: 0,
            since: None,
            timer: None,
        }
    }

    pub(in crate::proxy) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Whether the bounds allow reading another piece.
    pub(super) fn has_room(&self) -> bool {
        let ReadAheadBounds {
            bytes_max,
            held_bytes,
            held_bytes_max,
            ..
        } = &self.bounds;
        self.bytes < *bytes_max && held_bytes.load(Relaxed) < *held_bytes_max
    }

    /// Appends a piece.
    pub(in crate::proxy) fn push(&mut self, piece: AnswerPiece) {
        let bytes = length(&piece);
        self.bytes += bytes;
        self.bounds.held_bytes.fetch_add(bytes, Relaxed);
        self.pieces.push_back(piece);
    }

    /// Removes and returns the next piece for the client, if there is one.
    pub(in crate::proxy) fn take(&mut self) -> Option<AnswerPiece> {
        let piece = self.pieces.pop_front()?;
        let bytes = length(&piece);
        self.bytes -= bytes;
        self.bounds.held_bytes.fetch_sub(bytes, Relaxed);
        Some(piece)
    }

    /// Ends a wait of the engine, if any, and deducts it from the remaining time.
    pub(super) fn goes_on(&mut self) {
        if let Some(since) = self.since.take() {
            self.left = self.left.saturating_sub(since.elapsed());
        }
    }

    /// Becomes ready when the engine was blocked for too long.
    pub(super) fn poll_held_back(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.poll_after(self.left, cx)
    }

    /// Becomes ready when the rest of a finished response has waited for too long.
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
