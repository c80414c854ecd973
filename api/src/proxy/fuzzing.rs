//! Fuzz targets for client requests and engine responses. See [`crate::fuzzing`].

use bytes::Bytes;
use futures_util::FutureExt;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Version};
use http_body_util::BodyExt;
use serde::de::IgnoredAny;
use state::command::NAME_BYTES_MAX;
use state::ids::ReplicaId;

use super::request::headers::{Hop, clean_answer, request_id, toward_engine};
use super::request::identify::{Client, IdentifiedUser, RequestOrigin, check_key, identify};
use super::request::request_body::priority;
use super::request::routes::route;
use super::request::usage_options::{WantedUsage, splice};
use super::response::answer_usage::inspect;
use super::response::json_answer::Document;
use super::response::json_scan::{is_whole, members};
use super::response::sse::SseStream;
use super::settings::ProxySettings;
use super::settings::UsageRequest;
use super::settings::keys::ApiKeys;
use crate::error::ProxyError;
use crate::fuzzing::path_of;
use crate::prompt::{ParsedBody, Prompt, parse, parse_routed};
use crate::routing::Usage;

/// Parses a request: one byte for the path, then the body. The spliced body for an engine must
/// parse the same, apart from the requested usage reports.
pub fn prompt(bytes: &[u8]) {
    let Some((path, body)) = path_of(bytes) else {
        return;
    };
    let body = Bytes::copy_from_slice(body);
    drop(parse_routed(path, &body));
    let Ok(parsed) = parse(path, &body) else {
        return;
    };
    let read = match &parsed.prompt {
        Prompt::Text(text) => text.len(),
        Prompt::Tokens(tokens) => tokens.len(),
    };
    // Allows for the frames around messages and the escapes of text that is written as JSON.
    assert!(read <= 64 + 16 * body.len(), "{read} of {}", body.len());
    for mode in [
        UsageRequest::Continuous,
        UsageRequest::Final,
        UsageRequest::Off,
    ] {
        let (segments, wanted) = splice(mode, path, &parsed, &body);
        let length = segments.len();
        let sent = segments.collect().now_or_never();
        let sent = sent
            .expect("segments are at hand")
            .unwrap_or_else(|never| match never {});
        let sent = sent.to_bytes();
        assert_eq!(sent.len() as u64, length);
        if wanted == WantedUsage::ALL {
            assert_eq!(sent, body, "nothing is asked for, so nothing is changed");
            continue;
        }
        let again = parse(path, &sent).unwrap_or_else(|bad| panic!("{bad}: {sent:?}"));
        assert_eq!(again.include_usage, Some(true), "{sent:?}");
        assert_eq!(comparable(again), comparable(parsed.clone()), "{sent:?}");
    }
}

/// Removes the parsed fields that splicing changes.
fn comparable(parsed: ParsedBody) -> ParsedBody {
    ParsedBody {
        include_usage: None,
        continuous_usage: None,
        stream_options_span: None,
        stream_options_null_span: None,
        insert_at: 0,
        ..parsed
    }
}

/// Relays an engine's stream: 1 byte for the wanted usage, 1 byte for the frame length, then the
/// stream. The frame boundaries must not matter. With all usage wanted, every byte is relayed.
pub fn answer_events(bytes: &[u8]) {
    let Some(([flags, frame_bytes], stream)) = bytes.split_first_chunk() else {
        return;
    };
    let wanted = WantedUsage {
        final_chunk: flags & 1 != 0,
        running: flags & 2 != 0,
    };
    let cut = relayed(wanted, stream, usize::from(*frame_bytes).max(1));
    let whole = relayed(wanted, stream, stream.len().max(1));
    assert_eq!(cut, whole);
    assert!(cut.bytes.len() <= stream.len());
    if wanted == WantedUsage::ALL {
        assert_eq!(cut.bytes, stream);
    }
}

#[derive(Debug, Default, PartialEq)]
struct Relayed {
    bytes: Vec<u8>,
    text: String,
    usage: Option<Usage>,
    other_bytes: usize,
    is_done: bool,
}

fn relayed(wanted: WantedUsage, stream: &[u8], frame_bytes: usize) -> Relayed {
    let mut events = SseStream::new(wanted);
    let mut relayed = Relayed::default();
    let Relayed {
        bytes,
        text,
        usage,
        other_bytes,
        ..
    } = &mut relayed;
    let mut observe = |findings: &super::response::answer_usage::AnswerDelta<'_>| {
        text.push_str(findings.text.as_deref().unwrap_or_default());
        *usage = findings.usage.or(*usage);
        *other_bytes += findings.other_bytes;
    };
    for frame in stream.chunks(frame_bytes) {
        let passed = events.push(Bytes::copy_from_slice(frame), &mut observe);
        bytes.extend_from_slice(&passed.unwrap_or_default());
    }
    let last = events.finish(&mut observe);
    bytes.extend_from_slice(&last.unwrap_or_default());
    relayed.is_done = events.is_done();
    relayed
}

/// Parses an engine's response, and the end of one whose beginning is missing. Cutting the usage
/// out of a JSON object must leave a JSON object.
pub fn answer_document(bytes: &[u8]) {
    let findings = inspect(bytes);
    let is_json = serde_json::from_slice::<IgnoredAny>(bytes).is_ok();
    if let Some(cut) = findings.usage_member.clone() {
        let without = [&bytes[..cut.start], &bytes[cut.end..]].concat();
        let is_still = serde_json::from_slice::<IgnoredAny>(&without).is_ok();
        assert!(
            is_still || !is_json,
            "{}",
            String::from_utf8_lossy(&without)
        );
    }
    assert!(members(bytes).count() <= bytes.len());
    if is_json && bytes.trim_ascii_start().starts_with(b"{") {
        assert!(is_whole(bytes));
    }
    let mut tail = Document::default();
    for frame in bytes.chunks(1 + bytes.len() / 3) {
        tail.push(Bytes::copy_from_slice(frame));
    }
    tail.read(|_| {});
}

/// Parses a head: the request line, then one line per field. No hop-by-hop field may reach the next
/// hop, and the charged user's name must fit the state.
pub fn headers(bytes: &[u8]) {
    let mut lines = bytes.split(|byte| *byte == b'\n');
    let mut request = lines.next().unwrap_or_default().split(|byte| *byte == b' ');
    let method = Method::from_bytes(request.next().unwrap_or_default()).unwrap_or_default();
    let path = String::from_utf8_lossy(request.next().unwrap_or_default());
    let mut head = HeaderMap::new();
    for line in lines.take(128) {
        let Some(colon) = line.iter().position(|byte| *byte == b':') else {
            continue;
        };
        let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
        if let (Ok(name), Ok(value)) =
            (HeaderName::from_bytes(name), HeaderValue::from_bytes(value))
        {
            head.append(name, value);
        }
    }
    let mut settings = ProxySettings::new(ReplicaId(1));
    drop(route(&settings, &method, &path));
    let parsed = ParsedBody {
        user: Some(path.into_owned()),
        ..ParsedBody::default()
    };
    names(&mut settings, &head, &parsed);
    assert!(
        priority(&head, 3, true).is_ok_and(|it| it <= 3)
            || head.contains_key(super::request::headers::PRIORITY)
    );
    crate::routing::fuzzing::session(&head);
    let id = request_id(&head);
    let strip = super::HeaderRules::default();
    let hop = Hop {
        trace: None,
        rank: None,
        peer: &HeaderValue::from_static("127.0.0.1"),
        version: Version::HTTP_11,
        request_id: &id,
        forward_credentials: false,
        engine_key: None,
        strip: &strip,
    };
    let host = HeaderValue::from_static("engine:8000");
    let onward = toward_engine(&head, &host, &hop);
    clean_answer(&mut head);
    let mut hosts = onward.get_all(http::header::HOST).iter();
    assert_eq!((hosts.next(), hosts.next()), (Some(&host), None));
    for name in [
        "connection",
        "transfer-encoding",
        "upgrade",
        "te",
        "authorization",
        "x-api-key",
    ] {
        assert!(!onward.contains_key(name), "{name}");
    }
    for name in ["connection", "transfer-encoding", "upgrade"] {
        assert!(!head.contains_key(name), "{name}");
    }
}

/// Asserts that every user identified from a head has a name within the bound.
fn names(settings: &mut ProxySettings, head: &HeaderMap, parsed: &ParsedBody) {
    let mut keys = ApiKeys::default();
    keys.add("sk-one", None);
    // No key of the cluster's form is known here.
    let of_cluster = |_: &[u8]| Err(ProxyError::BadKey);
    for api_keys in [None, Some(keys)] {
        settings.api_keys = api_keys;
        for peer in ["127.0.0.1", "192.0.2.1"] {
            let peer = HeaderValue::from_static(peer);
            let Ok(holder) = check_key(settings, head, of_cluster) else {
                continue;
            };
            let client = Client {
                holder: &holder,
                origin: RequestOrigin::Address(&peer),
                is_of_gateway: true,
                headers: head,
            };
            let user = identify(settings, || 7.into(), &client, parsed);
            let is_name =
                |user: &IdentifiedUser| (1..=NAME_BYTES_MAX).contains(&user.name.as_str().len());
            assert!(user.iter().all(is_name), "{user:?}");
        }
    }
}

/// Returns requests for every endpoint as seeds.
#[must_use]
pub fn prompt_seeds() -> Vec<Vec<u8>> {
    let mut seeds = crate::fuzzing::chat_seeds();
    let bodies: [&str; 5] = [
        r#"{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}"#,
        r#" { "stream" : 1 , "stream_options" : { "include_usage" : false, "x": [1] } , "model":"m","messages":[] }"#,
        r#"{"model":"m","stream":"yes","stream_options":null,"user":"u","cache_salt":"s","messages":[{"role":"user","content":"a\u00e9\ud83d\ude00"}]}"#,
        r#"{"model":"m","stream":true,"stream":false,"model":"n","messages":[{"role":"x","name":"n","content":[{"type":"text","text":"a","text":"b"}]}],"max_tokens":"7","max_completion_tokens":9}"#,
        r#"{"model":"m","stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true},"prompt":"p"}"#,
    ];
    for (number, body) in (0..).zip(bodies) {
        seeds.push([&[number / 4][..], body.as_bytes()].concat());
    }
    seeds
}

/// Returns streams of every endpoint as seeds.
#[must_use]
pub fn answer_events_seeds() -> Vec<Vec<u8>> {
    let streams = [
        concat!(
            ": hello\n\ndata: {\"id\":\"é\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}],",
            "\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":1}}\n\n",
            "event: x\r\ndata: {\"usage\":null,\"choices\":[{\"index\":1,\"delta\":{\"reasoning\":\"b\"}}]}\r\n\r\n",
            "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"prompt_tokens_details\":{\"cached_tokens\":4},\"completion_tokens\":2}}\n\n",
            "data: [DONE]\n\n",
        ),
        concat!(
            "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"hi\"}\n\n",
            "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"usage\":{\"input_tokens\":7,\"output_tokens\":3}}}\n\n",
        ),
        concat!(
            "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":7}}}\n\n",
            "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"x\"}}\n\n",
            "event: message_stop\ndata:{\"type\":\"message_stop\"}\rdata: 2\r\r",
        ),
    ];
    let seed =
        |(number, stream): (u8, &str)| [&[number, 3 + number * 7][..], stream.as_bytes()].concat();
    (0..4)
        .flat_map(|number| streams.map(|stream| seed((number, stream))))
        .collect()
}

/// Returns responses of every endpoint as seeds.
#[must_use]
pub fn answer_document_seeds() -> Vec<Vec<u8>> {
    let answers = [
        r#"{"id":"c","choices":[{"index":0,"message":{"role":"assistant","content":"hi","tool_calls":[{"function":{"name":"f","arguments":"{\"a\":1}"}}]},"finish_reason":"stop"},{"index":1,"text":"b"}],"usage":{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}"#,
        r#" {"usage":{"input_tokens":5,"output_tokens":2},"output":[{"content":[{"type":"output_text","text":"a\u00e9\ud83d"}]}]} "#,
        r#"{"content":[{"type":"text","text":"a"}],"usage":{"cache_read_input_tokens":3,"input_tokens":5},"usage":null}"#,
        r#"ail":"x"}],"usage":{"prompt_tokens":5,"completion_tokens":2}}"#,
    ];
    answers.map(|answer| answer.as_bytes().to_vec()).to_vec()
}

/// Returns request heads as seeds.
#[must_use]
pub fn headers_seeds() -> Vec<Vec<u8>> {
    let heads = [
        "POST /v1/chat/completions\nhost: x\nauthorization: Bearer sk-one\nx-quorate-user: ann\nconnection: keep-alive, x-drop, te\nx-drop: 1\nte: trailers\nx-quorate-priority: -4\nx-request-id: abc-1\ncookie: a=b; quorate-session=s1; c=d\n",
        "GET /v1/models/a%2Fb\nx-api-key: k\nx-quorate-session: s2\ntransfer-encoding: chunked\nupgrade: h2c\nx-vllm-priority: 1\nvia: 1.1 x\nx-forwarded-for: 10.0.0.1\n",
    ];
    heads.map(|head| head.as_bytes().to_vec()).to_vec()
}
