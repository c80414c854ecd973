//! Messages from a gateway in a stream: the order in which they may arrive, and the request body
//! that they carry.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use http::Response;
use http_body::{Body, Frame};
use tonic::{Code, Status};

use super::ext_proc::{BodySendMode, ProtocolConfiguration};
use super::gateway_message::{GatewayMessage, ToldPart};
use super::gateway_reply::GatewayReply;
use super::{BodyMode, BodyModes};
use crate::error::ProxyError;

/// Reason why a stream ends before the response was relayed.
#[derive(Debug)]
pub(super) enum StreamHalt {
    /// The gateway has left.
    Left,
    /// The gateway sent an unexpected message or stopped sending.
    Broken(Status),
    /// The request is refused.
    Refused(ProxyError),
    /// This replica sends the response itself.
    Local(Box<Response<Bytes>>),
    /// The gateway responded itself. Its response waits to pass.
    Replied(GatewayReply),
}

impl StreamHalt {
    /// Converts the halt of a request body: if the body cannot be read completely, the request is
    /// refused as on the data port.
    pub(super) fn of_upload(self, bytes_max: u64) -> Self {
        match self {
            Self::Broken(why) if why.code() == Code::ResourceExhausted => {
                ProxyError::BodyTooLarge { bytes_max }.into()
            }
            Self::Broken(why) if why.code() == Code::Unavailable => ProxyError::Overloaded.into(),
            halt => halt,
        }
    }
}

impl From<ProxyError> for StreamHalt {
    fn from(failure: ProxyError) -> Self {
        Self::Refused(failure)
    }
}

/// Returns the halt for a gateway that sent an unexpected message.
pub(super) fn out_of_turn(told: &ToldPart, when: &str) -> StreamHalt {
    let told = told.name();
    StreamHalt::Broken(Status::failed_precondition(format!(
        "{told} arrived {when}, which no body mode allows"
    )))
}

/// Returns the halt for a gateway that would send a request's head to an engine before it has the
/// endpoints, unless it allows overrides, which it does not say.
pub(super) fn override_not_allowed() -> StreamHalt {
    StreamHalt::Broken(Status::failed_precondition(
        "request_body_mode is STREAMED: set send_body_without_waiting_for_header_response at the \
         gateway, or request_body_mode FULL_DUPLEX_STREAMED or BUFFERED; or set allow_mode_override \
         there and picker.bodies = \"streamed\" here",
    ))
}

/// Returns the halt for a gateway that sends a body in pieces although it was asked for the whole.
pub(super) fn override_ignored() -> StreamHalt {
    StreamHalt::Broken(Status::failed_precondition(
        "request_body came in pieces although mode_override asked for BUFFERED: set \
         allow_mode_override at the gateway (and have allowed_override_modes, if set, hold it), or \
         request_body_mode BUFFERED, or send_body_without_waiting_for_header_response",
    ))
}

/// Messages of the gateway in one stream. It ends when the gateway has left, and an error is that of
/// a message that could not be read.
pub(super) struct GatewayMessages {
    messages: BoxStream<'static, Result<Bytes, Status>>,
}

impl GatewayMessages {
    pub(super) fn new(messages: BoxStream<'static, Result<Bytes, Status>>) -> Self {
        Self { messages }
    }

    /// Returns the next message. Cancellation safe.
    pub(super) async fn next(&mut self) -> Result<GatewayMessage, StreamHalt> {
        let next = self.messages.next().await;
        read(next)
    }

    /// Returns the halt for the next message, while the gateway waits for this replica: it can only
    /// leave or respond by itself. With `may_go_on`, the body that it sent as whole may be
    /// incomplete.
    pub(super) async fn gone(&mut self, may_go_on: bool) -> StreamHalt {
        match self.next().await {
            Ok(message) => match message.told {
                ToldPart::RequestBody(_) if may_go_on => override_ignored(),
                // For example after a timeout of its own.
                ToldPart::ResponseHeaders(told) => {
                    StreamHalt::Replied(GatewayReply::of(&told, message.details))
                }
                told => out_of_turn(&told, "while its response was awaited"),
            },
            Err(halt) => halt,
        }
    }
}

fn read(next: Option<Result<Bytes, Status>>) -> Result<GatewayMessage, StreamHalt> {
    let message = next.ok_or(StreamHalt::Left)?;
    let message = message.and_then(|message| GatewayMessage::read(&message));
    message.map_err(StreamHalt::Broken)
}

impl BodyModes {
    /// Returns the body modes that a gateway's configuration requires. Fails if one is not
    /// supported.
    pub(super) fn told(told: ProtocolConfiguration) -> Result<Self, StreamHalt> {
        let early = told.send_body_without_waiting_for_header_response;
        let mode = |which: &str, mode: BodySendMode| match mode {
            BodySendMode::FullDuplexStreamed => Ok(BodyMode::Duplex),
            BodySendMode::Streamed if early => Ok(BodyMode::StreamedEarly),
            BodySendMode::Streamed => Ok(BodyMode::Streamed),
            BodySendMode::Buffered => Ok(BodyMode::Buffered),
            other => Err(StreamHalt::Broken(Status::failed_precondition(format!(
                "{which} is {}; expected FULL_DUPLEX_STREAMED, STREAMED or BUFFERED",
                other.as_str_name()
            )))),
        };
        Ok(Self {
            requests: mode("request_body_mode", told.request_body_mode())?,
            answers: mode("response_body_mode", told.response_body_mode())?,
        })
    }
}

/// Body of a request, received as messages from a gateway.
pub(super) struct UploadedBody<'a> {
    messages: &'a mut GatewayMessages,
    mode: BodyMode,
    is_over: bool,
    /// Whether the single piece of a whole body announced that more follows.
    pub(super) is_cut: bool,
    /// Number of messages with a piece of the body.
    pub(super) pieces: usize,
    /// Whether trailers ended the body. They need a reply.
    pub(super) has_trailers: bool,
    /// The body, if it arrived as a whole.
    pub(super) whole: Option<Bytes>,
    /// Reason why the body broke off, if it did.
    pub(super) halt: Option<StreamHalt>,
}

/// Error of a body that broke off, see [`UploadedBody::halt`].
pub(super) struct UploadError;

impl<'a> UploadedBody<'a> {
    /// Creates a body that begins with the next message. With `is_over`, it is empty.
    pub(super) fn new(messages: &'a mut GatewayMessages, mode: BodyMode, is_over: bool) -> Self {
        Self {
            messages,
            mode,
            is_over,
            is_cut: false,
            pieces: 0,
            has_trailers: false,
            whole: None,
            halt: None,
        }
    }

    fn take_in(&mut self, message: GatewayMessage) -> Result<Option<Bytes>, StreamHalt> {
        match message.told {
            ToldPart::RequestBody(piece) => {
                self.pieces += 1;
                // Only trailers can follow a whole body, and they wait for its reply.
                let is_whole = self.mode == BodyMode::Buffered;
                self.is_cut = is_whole && !piece.end_of_stream;
                self.is_over = is_whole || piece.end_of_stream;
                self.whole = is_whole.then(|| piece.body.clone());
                Ok(Some(piece.body))
            }
            ToldPart::RequestTrailers => {
                (self.is_over, self.has_trailers) = (true, true);
                Ok(None)
            }
            ToldPart::ResponseHeaders(told) => {
                let reply = GatewayReply::of(&told, message.details);
                Err(StreamHalt::Replied(reply))
            }
            told => Err(out_of_turn(&told, "within the body of a request")),
        }
    }
}

impl Body for UploadedBody<'_> {
    type Data = Bytes;
    type Error = UploadError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, UploadError>>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        let next = ready!(self.messages.messages.poll_next_unpin(cx));
        let taken = read(next).and_then(|message| self.take_in(message));
        Poll::Ready(match taken {
            Ok(piece) => piece.map(|piece| Ok(Frame::data(piece))),
            Err(halt) => {
                self.halt = Some(halt);
                Some(Err(UploadError))
            }
        })
    }
}
