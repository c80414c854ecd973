//! Heads of requests and responses in gateway messages, and mutations of them.

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, EXPECT, HOST, VIA};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Request, StatusCode, Uri, Version};

use super::DESTINATION;
use super::ext_proc::header_value_option::HeaderAppendAction;
use super::ext_proc::{self, HeaderMutation, HeaderValueOption, HttpHeaders};
use crate::error::ProxyError;
use crate::proxy::request::headers::{FORWARDED_FOR, carries_cluster_key, is_hop_by_hop};
use crate::proxy::request::request_body::bad_request;
use crate::proxy::settings::ProxyLimits;

/// Head of a request or response in a message.
struct GatewayHead<'a> {
    /// Pseudo-headers, whose names begin with a colon.
    pseudo: Vec<(&'a str, &'a [u8])>,
    headers: HeaderMap,
}

impl<'a> GatewayHead<'a> {
    fn of(told: &'a HttpHeaders, limits: &ProxyLimits) -> Result<Self, ProxyError> {
        let fields = told.headers.iter().flat_map(|map| &map.headers);
        let (mut pseudo, mut headers) = (Vec::new(), HeaderMap::new());
        let (mut count, mut bytes) = (0, 0);
        for field in fields {
            let value = value(field);
            count += 1;
            bytes += field.key.len() + value.len();
            if count > limits.headers_max || bytes > limits.head_bytes_max {
                return Err(bad_request("the request's head is too long"));
            }
            if field.key.starts_with(':') {
                pseudo.push((&*field.key, value));
                continue;
            }
            let name = HeaderName::from_bytes(field.key.as_bytes());
            let value = HeaderValue::from_bytes(value);
            let (Ok(name), Ok(value)) = (name, value) else {
                return Err(bad_request("a header is malformed"));
            };
            headers.append(name, value);
        }
        Ok(Self { pseudo, headers })
    }

    fn pseudo(&self, name: &str) -> Option<&'a str> {
        let found = self.pseudo.iter().find(|(known, _)| *known == name)?;
        std::str::from_utf8(found.1).ok()
    }
}

/// Returns a header's value: `raw_value`, or `value` of older gateways, which send text.
fn value(field: &ext_proc::HeaderValue) -> &[u8] {
    match field.raw_value.is_empty() {
        true => field.value.as_bytes(),
        false => &field.raw_value,
    }
}

/// Parses the head of a request as a server would.
pub(super) fn request(told: &HttpHeaders, limits: &ProxyLimits) -> Result<Parts, ProxyError> {
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
pub(super) fn answer(told: &HttpHeaders, limits: &ProxyLimits) -> Option<(StatusCode, HeaderMap)> {
    let head = GatewayHead::of(told, limits).ok()?;
    let status: StatusCode = head.pseudo(":status")?.parse().ok()?;
    (!status.is_informational()).then_some((status, head.headers))
}

/// Returns the status of a response, whatever its other fields; `None` if it has none.
pub(super) fn status(told: &HttpHeaders) -> Option<StatusCode> {
    let mut fields = told.headers.iter().flat_map(|map| &map.headers);
    let field = fields.find(|field| field.key == ":status")?;
    StatusCode::from_bytes(value(field)).ok()
}

/// Returns the mutation that turns the gateway's headers into those for an engine or a client. It
/// omits headers that are the gateway's own business.
pub(super) fn mutation(from: &HeaderMap, to: &HeaderMap) -> HeaderMutation {
    let removed = from
        .keys()
        .filter(|name| !is_gateways(name) && !to.contains_key(*name));
    let mut mutation = HeaderMutation {
        remove_headers: removed.map(|name| name.as_str().to_owned()).collect(),
        set_headers: Vec::new(),
    };
    for name in to.keys().filter(|name| !is_gateways(name)) {
        if from.get_all(name).iter().eq(to.get_all(name)) {
            continue;
        }
        for (nth, value) in to.get_all(name).iter().enumerate() {
            let action = match nth {
                0 => HeaderAppendAction::OverwriteIfExistsOrAdd,
                _ => HeaderAppendAction::AppendIfExistsOrAdd,
            };
            mutation.set_headers.push(option(name, value, action));
        }
    }
    mutation
}

/// Whether a header concerns a connection of the gateway, which sets it itself.
pub(super) fn is_gateways(name: &HeaderName) -> bool {
    is_hop_by_hop(name) || [HOST, EXPECT, VIA, FORWARDED_FOR].contains(name)
}

/// Adds a header that replaces all headers of its name.
pub(super) fn set(mutation: &mut HeaderMutation, name: &HeaderName, value: &HeaderValue) {
    let replaces = HeaderAppendAction::OverwriteIfExistsOrAdd;
    mutation.set_headers.push(option(name, value, replaces));
}

/// Returns the mutation that removes what no engine may get from a client, should the gateway go on
/// without this replica: a destination of the client's own, and keys of the cluster. Returns `None`
/// if there is none.
pub(super) fn withheld(headers: &HeaderMap) -> Option<HeaderMutation> {
    let is_withheld = |(name, value): &(&HeaderName, &HeaderValue)| {
        *name == DESTINATION || carries_cluster_key(name, value)
    };
    let mut names: Vec<_> = { headers.iter() }
        .filter(is_withheld)
        .map(|(name, _)| name.as_str().to_owned())
        .collect();
    names.dedup();
    (!names.is_empty()).then_some(HeaderMutation {
        remove_headers: names,
        set_headers: Vec::new(),
    })
}

/// Replaces the path of a request.
pub(super) fn set_path(mutation: &mut HeaderMutation, path: &Uri) {
    let replaces = HeaderAppendAction::OverwriteIfExistsOrAdd;
    let path = path.to_string();
    mutation
        .set_headers
        .push(field(":path", path.as_bytes(), replaces));
}

/// Adjusts a request's declared body length to `bytes`. Without a declared length, adds none.
pub(super) fn set_length(mutation: &mut HeaderMutation, from: &HeaderMap, bytes: u64) {
    mutation
        .remove_headers
        .retain(|name| name != CONTENT_LENGTH.as_str());
    let told = from.get(CONTENT_LENGTH);
    if told.is_some_and(|told| *told != HeaderValue::from(bytes)) {
        set(mutation, &CONTENT_LENGTH, &HeaderValue::from(bytes));
    }
}

fn option(name: &HeaderName, value: &HeaderValue, action: HeaderAppendAction) -> HeaderValueOption {
    field(name.as_str(), value.as_bytes(), action)
}

fn field(name: &str, value: &[u8], action: HeaderAppendAction) -> HeaderValueOption {
    HeaderValueOption {
        header: Some(ext_proc::HeaderValue {
            key: name.to_owned(),
            value: String::new(),
            raw_value: Bytes::copy_from_slice(value),
        }),
        append_action: action.into(),
    }
}
