//! One message of a gateway, read from the wire.

use bytes::Bytes;
use prost::Message as _;
use tonic::Status;

use super::ext_proc::{HttpTrailers, ProcessingRequest, ProtocolConfiguration};
use super::metadata;
use super::wire::{Field, Fields, NotPlain, once};

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
        let read = PlainParts::plain(message).or_else(|NotPlain| {
            // The protocol's own types gather what is in several parts and drop what is unknown.
            let read = ProcessingRequest::decode(&message[..]).map_err(|_| NotPlain)?;
            PlainParts::plain(&read.encode_to_vec().into())
        });
        let read = read.map_err(|NotPlain| {
            Status::invalid_argument("a message cannot be read: it is malformed")
        })?;
        if read.is_observed {
            return Err(Status::failed_precondition(
                "with observability_mode a picker cannot change anything: turn it off",
            ));
        }
        let told = read.told.ok_or_else(|| {
            Status::invalid_argument("a message contains nothing that this picker knows")
        })?;
        Ok(Self {
            told,
            metadata: read.metadata.unwrap_or_default(),
            details: read.details,
            protocol: read.protocol,
        })
    }
}

/// Parts of a message, as far as it has them.
#[derive(Default)]
struct PlainParts {
    told: Option<ToldPart>,
    metadata: Option<Bytes>,
    details: Option<String>,
    protocol: Option<ProtocolConfiguration>,
    is_observed: bool,
}

impl PlainParts {
    /// Reads a message of which each part is in one place.
    fn plain(message: &Bytes) -> Result<Self, NotPlain> {
        let mut parts = Self::default();
        let mut filter = None;
        for field in Fields::of(message) {
            let told = match field? {
                (2, Field::Bytes(it)) => ToldPart::RequestHeaders(head(message, it)?),
                (3, Field::Bytes(it)) => ToldPart::ResponseHeaders(head(message, it)?),
                (4, Field::Bytes(it)) => ToldPart::RequestBody(piece(message, it)?),
                (5, Field::Bytes(it)) => ToldPart::ResponseBody(piece(message, it)?),
                (6, Field::Bytes(it)) => trailers(it).map(|()| ToldPart::RequestTrailers)?,
                (7, Field::Bytes(it)) => trailers(it).map(|()| ToldPart::ResponseTrailers)?,
                field => {
                    parts.take_in(message, field, &mut filter)?;
                    continue;
                }
            };
            once(&mut parts.told, told)?;
        }
        Ok(parts)
    }

    /// Takes in what is beside the part of a request or response. `filter` is the last one whose
    /// attributes were read: those of several are in the order of their names.
    fn take_in<'a>(
        &mut self,
        message: &Bytes,
        field: (u64, Field<'a>),
        filter: &mut Option<&'a str>,
    ) -> Result<(), NotPlain> {
        match field {
            (8, Field::Bytes(it)) => once(&mut self.metadata, message.slice_ref(it)),
            (9, Field::Bytes(it)) => {
                let name = Fields::of(it).bytes(1)?.unwrap_or_default();
                let name = std::str::from_utf8(name).map_err(|_| NotPlain)?;
                if filter.replace(name).is_some_and(|last| last >= name) {
                    return Err(NotPlain);
                }
                // The filter's name is its operator's choice.
                let attributes = Fields::of(it).bytes(2)?.unwrap_or_default();
                let told = metadata::details(attributes)?;
                self.details = self.details.take().or(told);
                Ok(())
            }
            (10, Field::Number(it)) => {
                self.is_observed = it != 0;
                Ok(())
            }
            (11, Field::Bytes(it)) => {
                let read = ProtocolConfiguration::decode(it).map_err(|_| NotPlain)?;
                once(&mut self.protocol, read)
            }
            (2..=11, _) => Err(NotPlain),
            _ => Ok(()),
        }
    }
}

fn head(message: &Bytes, told: &[u8]) -> Result<ToldHead, NotPlain> {
    let (mut head, mut fields) = (ToldHead::default(), None);
    for field in Fields::of(told) {
        match field? {
            (1, Field::Bytes(it)) => once(&mut fields, message.slice_ref(it))?,
            (3, Field::Number(it)) => head.end_of_stream = it != 0,
            (1 | 3, _) => return Err(NotPlain),
            _ => {}
        }
    }
    head.fields = fields.unwrap_or_default();
    Ok(head)
}

fn piece(message: &Bytes, told: &[u8]) -> Result<ToldPiece, NotPlain> {
    let mut piece = ToldPiece::default();
    for field in Fields::of(told) {
        match field? {
            (1, Field::Bytes(body)) => piece.body = message.slice_ref(body),
            (2, Field::Number(it)) => piece.end_of_stream = it != 0,
            (1 | 2, _) => return Err(NotPlain),
            _ => {}
        }
    }
    Ok(piece)
}

/// Checks trailers, which tell nothing.
fn trailers(told: &[u8]) -> Result<(), NotPlain> {
    HttpTrailers::decode(told).map_err(|_| NotPlain).map(drop)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use prost_types::value::Kind;
    use prost_types::{Struct, Value};

    use super::*;
    use crate::proxy::picker::ext_proc::processing_request::Request;
    use crate::proxy::picker::ext_proc::{HeaderMap, HeaderValue, HttpBody, HttpHeaders, Metadata};
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

    /// Encoding of a field with a number below 16 and this wire type.
    fn field(number: u8, wire_type: u8, value: &[u8]) -> Vec<u8> {
        [&[number << 3 | wire_type], value].concat()
    }

    fn nested(number: u8, message: &[u8]) -> Vec<u8> {
        let length = u8::try_from(message.len() % 128).unwrap();
        let length = [length | 0x80, u8::try_from(message.len() / 128).unwrap()];
        [&field(number, 2, &length), message].concat()
    }

    /// What no gateway sends, and some of which no message may have.
    fn strange() -> impl Strategy<Value = Vec<u8>> {
        let value = prop::sample::select(vec![
            vec![],
            vec![1],
            vec![0x80, 0],
            [&[0xff; 9][..], &[1]].concat(),
            [&[0xff; 9][..], &[2]].concat(),
            vec![0xff; 11],
            vec![3, b'a', b'b', b'c'],
            vec![2, 0xff, 0xfe],
            vec![0; 8],
        ]);
        let one =
            (0..16_u8, 0..8_u8, value).prop_map(|(number, kind, it)| field(number, kind, &it));
        let group = (1..16_u8, any::<bool>(), 1..16_u8).prop_map(|(number, is_ended, other)| {
            let within = field(5, 0, &[7]);
            let end = if is_ended { number } else { other };
            [field(number, 3, &within), field(end, 4, &[])].concat()
        });
        let far = vec![0x80, 0x80, 0x80, 0x80, 0x10, 0];
        prop_oneof![2 => Just(Vec::new()), 1 => one, 1 => group, 1 => Just(far)]
    }

    /// The encoding of a message in several parts, with something strange among them.
    fn in_parts(part: impl Strategy<Value = Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
        (prop::collection::vec(part, 1..3), strange(), any::<bool>()).prop_map(
            |(mut parts, strange, is_first)| {
                parts.insert(usize::from(!is_first), strange);
                parts.concat()
            },
        )
    }

    fn any_part() -> impl Strategy<Value = Vec<u8>> {
        let head = (fields(), any::<bool>(), any::<bool>()).prop_map(|(fields, is_some, end)| {
            let headers = is_some.then_some(fields);
            HttpHeaders {
                headers,
                end_of_stream: end,
            }
            .encode_to_vec()
        });
        let piece = ("[a-z]{0,20}", any::<bool>()).prop_map(|(body, end_of_stream)| {
            let body = body.into();
            HttpBody {
                body,
                end_of_stream,
            }
            .encode_to_vec()
        });
        let trailers = fields().prop_map(|trailers| {
            let trailers = Some(trailers);
            HttpTrailers { trailers }.encode_to_vec()
        });
        let beside = ("[a-c]", "[a-c]").prop_map(|(namespace, value)| {
            Metadata {
                filter_metadata: [(namespace, text(SERVED, &value))].into(),
            }
            .encode_to_vec()
        });
        let entry = (
            "[a-c]",
            prop::sample::select(vec![DETAILS, SERVED]),
            "[a-c]",
        );
        let attributes = entry.prop_map(|(filter, key, value)| {
            let struct_ = nested(2, &text(key, &value).encode_to_vec());
            [nested(1, filter.as_bytes()), struct_].concat()
        });
        let protocol = (0..6_u8).prop_map(|mode| field(1, 0, &[mode]));
        prop_oneof![
            2 => (2..4_u8, in_parts(head)).prop_map(|(number, it)| nested(number, &it)),
            2 => (4..6_u8, in_parts(piece)).prop_map(|(number, it)| nested(number, &it)),
            1 => (6..8_u8, in_parts(trailers)).prop_map(|(number, it)| nested(number, &it)),
            1 => in_parts(beside).prop_map(|it| nested(8, &it)),
            2 => in_parts(attributes).prop_map(|it| nested(9, &it)),
            1 => in_parts(protocol).prop_map(|it| nested(11, &it)),
        ]
    }

    /// Reads a message, with its metadata, as text that can be compared.
    fn told(message: &Bytes) -> Result<String, String> {
        let read = GatewayMessage::read(message).map_err(|why| why.to_string())?;
        let beside = metadata::read(&read.metadata).map_err(|why| why.to_string())?;
        Ok(format!(
            "{:?} {beside:?} {:?} {:?}",
            read.told, read.details, read.protocol
        ))
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

        #[test]
        fn messages_in_parts_read_as_the_protocols_own_types_gather_them(
            encoded in in_parts(prop::collection::vec(any_part(), 1..4).prop_map(|it| it.concat())),
        ) {
            let encoded = Bytes::from(encoded);
            match ProcessingRequest::decode(encoded.clone()) {
                Ok(read) => {
                    let gathered = Bytes::from(read.encode_to_vec());
                    prop_assert_eq!(told(&encoded), told(&gathered), "{:?}", read);
                }
                Err(why) => prop_assert!(told(&encoded).is_err(), "{}", why),
            }
        }
    }
}
