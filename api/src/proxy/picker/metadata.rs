//! Metadata that gateways and pickers exchange in addition to headers.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use prost_types::value::Kind;
use prost_types::{Struct, Value};

use super::ext_proc::Metadata;
use super::{DESTINATION, DETAILS, NAMESPACE, SERVED, SUBSET, SUBSET_NAMESPACE};
use crate::routing::OfferedEndpoints;

/// Maximum number of endpoints in a hint.
pub(super) const HINTED_MAX: usize = 4096;

/// Returns the endpoints that a gateway offers for a request: all, unless it names some. Values
/// other than an address with a port are ignored.
pub(super) fn offered(told: Option<&Metadata>) -> OfferedEndpoints {
    let hint = value(told, SUBSET_NAMESPACE, SUBSET);
    let Some(hint) = hint else {
        return OfferedEndpoints::All;
    };
    let texts: Vec<&str> = match &hint.kind {
        Some(Kind::ListValue(list)) => list.values.iter().filter_map(text).collect(),
        Some(Kind::StringValue(text)) => text.split(',').map(str::trim).collect(),
        _ => Vec::new(),
    };
    let endpoints = texts.iter().take(HINTED_MAX);
    OfferedEndpoints::those(endpoints.filter_map(|it| it.parse().ok()).collect())
}

/// Returns the endpoint that responded; `None` if the gateway does not report it.
pub(super) fn served(told: Option<&Metadata>) -> Option<SocketAddr> {
    let served = value(told, NAMESPACE, SERVED)?;
    text(served)?.trim().parse().ok()
}

/// Returns the gateway's reason for a response; `None` if it sends none. The attributes are in a
/// struct under the name of the gateway's filter, which its operator may choose.
pub(super) fn details(attributes: &BTreeMap<String, Struct>) -> Option<&str> {
    let mut found = attributes.values();
    found.find_map(|of_filter| text(of_filter.fields.get(DETAILS)?))
}

/// Returns the metadata that names the endpoints for a request.
pub(super) fn destination(endpoints: &str) -> Struct {
    let of = |kind| Value { kind: Some(kind) };
    let endpoints = of(Kind::StringValue(endpoints.to_owned()));
    let key = DESTINATION.as_str().to_owned();
    let inner = Struct {
        fields: [(key, endpoints)].into(),
    };
    Struct {
        fields: [(NAMESPACE.to_owned(), of(Kind::StructValue(inner)))].into(),
    }
}

fn value<'a>(told: Option<&'a Metadata>, namespace: &str, key: &str) -> Option<&'a Value> {
    told?.filter_metadata.get(namespace)?.fields.get(key)
}

fn text(value: &Value) -> Option<&str> {
    match &value.kind {
        Some(Kind::StringValue(text)) => Some(text),
        _ => None,
    }
}
