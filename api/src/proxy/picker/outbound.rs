//! Messages from a picker to a gateway.

use std::time::Duration;

use bytes::Bytes;
use http::Response;
use prost_types::Struct;
use tokio::sync::mpsc::Sender;
use tokio::time::{Instant, timeout};
use tonic::Status;

use super::ext_proc::body_mutation::Mutation;
use super::ext_proc::processing_response::Response as Reply;
use super::ext_proc::{
    BodyMutation, BodyResponse, BodySendMode, CommonResponse, HeaderMutation, HeadersResponse,
    HttpStatus, ImmediateResponse, ProcessingMode, ProcessingResponse, StreamedBodyResponse,
    TrailersResponse,
};
use super::inbound::StreamHalt;
use super::{BodyMode, heads};

/// Maximum length of a body piece in a message, in bytes. Envoy accepts no more in one.
pub(super) const PIECE_BYTES_MAX: usize = 62 * 1024;

/// Sender of the picker's messages in one stream.
#[derive(Clone)]
pub(super) struct PickerMessages {
    pub(super) sender: Sender<ProcessingResponse>,
    /// Maximum time for which a gateway may accept no message.
    pub(super) untaken: Duration,
}

impl PickerMessages {
    /// Sends a message as soon as the gateway accepts it.
    pub(super) async fn send(&self, said: Reply) -> Result<(), StreamHalt> {
        self.send_with(said, None).await
    }

    /// Sends a message, with metadata if given, as soon as the gateway accepts it.
    pub(super) async fn send_with(
        &self,
        said: Reply,
        dynamic_metadata: Option<Struct>,
    ) -> Result<(), StreamHalt> {
        let message = ProcessingResponse {
            response: Some(said),
            dynamic_metadata,
            mode_override: None,
        };
        self.put(message).await
    }

    /// Lets a request's head pass without `withheld`, and asks for its body in one piece. A gateway
    /// takes both modes from this message, so it repeats the mode of `answers`.
    pub(super) async fn ask_for_whole(
        &self,
        answers: BodyMode,
        withheld: Option<HeaderMutation>,
    ) -> Result<(), StreamHalt> {
        let answers = match answers {
            BodyMode::Duplex => BodySendMode::FullDuplexStreamed,
            BodyMode::Streamed | BodyMode::StreamedEarly => BodySendMode::Streamed,
            BodyMode::Buffered => BodySendMode::Buffered,
        };
        let message = ProcessingResponse {
            response: Some(request_head_waits(withheld)),
            dynamic_metadata: None,
            mode_override: Some(ProcessingMode {
                request_body_mode: BodySendMode::Buffered.into(),
                response_body_mode: answers.into(),
            }),
        };
        self.put(message).await
    }

    /// Sends a piece of a response body. The wait is taken from `left`, the total time for which a
    /// gateway may block an engine during the response.
    pub(super) async fn send_within(
        &self,
        said: Reply,
        left: &mut Duration,
    ) -> Result<(), StreamHalt> {
        let since = Instant::now();
        let sent = timeout(*left, self.send(said)).await;
        *left = left.saturating_sub(since.elapsed());
        sent.unwrap_or_else(|_| Err(untaken()))
    }

    async fn put(&self, message: ProcessingResponse) -> Result<(), StreamHalt> {
        match timeout(self.untaken, self.sender.send(message)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(StreamHalt::Left),
            Err(_) => Err(untaken()),
        }
    }
}

/// Returns the halt for a gateway that accepts messages too slowly. It ends with an error, since
/// after a stream without one, the gateway would continue without this replica.
pub(super) fn untaken() -> StreamHalt {
    let why = "the gateway took too little for too long";
    StreamHalt::Broken(Status::deadline_exceeded(why))
}

/// Body that a piece belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BodyOf {
    Request,
    Answer,
}

impl BodyOf {
    /// Returns the reply to a piece of this body.
    fn said(self, common: CommonResponse) -> Reply {
        let body = BodyResponse {
            response: Some(common),
        };
        match self {
            Self::Request => Reply::RequestBody(body),
            Self::Answer => Reply::ResponseBody(body),
        }
    }

    /// Returns a piece of a body that streams independently in both directions.
    pub(super) fn piece(self, body: Bytes, end_of_stream: bool) -> Reply {
        let mutation = Mutation::StreamedResponse(StreamedBodyResponse {
            body,
            end_of_stream,
        });
        self.said(changed(mutation, None))
    }

    /// Returns the replacement of one received piece, with changes of the headers, if any.
    pub(super) fn replaced(self, body: Bytes, headers: Option<HeaderMutation>) -> Reply {
        let mutation = match body.is_empty() {
            true => Mutation::ClearBody(true),
            false => Mutation::Body(body),
        };
        self.said(changed(mutation, headers))
    }
}

fn changed(mutation: Mutation, headers: Option<HeaderMutation>) -> CommonResponse {
    CommonResponse {
        clear_route_cache: headers.is_some(),
        header_mutation: headers,
        body_mutation: Some(BodyMutation {
            mutation: Some(mutation),
        }),
    }
}

/// Returns the reply to a request's head that lets it wait for its body, without `withheld`.
pub(super) fn request_head_waits(withheld: Option<HeaderMutation>) -> Reply {
    Reply::RequestHeaders(HeadersResponse {
        response: withheld.map(|header_mutation| CommonResponse {
            header_mutation: Some(header_mutation),
            body_mutation: None,
            clear_route_cache: false,
        }),
    })
}

/// Returns the reply to a request's head, with a new route lookup.
pub(super) fn request_head(headers: HeaderMutation) -> Reply {
    Reply::RequestHeaders(HeadersResponse {
        response: Some(CommonResponse {
            header_mutation: Some(headers),
            body_mutation: None,
            clear_route_cache: true,
        }),
    })
}

/// Returns the reply to a response's head.
pub(super) fn answer_head(headers: HeaderMutation) -> Reply {
    Reply::ResponseHeaders(HeadersResponse {
        response: Some(CommonResponse {
            header_mutation: Some(headers),
            body_mutation: None,
            clear_route_cache: false,
        }),
    })
}

/// Returns the reply that lets the trailers of a request pass.
pub(super) fn request_trailers() -> Reply {
    Reply::RequestTrailers(TrailersResponse::default())
}

/// Returns the reply that lets the trailers of a response pass.
pub(super) fn answer_trailers() -> Reply {
    Reply::ResponseTrailers(TrailersResponse::default())
}

/// Returns the message that makes the gateway send a response of the router to the client. `details`
/// is the reason in the gateway's access log.
pub(super) fn immediate(answer: Response<Bytes>, details: String) -> Reply {
    let (head, body) = answer.into_parts();
    Reply::ImmediateResponse(ImmediateResponse {
        status: Some(HttpStatus {
            code: i32::from(head.status.as_u16()),
        }),
        headers: Some(heads::mutation(&http::HeaderMap::new(), &head.headers)),
        body,
        details,
    })
}
