//! Filters headers on their way to the engine and back to the client. `expose.rs` adds Quorate's
//! own headers.
//!
//! Hop-by-hop fields (RFC 9110, section 7.6.1) and those that `connection` names are removed in
//! both directions.

use bytes::Bytes;
use http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, EXPECT, HOST,
    PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE, VIA,
};
use http::{HeaderMap, HeaderName, HeaderValue, Version};

use crate::engines::backends::EngineHeaders;
use crate::proxy::settings::reserved_fields::{HeaderRules, is_engines_own};
use crate::traces::TraceHeaders;
use crate::users::api_keys::is_of_cluster;

/// Value of the `connection` header that marks a response as the last of its connection.
pub(in crate::proxy) const CLOSE: HeaderValue = HeaderValue::from_static("close");
/// Value of the `connection` header of a response that names another protocol and is the last of
/// its connection.
pub(in crate::proxy) const UPGRADE_AND_CLOSE: HeaderValue =
    HeaderValue::from_static("upgrade, close");
/// Header with the request id, used by clients, Quorate and engines.
pub(in crate::proxy) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// API key header of some clients.
pub(super) const API_KEY: HeaderName = HeaderName::from_static("x-api-key");
/// API key header of clients of Azure's service.
pub(super) const AZURE_KEY: HeaderName = HeaderName::from_static("api-key");
/// Header with the data-parallel rank that computes a request; vLLM and SGLang read it.
pub(super) const RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");
pub(in crate::proxy) const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
/// Header with the id of the last event that a client has received (WHATWG HTML, section 9.2.4).
pub(in crate::proxy) const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
/// Header with which a client asks for event ids, and a response shows that it has them.
pub(in crate::proxy) const RESUMABLE: HeaderName = HeaderName::from_static("x-quorate-resumable");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
/// Header with a request's priority among waiting requests.
pub(in crate::proxy) const PRIORITY: HeaderName = HeaderName::from_static("x-quorate-priority");
/// Header with a request's objective in the Gateway API Inference Extension.
pub(super) const OBJECTIVE: HeaderName = HeaderName::from_static("x-gateway-inference-objective");

/// Prefix of headers that only Quorate sets. Headers of an engine that have it are not relayed.
const OWN_PREFIX: &str = "x-quorate-";

/// Request headers that are not forwarded: engines receive decoded bodies and respond uncompressed.
const NOT_FORWARDED: [HeaderName; 6] = [
    LAST_EVENT_ID,
    HOST,
    CONTENT_LENGTH,
    CONTENT_ENCODING,
    EXPECT,
    ACCEPT_ENCODING,
];

/// Maximum length of a request id accepted from a client, in bytes.
pub(super) const REQUEST_ID_BYTES_MAX: usize = 128;
/// Maximum number of header fields added to a request to an engine.
const ADDED_MAX: usize = 7;

pub(in crate::proxy) fn is_hop_by_hop(name: &HeaderName) -> bool {
    [
        &CONNECTION,
        &KEEP_ALIVE,
        &PROXY_CONNECTION,
        &PROXY_AUTHENTICATE,
        &PROXY_AUTHORIZATION,
        &TE,
        &TRAILER,
        &TRANSFER_ENCODING,
        &UPGRADE,
    ]
    .contains(&name)
}

/// Whether a `connection` field of `headers` names `name`.
fn is_named(headers: &HeaderMap, name: &HeaderName) -> bool {
    headers.get_all(CONNECTION).iter().any(|value| {
        let tokens = value.as_bytes().split(|byte| *byte == b',');
        tokens
            .map(<[u8]>::trim_ascii)
            .any(|token| name.as_str().as_bytes().eq_ignore_ascii_case(token))
    })
}

/// Properties of a request's hop that headers to the engine depend on.
#[derive(Debug, Clone, Copy)]
pub(in crate::proxy) struct Hop<'a> {
    /// The client's address.
    pub(in crate::proxy) peer: &'a HeaderValue,
    /// HTTP version that the client used.
    pub(in crate::proxy) version: Version,
    /// Request id.
    pub(in crate::proxy) request_id: &'a HeaderValue,
    /// Whether to forward the client's credentials if the engine has no key of its own.
    pub(in crate::proxy) forward_credentials: bool,
    /// Credentials for the engine that replace the client's; `None` if it has none of its own.
    pub(in crate::proxy) engine_key: Option<&'a EngineHeaders>,
    /// Rules for headers that are commands to engines.
    pub(in crate::proxy) strip: &'a HeaderRules,
    /// Rank that the request was dispatched to; `None` if the engine has only one.
    pub(in crate::proxy) rank: Option<u16>,
    /// Trace headers for the engine; `None` to forward the client's.
    pub(in crate::proxy) trace: Option<&'a TraceHeaders>,
}

/// Whether the value contains a key of the cluster, which no engine may see.
fn has_cluster_key(value: &HeaderValue) -> bool {
    // HTTP/2 keeps white space at the ends.
    let words = value.as_bytes().trim_ascii();
    let last = words.rsplit(u8::is_ascii_whitespace).next();
    last.is_some_and(is_of_cluster)
}

fn is_credential(name: &HeaderName) -> bool {
    [&AUTHORIZATION, &API_KEY, &AZURE_KEY].contains(&name)
}

/// Whether the header is a key of the cluster, which no engine may see.
pub(in crate::proxy) fn carries_cluster_key(name: &HeaderName, value: &HeaderValue) -> bool {
    is_credential(name) && has_cluster_key(value)
}

/// Returns the headers for the request to the engine. The sender adds the body's length.
pub(in crate::proxy) fn toward_engine(
    client: &HeaderMap,
    host: &HeaderValue,
    hop: &Hop<'_>,
) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(client.len() + ADDED_MAX);
    let names_fields = client.contains_key(CONNECTION);
    let forward_credentials = hop.forward_credentials && hop.engine_key.is_none();
    for (name, value) in client {
        let is_dropped = is_hop_by_hop(name)
            || NOT_FORWARDED.contains(name)
            || (is_credential(name) && !forward_credentials)
            || carries_cluster_key(name, value)
            || hop.strip.is_stripped(name)
            || (names_fields && is_named(client, name));
        if !is_dropped {
            headers.append(name.clone(), value.clone());
        }
    }
    if let Some(key) = hop.engine_key {
        key.put_into(&mut headers);
    }
    if let Some(rank) = hop.rank {
        headers.insert(RANK, HeaderValue::from(rank));
    }
    if let Some(trace) = hop.trace {
        trace.put_into(&mut headers);
    }
    headers.insert(HOST, host.clone());
    headers.insert(REQUEST_ID, hop.request_id.clone());
    headers.append(VIA, via(hop.version));
    // Several fields with one name form one list (RFC 9110, section 5.3).
    headers.append(FORWARDED_FOR, hop.peer.clone());
    headers
}

fn via(version: Version) -> HeaderValue {
    HeaderValue::from_static(match version {
        Version::HTTP_2 => "2 quorate",
        Version::HTTP_10 => "1.0 quorate",
        _ => "1.1 quorate",
    })
}

fn is_quorates_own(name: &HeaderName) -> bool {
    name.as_str().starts_with(OWN_PREFIX)
}

/// Removes the headers of an engine's response that concern its connection or itself, and those
/// that only Quorate sets.
pub(in crate::proxy) fn clean_answer(headers: &mut HeaderMap) {
    if headers.contains_key(TRANSFER_ENCODING) {
        // RFC 9112, 6.3: next to transfer-encoding, it has no meaning.
        headers.remove(CONTENT_LENGTH);
    }
    let connection = headers.get(CONNECTION).map(HeaderValue::as_bytes);
    let names_fields = !matches!(connection, None | Some(b"close" | b"keep-alive"));
    let is_dropped = |name: &&HeaderName| {
        is_hop_by_hop(name)
            || is_engines_own(name)
            || is_quorates_own(name)
            || (names_fields && is_named(headers, name))
    };
    let dropped: Vec<HeaderName> = headers.keys().filter(is_dropped).cloned().collect();
    for name in dropped {
        headers.remove(name);
    }
}

/// Returns the client's request id if it is safe to forward and log.
pub(in crate::proxy) fn client_request_id(client: &HeaderMap) -> Option<&HeaderValue> {
    let is_fit = |id: &&HeaderValue| {
        (1..=REQUEST_ID_BYTES_MAX).contains(&id.len())
            && id.as_bytes().iter().all(u8::is_ascii_graphic)
    };
    client.get(&REQUEST_ID).filter(is_fit)
}

/// Returns the client's request id, or a new one of 32 hex digits.
pub(in crate::proxy) fn request_id(client: &HeaderMap) -> HeaderValue {
    if let Some(id) = client_request_id(client) {
        return id.clone();
    }
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut id = [0; 32];
    for (pair, byte) in id
        .chunks_exact_mut(2)
        .zip(rand::random::<u128>().to_be_bytes())
    {
        pair[0] = DIGITS[usize::from(byte >> 4)];
        pair[1] = DIGITS[usize::from(byte & 15)];
    }
    HeaderValue::from_maybe_shared(Bytes::copy_from_slice(&id))
        .expect("hex digits are visible ascii")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(
                HeaderName::from_static(name),
                HeaderValue::from_static(value),
            );
        }
        headers
    }

    fn forwarded(client: &HeaderMap, forward_credentials: bool) -> HeaderMap {
        let hop = Hop {
            trace: None,
            rank: None,
            peer: &HeaderValue::from_static("10.0.0.9"),
            version: Version::HTTP_11,
            request_id: &HeaderValue::from_static("r1"),
            forward_credentials,
            engine_key: None,
            strip: &HeaderRules::default(),
        };
        toward_engine(client, &HeaderValue::from_static("engine:8000"), &hop)
    }

    #[test]
    fn cluster_keys_are_never_forwarded_to_engines() {
        let secret = crate::users::api_keys::NewSecret::draw();
        let secret = secret.text();
        for (name, value) in [
            ("authorization", format!("Bearer {secret}")),
            ("authorization", format!("bearer  {secret} \t ")),
            ("x-api-key", format!("{secret} ")),
            ("api-key", format!(" {secret}")),
        ] {
            let mut client = headers(&[("x-other", "1")]);
            client.insert(name, HeaderValue::try_from(value).unwrap());
            let sent = forwarded(&client, true);
            assert!(sent.contains_key("x-other") && !sent.contains_key(name));
        }
        let client = headers(&[("authorization", "Bearer sk-1 ")]);
        assert!(forwarded(&client, true).contains_key("authorization"));
    }

    #[test]
    fn priority_headers_are_forwarded_only_if_configured() {
        let client = headers(&[("x-vllm-priority", "-9"), ("x-other", "1")]);
        assert!(!forwarded(&client, true).contains_key("x-vllm-priority"));
        let hop = Hop {
            trace: None,
            rank: None,
            peer: &HeaderValue::from_static("10.0.0.9"),
            version: Version::HTTP_11,
            request_id: &HeaderValue::from_static("r1"),
            forward_credentials: true,
            engine_key: None,
            strip: &HeaderRules::new(&[]).unwrap(),
        };
        let sent = toward_engine(&client, &HeaderValue::from_static("engine:8000"), &hop);
        assert_eq!(sent["x-vllm-priority"], "-9");
    }

    #[test]
    fn clients_cannot_choose_the_rank() {
        let client = headers(&[("x-data-parallel-rank", "7"), ("x-other", "1")]);
        assert!(!forwarded(&client, true).contains_key(RANK));
        for (strip, rank, sent) in [
            (HeaderRules::default(), Some(3), Some("3")),
            (HeaderRules::new(&[]).unwrap(), Some(3), Some("3")),
            (HeaderRules::new(&[]).unwrap(), None, Some("7")),
        ] {
            let hop = Hop {
                trace: None,
                rank,
                peer: &HeaderValue::from_static("10.0.0.9"),
                version: Version::HTTP_11,
                request_id: &HeaderValue::from_static("r1"),
                forward_credentials: true,
                engine_key: None,
                strip: &strip,
            };
            let headers = toward_engine(&client, &HeaderValue::from_static("engine:8000"), &hop);
            let ranks = headers.get_all(RANK).iter();
            let ranks: Vec<_> = ranks.map(|it| it.to_str().ok()).collect();
            assert_eq!(ranks, [sent]);
        }
    }

    #[test]
    fn client_hop_by_hop_headers_are_not_forwarded() {
        let client = headers(&[
            ("host", "router"),
            ("connection", "keep-alive, X-Secret ,te"),
            ("x-secret", "1"),
            ("keep-alive", "timeout=5"),
            ("te", "trailers"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("proxy-authorization", "Basic x"),
            ("content-length", "3"),
            ("expect", "100-continue"),
            ("accept-encoding", "gzip"),
            ("content-type", "application/json"),
            ("traceparent", "00-1-2-03"),
            ("x-forwarded-for", "1.2.3.4"),
            ("x-two", "a"),
            ("x-two", "b"),
            ("authorization", "Bearer k"),
        ]);
        let sent = forwarded(&client, true);
        let mut names: Vec<_> = sent
            .iter()
            .map(|(n, v)| format!("{n}: {}", v.to_str().unwrap()))
            .collect();
        names.sort();
        assert_eq!(
            names,
            [
                "authorization: Bearer k",
                "content-type: application/json",
                "host: engine:8000",
                "traceparent: 00-1-2-03",
                "via: 1.1 quorate",
                "x-forwarded-for: 1.2.3.4",
                "x-forwarded-for: 10.0.0.9",
                "x-request-id: r1",
                "x-two: a",
                "x-two: b",
            ]
        );
        assert!(!forwarded(&client, false).contains_key(AUTHORIZATION));
    }

    #[test]
    fn engine_hop_by_hop_headers_are_not_forwarded() {
        let mut answer = headers(&[
            ("connection", "close, x-inner"),
            ("x-inner", "1"),
            ("transfer-encoding", "chunked"),
            ("content-type", "text/event-stream"),
            ("location", "http://10.0.0.7:8000/"),
            ("server", "uvicorn"),
            ("set-cookie", "a=b"),
            ("set-cookie", "c=d"),
            ("x-accel-redirect", "/secret"),
            ("x-quorate-backend", "inner"),
        ]);
        clean_answer(&mut answer);
        assert_eq!(answer, headers(&[("content-type", "text/event-stream")]));
    }

    #[test]
    fn only_harmless_request_ids_are_adopted() {
        assert_eq!(request_id(&headers(&[("x-request-id", "abc-1")])), "abc-1");
        for bad in ["", "two words", "tab\tbed"] {
            assert_eq!(request_id(&headers(&[("x-request-id", bad)])).len(), 32);
        }
        let long: &'static str = "x".repeat(REQUEST_ID_BYTES_MAX + 1).leak();
        assert_eq!(request_id(&headers(&[("x-request-id", long)])).len(), 32);
        assert_ne!(request_id(&HeaderMap::new()), request_id(&HeaderMap::new()));
    }
}
