//! Metadata that gateways and pickers exchange in addition to headers.

use std::net::SocketAddr;

use super::wire::{Field, Fields, PickerMessage};
use super::{DESTINATION, DETAILS, NAMESPACE, SERVED, SUBSET, SUBSET_NAMESPACE};
use crate::routing::OfferedEndpoints;

/// Maximum number of endpoints in a hint.
pub(super) const HINTED_MAX: usize = 4096;

/// Number of the map in `Metadata` and in `Struct`, and of the list in `ListValue`.
const ENTRIES: u64 = 1;
/// Numbers of the kinds of a `Value`.
const TEXT: u64 = 3;
const STRUCT: u64 = 5;
const LIST: u64 = 6;

/// Returns the endpoints that a gateway offers for a request by its `Metadata`: all, unless it names
/// some. Values other than an address with a port are ignored.
pub(super) fn offered(told: &[u8]) -> OfferedEndpoints {
    let Some(hint) = value(told, SUBSET_NAMESPACE, SUBSET) else {
        return OfferedEndpoints::All;
    };
    let texts: Vec<&str> = if let Some(list) = Fields::of(hint).bytes(LIST) {
        let values = Fields::of(list).filter_map(|field| match field {
            Ok((ENTRIES, Field::Bytes(value))) => text(value),
            _ => None,
        });
        values.collect()
    } else {
        let listed = text(hint).into_iter();
        listed.flat_map(|it| it.split(',').map(str::trim)).collect()
    };
    let endpoints = texts.iter().take(HINTED_MAX);
    OfferedEndpoints::those(endpoints.filter_map(|it| it.parse().ok()).collect())
}

/// Returns the endpoint that responded by a gateway's `Metadata`; `None` if it does not report it.
pub(super) fn served(told: &[u8]) -> Option<SocketAddr> {
    let served = value(told, NAMESPACE, SERVED)?;
    text(served)?.trim().parse().ok()
}

/// Returns the gateway's reason for a response by an entry of its attributes; `None` if it sends
/// none. The attributes are in a struct under the name of the gateway's filter, which its operator
/// may choose.
pub(super) fn details(attributes: &[u8]) -> Option<&str> {
    let of_filter = Fields::of(attributes).bytes(2)?;
    text(Fields::of(of_filter).entry(ENTRIES, DETAILS)?)
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

fn value<'a>(told: &'a [u8], namespace: &str, key: &str) -> Option<&'a [u8]> {
    let found = Fields::of(told).entry(ENTRIES, namespace)?;
    Fields::of(found).entry(ENTRIES, key)
}

fn text(value: &[u8]) -> Option<&str> {
    std::str::from_utf8(Fields::of(value).bytes(TEXT)?).ok()
}
