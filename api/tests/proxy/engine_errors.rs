//! Engines that report errors within responses whose status is a success.

use std::sync::Arc;

use api::proxy::RequestOutcome;
use api::proxy::picker::PickedOutcome;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::client::{Answer, chat, post};
use super::engine::{DONE, Engine, Step, chunk, delta, json as document, last_chunk, stream_head};
use super::fleet::{Fleet, eventually};
use super::picking::{CHAT, EVENTS, engines, plain, start};

const STREAM: &str = ",\"stream\":true";
const FULL: &str =
    r#"{"error":{"message":"the queue is full","type":"SERVICE_UNAVAILABLE","code":503}}"#;
const ROLE: &str =
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";

fn event(payload: &str) -> String {
    format!("data: {payload}\n\n")
}

/// Returns a whole stream of these events.
fn stream(events: &[&str]) -> Vec<Step> {
    let mut steps = vec![stream_head()];
    steps.extend(events.iter().map(|event| chunk(event)));
    steps.push(last_chunk());
    steps
}

/// Returns the requests of the paths that stream and of one that does not.
fn asked(path: &str, is_stream: bool) -> String {
    let body = match path {
        "/v1/messages" => json!({"model": "m", "max_tokens": 9, "stream": is_stream,
            "messages": [{"role": "user", "content": "hello"}]}),
        "/v1/responses" => json!({"model": "m", "stream": is_stream, "input": "hello"}),
        "/v1/completions" => json!({"model": "m", "stream": is_stream, "prompt": "hello"}),
        _ => json!({"model": "m", "stream": is_stream,
            "messages": [{"role": "user", "content": "hello"}]}),
    };
    post(path, "", &body.to_string())
}

#[tokio::test]
async fn an_engine_that_refuses_in_a_200_is_retried() {
    let overloaded = r#"{"type":"error","error":{"type":"overloaded_error","message":"busy"}}"#;
    let failed =
        r#"{"type":"response.failed","response":{"error":{"code":"overloaded","message":"busy"}}}"#;
    let start =
        "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"content\":[]}}\n\n";
    let created = "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"error\":null}}\n\n";
    let full = event(FULL);
    for (path, is_stream, steps) in [
        ("/v1/chat/completions", true, stream(&[&full, DONE])),
        ("/v1/completions", true, stream(&[&full, DONE])),
        (
            "/v1/chat/completions",
            true,
            stream(&[": wait\n\n", ROLE, &full, DONE]),
        ),
        (
            "/v1/messages",
            true,
            stream(&[start, &format!("event: error\ndata: {overloaded}\n\n")]),
        ),
        (
            "/v1/responses",
            true,
            stream(&[
                created,
                &format!("event: response.failed\ndata: {failed}\n\n"),
            ]),
        ),
        (
            "/v1/chat/completions",
            false,
            vec![document("200 OK", FULL)],
        ),
        ("/v1/messages", false, vec![document("200 OK", overloaded)]),
    ] {
        let full = Engine::always(steps).await;
        let alive = Engine::always(match is_stream {
            true => stream(&[&delta("a", 1), DONE]),
            false => vec![document("200 OK", "{}")],
        })
        .await;
        let fleet = Fleet::start(&[&full, &alive]).await;
        for _ in 0..8 {
            let answer = fleet.client().await.ask(asked(path, is_stream)).await;
            assert_eq!(answer.status, 200, "{path}");
            assert!(
                answer.is_complete && !answer.body.contains("error"),
                "{}",
                answer.body
            );
            assert_eq!(answer.header("x-quorate-backend"), Some("e1"));
        }
        fleet.is_idle().await;
        assert!(!full.requests().is_empty(), "{path}");
        assert_eq!(fleet.count(RequestOutcome::Finished, 200), 8, "{path}");
        let circuit = fleet.backends.circuit(fleet.backend(0), Instant::now());
        assert!(circuit.recent_failures > 0, "{path}");
    }
}

/// Returns the answer of a single engine with these steps, and what it was charged.
async fn alone(path: &str, is_stream: bool, steps: Vec<Step>) -> (Answer, u64) {
    let engine = Engine::always(steps).await;
    let fleet = Fleet::start(&[&engine]).await;
    let answer = fleet.client().await.ask(asked(path, is_stream)).await;
    assert!(answer.is_complete);
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::EngineError, answer.status), 1);
    (answer, fleet.charged().await.input_uncached)
}

#[tokio::test]
async fn the_client_gets_the_status_that_the_error_stands_for() {
    let oops = r#"{"error":{"message":"core failed","type":"InternalServerError","code":500}}"#;
    let bad = r#"{"object":"error","message":"too long","type":"BadRequestError","param":null,"code":400}"#;
    let limit = r#"{"error":{"message":"slow down","type":"rate_limit_error"}}"#;
    for (path, payload, status, message) in [
        ("/v1/chat/completions", FULL, 503, "the queue is full"),
        ("/v1/chat/completions", limit, 429, "slow down"),
        ("/v1/completions", bad, 400, "too long"),
        ("/v1/responses", oops, 500, "core failed"),
        ("/v1/messages", oops, 500, "core failed"),
    ] {
        for is_stream in [true, false] {
            let steps = match is_stream {
                true => stream(&[&event(payload), DONE]),
                false => vec![document("200 OK", payload)],
            };
            let (answer, charged) = alone(path, is_stream, steps).await;
            assert_eq!(answer.status, status, "{payload}");
            assert_eq!(answer.header("content-type"), Some("application/json"));
            let body: Value = serde_json::from_str(&answer.body).expect(&answer.body);
            assert_eq!(body["error"]["message"], message);
            assert_eq!(body["type"] == "error", path == "/v1/messages");
            // An engine may have computed before it failed, but not before it refused.
            assert_eq!(charged > 0, status == 500, "{payload}");
            let is_final = answer.header("x-should-retry") == Some("false");
            assert_eq!(is_final, status == 500);
        }
    }
}

#[tokio::test]
async fn a_stream_without_output_is_the_engines_failure() {
    for events in [&[][..], &[": wait\n\n"], &[DONE], &[ROLE, DONE]] {
        let engine = Engine::always(stream(events)).await;
        let fleet = Fleet::start(&[&engine]).await;
        let answer = fleet.client().await.ask(chat(STREAM)).await;
        assert_eq!(answer.status, 502, "{events:?}");
        fleet.is_idle().await;
        let circuit = fleet.backends.circuit(fleet.backend(0), Instant::now());
        assert_eq!(circuit.recent_failures, 1, "{events:?}");
    }
}

#[tokio::test]
async fn a_page_in_place_of_an_answer_is_the_engines_failure() {
    for (media_type, body, status) in [
        ("text/html", "<html>out of order</html>", 502),
        ("text/plain; charset=utf-8", "no healthy upstream", 502),
        ("text/plain", "{\"choices\":[]}", 200),
    ] {
        let head = format!("HTTP/1.1 200 OK\r\ncontent-type: {media_type}\r\n");
        let response = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
        let engine = Engine::always(vec![Step::Send(response.into_bytes())]).await;
        let fleet = Fleet::start(&[&engine]).await;
        let answer = fleet.client().await.ask(chat("")).await;
        assert_eq!(answer.status, status, "{media_type}");
        fleet.is_idle().await;
        let circuit = fleet.backends.circuit(fleet.backend(0), Instant::now());
        assert_eq!(circuit.recent_failures > 0, status == 502, "{media_type}");
    }
}

#[tokio::test]
async fn an_error_after_output_passes_and_opens_the_circuit() {
    let oops = event(r#"{"error":{"message":"core failed","code":500}}"#);
    let engine = Engine::always(stream(&[&delta("a", 1), &delta("b", 5), &oops, DONE])).await;
    let fleet = Fleet::start(&[&engine]).await;
    let is_open = || {
        fleet
            .backends
            .circuit(fleet.backend(0), Instant::now())
            .is_open
    };
    for _ in 0..5 {
        assert!(!is_open());
        let answer = fleet.client().await.ask(chat(STREAM)).await;
        assert_eq!(answer.status, 200);
        assert!(answer.body.contains("core failed") && answer.body.ends_with(DONE));
    }
    fleet.is_idle().await;
    assert!(is_open());
    assert_eq!(fleet.count(RequestOutcome::EngineError, 200), 5);
    let charge = fleet.charged().await;
    assert_eq!((charge.input_uncached, charge.output), (5 * 7, 5 * 5));
}

#[tokio::test]
async fn events_before_output_do_not_wait_for_it() {
    let (refusal, nothing) = (event(FULL), String::new());
    let refused = fails_later(&refusal, "the queue is full");
    tokio::join!(refused, fails_later(&nothing, DONE));
}

/// Asks an engine that begins a stream, and after a while sends only `rest`.
async fn fails_later(rest: &str, expected: &str) {
    let gate = Arc::new(Semaphore::new(0));
    let engine = Engine::always(vec![
        stream_head(),
        chunk(ROLE),
        Step::Await(Arc::clone(&gate)),
        chunk(&format!("{rest}: end\n\n")),
        chunk(DONE),
        last_chunk(),
    ])
    .await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    client.send(chat(STREAM)).await;
    client.read_until("assistant").await;
    gate.add_permits(1);
    let answer = client.answer().await;
    assert_eq!(answer.status, 200);
    assert!(answer.body.contains(expected));
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::EngineError, 200), 1);
    let circuit = fleet.backends.circuit(fleet.backend(0), Instant::now());
    assert_eq!(circuit.recent_failures, 1);
    let charge = fleet.charged().await;
    // What ended without a word may have run.
    assert_eq!(
        (charge.input_uncached > 0, charge.output),
        (rest.is_empty(), 0)
    );
}

#[tokio::test]
async fn an_engine_that_breaks_before_output_is_a_502() {
    let engine = Engine::always(vec![stream_head(), chunk(ROLE), Step::Close]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let answer = fleet.client().await.ask(chat(STREAM)).await;
    answer.refuses(502, "backend_broke");
}

#[tokio::test]
async fn an_error_within_a_document_counts_even_if_it_comes_late() {
    let gate = Arc::new(Semaphore::new(0));
    let head =
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
    let engine = Engine::always(vec![
        Step::Send(head.into()),
        chunk("\n"),
        Step::Await(Arc::clone(&gate)),
        chunk(FULL),
        last_chunk(),
    ])
    .await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    client.send(chat("")).await;
    client.read_until("application/json").await;
    gate.add_permits(1);
    assert_eq!(client.answer().await.status, 200);
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::EngineError, 200), 1);
    let circuit = fleet.backends.circuit(fleet.backend(0), Instant::now());
    assert_eq!(circuit.recent_failures, 1);
    assert_eq!(fleet.charged().await.input_uncached, 0);
}

#[tokio::test]
async fn a_client_that_leaves_after_an_error_saw_the_engines_error() {
    let engine = Engine::always(vec![
        stream_head(),
        chunk(&delta("a", 1)),
        chunk(&event(FULL)),
        Step::Hang,
    ])
    .await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    client.send(chat(STREAM)).await;
    client.read_until("the queue is full").await;
    drop(client);
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::EngineError, 200), 1);
}

#[tokio::test]
async fn an_error_through_a_gateway_counts_like_a_status() {
    for (before, charged) in [(None, 0), (Some(delta("a", 1)), 7)] {
        let engines = engines().await;
        let (fleet, picking) = start(&engines).await;
        let mut talk = picking.ask(CHAT, 1000, plain()).await;
        talk.picked().await;
        talk.streamed().await;
        let head = talk.begin(EVENTS, None).await;
        let name = super::picking::header(&head, "x-quorate-backend").unwrap();
        let full = event(FULL);
        let pieces: Vec<&str> = before
            .iter()
            .map(String::as_str)
            .chain([full.as_str(), DONE])
            .collect();
        talk.answer(&pieces).await;
        assert!(talk.streamed().await.contains("the queue is full"));
        talk.is_over().await;
        fleet.is_idle().await;
        eventually("it is counted", || {
            picking.metrics.requests(PickedOutcome::Picked) == 1
        })
        .await;
        assert_eq!(fleet.count(RequestOutcome::EngineError, 200), 1);
        let backend = fleet.backend(usize::from(name == "e1"));
        assert_eq!(
            fleet
                .backends
                .circuit(backend, Instant::now())
                .recent_failures,
            1
        );
        assert_eq!(fleet.charged().await.input_uncached, charged);
    }
}
