//! Messages that a gateway sends to a picker, and the header changes in the picker's responses.

use std::net::SocketAddr;

use anyhow::Context as _;
use api::proxy::picker::ext_proc::header_value_option::HeaderAppendAction;
use api::proxy::picker::ext_proc::processing_request::Request as ProcessingMessage;
use api::proxy::picker::ext_proc::{
    HeaderMap as ToldHeaders, HeaderMutation, HeaderValue as ToldHeader, HttpBody, HttpHeaders,
    Metadata,
};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use prost_types::value::Kind;
use prost_types::{ListValue, Struct, Value};

/// Name of the header and of the metadata key with a request's destination.
pub(super) const DESTINATION: &str = "x-gateway-destination-endpoint";

/// Builds the message with the head of a request or response. `end` means that no body follows.
pub(super) fn head(pseudo: &[(&str, &str)], headers: &HeaderMap, end: bool) -> HttpHeaders {
    let told = |key: &str, value: &[u8]| ToldHeader {
        key: key.to_owned(),
        value: String::new(),
        raw_value: Bytes::copy_from_slice(value),
    };
    let pseudo = pseudo
        .iter()
        .map(|(key, value)| told(key, value.as_bytes()));
    let fields = headers.iter();
    let fields = fields.map(|(name, value)| told(name.as_str(), value.as_bytes()));
    HttpHeaders {
        headers: Some(ToldHeaders {
            headers: pseudo.chain(fields).collect(),
        }),
        end_of_stream: end,
    }
}

/// Builds the message with a chunk of a body.
pub(super) fn piece(body: Bytes, end_of_stream: bool) -> HttpBody {
    HttpBody {
        body,
        end_of_stream,
    }
}

/// Builds the message with a chunk of a request's body.
pub(super) fn upload(body: Bytes, end: bool) -> ProcessingMessage {
    ProcessingMessage::RequestBody(piece(body, end))
}

fn text(text: String) -> Value {
    Value {
        kind: Some(Kind::StringValue(text)),
    }
}

fn metadata(namespace: &str, key: &str, value: Value) -> Metadata {
    let fields = [(key.to_owned(), value)].into();
    Metadata {
        filter_metadata: [(namespace.to_owned(), Struct { fields })].into(),
    }
}

/// Builds the metadata that restricts a picker's choice to `endpoints`.
pub(super) fn subset(endpoints: &[SocketAddr]) -> Metadata {
    let values = endpoints.iter().map(|it| text(it.to_string())).collect();
    let list = Value {
        kind: Some(Kind::ListValue(ListValue { values })),
    };
    let key = "x-gateway-destination-endpoint-subset";
    metadata("envoy.lb.subset_hint", key, list)
}

/// Builds the metadata that names the endpoint that responded.
pub(super) fn served(endpoint: SocketAddr) -> Metadata {
    let key = "x-gateway-destination-endpoint-served";
    metadata("envoy.lb", key, text(endpoint.to_string()))
}

/// Returns the destination endpoints in a picker's metadata, if any.
pub(super) fn destination(told: Option<&Struct>) -> Option<&str> {
    let Kind::StructValue(inner) = told?.fields.get("envoy.lb")?.kind.as_ref()? else {
        return None;
    };
    match inner.fields.get(DESTINATION)?.kind.as_ref()? {
        Kind::StringValue(text) => Some(text),
        _ => None,
    }
}

/// Name of the pseudo-header with a request's path.
const PATH: &str = ":path";

/// Returns the path that a picker gives a request; `None` if it keeps the client's.
pub(super) fn path(by: &HeaderMutation) -> anyhow::Result<Option<String>> {
    let mut fields = by.set_headers.iter().flat_map(|set| &set.header);
    let Some(field) = fields.find(|field| field.key == PATH) else {
        return Ok(None);
    };
    Ok(Some(String::from_utf8(field.raw_value.to_vec())?))
}

/// Applies a picker's changes to `headers`, except for the path.
///
/// # Errors
/// If a header is invalid, or the picker requests an unsupported append action.
pub(super) fn change(headers: &mut HeaderMap, by: &HeaderMutation) -> anyhow::Result<()> {
    for name in &by.remove_headers {
        headers.remove(name);
    }
    for set in &by.set_headers {
        let field = set.header.as_ref().context("a header without a header")?;
        if field.key == PATH {
            continue;
        }
        let name = HeaderName::from_bytes(field.key.as_bytes())?;
        let value = HeaderValue::from_bytes(&field.raw_value)?;
        match set.append_action() {
            HeaderAppendAction::OverwriteIfExistsOrAdd => drop(headers.insert(name, value)),
            HeaderAppendAction::AppendIfExistsOrAdd => drop(headers.append(name, value)),
            other => anyhow::bail!("a picker asks for {}", other.as_str_name()),
        }
    }
    Ok(())
}
