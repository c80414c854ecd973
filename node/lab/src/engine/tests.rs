//! Tests of the engine over real sockets: vLLM's formats, cached tokens in `usage`, and
//! disconnects.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{EmulatedEngine, EngineHandle, EngineOptions};

async fn engine(speed: f64) -> EngineHandle {
    EmulatedEngine::start(EngineOptions {
        speed,
        ..EngineOptions::default()
    })
    .await
    .unwrap()
}

pub(super) async fn connect(engine: &EngineHandle) -> SendRequest<Full<Bytes>> {
    let socket = TcpStream::connect(engine.addr()).await.unwrap();
    let (sender, connection) = handshake(TokioIo::new(socket)).await.unwrap();
    tokio::spawn(connection);
    sender
}

pub(super) async fn send(
    sender: &mut SendRequest<Full<Bytes>>,
    method: &str,
    path: &str,
    body: &Value,
) -> Response<Incoming> {
    let body = if body.is_null() {
        String::new()
    } else {
        body.to_string()
    };
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", "engine")
        .header("content-type", "application/json")
        .body(Full::from(body))
        .unwrap();
    sender.ready().await.unwrap();
    sender.send_request(request).await.unwrap()
}

pub(super) async fn ask(
    engine: &EngineHandle,
    method: &str,
    path: &str,
    body: Value,
) -> (StatusCode, Value) {
    let mut sender = connect(engine).await;
    let response = send(&mut sender, method, path, &body).await;
    let status = response.status();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    (
        status,
        serde_json::from_slice(&bytes).unwrap_or(Value::Null),
    )
}

fn chat(messages: &Value, max_tokens: u32) -> Value {
    json!({ "model": "emulated", "messages": messages, "max_tokens": max_tokens })
}

/// Returns the JSON of a stream's events, after checking that the stream ends with `[DONE]`.
pub(super) async fn events(response: Response<Incoming>) -> Vec<Value> {
    assert_eq!(
        response.headers()["content-type"],
        "text/event-stream; charset=utf-8"
    );
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    let text = std::str::from_utf8(&bytes).unwrap();
    let events = text
        .strip_suffix("data: [DONE]\n\n")
        .expect("ends with [DONE]");
    let read = |event: &str| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap();
    events.split_terminator("\n\n").map(read).collect()
}

#[tokio::test]
async fn the_next_chat_turn_finds_the_previous_one_cached() {
    let engine = engine(1000.0).await;
    let mut messages = json!([{ "role": "user", "content": "x".repeat(600) }]);
    let (status, first) = ask(&engine, "POST", "/v1/chat/completions", chat(&messages, 40)).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(first["usage"]["completion_tokens"], 40);
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(first["choices"][0]["finish_reason"], "length");
    let prompt_tokens = first["usage"]["prompt_tokens"].as_u64().unwrap();
    let reply = first["choices"][0]["message"]["content"].as_str().unwrap();
    assert_eq!(reply.len(), 160);
    messages.as_array_mut().unwrap().extend([
        json!({ "role": "assistant", "content": reply }),
        json!({ "role": "user", "content": "go on" }),
    ]);
    let (_, second) = ask(&engine, "POST", "/v1/chat/completions", chat(&messages, 1)).await;
    let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap();
    // The last output token was never computed.
    assert_eq!(cached, (prompt_tokens + 39) / 32 * 32);
    engine.stop().await;
}

#[tokio::test]
async fn usage_has_the_cached_tokens_by_tier() {
    let mut options = EngineOptions {
        speed: 1000.0,
        ..EngineOptions::default()
    };
    options.shape.num_gpu_blocks = 10;
    options.offload.cpu_blocks = 64;
    let engine = EmulatedEngine::start(options).await.unwrap();
    let details = async |word: &str| {
        let prompt = word.repeat(256);
        let body = json!({ "model": "emulated", "prompt": prompt, "max_tokens": 1 });
        let (_, answer) = ask(&engine, "POST", "/v1/completions", body).await;
        answer["usage"]["prompt_tokens_details"].clone()
    };
    details("four").await;
    details("five").await;
    // Of the first prompt's eight blocks, the GPU still has one; the last one is computed again.
    let by_tier = json!({ "device": 32, "host": 192, "storage": 0 });
    let expected = json!({ "cached_tokens": 224, "cached_tokens_details": by_tier });
    assert_eq!(details("four").await, expected);
    engine.stop().await;
}

#[tokio::test]
async fn equal_prompts_get_equal_answers_and_the_default_length() {
    let engine = engine(1000.0).await;
    let body = json!({ "model": "emulated", "prompt": "tell me" });
    let (_, one) = ask(&engine, "POST", "/v1/completions", body.clone()).await;
    let (_, other) = ask(&engine, "POST", "/v1/completions", body).await;
    assert_eq!(one["choices"][0]["text"], other["choices"][0]["text"]);
    assert_eq!(one["usage"]["completion_tokens"], 16);
    assert_eq!(one["choices"][0]["finish_reason"], "stop");
    assert_eq!(one["object"], "text_completion");
}

#[tokio::test]
async fn a_stream_has_its_text_and_requested_usage() {
    let engine = engine(1000.0).await;
    let messages = json!([{ "role": "user", "content": "hello" }]);
    let mut body = chat(&messages, 5);
    let (_, whole) = ask(&engine, "POST", "/v1/chat/completions", body.clone()).await;
    body["stream"] = json!(true);
    for (options, has_last, has_running) in [
        (json!(null), false, false),
        (json!({ "include_usage": true }), true, false),
        (
            json!({ "include_usage": true, "continuous_usage_stats": true }),
            true,
            true,
        ),
    ] {
        body["stream_options"] = options;
        let mut sender = connect(&engine).await;
        let response = send(&mut sender, "POST", "/v1/chat/completions", &body).await;
        let mut events = events(response).await;
        if has_last {
            let last = events.pop().unwrap();
            assert_eq!(last["choices"], json!([]));
            assert_eq!(last["usage"], whole["usage"]);
        }
        let delta = |event: &Value| {
            event["choices"][0]["delta"]["content"]
                .as_str()
                .map(String::from)
        };
        let words: String = events.iter().map(|event| delta(event).unwrap()).collect();
        assert_eq!(
            words,
            whole["choices"][0]["message"]["content"].as_str().unwrap()
        );
        assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
        assert_eq!(
            events.last().unwrap()["choices"][0]["finish_reason"],
            "length"
        );
        assert!(
            events
                .iter()
                .all(|event| event["usage"].is_object() == has_running)
        );
    }
}

#[tokio::test]
async fn a_text_stream_carries_its_text() {
    let engine = engine(1000.0).await;
    let body = json!({ "model": "emulated", "prompt": "abc", "max_tokens": 3, "stream": true });
    let mut sender = connect(&engine).await;
    let events = events(send(&mut sender, "POST", "/v1/completions", &body).await).await;
    let words: String = events
        .iter()
        .map(|event| event["choices"][0]["text"].as_str().unwrap())
        .collect();
    assert_eq!(words.len(), 12);
    assert!(events.iter().all(|event| event["usage"].is_null()));
}

#[tokio::test]
async fn unservable_requests_are_refused_in_vllms_format() {
    let engine = engine(1000.0).await;
    let most = u64::from(engine.stats().usable_blocks) * 32;
    let cases = [
        (
            "/v1/completions",
            json!({ "model": "other", "prompt": "a" }),
            404,
        ),
        (
            "/v1/completions",
            json!({ "model": "emulated", "prompt": "" }),
            400,
        ),
        (
            "/v1/completions",
            json!({ "model": "emulated", "prompt": "a", "n": 2 }),
            400,
        ),
        (
            "/v1/completions",
            json!({ "model": "emulated", "prompt": "a", "max_tokens": 0 }),
            400,
        ),
        (
            "/v1/completions",
            json!({ "model": "emulated", "prompt": "a", "max_tokens": most }),
            400,
        ),
        (
            "/v1/chat/completions",
            json!({ "model": "emulated", "messages": 1 }),
            400,
        ),
        ("/v1/chat/completions", json!([1]), 400),
        ("/detokenize", json!({ "tokens": "x" }), 400),
    ];
    for (path, body, expected) in cases {
        let (status, answer) = ask(&engine, "POST", path, body.clone()).await;
        assert_eq!(status.as_u16(), expected, "{path} {body}");
        assert_eq!(answer["error"]["code"], expected, "{path} {body}");
        assert!(
            answer["error"]["message"]
                .as_str()
                .is_some_and(|message| !message.is_empty())
        );
    }
    assert_eq!(
        ask(&engine, "GET", "/v1/completions", Value::Null)
            .await
            .0
            .as_u16(),
        405
    );
    assert_eq!(
        ask(&engine, "POST", "/sleep", json!({})).await.0.as_u16(),
        404
    );
    assert_eq!(engine.stats().aborted, 0);
}

#[tokio::test]
async fn the_endpoints_a_router_reads_exist() {
    let engine = engine(1000.0).await;
    for path in ["/health", "/ping", "/version", "/load", "/metrics"] {
        assert_eq!(
            ask(&engine, "GET", path, Value::Null).await.0,
            StatusCode::OK,
            "{path}"
        );
    }
    let (_, models) = ask(&engine, "GET", "/v1/models", Value::Null).await;
    assert_eq!(models["data"][0]["id"], "emulated");
    let body = json!({ "model": "emulated", "prompt": "five5" });
    let (_, tokens) = ask(&engine, "POST", "/tokenize", body).await;
    assert_eq!(tokens["count"], 2);
    let (_, text) = ask(
        &engine,
        "POST",
        "/detokenize",
        json!({ "tokens": tokens["tokens"] }),
    )
    .await;
    assert_eq!(text["prompt"], "five5");
}

/// Sends a request that would run for hours and disconnects: while waiting for the first token if
/// `is_stream` is false, or during the stream.
async fn leave(is_stream: bool) {
    let engine = engine(0.001).await;
    let body = json!({
        "model": "emulated", "prompt": "a", "max_tokens": 10_000, "stream": is_stream,
    })
    .to_string();
    let mut socket = TcpStream::connect(engine.addr()).await.unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: e\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all(head.as_bytes()).await.unwrap();
    socket.write_all(body.as_bytes()).await.unwrap();
    let mut open = engine.watch_open();
    open.wait_for(|open| *open == 1).await.unwrap();
    if is_stream {
        let mut head = [0; 16];
        socket.read_exact(&mut head).await.unwrap();
    }
    drop(socket);
    open.wait_for(|open| *open == 0).await.unwrap();
    let stats = engine.stats();
    assert_eq!(
        (
            stats.running,
            stats.waiting,
            stats.used_blocks,
            stats.aborted
        ),
        (0, 0, 0, 1)
    );
}

#[tokio::test]
async fn a_waiting_client_that_disconnects_frees_its_blocks() {
    leave(false).await;
}

#[tokio::test]
async fn a_streaming_client_that_disconnects_frees_its_blocks() {
    leave(true).await;
}

#[tokio::test]
async fn an_idle_connection_is_closed_silently() {
    let keep_alive = Duration::from_millis(20);
    let options = EngineOptions {
        keep_alive,
        speed: 1000.0,
        ..EngineOptions::default()
    };
    let engine = EmulatedEngine::start(options).await.unwrap();
    let mut socket = TcpStream::connect(engine.addr()).await.unwrap();
    socket
        .write_all(b"GET /health HTTP/1.1\r\nhost: e\r\n\r\n")
        .await
        .unwrap();
    let mut all = Vec::new();
    socket.read_to_end(&mut all).await.unwrap();
    let text = String::from_utf8(all).unwrap();
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
    assert_eq!(text.matches("HTTP/1.1").count(), 1, "{text}");
}

#[tokio::test]
async fn a_stopped_engine_cuts_its_connections_off() {
    let engine = engine(0.001).await;
    let mut socket = TcpStream::connect(engine.addr()).await.unwrap();
    let body = json!({ "model": "emulated", "prompt": "a" }).to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: e\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    socket.write_all(head.as_bytes()).await.unwrap();
    engine
        .watch_open()
        .wait_for(|open| *open == 1)
        .await
        .unwrap();
    engine.stop().await;
    let mut all = Vec::new();
    // Closed or reset: either way, no more data comes.
    let _ = socket.read_to_end(&mut all).await;
    assert!(all.is_empty());
}
