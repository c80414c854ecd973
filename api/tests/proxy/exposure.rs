//! Headers that responses expose to clients (I61).

use std::time::Duration;

use api::proxy::Expose;

use super::client::{Answer, chat, post};
use super::engine::{Engine, Step, json};
use super::fleet::Fleet;

/// Returns the names of all of the router's headers, sorted.
fn told(answer: &Answer) -> Vec<&str> {
    let names = answer.headers.iter().map(|(name, _)| name.as_str());
    let mut ours: Vec<&str> = names
        .filter(|name| name.starts_with("x-quorate-") || *name == "x-request-id")
        .collect();
    ours.sort_unstable();
    ours
}

async fn exposing(engine: &Engine, expose: Expose) -> Fleet {
    Fleet::start_with(&[engine], Duration::ZERO, |settings| {
        settings.expose = expose;
    })
    .await
}

/// Returns a response of an engine that is itself behind a router that exposes everything.
fn talkative(status: &str) -> Vec<Step> {
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-length: 2\r\nx-request-id: inner\r\nx-quorate-backend: inner\r\n\
         x-quorate-prefix: 7/9\r\nx-quorate-other: 1\r\n\r\n{{}}"
    );
    vec![Step::Send(head.into_bytes())]
}

#[tokio::test]
async fn decision_headers_are_sent_only_if_exposed() {
    let engine = Engine::always(talkative("200 OK")).await;
    for (expose, expected) in [
        (Expose::None, &[][..]),
        (
            Expose::Basic,
            &["x-quorate-index", "x-quorate-replica", "x-request-id"],
        ),
        (
            Expose::Full,
            &[
                "x-quorate-backend",
                "x-quorate-index",
                "x-quorate-policy",
                "x-quorate-prefix",
                "x-quorate-replica",
                "x-request-id",
            ],
        ),
    ] {
        let fleet = exposing(&engine, expose).await;
        let answer = fleet.client().await.ask(chat("")).await;
        assert_eq!(answer.status, 200);
        assert_eq!(told(&answer), expected, "{expose:?}");
        assert_ne!(answer.header("x-quorate-backend"), Some("inner"));
        fleet.is_idle().await;
    }
}

#[tokio::test]
async fn refusals_disclose_nothing_of_the_prompt() {
    let unknown = chat("").replace("\"model\":\"m\"", "\"model\":\"x\"");
    for (status, request) in [
        ("400 Bad Request", chat("")),
        ("500 Internal Server Error", chat("")),
        // Held until no other backend can be tried.
        ("503 Service Unavailable", chat("")),
        // From the router.
        ("200 OK", unknown),
        ("200 OK", post("/v1/chat/completions", "", "{")),
        ("200 OK", post("/none", "", "{}")),
    ] {
        let engine = Engine::always(talkative(status)).await;
        let fleet = exposing(&engine, Expose::Full).await;
        let answer = fleet.client().await.ask(request).await;
        assert!(answer.status >= 400, "{status}");
        assert_eq!(
            told(&answer),
            ["x-quorate-replica", "x-request-id"],
            "{status}: {}",
            answer.status
        );
        fleet.is_idle().await;
    }
}

#[tokio::test]
async fn errors_carry_no_headers_if_nothing_is_exposed() {
    let engine = Engine::always(vec![json("200 OK", "{}")]).await;
    let fleet = exposing(&engine, Expose::None).await;
    let answer = fleet.client().await.ask(post("/none", "", "{}")).await;
    assert_eq!(answer.status, 404);
    assert!(told(&answer).is_empty(), "{:?}", answer.headers);
    fleet.is_idle().await;
}
