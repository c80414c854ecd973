//! One message of a gateway, read from the wire.

use bytes::Bytes;
use prost::Message as _;
use tonic::Status;

use super::ext_proc::ProtocolConfiguration;
use super::metadata;
use super::wire::{Field, Fields, Malformed};

/// What a message of a gateway tells.
#[derive(Debug)]
pub(super) enum ToldPart {
    RequestHeaders(ToldHead),
    ResponseHeaders(ToldHead),
    RequestBody(ToldPiece),
    ResponseBody(ToldPiece),
    RequestTrailers,
    ResponseTrailers,
}

/// Head of a request or response.
#[derive(Debug, Default)]
pub(super) struct ToldHead {
    /// The fields, as a `HeaderMap` on the wire.
    pub(super) fields: Bytes,
    pub(super) end_of_stream: bool,
}

/// Piece of a body.
#[derive(Debug, Default)]
pub(super) struct ToldPiece {
    pub(super) body: Bytes,
    pub(super) end_of_stream: bool,
}

/// One message of a gateway.
#[derive(Debug)]
pub(super) struct GatewayMessage {
    pub(super) told: ToldPart,
    /// `Metadata` on the wire; empty if the gateway sends none.
    pub(super) metadata: Bytes,
    /// The gateway's reason for a response; `None` if it sends none.
    pub(super) details: Option<String>,
    /// Protocol configuration; `None` if the gateway sends none, or has sent it before.
    pub(super) protocol: Option<ProtocolConfiguration>,
}

impl ToldPart {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::RequestHeaders(_) => "request_headers",
            Self::ResponseHeaders(_) => "response_headers",
            Self::RequestBody(_) => "request_body",
            Self::ResponseBody(_) => "response_body",
            Self::RequestTrailers => "request_trailers",
            Self::ResponseTrailers => "response_trailers",
        }
    }
}

impl GatewayMessage {
    /// Reads a `ProcessingRequest`.
    ///
    /// # Errors
    /// Returns the error that ends the stream if the message is malformed, or none that a picker
    /// can respond to.
    pub(super) fn read(message: &Bytes) -> Result<Self, Status> {
        let malformed =
            |Malformed| Status::invalid_argument("a message cannot be read: it is malformed");
        let (mut told, mut protocol) = (None, None);
        let (mut metadata, mut details) = (Bytes::new(), None);
        let mut is_observed = false;
        for field in Fields::of(message) {
            match field.map_err(malformed)? {
                (2, Field::Bytes(it)) => {
                    told = Some(ToldPart::RequestHeaders(
                        head(message, it).map_err(malformed)?,
                    ));
                }
                (3, Field::Bytes(it)) => {
                    told = Some(ToldPart::ResponseHeaders(
                        head(message, it).map_err(malformed)?,
                    ));
                }
                (4, Field::Bytes(it)) => {
                    told = Some(ToldPart::RequestBody(
                        piece(message, it).map_err(malformed)?,
                    ));
                }
                (5, Field::Bytes(it)) => {
                    told = Some(ToldPart::ResponseBody(
                        piece(message, it).map_err(malformed)?,
                    ));
                }
                (6, Field::Bytes(_)) => told = Some(ToldPart::RequestTrailers),
                (7, Field::Bytes(_)) => told = Some(ToldPart::ResponseTrailers),
                (8, Field::Bytes(it)) => metadata = message.slice_ref(it),
                (9, Field::Bytes(it)) => {
                    let told = metadata::details(it).map_err(malformed)?;
                    details = details.or(told);
                }
                (10, Field::Number(it)) => is_observed = it != 0,
                (11, Field::Bytes(it)) => {
                    let read = ProtocolConfiguration::decode(it);
                    protocol = Some(read.map_err(|_| malformed(Malformed))?);
                }
                _ => {}
            }
        }
        if is_observed {
            return Err(Status::failed_precondition(
                "with observability_mode a picker cannot change anything: turn it off",
            ));
        }
        let told = told.ok_or_else(|| {
            Status::invalid_argument("a message contains nothing that this picker knows")
        })?;
        Ok(Self {
            told,
            metadata,
            details,
            protocol,
        })
    }
}

fn head(message: &Bytes, told: &[u8]) -> Result<ToldHead, Malformed> {
    let mut head = ToldHead::default();
    for field in Fields::of(told) {
        match field? {
            (1, Field::Bytes(fields)) => head.fields = message.slice_ref(fields),
            (3, Field::Number(it)) => head.end_of_stream = it != 0,
            _ => {}
        }
    }
    Ok(head)
}

fn piece(message: &Bytes, told: &[u8]) -> Result<ToldPiece, Malformed> {
    let mut piece = ToldPiece::default();
    for field in Fields::of(told) {
        match field? {
            (1, Field::Bytes(body)) => piece.body = message.slice_ref(body),
            (2, Field::Number(it)) => piece.end_of_stream = it != 0,
            _ => {}
        }
    }
    Ok(piece)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use prost_types::value::Kind;
    use prost_types::{Struct, Value};

    use super::*;
    use crate::proxy::picker::ext_proc::processing_request::Request;
    use crate::proxy::picker::ext_proc::{
        HeaderMap, HeaderValue, HttpBody, HttpHeaders, HttpTrailers, Metadata, ProcessingRequest,
    };
    use crate::proxy::picker::{DETAILS, NAMESPACE, SERVED};
    use crate::routing::OfferedEndpoints;

    fn text(key: &str, text: &str) -> Struct {
        let kind = Some(Kind::StringValue(text.to_owned()));
        Struct {
            fields: [(key.to_owned(), Value { kind })].into(),
        }
    }

    /// A request of each kind, by its place in the oneof.
    fn request(kind: u8, fields: HeaderMap, bytes: Vec<u8>, end_of_stream: bool) -> Request {
        let head = HttpHeaders {
            headers: Some(fields),
            end_of_stream,
        };
        let piece = HttpBody {
            body: bytes.into(),
            end_of_stream,
        };
        match kind {
            0 => Request::RequestHeaders(head),
            1 => Request::ResponseHeaders(head),
            2 => Request::RequestBody(piece),
            3 => Request::ResponseBody(piece),
            4 => Request::RequestTrailers(HttpTrailers::default()),
            _ => Request::ResponseTrailers(HttpTrailers::default()),
        }
    }

    fn fields() -> impl Strategy<Value = HeaderMap> {
        let field = ("[a-z:-]{1,20}", "[ -~]{0,300}", any::<bool>());
        prop::collection::vec(field, 0..5).prop_map(|fields| {
            let headers = fields.into_iter().map(|(key, text, is_raw)| HeaderValue {
                key,
                raw_value: if is_raw {
                    text.clone().into()
                } else {
                    Bytes::new()
                },
                value: if is_raw { String::new() } else { text },
            });
            HeaderMap {
                headers: headers.collect(),
            }
        })
    }

    #[test]
    fn malformed_metadata_ends_the_stream_and_offers_nothing() {
        let none = metadata::read(&[]).expect("none is no fault");
        assert_eq!(metadata::offered(&none), OfferedEndpoints::All);
        assert!(metadata::read(&[0x0a, 5, 1]).is_err());
    }

    proptest! {
        #[test]
        fn a_message_reads_as_the_protocols_own_types_do(
            (kind, fields, bytes) in (0..6_u8, fields(), prop::collection::vec(any::<u8>(), 0..400)),
            (end, early, modes) in (any::<bool>(), any::<bool>(), 0..6_i32),
            (served, details) in ("[ -~]{0,30}", "[ -~]{0,30}"),
        ) {
            let protocol = ProtocolConfiguration {
                request_body_mode: modes,
                response_body_mode: 5 - modes,
                send_body_without_waiting_for_header_response: early,
            };
            let metadata = Metadata {
                filter_metadata: BTreeMap::from([
                    ("another".to_owned(), text(SERVED, "not this")),
                    (NAMESPACE.to_owned(), text(SERVED, &served)),
                ]),
            };
            let message = ProcessingRequest {
                request: Some(request(kind, fields.clone(), bytes.clone(), end)),
                metadata_context: Some(metadata.clone()),
                attributes: [("a-filter".to_owned(), text(DETAILS, &details))].into(),
                observability_mode: false,
                protocol_config: Some(protocol),
            };
            let encoded = Bytes::from(message.encode_to_vec());
            let read = GatewayMessage::read(&encoded).unwrap();
            prop_assert_eq!(read.protocol, Some(protocol));
            prop_assert_eq!(read.details, Some(details));
            prop_assert_eq!(Metadata::decode(read.metadata).unwrap(), metadata);
            let again = match read.told {
                ToldPart::RequestHeaders(it) | ToldPart::ResponseHeaders(it) => {
                    let fields = HeaderMap::decode(it.fields).unwrap();
                    request(kind, fields, bytes, it.end_of_stream)
                }
                ToldPart::RequestBody(it) | ToldPart::ResponseBody(it) => {
                    request(kind, fields, it.body.to_vec(), it.end_of_stream)
                }
                ToldPart::RequestTrailers => request(4, fields, bytes, end),
                ToldPart::ResponseTrailers => request(5, fields, bytes, end),
            };
            prop_assert_eq!(Some(again), message.request);
            for length in (0..encoded.len()).step_by(11) {
                // No message panics, and none that is cut off within a field is read.
                let cut = GatewayMessage::read(&encoded.slice(..length));
                let is_whole = ProcessingRequest::decode(encoded.slice(..length)).is_ok();
                prop_assert!(is_whole || cut.is_err(), "{}", length);
            }
        }
    }
}
