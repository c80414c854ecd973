//! Fuzz targets for messages of gateways: heads, header maps and metadata. See [`crate::fuzzing`].

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use prost::Message as _;
use prost_types::value::Kind;
use prost_types::{ListValue, Struct, Value};

use super::ext_proc::header_value_option::HeaderAppendAction;
use super::ext_proc::processing_request::Request;
use super::ext_proc::{
    self, BodySendMode, HeaderMutation, HttpBody, HttpHeaders, HttpTrailers, Metadata,
    ProcessingRequest, ProtocolConfiguration,
};
use super::frames::MessageReader;
use super::gateway_message::{GatewayMessage, ToldPart};
use super::heads::HeadChange;
use super::own_reply::ReplyCause;
use super::wire::PickerMessage;
use super::{BodyModes, DETAILS, NAMESPACE, SERVED, SUBSET, SUBSET_NAMESPACE, heads, metadata};
use crate::proxy::request::request_body::HeldBodyBytes;
use crate::proxy::settings::ProxyLimits;
use crate::routing::OfferedEndpoints;

/// Maximum length of a message in the frame count, in bytes.
const MESSAGE_BYTES_MAX: usize = 4096;

/// Parses a gateway's message. Its head must be within the limits, a mutation of the head must have
/// the intended result, and the frames of a stream must hold no more than they may.
pub fn gateway_message(bytes: &[u8]) {
    frames(bytes);
    let Ok(message) = GatewayMessage::read(&Bytes::copy_from_slice(bytes)) else {
        return;
    };
    let Ok(told) = metadata::read(&message.metadata) else {
        return;
    };
    if let OfferedEndpoints::Those(those) = metadata::offered(&told) {
        assert!(those.is_sorted());
        assert!(those.len() <= metadata::HINTED_MAX, "{}", those.len());
    }
    if let Some(served) = metadata::served(&told) {
        let served = served.to_string();
        let mut back = PickerMessage::new();
        metadata::write_destination(&mut back, &served);
        let back = Struct::decode(back.encoded()).expect("it is one");
        assert!(back.fields.contains_key(NAMESPACE));
    }
    if let Some(told) = message.protocol {
        drop(BodyModes::told(told));
    }
    let limits = ProxyLimits::default();
    match &message.told {
        ToldPart::RequestHeaders(told) => {
            if let Ok(parts) = heads::request(told, &limits) {
                head(&parts.headers, &limits);
            }
        }
        ToldPart::ResponseHeaders(told) => {
            if let Some((status, headers)) = heads::answer(told, &limits) {
                assert!(!status.is_informational(), "{status}");
                assert_eq!(heads::status(told), Some(status));
                let details = message.details.as_deref();
                let cause = ReplyCause::of(status, &headers, details);
                // An engine is never blamed for a response that is not an error.
                let is_blamed = matches!(cause, Some(ReplyCause::Engine(_)));
                assert!(!is_blamed || details.is_some());
                head(&headers, &limits);
            }
        }
        _ => {}
    }
}

/// Reads a stream in frames of the length that its first byte gives.
fn frames(bytes: &[u8]) {
    const HELD_MAX: u64 = 3000;
    let Some((first, stream)) = bytes.split_first() else {
        return;
    };
    let all: Arc<AtomicU64> = Arc::default();
    let held = HeldBodyBytes::none(&all, HELD_MAX);
    let mut reader = MessageReader::new(held, MESSAGE_BYTES_MAX);
    'stream: for data in stream.chunks(usize::from(*first) + 1) {
        let mut data = Bytes::copy_from_slice(data);
        loop {
            match reader.take(&mut data) {
                Ok(Some(message)) => assert!(message.len() <= MESSAGE_BYTES_MAX),
                Ok(None) => break,
                Err(_) => break 'stream,
            }
        }
        assert!(all.load(Relaxed) <= HELD_MAX);
    }
    drop(reader);
    assert_eq!(all.load(Relaxed), 0);
}

/// Removes every second header, changes every third one, and adds one.
fn head(from: &HeaderMap, limits: &ProxyLimits) {
    assert!(from.len() <= limits.headers_max, "{}", from.len());
    let mut to = from.clone();
    for (number, name) in from.keys().enumerate() {
        if number % 2 == 1 {
            to.remove(name);
        } else if number % 3 == 2 {
            to.append(name, HeaderValue::from_static("more"));
        }
    }
    to.insert("x-quorate-new", HeaderValue::from_static("new"));
    let mut changed = from.clone();
    let mut mutation = PickerMessage::new();
    HeadChange::between(from, &to).write(&mut mutation);
    let mutation = HeaderMutation::decode(mutation.encoded()).expect("it is one");
    apply(&mut changed, &mutation);
    for map in [&mut changed, &mut to] {
        let own: Vec<_> = { map.keys() }
            .filter(|name| heads::is_gateways(name))
            .cloned()
            .collect();
        for name in own {
            map.remove(name);
        }
    }
    assert_eq!(changed, to);
}

/// Applies a mutation as a gateway does.
fn apply(headers: &mut HeaderMap, by: &HeaderMutation) {
    for name in &by.remove_headers {
        headers.remove(name);
    }
    for set in &by.set_headers {
        let field = set.header.as_ref().expect("each names a header");
        let name = HeaderName::from_bytes(field.key.as_bytes()).expect("it was one");
        let value = HeaderValue::from_bytes(&field.raw_value).expect("it was one");
        match set.append_action() {
            HeaderAppendAction::OverwriteIfExistsOrAdd => drop(headers.insert(name, value)),
            _ => drop(headers.append(name, value)),
        }
    }
}

/// Returns messages of each kind as seeds.
#[must_use]
pub fn gateway_message_seeds() -> Vec<Vec<u8>> {
    let request = [
        (":method", "POST"),
        (":path", "/v1/chat/completions"),
        (":authority", "models.example"),
        ("content-type", "application/json"),
        ("cookie", "a=b"),
        ("cookie", "c=d"),
        ("x-request-id", "r1"),
        ("via", "1.1 gateway"),
    ];
    let answer = [
        (":status", "200"),
        ("content-type", "text/event-stream"),
        ("x-one", "1"),
        ("x-two", "2"),
    ];
    let body = |end_of_stream| HttpBody {
        body: Bytes::from_static(b"{\"model\":\"m\"}"),
        end_of_stream,
    };
    let text = |text: &str| Kind::StringValue(text.to_owned());
    let endpoints = ["10.0.0.1:8000", "[fd00::1]:80", "what"];
    let values = endpoints.map(|endpoint| Value {
        kind: Some(text(endpoint)),
    });
    let list = Kind::ListValue(ListValue {
        values: values.into(),
    });
    let hint = told(SUBSET_NAMESPACE, SUBSET, list);
    let served = told(NAMESPACE, SERVED, text("10.0.0.1:8000"));
    let said = [
        (Request::RequestHeaders(fields(&request)), Some(hint)),
        (Request::RequestBody(body(false)), None),
        (Request::RequestTrailers(HttpTrailers::default()), None),
        (Request::ResponseHeaders(fields(&answer)), Some(served)),
        (Request::ResponseBody(body(true)), None),
    ];
    let details = told(NAMESPACE, DETAILS, text("response_timeout"));
    let details = details.filter_metadata[NAMESPACE].clone();
    let messages = said.map(|(request, metadata_context)| {
        let message = ProcessingRequest {
            request: Some(request),
            metadata_context,
            attributes: BTreeMap::from([(NAMESPACE.to_owned(), details.clone())]),
            observability_mode: false,
            protocol_config: Some(ProtocolConfiguration {
                request_body_mode: BodySendMode::FullDuplexStreamed.into(),
                response_body_mode: BodySendMode::Streamed.into(),
                send_body_without_waiting_for_header_response: true,
            }),
        };
        message.encode_to_vec()
    });
    let framed = messages.iter().map(|message| {
        let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
        [&[9, 0][..], &length.to_be_bytes(), message].concat()
    });
    let framed = framed.collect::<Vec<_>>();
    messages.into_iter().chain(framed).collect()
}

fn fields(fields: &[(&str, &str)]) -> HttpHeaders {
    let field = |(key, value): &(&str, &str)| ext_proc::HeaderValue {
        key: (*key).to_owned(),
        value: String::new(),
        raw_value: Bytes::copy_from_slice(value.as_bytes()),
    };
    HttpHeaders {
        headers: Some(ext_proc::HeaderMap {
            headers: fields.iter().map(field).collect(),
        }),
        end_of_stream: false,
    }
}

fn told(namespace: &str, key: &str, kind: Kind) -> Metadata {
    let fields = [(key.to_owned(), Value { kind: Some(kind) })].into();
    Metadata {
        filter_metadata: [(namespace.to_owned(), Struct { fields })].into(),
    }
}
