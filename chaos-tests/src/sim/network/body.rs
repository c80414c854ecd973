//! Bodies of calls, which are read on one side and reassembled on the other.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::Frame;
use http_body_util::BodyExt;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tonic::Status;
use tonic::body::Body;

/// Maximum number of messages of one stream in flight, in place of HTTP/2's window.
const WINDOW_MESSAGES: usize = 4;

/// A part of a body on its way.
#[derive(Debug)]
pub(super) enum BodyPiece {
    /// One frame of the body.
    Frame(Frame<Bytes>),
    /// The end of a complete body.
    End,
    /// The end of a body that breaks off, with the error.
    Broken(Status),
}

/// A complete body with its trailers.
#[derive(Debug, Clone, Default)]
pub(super) struct WholeBody {
    data: Vec<Bytes>,
    trailers: Option<http::HeaderMap>,
}

impl WholeBody {
    /// Reads a body to its end.
    ///
    /// # Errors
    /// If the body breaks off.
    pub(super) async fn read(mut body: Body) -> Result<Self, Status> {
        let mut whole = Self::default();
        while let Some(frame) = body.frame().await {
            match frame?.into_data() {
                Ok(data) => whole.data.push(data),
                Err(frame) => whole.trailers = frame.into_trailers().ok(),
            }
        }
        Ok(whole)
    }

    /// Converts the parts back to a body.
    pub(super) fn into_body(self) -> Body {
        let data = self.data.into_iter().map(Frame::data);
        Body::new(IncomingBody {
            ready: data.chain(self.trailers.map(Frame::trailers)).collect(),
            more: None,
        })
    }

    /// Returns the hash of the data, by which runs are compared.
    pub(super) fn hash(&self) -> u64 {
        let hash = |hash, data: &Bytes| xxhash_rust::xxh3::xxh3_64_with_seed(data, hash);
        self.data.iter().fold(0, hash)
    }
}

/// Returns the hash of a piece, by which runs are compared.
pub(super) fn hash_of(piece: &BodyPiece) -> u64 {
    match piece {
        BodyPiece::Frame(frame) => frame
            .data_ref()
            .map_or(1, |data| xxhash_rust::xxh3::xxh3_64(data)),
        BodyPiece::End => 2,
        BodyPiece::Broken(_) => 3,
    }
}

/// Window that limits how many messages the writer of a stream may be ahead of its reader.
#[derive(Debug, Clone)]
pub(super) struct BodyWindow(Arc<Semaphore>);

impl BodyWindow {
    /// Creates an open window with room for [`WINDOW_MESSAGES`] messages.
    pub(super) fn new() -> Self {
        Self(Arc::new(Semaphore::new(WINDOW_MESSAGES)))
    }

    /// Waits for room for a message. Returns `false` once the reader is gone.
    pub(super) async fn take(&self) -> bool {
        match self.0.acquire().await {
            Ok(permit) => {
                permit.forget();
                true
            }
            Err(_) => false,
        }
    }

    /// Closes the window, because the reader is gone.
    pub(super) fn close(&self) {
        self.0.close();
    }
}

/// The reader's side of a body. Dropping it notifies no one directly. The other side learns of it
/// by a packet, as of everything else.
pub(super) struct IncomingBody {
    ready: VecDeque<Frame<Bytes>>,
    /// Source of further pieces; `None` if the rest is in `ready`.
    more: Option<(UnboundedReceiver<BodyPiece>, BodyWindow)>,
}

/// Creates a body that arrives in pieces, and the sender of its pieces.
pub(super) fn stream(window: BodyWindow) -> (UnboundedSender<BodyPiece>, Body) {
    let (pieces, more) = unbounded_channel();
    let body = IncomingBody {
        ready: VecDeque::new(),
        more: Some((more, window)),
    };
    (pieces, Body::new(body))
}

impl http_body::Body for IncomingBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Some(frame) = self.ready.pop_front() {
            return Poll::Ready(Some(Ok(frame)));
        }
        let Some((more, window)) = &mut self.more else {
            return Poll::Ready(None);
        };
        let piece = match more.poll_recv(context) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(piece) => piece,
        };
        Poll::Ready(match piece {
            Some(BodyPiece::Frame(frame)) => {
                window.0.add_permits(1);
                Some(Ok(frame))
            }
            Some(BodyPiece::End) => {
                self.more = None;
                None
            }
            Some(BodyPiece::Broken(status)) => {
                self.more = None;
                Some(Err(status))
            }
            None => {
                self.more = None;
                Some(Err(Status::unavailable("connection broken")))
            }
        })
    }
}
