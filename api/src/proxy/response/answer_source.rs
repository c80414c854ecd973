//! Sources of a response's bytes: the backend itself, or a gateway that forwards them.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use crate::engines::backends::pool::{EngineBody, SendError};

/// Body of a backend's response.
pub(in crate::proxy) enum AnswerSource {
    /// Received over this replica's own connection.
    Engine(EngineBody),
    /// Received in pieces from a gateway.
    Gateway(AnswerPipeReader),
}

impl Body for AnswerSource {
    type Data = Bytes;
    type Error = SendError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, SendError>>> {
        match &mut *self {
            Self::Engine(engine) => Pin::new(engine).poll_frame(cx),
            Self::Gateway(handed) => handed.poll_frame(cx).map(|frame| frame.map(Ok)),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Engine(engine) => engine.is_end_stream(),
            Self::Gateway(handed) => handed.lock().is_over(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Engine(engine) => engine.size_hint(),
            Self::Gateway(_) => SizeHint::default(),
        }
    }
}

/// Reading end of a response that a gateway forwards. One task holds both ends.
pub(in crate::proxy) struct AnswerPipeReader(Arc<Mutex<AnswerPipe>>);

/// Writing end of a response that a gateway forwards. The response stays open until
/// [end](AnswerPipeWriter::end) is called.
pub(in crate::proxy) struct AnswerPipeWriter(Arc<Mutex<AnswerPipe>>);

#[derive(Default)]
struct AnswerPipe {
    pieces: VecDeque<Bytes>,
    has_ended: bool,
    reader: Option<Waker>,
}

impl AnswerPipe {
    fn is_over(&self) -> bool {
        self.has_ended && self.pieces.is_empty()
    }
}

/// Creates both ends of a response that a gateway forwards.
pub(in crate::proxy) fn handed() -> (AnswerPipeWriter, AnswerPipeReader) {
    let pieces = Arc::<Mutex<AnswerPipe>>::default();
    (
        AnswerPipeWriter(Arc::clone(&pieces)),
        AnswerPipeReader(pieces),
    )
}

impl AnswerPipeWriter {
    /// Adds a piece, unless it is empty. The caller reads it before adding the next.
    pub(in crate::proxy) fn push(&self, piece: Bytes) {
        self.change(|pieces| {
            if !piece.is_empty() {
                pieces.pieces.push_back(piece);
            }
        });
    }

    /// Ends the response.
    pub(in crate::proxy) fn end(&self) {
        self.change(|pieces| pieces.has_ended = true);
    }

    fn change(&self, change: impl FnOnce(&mut AnswerPipe)) {
        let mut pieces = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut pieces);
        if let Some(reader) = pieces.reader.take() {
            reader.wake();
        }
    }
}

impl AnswerPipeReader {
    /// Locks the pipe. The lock is never contended, because one task holds both ends.
    fn lock(&self) -> MutexGuard<'_, AnswerPipe> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn poll_frame(&self, cx: &Context<'_>) -> Poll<Option<Frame<Bytes>>> {
        let mut pieces = self.lock();
        match pieces.pieces.pop_front() {
            Some(piece) => Poll::Ready(Some(Frame::data(piece))),
            None if pieces.has_ended => Poll::Ready(None),
            None => {
                pieces.reader = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}
