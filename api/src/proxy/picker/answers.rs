//! The picker's side of a stream: its messages, then the end of the stream.
//!
//! An error follows the messages without occupying a slot among them. A gateway that stopped
//! reading for too long gets it once it reads them.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures_util::stream::Stream;
use futures_util::{FutureExt as _, StreamExt as _};
use tokio::sync::{mpsc, oneshot};
use tonic::Status;

use super::wire::PickerMessage;

/// End of a stream. After an end without an error, the gateway continues without this replica.
pub(super) type StreamEnd = Result<(), Status>;

/// Messages of the picker in one stream, followed by the end of the stream.
pub struct PickerAnswers {
    messages: mpsc::Receiver<PickerMessage>,
    /// First message, if it was taken before the stream was polled.
    first: Option<PickerMessage>,
    /// End of the stream; `None` once sent.
    end: Option<oneshot::Receiver<StreamEnd>>,
}

impl PickerAnswers {
    pub(super) fn new(
        messages: mpsc::Receiver<PickerMessage>,
        end: oneshot::Receiver<StreamEnd>,
    ) -> Self {
        let end = Some(end);
        Self {
            messages,
            first: None,
            end,
        }
    }

    /// Waits until the stream has a first message or has ended. A gateway whose picker is gone before
    /// the head of the picker's response can send the request to another one, so that head waits too.
    ///
    /// # Errors
    /// Returns the error of a stream that ends without a message.
    pub(super) async fn begun(mut self) -> Result<Self, Status> {
        self.first = self.next().await.transpose()?;
        Ok(self)
    }
}

impl Stream for PickerAnswers {
    type Item = Result<PickerMessage, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        if self.end.is_none() {
            return Poll::Ready(None);
        }
        if let Some(message) = ready!(self.messages.poll_recv(cx)) {
            if message.is_last {
                // The end goes with it, in one write.
                self.end = None;
            }
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
