//! Messages from a picker to a gateway.

use std::time::Duration;

use bytes::Bytes;
use http::Response;
use tokio::sync::mpsc::Sender;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::{Instant, timeout};
use tonic::Status;

use super::ext_proc::BodySendMode;
use super::heads::HeadChange;
use super::inbound::StreamHalt;
use super::wire::PickerMessage;
use super::{BodyMode, metadata};

/// Maximum length of a body piece in a message, in bytes. Envoy accepts no more in one.
pub(super) const PIECE_BYTES_MAX: usize = 62 * 1024;

/// Sender of the picker's messages in one stream.
#[derive(Clone)]
pub(super) struct PickerMessages {
    pub(super) sender: Sender<PickerMessage>,
    /// Maximum time for which a gateway may accept no message.
    pub(super) untaken: Duration,
}

impl PickerMessages {
    /// Sends a message as soon as the gateway accepts it.
    pub(super) async fn send(&self, said: PickerMessage) -> Result<(), StreamHalt> {
        let said = match self.sender.try_send(said) {
            Ok(()) => return Ok(()),
            Err(TrySendError::Closed(_)) => return Err(StreamHalt::Left),
            Err(TrySendError::Full(said)) => said,
        };
        match timeout(self.untaken, self.sender.send(said)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(StreamHalt::Left),
            Err(_) => Err(untaken()),
        }
    }

    /// Sends a piece of a response body. The wait is taken from `left`, the total time for which a
    /// gateway may block an engine during the response.
    pub(super) async fn send_within(
        &self,
        said: PickerMessage,
        left: &mut Duration,
    ) -> Result<(), StreamHalt> {
        if self.sender.capacity() > 0 {
            return self.send(said).await;
        }
        let since = Instant::now();
        let sent = timeout(*left, self.send(said)).await;
        *left = left.saturating_sub(since.elapsed());
        sent.unwrap_or_else(|_| Err(untaken()))
    }
}

/// Returns the halt for a gateway that accepts messages too slowly. It ends with an error, since
/// after a stream without one, the gateway would continue without this replica.
pub(super) fn untaken() -> StreamHalt {
    let why = "the gateway took too little for too long";
    StreamHalt::Broken(Status::deadline_exceeded(why))
}

/// Numbers of the parts of a `ProcessingResponse`.
const REQUEST_HEADERS: u64 = 1;
const ANSWER_HEADERS: u64 = 2;
const REQUEST_BODY: u64 = 3;
const ANSWER_BODY: u64 = 4;
const REQUEST_TRAILERS: u64 = 5;
const ANSWER_TRAILERS: u64 = 6;
const IMMEDIATE: u64 = 7;
const METADATA: u64 = 8;
const MODE_OVERRIDE: u64 = 9;

/// Body that a piece belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BodyOf {
    Request,
    Answer,
}

impl BodyOf {
    fn part(self) -> u64 {
        match self {
            Self::Request => REQUEST_BODY,
            Self::Answer => ANSWER_BODY,
        }
    }

    /// Returns a piece of a body that streams independently in both directions.
    pub(super) fn piece(self, body: Bytes, end_of_stream: bool) -> PickerMessage {
        let mut message = PickerMessage::new();
        common(&mut message, self.part(), |common| {
            common.within(3, |mutation| {
                mutation.within(3, |piece| {
                    if end_of_stream {
                        piece.number(2, 1);
                    }
                    piece.ends_with(1, body);
                });
            });
        });
        message
    }

    /// Returns the replacement of one received piece.
    pub(super) fn replaced(self, body: Bytes) -> PickerMessage {
        let mut message = PickerMessage::new();
        common(&mut message, self.part(), |common| replace(common, body));
        message
    }

    /// Returns the reply that lets a piece pass unchanged.
    pub(super) fn passes(self) -> PickerMessage {
        let mut message = PickerMessage::new();
        common(&mut message, self.part(), |_| {});
        message
    }
}

/// Writes a part with a `CommonResponse`.
fn common(message: &mut PickerMessage, part: u64, write: impl FnOnce(&mut PickerMessage)) {
    message.within(part, |part| part.within(1, write));
}

fn replace(common: &mut PickerMessage, body: Bytes) {
    common.within(3, |mutation| match body.is_empty() {
        true => mutation.number(2, 1),
        false => mutation.ends_with(1, body),
    });
}

/// Writes the change of a request's head, and that the gateway looks up the route again.
fn change_request(common: &mut PickerMessage, headers: &HeadChange) {
    common.number(5, 1);
    common.within(2, |mutation| headers.write(mutation));
}

/// Returns the reply to a request's head that lets it wait for its body, without `withheld`.
pub(super) fn request_head_waits(withheld: Option<&HeadChange>) -> PickerMessage {
    let mut message = PickerMessage::new();
    head_waits(&mut message, withheld);
    message
}

fn head_waits(message: &mut PickerMessage, withheld: Option<&HeadChange>) {
    match withheld {
        None => message.within(REQUEST_HEADERS, |_| {}),
        Some(headers) => common(message, REQUEST_HEADERS, |common| {
            common.within(2, |mutation| headers.write(mutation));
        }),
    }
}

/// Returns the reply to a request's head that lets it wait for its body, without `withheld`, and asks
/// for that body in one piece. A gateway takes both modes from this message, so it repeats the mode
/// of `answers`.
pub(super) fn request_head_waits_for_whole(
    answers: BodyMode,
    withheld: Option<&HeadChange>,
) -> PickerMessage {
    let answers = match answers {
        BodyMode::Duplex => BodySendMode::FullDuplexStreamed,
        BodyMode::Streamed | BodyMode::StreamedEarly => BodySendMode::Streamed,
        BodyMode::Buffered => BodySendMode::Buffered,
    };
    let mut message = PickerMessage::new();
    message.within(MODE_OVERRIDE, |modes| {
        modes.number(3, BodySendMode::Buffered as u64);
        modes.number(4, answers as u64);
    });
    head_waits(&mut message, withheld);
    message
}

/// Returns the reply to a request's head with the endpoints for it.
pub(super) fn request_head(headers: &HeadChange, endpoints: &str) -> PickerMessage {
    let mut message = destined(endpoints);
    common(&mut message, REQUEST_HEADERS, |common| {
        change_request(common, headers);
    });
    message
}

/// Returns the reply to a request's whole body with the endpoints for it. `body` is `None` if it
/// passes unchanged.
pub(super) fn request_whole(
    headers: &HeadChange,
    endpoints: &str,
    body: Option<Bytes>,
) -> PickerMessage {
    let mut message = destined(endpoints);
    common(&mut message, REQUEST_BODY, |common| {
        change_request(common, headers);
        if let Some(body) = body {
            replace(common, body);
        }
    });
    message
}

/// Begins a message with the metadata that names the endpoints for a request.
fn destined(endpoints: &str) -> PickerMessage {
    let mut message = PickerMessage::new();
    message.within(METADATA, |beside| {
        metadata::write_destination(beside, endpoints);
    });
    message
}

/// Returns the reply to a response's head. `None` lets the head pass unchanged.
pub(super) fn answer_head(headers: Option<&HeadChange>) -> PickerMessage {
    let mut message = PickerMessage::new();
    match headers {
        None => message.within(ANSWER_HEADERS, |_| {}),
        Some(headers) => common(&mut message, ANSWER_HEADERS, |common| {
            common.within(2, |mutation| headers.write(mutation));
        }),
    }
    message
}

/// Returns the reply that lets the trailers of a request pass.
pub(super) fn request_trailers() -> PickerMessage {
    let mut message = PickerMessage::new();
    message.within(REQUEST_TRAILERS, |_| {});
    message
}

/// Returns the reply that lets the trailers of a response pass, which end the stream.
pub(super) fn answer_trailers() -> PickerMessage {
    let mut message = PickerMessage::new();
    message.within(ANSWER_TRAILERS, |_| {});
    message.last()
}

/// Returns the message that makes the gateway send a response of the router to the client, and ends
/// the stream. `details` is the reason in the gateway's access log.
pub(super) fn immediate(answer: Response<Bytes>, details: &str) -> PickerMessage {
    let (head, body) = answer.into_parts();
    let headers = HeadChange::between(&http::HeaderMap::new(), &head.headers);
    let mut message = PickerMessage::new();
    message.within(IMMEDIATE, |immediate| {
        immediate.within(1, |status| status.number(1, head.status.as_u16().into()));
        immediate.within(2, |mutation| headers.write(mutation));
        immediate.bytes(5, details.as_bytes());
        immediate.ends_with(3, body);
    });
    message.last()
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
    use prost::Message as _;

    use super::*;
    use crate::proxy::picker::ext_proc::body_mutation::Mutation;
    use crate::proxy::picker::ext_proc::header_value_option::HeaderAppendAction;
    use crate::proxy::picker::ext_proc::processing_response::Response as Part;
    use crate::proxy::picker::ext_proc::{
        self, BodyMutation, BodyResponse, CommonResponse, HeaderMutation, HeaderValueOption,
        HeadersResponse, HttpStatus, ImmediateResponse, ProcessingMode, ProcessingResponse,
        StreamedBodyResponse, TrailersResponse,
    };
    use crate::proxy::picker::{DESTINATION, NAMESPACE};

    fn change() -> HeadChange {
        let long = "v".repeat(300);
        let from = [("x-gone", "1"), ("x-kept", "1"), ("x-other", "1")];
        let to = [("x-kept", "1"), ("x-other", "2"), ("x-other", &*long)];
        let map = |fields: &[(&'static str, &str)]| {
            let field = |(name, value): &(&'static str, &str)| {
                let name = HeaderName::from_static(name);
                (name, HeaderValue::from_str(value).unwrap())
            };
            let mut headers = HeaderMap::new();
            for (name, value) in fields.iter().map(field) {
                headers.append(name, value);
            }
            headers
        };
        HeadChange::between(&map(&from), &map(&to))
    }

    fn changed() -> HeaderMutation {
        let set = |value: &str, action: HeaderAppendAction| HeaderValueOption {
            header: Some(ext_proc::HeaderValue {
                key: "x-other".to_owned(),
                value: String::new(),
                raw_value: Bytes::copy_from_slice(value.as_bytes()),
            }),
            append_action: action.into(),
        };
        HeaderMutation {
            set_headers: vec![
                set("2", HeaderAppendAction::OverwriteIfExistsOrAdd),
                set(&"v".repeat(300), HeaderAppendAction::AppendIfExistsOrAdd),
            ],
            remove_headers: vec!["x-gone".to_owned()],
        }
    }

    fn common(
        header_mutation: Option<HeaderMutation>,
        body: Option<Mutation>,
        clear_route_cache: bool,
    ) -> Option<CommonResponse> {
        let body_mutation = body.map(|mutation| BodyMutation {
            mutation: Some(mutation),
        });
        Some(CommonResponse {
            header_mutation,
            body_mutation,
            clear_route_cache,
        })
    }

    fn body(response: Option<CommonResponse>) -> BodyResponse {
        BodyResponse { response }
    }

    fn head(response: Option<CommonResponse>) -> HeadersResponse {
        HeadersResponse { response }
    }

    /// The protocol's own types read what is written, and nothing else.
    fn check(written: &PickerMessage, part: Part, modes: Option<ProcessingMode>) {
        let mut read = ProcessingResponse::decode(written.encoded()).unwrap();
        if let Some(mut told) = read.dynamic_metadata.take() {
            let told = told.fields.remove(NAMESPACE).unwrap();
            assert!(format!("{told:?}").contains("10.0.0.1:80"), "{told:?}");
            assert!(format!("{told:?}").contains(DESTINATION.as_str()));
        }
        let expected = ProcessingResponse {
            response: Some(part),
            dynamic_metadata: None,
            mode_override: modes,
        };
        assert_eq!(read, expected);
    }

    #[test]
    fn messages_to_gateways_read_as_the_protocols_own_types_do() {
        let long = Bytes::from("b".repeat(70_000));
        let streamed = |body: &Bytes, end_of_stream| {
            let (body, it) = (body.clone(), end_of_stream);
            Some(Mutation::StreamedResponse(StreamedBodyResponse {
                body,
                end_of_stream: it,
            }))
        };
        for bytes in [Bytes::new(), Bytes::from_static(b"{}"), long] {
            for ends in [false, true] {
                let piece = body(common(None, streamed(&bytes, ends), false));
                let (request, answer) = (BodyOf::Request, BodyOf::Answer);
                let written = request.piece(bytes.clone(), ends);
                check(&written, Part::RequestBody(piece.clone()), None);
                check(
                    &answer.piece(bytes.clone(), ends),
                    Part::ResponseBody(piece),
                    None,
                );
            }
            let whole = match bytes.is_empty() {
                true => Mutation::ClearBody(true),
                false => Mutation::Body(bytes.clone()),
            };
            let replaced = body(common(None, Some(whole.clone()), false));
            let written = BodyOf::Answer.replaced(bytes.clone());
            check(&written, Part::ResponseBody(replaced), None);
            let told = body(common(Some(changed()), Some(whole), true));
            let written = request_whole(&change(), "10.0.0.1:80", Some(bytes));
            check(&written, Part::RequestBody(told), None);
        }
        let told = body(common(Some(changed()), None, true));
        let written = request_whole(&change(), "10.0.0.1:80", None);
        check(&written, Part::RequestBody(told), None);
        let told = head(common(Some(changed()), None, true));
        let written = request_head(&change(), "10.0.0.1:80");
        check(&written, Part::RequestHeaders(told), None);
        let told = head(common(Some(changed()), None, false));
        check(
            &answer_head(Some(&change())),
            Part::ResponseHeaders(told.clone()),
            None,
        );
        check(&answer_head(None), Part::ResponseHeaders(head(None)), None);
        check(
            &BodyOf::Answer.passes(),
            Part::ResponseBody(body(common(None, None, false))),
            None,
        );
        let modes = ProcessingMode {
            request_body_mode: BodySendMode::Buffered.into(),
            response_body_mode: BodySendMode::Streamed.into(),
        };
        let written = request_head_waits_for_whole(BodyMode::Streamed, Some(&change()));
        check(&written, Part::RequestHeaders(told), Some(modes));
        check(
            &request_head_waits(None),
            Part::RequestHeaders(head(None)),
            None,
        );
        let trailers = TrailersResponse::default();
        check(
            &request_trailers(),
            Part::RequestTrailers(trailers.clone()),
            None,
        );
        check(&answer_trailers(), Part::ResponseTrailers(trailers), None);
    }

    #[test]
    fn an_immediate_response_has_status_headers_body_and_reason() {
        let mut answer = Response::new(Bytes::from_static(b"{}"));
        *answer.status_mut() = StatusCode::TOO_MANY_REQUESTS;
        let value = HeaderValue::from_static("1");
        answer.headers_mut().insert("retry-after", value);
        let header = HeaderValueOption {
            header: Some(ext_proc::HeaderValue {
                key: "retry-after".to_owned(),
                value: String::new(),
                raw_value: Bytes::from_static(b"1"),
            }),
            append_action: HeaderAppendAction::OverwriteIfExistsOrAdd.into(),
        };
        let told = ImmediateResponse {
            status: Some(HttpStatus { code: 429 }),
            headers: Some(HeaderMutation {
                set_headers: vec![header],
                remove_headers: Vec::new(),
            }),
            body: Bytes::from_static(b"{}"),
            details: "quorate{overloaded}".to_owned(),
        };
        let written = immediate(answer, "quorate{overloaded}");
        check(&written, Part::ImmediateResponse(told), None);
    }
}
