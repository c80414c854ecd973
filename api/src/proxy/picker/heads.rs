//! Heads of requests and responses in gateway messages, and mutations of them.

use http::header::{CONTENT_LENGTH, EXPECT, HOST, VIA};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Request, StatusCode, Uri, Version};

use super::DESTINATION;
use super::ext_proc::header_value_option::HeaderAppendAction;
use super::gateway_message::ToldHead;
use super::wire::{Field, Fields, NotPlain, PickerMessage};
use crate::error::ProxyError;
use crate::proxy::request::headers::{FORWARDED_FOR, carries_cluster_key, is_hop_by_hop};
use crate::proxy::request::request_body::bad_request;
use crate::proxy::settings::ProxyLimits;

/// Head of a request or response in a message.
struct GatewayHead<'a> {
    /// Pseudo-headers, whose names begin with a colon.
    pseudo: Vec<(&'a [u8], &'a [u8])>,
    headers: HeaderMap,
}

/// Returns the name and value of each field of a head. The value is in `raw_value`, or in `value` of
/// older gateways, which send text. A field that cannot be read has no name.
fn fields(told: &ToldHead) -> impl Iterator<Item = (&[u8], &[u8])> {
    Fields::of(&told.fields).filter_map(|field| match field {
        Ok((1, Field::Bytes(field))) => Some(named(field).unwrap_or_default()),
        Ok((1, _)) | Err(NotPlain) => Some(Default::default()),
        Ok(_) => None,
    })
}

fn named(field: &[u8]) -> Result<(&[u8], &[u8]), NotPlain> {
    let (mut name, mut text, mut raw) = (&[][..], &[][..], &[][..]);
    for part in Fields::of(field) {
        match part? {
            (1, Field::Bytes(it)) => name = it,
            (2, Field::Bytes(it)) if std::str::from_utf8(it).is_ok() => text = it,
            (3, Field::Bytes(it)) => raw = it,
            (1..=3, _) => return Err(NotPlain),
            _ => {}
        }
    }
    Ok((name, if raw.is_empty() { text } else { raw }))
}

impl<'a> GatewayHead<'a> {
    fn of(told: &'a ToldHead, limits: &ProxyLimits) -> Result<Self, ProxyError> {
        let (mut pseudo, mut headers) = (Vec::with_capacity(4), HeaderMap::with_capacity(12));
        let (mut count, mut bytes) = (0, 0);
        for (name, value) in fields(told) {
            count += 1;
            bytes += name.len() + value.len();
            if count > limits.headers_max || bytes > limits.head_bytes_max {
                return Err(bad_request("the request's head is too long"));
            }
            if name.starts_with(b":") {
                pseudo.push((name, value));
                continue;
            }
            let name = HeaderName::from_bytes(name);
            let value = HeaderValue::from_maybe_shared(told.fields.slice_ref(value));
            let (Ok(name), Ok(value)) = (name, value) else {
                return Err(bad_request("a header is malformed"));
            };
            headers.append(name, value);
        }
        Ok(Self { pseudo, headers })
    }

    fn pseudo(&self, name: &str) -> Option<&'a str> {
        let mut found = self.pseudo.iter();
        let (_, value) = found.find(|(known, _)| *known == name.as_bytes())?;
        std::str::from_utf8(value).ok()
    }
}

/// Parses the head of a request as a server would.
pub(super) fn request(told: &ToldHead, limits: &ProxyLimits) -> Result<Parts, ProxyError> {
    let head = GatewayHead::of(told, limits)?;
    let (Some(method), Some(path)) = (head.pseudo(":method"), head.pseudo(":path")) else {
        return Err(bad_request("the request has no method or no path"));
    };
    let request = Request::builder().version(Version::HTTP_2);
    let request = request.method(method).uri(path).body(());
    let request = request.map_err(|_| bad_request("the request's method or path is malformed"))?;
    let (mut parts, ()) = request.into_parts();
    parts.headers = head.headers;
    Ok(parts)
}

/// Parses the status and headers of a response; `None` if they are not those of a response.
pub(super) fn answer(told: &ToldHead, limits: &ProxyLimits) -> Option<(StatusCode, HeaderMap)> {
    let head = GatewayHead::of(told, limits).ok()?;
    let status: StatusCode = head.pseudo(":status")?.parse().ok()?;
    (!status.is_informational()).then_some((status, head.headers))
}

/// Returns the status of a response, whatever its other fields; `None` if it has none.
pub(super) fn status(told: &ToldHead) -> Option<StatusCode> {
    let (_, value) = fields(told).find(|(name, _)| *name == b":status")?;
    StatusCode::from_bytes(value).ok()
}

/// A change of a head: what a gateway removes from it and sets in it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct HeadChange {
    removed: Vec<HeaderName>,
    /// Each field, and whether it replaces those of its name.
    set: Vec<(HeaderName, HeaderValue, bool)>,
    path: Option<String>,
}

impl HeadChange {
    /// Returns the change that turns the gateway's headers into those for an engine or a client. It
    /// omits headers that are the gateway's own business.
    pub(super) fn between(from: &HeaderMap, to: &HeaderMap) -> Self {
        let is_ours = |(name, _): &(&HeaderName, &HeaderValue)| !is_gateways(name);
        let mut was = from.iter().filter(is_ours).peekable();
        let mut is = to.iter().filter(is_ours).peekable();
        let mut change = Self::default();
        // Most fields keep their place, and need no look-up by name.
        loop {
            match (was.peek(), is.peek()) {
                (None, None) => return change,
                (Some(before), Some(after)) if before == after => drop((was.next(), is.next())),
                (Some((name, _)), _) if !to.contains_key(*name) => {
                    if change.removed.last() != Some(*name) {
                        change.removed.push((*name).clone());
                    }
                    was.next();
                }
                (_, Some((name, value))) if !from.contains_key(*name) => {
                    let last = change.set.last();
                    let is_first = last.is_none_or(|(last, ..)| last != *name);
                    change
                        .set
                        .push(((*name).clone(), (*value).clone(), is_first));
                    is.next();
                }
                _ => return Self::by_name(from, to),
            }
        }
    }

    /// Returns the same change for fields whose places or values differ.
    fn by_name(from: &HeaderMap, to: &HeaderMap) -> Self {
        let mut change = Self::default();
        for name in to.keys().filter(|name| !is_gateways(name)) {
            if from.get_all(name).iter().eq(to.get_all(name)) {
                continue;
            }
            for (nth, value) in to.get_all(name).iter().enumerate() {
                change.set.push((name.clone(), value.clone(), nth == 0));
            }
        }
        let removed = { from.keys() }.filter(|name| !is_gateways(name) && !to.contains_key(*name));
        change.removed = removed.cloned().collect();
        change
    }

    /// Sets a header that replaces all headers of its name.
    pub(super) fn set(&mut self, name: HeaderName, value: HeaderValue) {
        self.set.push((name, value, true));
    }

    /// Replaces the path of a request.
    pub(super) fn set_path(&mut self, path: &Uri) {
        self.path = Some(path.to_string());
    }

    /// Adjusts a request's declared body length to `bytes`. Without a declared length, adds none.
    pub(super) fn set_length(&mut self, from: &HeaderMap, bytes: u64) {
        self.removed.retain(|name| *name != CONTENT_LENGTH);
        let told = from.get(CONTENT_LENGTH);
        if told.is_some_and(|told| *told != HeaderValue::from(bytes)) {
            self.set(CONTENT_LENGTH, HeaderValue::from(bytes));
        }
    }

    /// Returns the change that removes what no engine may get from a client, should the gateway go
    /// on without this replica: a destination of the client's own, and keys of the cluster. Returns
    /// `None` if there is none.
    pub(super) fn withheld(headers: &HeaderMap) -> Option<Self> {
        let is_withheld = |(name, value): &(&HeaderName, &HeaderValue)| {
            **name == DESTINATION || carries_cluster_key(name, value)
        };
        let names = headers.iter().filter(is_withheld);
        let mut removed: Vec<_> = names.map(|(name, _)| name.clone()).collect();
        removed.dedup();
        (!removed.is_empty()).then(|| Self {
            removed,
            ..Self::default()
        })
    }

    /// Writes the `HeaderMutation`.
    pub(super) fn write(&self, mutation: &mut PickerMessage) {
        let path = self.path.iter().map(|it| (":path", it.as_bytes(), true));
        let set = self.set.iter();
        let set = set.map(|(name, value, replaces)| (name.as_str(), value.as_bytes(), *replaces));
        for (name, value, replaces) in set.chain(path) {
            let action = match replaces {
                true => HeaderAppendAction::OverwriteIfExistsOrAdd,
                false => HeaderAppendAction::AppendIfExistsOrAdd,
            };
            mutation.within(1, |option| {
                option.within(1, |header| {
                    header.bytes(1, name.as_bytes());
                    header.bytes(3, value);
                });
                option.number(3, action as u64);
            });
        }
        for name in &self.removed {
            mutation.bytes(2, name.as_str().as_bytes());
        }
    }
}

/// Whether a header concerns a connection of the gateway, which sets it itself.
pub(super) fn is_gateways(name: &HeaderName) -> bool {
    is_hop_by_hop(name) || [HOST, EXPECT, VIA, FORWARDED_FOR].contains(name)
}
