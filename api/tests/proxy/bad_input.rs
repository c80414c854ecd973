//! Clients that send invalid requests: each gets a clear error, and no other client is affected.

use std::time::Duration;

use api::proxy::{ApiKeys, RequestOutcome};
use tokio::io::AsyncWriteExt;

use super::client::{Answer, chat, post};
use super::engine::{Engine, json};
use super::fleet::Fleet;

const CHAT: &str = "/v1/chat/completions";
const MIB: usize = 1024 * 1024;

/// Starts a fleet whose engine must not be called.
async fn start() -> (Engine, Fleet) {
    let engine = Engine::always(vec![json("200 OK", "{}")]).await;
    let fleet = Fleet::start(&[&engine]).await;
    (engine, fleet)
}

#[tokio::test]
async fn unroutable_bodies_are_refused_with_a_reason() {
    let (engine, fleet) = start().await;
    for (body, status, code) in [
        ("", 400, "invalid_request"),
        ("{", 400, "invalid_request"),
        ("[]", 400, "invalid_request"),
        ("{\"model\":\"\",\"messages\":[]}", 400, "invalid_request"),
        ("{\"model\":7,\"messages\":[]}", 400, "invalid_request"),
        ("{\"model\":\"m\",\"messages\":{}}", 400, "invalid_request"),
        (
            "{\"model\":\"m\",\"messages\":[]} x",
            400,
            "invalid_request",
        ),
        ("{\"model\":\"x\",\"messages\":[]}", 404, "model_not_found"),
    ] {
        let mut client = fleet.client().await;
        let answer = client.ask(post(CHAT, "", body)).await;
        assert_eq!(
            (answer.status, answer.error_code().as_str()),
            (status, code),
            "{body}"
        );
        assert!(answer.header("x-request-id").is_some());
        // The connection stays usable.
        assert_eq!(client.ask(post(CHAT, "", body)).await.status, status);
    }
    fleet.is_idle().await;
    assert_eq!(engine.requests().len(), 0);
    assert_eq!(fleet.count(RequestOutcome::Refused, 404), 2);
}

#[tokio::test]
async fn invalid_utf8_and_deep_nesting_are_refused() {
    let (_engine, fleet) = start().await;
    let mut bytes = post(CHAT, "", "{\"model\":\"m??\",\"messages\":[]}").into_bytes();
    for byte in &mut bytes {
        *byte = if *byte == b'?' { 0xff } else { *byte };
    }
    assert_eq!(fleet.client().await.ask(bytes).await.status, 400);
    let deep = format!("{{\"model\":\"m\",\"messages\":{}", "[".repeat(100_000));
    assert_eq!(
        fleet.client().await.ask(post(CHAT, "", &deep)).await.status,
        400
    );
    fleet.is_idle().await;
}

#[tokio::test]
async fn unserved_paths_methods_and_codings_are_refused() {
    let (engine, fleet) = start().await;
    for (request, status, code) in [
        (post("/sleep", "", "{\"model\":\"m\"}"), 404, "unknown_url"),
        (
            post("/v1/load_lora_adapter", "", "{\"model\":\"m\"}"),
            404,
            "unknown_url",
        ),
        (
            post("/v1/../flush_cache", "", "{\"model\":\"m\"}"),
            404,
            "unknown_url",
        ),
        (
            format!("GET {CHAT} HTTP/1.1\r\nhost: r\r\n\r\n"),
            405,
            "method_not_supported",
        ),
        (post("/v1/models", "", "{}"), 405, "method_not_supported"),
        (
            post(CHAT, "content-encoding: br\r\n", "zipped"),
            415,
            "unsupported_content_encoding",
        ),
    ] {
        let answer = fleet.client().await.ask(&request).await;
        assert_eq!(
            (answer.status, answer.error_code().as_str()),
            (status, code),
            "{request}"
        );
        assert_eq!(answer.header("allow").is_some(), status == 405);
    }
    assert_eq!(engine.requests().len(), 0);
}

#[tokio::test]
async fn requests_without_a_required_key_are_refused() {
    let engine = Engine::always(vec![json("200 OK", "{}")]).await;
    let fleet = Fleet::start_with(&[&engine], Duration::ZERO, |settings| {
        let mut keys = ApiKeys::default();
        keys.add("sk-right", None);
        settings.api_keys = Some(keys);
    })
    .await;
    let keyed =
        |key: &str| chat("").replace("host: ", &format!("authorization: Bearer {key}\r\nhost: "));
    let mut client = fleet.client().await;
    let answer = client.ask(chat("")).await;
    answer.refuses(401, "invalid_api_key");
    assert_eq!(answer.header("connection"), Some("close"));
    assert!(client.is_closed().await);
    let wrong = fleet.client().await.ask(keyed("sk-wrong")).await;
    assert_eq!(wrong.status, 401);
    let right = fleet.client().await.ask(keyed("sk-right")).await;
    assert_eq!(right.status, 200);
    assert_eq!(engine.requests().len(), 1);
    assert!(!engine.requests()[0].contains("sk-right"));
}

fn assert_too_large(answer: &Answer) {
    answer.refuses(413, "request_too_large");
}

#[tokio::test]
async fn a_body_of_33_mib_is_refused_with_and_without_a_length() {
    let engine = Engine::always(vec![json("200 OK", "{}")]).await;
    let fleet = Fleet::start_with(&[&engine], Duration::ZERO, |settings| {
        settings.timeouts.refused_body = Duration::from_secs(60);
    })
    .await;
    let mut client = fleet.client().await;
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: r\r\ncontent-length: {}\r\n\r\n",
        33 * MIB
    );
    client.send(head).await;
    client.send(vec![b' '; 33 * MIB]).await;
    assert_too_large(&client.answer().await);

    let mut client = fleet.client().await;
    client
        .send(format!(
            "POST {CHAT} HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n"
        ))
        .await;
    let mut chunk = format!("{MIB:x}\r\n").into_bytes();
    chunk.resize(chunk.len() + MIB, b' ');
    chunk.extend_from_slice(b"\r\n");
    for _ in 0..33 {
        client.send(&chunk).await;
    }
    client.send("0\r\n\r\n").await;
    assert_too_large(&client.answer().await);

    let mut client = fleet.client().await;
    let expecting = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: r\r\nexpect: 100-continue\r\ncontent-length: {}\r\n\r\n",
        33 * MIB
    );
    assert_too_large(&client.ask(expecting).await);
    assert_eq!(engine.requests().len(), 0);
    fleet.is_idle().await;
}

#[tokio::test]
async fn a_body_just_within_the_limit_passes() {
    let engine = Engine::always(vec![json("200 OK", "{}")]).await;
    let fleet = Fleet::start_with(&[&engine], Duration::ZERO, |settings| {
        settings.limits.body_bytes_max = 300_000;
    })
    .await;
    let (before, after) = ("{\"model\":\"m\",\"prompt\":\"", "\"}");
    let text = "x".repeat(300_000 - before.len() - after.len());
    let mut client = fleet.client().await;
    let answer = client
        .ask(post(
            "/v1/completions",
            "",
            &format!("{before}{text}{after}"),
        ))
        .await;
    assert_eq!(answer.status, 200);
    let answer = client
        .ask(post(
            "/v1/completions",
            "",
            &format!("{before}{text} {after}"),
        ))
        .await;
    assert_too_large(&answer);
}

#[tokio::test]
async fn invalid_http_heads_are_refused() {
    let (engine, fleet) = start().await;
    for (host, status, code) in [
        ("", 400, "invalid_request"),
        ("host: a\r\nhost: a\r\n", 400, "invalid_request"),
        ("host: a\r\nexpect: bogus\r\n", 417, "expectation_failed"),
        ("host: a\r\nexpect: 100-Continue\r\n", 200, ""),
    ] {
        let request = chat("").replace("host: router\r\n", host);
        let answer = fleet.client().await.ask(&request).await;
        assert_eq!(answer.status, status, "{host}");
        if status != 200 {
            assert_eq!(answer.error_code(), code);
        }
    }
    let old = chat("").replace("HTTP/1.1\r\nhost: router", "HTTP/1.0");
    assert_eq!(fleet.client().await.ask(old).await.status, 200);
    assert_eq!(engine.requests().len(), 2);
}

#[tokio::test]
async fn header_bombs_are_refused() {
    let (engine, fleet) = start().await;
    let many = "x-a: b\r\n".repeat(200);
    let long = format!("x-a: {}\r\n", "b".repeat(100_000));
    for headers in [many, long] {
        let mut client = fleet.client().await;
        // The request may be rejected before all of it is written.
        let sent = client
            .stream
            .write_all(post(CHAT, &headers, "{}").as_bytes())
            .await;
        let status = client.answer().await.status;
        assert!(status == 431 || (status == 0 && sent.is_err()), "{status}");
    }
    let mut client = fleet.client().await;
    assert_eq!(client.ask("NOT HTTP AT ALL\r\n\r\n").await.status, 400);
    assert_eq!(engine.requests().len(), 0);
    assert_eq!(fleet.client().await.ask(chat("")).await.status, 200);
}

#[tokio::test]
async fn stalled_clients_are_disconnected() {
    let engine = Engine::always(vec![json("200 OK", "{}")]).await;
    let fleet = Fleet::start_with(&[&engine], Duration::ZERO, |settings| {
        settings.timeouts.first_request = Duration::from_millis(20);
        settings.timeouts.next_request = Duration::from_millis(40);
        settings.timeouts.body_idle = Duration::from_millis(20);
    })
    .await;
    let mut silent = fleet.client().await;
    assert!(silent.is_closed().await);
    let mut half_head = fleet.client().await;
    half_head.send("POST / HTTP/1.1\r\nx-a: ").await;
    assert!(half_head.is_closed().await);
    let mut half_body = fleet.client().await;
    let answer = half_body
        .ask(post(CHAT, "", "{}").replace("length: 2", "length: 9"))
        .await;
    answer.refuses(408, "request_timeout");
    let mut idle = fleet.client().await;
    assert_eq!(idle.ask(chat("")).await.status, 200);
    assert!(idle.is_closed().await);
    eventually_no_connections(&fleet).await;
}

async fn eventually_no_connections(fleet: &Fleet) {
    super::fleet::eventually("no connection", || fleet.metrics.connections.get() == 0).await;
}

#[tokio::test]
async fn requests_beyond_the_limit_are_refused() {
    let engine = Engine::always(vec![super::engine::Step::Hang]).await;
    let fleet = Fleet::start_with(&[&engine], Duration::ZERO, |settings| {
        settings.limits.requests_max = 1;
    })
    .await;
    let mut first = fleet.client().await;
    first.send(chat("")).await;
    super::fleet::eventually("it is under way", || fleet.running() == 1).await;
    let answer = fleet.client().await.ask(chat("")).await;
    answer.refuses(503, "overloaded");
    assert_eq!(answer.header("retry-after"), Some("1"));
}

#[tokio::test]
async fn bodies_beyond_the_buffer_limit_are_refused() {
    let engine = Engine::start(|number| match number {
        0 => vec![super::engine::Step::Hang],
        _ => vec![json("200 OK", "{}")],
    })
    .await;
    let request = chat("");
    let body_bytes = request.split_once("\r\n\r\n").unwrap().1.len() as u64;
    let fleet = Fleet::start_with(&[&engine], Duration::ZERO, |settings| {
        settings.limits.held_bytes_max = Some(body_bytes);
    })
    .await;
    let mut first = fleet.client().await;
    first.send(&request).await;
    super::fleet::eventually("it is under way", || fleet.running() == 1).await;
    let mut second = fleet.client().await;
    let answer = second.ask(&request).await;
    answer.refuses(503, "overloaded");
    assert_eq!(answer.header("x-quorate-replica"), Some("1"));
    drop(first);
    fleet.is_idle().await;
    for _ in 0..3 {
        assert_eq!(fleet.client().await.ask(&request).await.status, 200);
    }
}

#[tokio::test]
async fn an_idle_http2_connection_is_closed() {
    let engine = Engine::always(vec![json("200 OK", "{}")]).await;
    let fleet = Fleet::start_with(&[&engine], Duration::ZERO, |settings| {
        settings.timeouts.first_request = Duration::from_millis(500);
        settings.timeouts.next_request = Duration::from_millis(20);
    })
    .await;
    let stream = tokio::net::TcpStream::connect(fleet.address).await.unwrap();
    let (mut sender, connection) = hyper::client::conn::http2::handshake(
        hyper_util::rt::TokioExecutor::new(),
        hyper_util::rt::TokioIo::new(stream),
    )
    .await
    .unwrap();
    let connection = tokio::spawn(connection);
    let body = chat("").split_once("\r\n\r\n").unwrap().1.to_owned();
    let request = http::Request::post("http://router/v1/chat/completions")
        .body(http_body_util::Full::new(bytes::Bytes::from(body)))
        .unwrap();
    let response = sender.send_request(request).await.unwrap();
    assert_eq!(response.status(), 200);
    drop(response);
    eventually_no_connections(&fleet).await;
    connection.await.unwrap().unwrap();
    // Not earlier: a client without a handle would close by itself.
    drop(sender);
}
