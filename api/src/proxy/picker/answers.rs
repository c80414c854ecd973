//! The picker's side of a stream: its messages, then the end of the stream.
//!
//! An error follows the messages without occupying a slot among them. A gateway that stopped
//! reading for too long gets it once it reads them.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures_util::FutureExt as _;
use futures_util::stream::Stream;
use tokio::sync::{mpsc, oneshot};
use tonic::Status;

use super::ext_proc::ProcessingResponse;

/// End of a stream. After an end without an error, the gateway continues without this replica.
pub(super) type StreamEnd = Result<(), Status>;

/// Messages of the picker in one stream, followed by the end of the stream.
pub struct PickerAnswers {
    messages: mpsc::Receiver<ProcessingResponse>,
    /// End of the stream; `None` once sent.
    end: Option<oneshot::Receiver<StreamEnd>>,
}

impl PickerAnswers {
    pub(super) fn new(
        messages: mpsc::Receiver<ProcessingResponse>,
        end: oneshot::Receiver<StreamEnd>,
    ) -> Self {
        let end = Some(end);
        Self { messages, end }
    }
}

impl Stream for PickerAnswers {
    type Item = Result<ProcessingResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(message) = ready!(self.messages.poll_recv(cx)) {
            return Poll::Ready(Some(Ok(message)));
        }
        let Some(end) = &mut self.end else {
            return Poll::Ready(None);
        };
        let ended = ready!(end.poll_unpin(cx));
        self.end = None;
        Poll::Ready(match ended {
            Ok(Ok(())) => None,
            Ok(Err(why)) => Some(Err(why)),
            // The task is gone without a reason.
            Err(_) => Some(Err(Status::internal("the picker lost the stream"))),
        })
    }
}
