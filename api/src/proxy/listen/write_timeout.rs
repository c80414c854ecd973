//! Timeouts for clients that stop receiving their response. They bound how long a client may hold
//! its connection, and with it an engine's request.
//!
//! hyper polls a body only when there is room for the next piece, so a response cannot time its own
//! reader. Over HTTP/1.1 the socket can: [`WriteTimeoutSocket`] fails a write that has waited for
//! too long. An h2 stream can stall while its connection is alive, so a separate task polls the
//! pieces and passes them on one by one ([`hand_over`]). While a client receives nothing, both read
//! its response ahead ([`crate::proxy::response::read_ahead`]), each in its existing task.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::{Instant, Sleep, sleep, timeout};
use tokio_util::task::TaskTracker;

use crate::proxy::response::response_body::{ResponseBody, SharedResponseBody, lock};
use crate::proxy::response::response_chunk::ResponseBodyError;

/// The backend response that an HTTP/1.1 connection writes at present.
#[derive(Clone, Default)]
pub(super) struct CurrentResponse(Arc<Mutex<Weak<Mutex<ResponseBody>>>>);

impl CurrentResponse {
    /// Sets the present response, if `answer` is one.
    pub(in crate::proxy) fn is(&self, answer: Option<&SharedResponseBody>) {
        if let Some(relay) = answer {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(relay);
        }
    }

    fn poll_read_ahead(&self, cx: &mut Context<'_>) -> Poll<()> {
        let relay = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match relay.upgrade() {
            Some(relay) => lock(&relay).read_ahead(cx),
            None => Poll::Pending,
        }
    }
}

/// A socket whose writes fail after its peer has received nothing for `patience`.
pub(super) struct WriteTimeoutSocket<S> {
    stream: S,
    patience: Duration,
    written: CurrentResponse,
    /// Timer of the present or last wait, reused for later ones; `None` before the first.
    timer: Option<Pin<Box<Sleep>>>,
    is_waiting: bool,
}

impl<S> WriteTimeoutSocket<S> {
    pub(in crate::proxy) fn new(stream: S, patience: Duration, written: CurrentResponse) -> Self {
        Self {
            stream,
            patience,
            written,
            timer: None,
            is_waiting: false,
        }
    }

    /// Passes on the result of a write, and reads the response ahead while it waits. Returns an
    /// error after too long a wait.
    fn judge<T>(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.is_waiting = false;
            return written;
        }
        let patience = self.patience;
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(patience)));
        if !std::mem::replace(&mut self.is_waiting, true) {
            timer.as_mut().reset(Instant::now() + patience);
        }
        let is_given_up = self.written.poll_read_ahead(cx).is_ready();
        if !is_given_up {
            ready!(timer.as_mut().poll(cx));
        }
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteTimeoutSocket<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteTimeoutSocket<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.judge(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, buffers);
        self.judge(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

type BodyPiece = Result<Frame<Bytes>, ResponseBodyError>;

/// A response body produced by another task. It buffers at most one piece.
pub(in crate::proxy) struct ChannelBody {
    /// Pieces of the body; `None` marks the end of the response. If the channel ends without it,
    /// the response broke off.
    pieces: mpsc::Receiver<Option<BodyPiece>>,
    is_over: bool,
}

/// Drives `relay` in its own task and returns a body with its pieces. The task stops if a piece is
/// not received within `patience`, or if the reader is dropped.
pub(in crate::proxy) fn hand_over(
    relay: SharedResponseBody,
    patience: Duration,
    tasks: &TaskTracker,
) -> ChannelBody {
    let (sender, pieces) = mpsc::channel(1);
    tasks.spawn(drive(relay, sender, patience));
    ChannelBody {
        pieces,
        is_over: false,
    }
}

async fn drive(
    relay: SharedResponseBody,
    reader: mpsc::Sender<Option<BodyPiece>>,
    patience: Duration,
) {
    loop {
        let place = match reader.try_reserve() {
            Ok(place) => place,
            Err(TrySendError::Closed(())) => return,
            Err(TrySendError::Full(())) => tokio::select! {
                biased;
                place = timeout(patience, reader.reserve()) => match place {
                    Ok(Ok(place)) => place,
                    Ok(Err(_)) | Err(_) => return,
                },
                () = poll_fn(|cx| lock(&relay).read_ahead(cx)) => return,
            },
        };
        let piece = tokio::select! {
            biased;
            () = reader.closed() => return,
            piece = poll_fn(|cx| Pin::new(&mut *lock(&relay)).poll_frame(cx)) => piece,
        };
        let is_last = !matches!(piece, Some(Ok(_)));
        place.send(piece);
        if is_last {
            return;
        }
    }
}

impl Body for ChannelBody {
    type Data = Bytes;
    type Error = ResponseBodyError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<BodyPiece>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        let piece = match ready!(self.pieces.poll_recv(cx)) {
            Some(piece) => piece,
            None => Some(Err(ResponseBodyError::Untaken)),
        };
        self.is_over = !matches!(piece, Some(Ok(_)));
        Poll::Ready(piece)
    }

    fn is_end_stream(&self) -> bool {
        self.is_over
    }
}
