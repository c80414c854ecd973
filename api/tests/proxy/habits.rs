//! Small habits of clients and of the servers before engines: each is served as HTTP and the SDKs
//! expect.

use std::sync::Arc;

use api::engines::backends::Health;
use serde_json::json;
use tokio::sync::Semaphore;

use super::client::{Answer, chat, post};
use super::clients::{body, get, spec};
use super::engine::{Engine, Step, chunk, json as answer_json, last_chunk};
use super::fleet::{Fleet, HEALTHY, eventually};

#[tokio::test]
async fn a_list_of_models_is_never_empty_because_engines_are_down() {
    let engine = Engine::always(vec![answer_json("200 OK", "{}")]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let ask = async |path: &str| fleet.client().await.ask(get(path, "")).await;
    let down = Health {
        is_healthy: false,
        ..HEALTHY
    };
    fleet.backends.assume(fleet.backend(0).slot, &down);
    ask("/v1/models/m").await.refuses(503, "no_healthy_backend");
    ask("/v1/models/other")
        .await
        .refuses(404, "model_not_found");
    fleet.apply(spec("e0", &engine, &["*"]));
    for path in ["/v1/models", "/v1/models/m"] {
        ask(path).await.refuses(503, "replica_starting");
    }
    // An engine without a list serves any model.
    fleet.backends.assume(fleet.backend(0).slot, &HEALTHY);
    assert_eq!(body(&ask("/v1/models").await)["data"], json!([]));
}

#[tokio::test]
async fn a_byte_order_mark_before_the_body_is_skipped() {
    let engine = Engine::always(vec![answer_json("200 OK", "{}")]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let body = r#"{"model":"m","messages":[],"stream":true}"#;
    let request = post("/v1/chat/completions", "", &format!("\u{feff}{body}"));
    let answer = fleet.client().await.ask(request).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let seen = engine.requests().remove(0);
    assert!(seen.contains("\r\n\r\n{"), "{seen}");
}

#[tokio::test]
async fn head_is_served_like_get_without_a_body() {
    let engine = Engine::always(vec![answer_json("200 OK", r#"{"id":"resp_1"}"#)]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    for path in ["/v1/models", "/v1/models/m", "/v1/responses/resp_1"] {
        let whole = client.ask(get(path, "")).await;
        assert_eq!(whole.status, 200, "{path}");
        let request = get(path, "").replacen("GET", "HEAD", 1);
        // A body would be taken for the next response.
        client.send(request.clone() + &request).await;
        for _ in 0..2 {
            client.read_until("\r\n\r\n").await;
            let head = client.head().await;
            assert_eq!(head.status, 200, "{path}");
            let length = |answer: &Answer| answer.header("content-length").map(str::to_owned);
            assert_eq!(length(&head), length(&whole), "{path}");
        }
    }
    let request = get("/v1/models/other", "").replacen("GET", "HEAD", 1);
    client.send(request).await;
    assert_eq!(client.head().await.status, 404);
    let seen = engine.requests();
    assert!(
        seen.iter().all(|request| request.starts_with("GET ")),
        "{seen:?}"
    );
}

#[tokio::test]
async fn an_error_above_a_mebibyte_ends_properly() {
    let long = "x".repeat(3 << 20);
    for framing in ["content-length", "chunked"] {
        let steps = match framing {
            "chunked" => {
                let head = "HTTP/1.1 400 Bad Request\r\ntransfer-encoding: chunked\r\n\r\n";
                vec![
                    Step::Send(head.as_bytes().to_vec()),
                    chunk(&long),
                    last_chunk(),
                ]
            }
            _ => vec![answer_json("400 Bad Request", &long)],
        };
        let engine = Engine::always(steps).await;
        let fleet = Fleet::start(&[&engine]).await;
        let mut client = fleet.client().await;
        let answer = client.ask(chat("")).await;
        assert_eq!(answer.status, 400);
        assert!(
            answer.is_complete && answer.body.len() == 1 << 20,
            "{framing}"
        );
        let again = client.ask(get("/v1/models", "")).await;
        assert_eq!(again.status, 200, "the connection stays usable");
        fleet.is_idle().await;
    }
}

#[tokio::test]
async fn a_request_id_in_flight_gets_a_suffix_for_the_engine() {
    let gate = Arc::new(Semaphore::new(0));
    let waits = Arc::clone(&gate);
    let steps = move |_| vec![Step::Await(Arc::clone(&waits)), answer_json("200 OK", "{}")];
    let engine = Engine::start(steps).await;
    let fleet = Fleet::start(&[&engine]).await;
    let named = chat("").replacen("host: ", "x-request-id: r1\r\nhost: ", 1);
    let (mut first, mut second) = (fleet.client().await, fleet.client().await);
    first.send(&named).await;
    eventually("the first is there", || engine.requests().len() == 1).await;
    second.send(&named).await;
    eventually("the second is there", || engine.requests().len() == 2).await;
    gate.add_permits(2);
    for client in [&mut first, &mut second] {
        assert_eq!(client.answer().await.header("x-request-id"), Some("r1"));
    }
    fleet.is_idle().await;
    gate.add_permits(1);
    assert_eq!(first.ask(&named).await.status, 200);
    let seen = engine.requests();
    let is_plain = |request: &String| request.contains("x-request-id: r1\r\n");
    let are_plain: Vec<bool> = seen.iter().map(is_plain).collect();
    assert_eq!(are_plain, [true, false, true]);
    assert!(seen[1].contains("x-request-id: r1-"), "{}", seen[1]);
}
