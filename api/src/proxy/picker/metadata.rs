//! Metadata that gateways and pickers exchange in addition to headers.

use std::net::SocketAddr;

use prost::Message as _;
use prost_types::value::Kind;
use prost_types::{Struct, Value};
use tonic::Status;

use super::ext_proc::Metadata;
use super::wire::{NotPlain, PickerMessage};
use super::{DESTINATION, DETAILS, NAMESPACE, SERVED, SUBSET, SUBSET_NAMESPACE};
use crate::routing::OfferedEndpoints;

/// Maximum number of endpoints in a hint.
pub(super) const HINTED_MAX: usize = 4096;

/// Number of the map in `Struct`.
const ENTRIES: u64 = 1;
/// Numbers of the kinds of a `Value`.
const TEXT: u64 = 3;
const STRUCT: u64 = 5;

/// Reads a gateway's `Metadata` from the wire.
///
/// # Errors
/// Returns the error that ends the stream if it is malformed: a hint that cannot be read must not
/// offer every endpoint.
pub(super) fn read(told: &[u8]) -> Result<Metadata, Status> {
    let why = "metadata_context cannot be read: it is malformed";
    Metadata::decode(told).map_err(|_| Status::invalid_argument(why))
}

/// Returns the endpoints that a gateway offers for a request: all, unless it names some. Values
/// other than an address with a port are ignored.
pub(super) fn offered(told: &Metadata) -> OfferedEndpoints {
    let Some(hint) = value(told, SUBSET_NAMESPACE, SUBSET) else {
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
pub(super) fn served(told: &Metadata) -> Option<SocketAddr> {
    text(value(told, NAMESPACE, SERVED)?)?.trim().parse().ok()
}

/// Returns the gateway's reason for a response by the attributes of one of its filters; `None` if they
/// have none.
///
/// # Errors
/// If they are malformed.
pub(super) fn details(of_filter: &[u8]) -> Result<Option<String>, NotPlain> {
    let of_filter = Struct::decode(of_filter).map_err(|_| NotPlain)?;
    let found = of_filter.fields.get(DETAILS).and_then(text);
    Ok(found.map(str::to_owned))
}

/// Writes the `Struct` that names the endpoints for a request.
pub(super) fn write_destination(message: &mut PickerMessage, endpoints: &str) {
    message.within(ENTRIES, |entry| {
        entry.bytes(1, NAMESPACE.as_bytes());
        entry.within(2, |value| {
            value.within(STRUCT, |inner| {
                inner.within(ENTRIES, |entry| {
                    entry.bytes(1, DESTINATION.as_str().as_bytes());
                    entry.within(2, |value| value.bytes(TEXT, endpoints.as_bytes()));
                });
            });
        });
    });
}

fn value<'a>(told: &'a Metadata, namespace: &str, key: &str) -> Option<&'a Value> {
    told.filter_metadata.get(namespace)?.fields.get(key)
}

fn text(value: &Value) -> Option<&str> {
    match &value.kind {
        Some(Kind::StringValue(text)) => Some(text),
        _ => None,
    }
}
