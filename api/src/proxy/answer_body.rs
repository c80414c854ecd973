//! The body of an answer as its connection writes it.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use super::piece::ResponseBodyError;
use super::response_body::{SharedResponseBody, lock};
use super::write_timeout::ChannelBody;

/// The body of an answer.
pub(super) struct AnswerBody(pub(super) AnswerBodyKind);

/// Where it comes from.
pub(super) enum AnswerBodyKind {
    /// Made here; `None` once sent.
    Local(Option<Bytes>),
    /// An engine's.
    Relay(SharedResponseBody),
    /// An engine's, made by another task.
    Handed(ChannelBody),
}

impl AnswerBody {
    /// The body of an answer that was made here.
    pub(super) fn into_local(self) -> Bytes {
        match self.0 {
            AnswerBodyKind::Local(body) => body.unwrap_or_default(),
            AnswerBodyKind::Relay(_) | AnswerBodyKind::Handed(_) => Bytes::new(),
        }
    }

    /// The engine's answer that the connection itself writes.
    pub(super) fn relay(&self) -> Option<&SharedResponseBody> {
        match &self.0 {
            AnswerBodyKind::Relay(relay) => Some(relay),
            AnswerBodyKind::Local(_) | AnswerBodyKind::Handed(_) => None,
        }
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = ResponseBodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ResponseBodyError>>> {
        match &mut self.0 {
            AnswerBodyKind::Local(body) => {
                Poll::Ready(body.take().map(|body| Ok(Frame::data(body))))
            }
            AnswerBodyKind::Relay(relay) => Pin::new(&mut *lock(relay)).poll_frame(cx),
            AnswerBodyKind::Handed(handed) => Pin::new(handed).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            AnswerBodyKind::Local(body) => body.is_none(),
            AnswerBodyKind::Relay(relay) => lock(relay).is_end_stream(),
            AnswerBodyKind::Handed(handed) => handed.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            AnswerBodyKind::Local(body) => {
                SizeHint::with_exact(body.as_ref().map_or(0, |body| body.len() as u64))
            }
            AnswerBodyKind::Relay(relay) => lock(relay).size_hint(),
            AnswerBodyKind::Handed(handed) => handed.size_hint(),
        }
    }
}
