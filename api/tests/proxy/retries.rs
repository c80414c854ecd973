//! When a request goes to another connection or another backend, and when it does not.

use std::time::Duration;

use api::proxy::RequestOutcome;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::client::chat;
use super::engine::{Engine, Step, chunk, json, stream_head};
use super::fleet::Fleet;

#[tokio::test]
async fn a_backend_that_refuses_connections_is_skipped() {
    let (dead, alive) = (
        Engine::dead().await,
        Engine::always(vec![json("200 OK", "{}")]).await,
    );
    let fleet = Fleet::start(&[&dead, &alive]).await;
    for _ in 0..8 {
        let answer = fleet.client().await.ask(chat("")).await;
        assert_eq!(
            (answer.status, answer.header("x-quorate-backend")),
            (200, Some("e1"))
        );
    }
    fleet.is_idle().await;
}

#[tokio::test]
async fn without_a_reachable_backend_clients_get_retry_after() {
    let dead = Engine::dead().await;
    let fleet = Fleet::start(&[&dead]).await;
    let answer = fleet.client().await.ask(chat("")).await;
    assert_eq!(answer.status, 503);
    assert!(answer.header("retry-after").is_some());
    fleet.is_idle().await;
}

#[tokio::test]
async fn a_refused_request_is_retried_until_all_refuse() {
    let body = "{\"error\":\"full\"}";
    let full = Engine::always(vec![json("503 Service Unavailable", body)]).await;
    let full_too = Engine::always(vec![json("503 Service Unavailable", body)]).await;
    let alive = Engine::always(vec![json("200 OK", "{}")]).await;
    let fleet = Fleet::start(&[&full, &alive, &full_too]).await;
    for _ in 0..8 {
        assert_eq!(fleet.client().await.ask(chat("")).await.status, 200);
    }
    fleet.is_idle().await;

    let fleet = Fleet::start(&[&full, &full_too]).await;
    let tried = full.requests().len() + full_too.requests().len();
    let answer = fleet.client().await.ask(chat("")).await;
    assert_eq!((answer.status, answer.body.as_str()), (503, body));
    assert_eq!(full.requests().len() + full_too.requests().len(), tried + 2);
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::EngineError, 503), 1);
}

#[tokio::test]
async fn a_broken_reused_connection_is_not_reused_again() {
    let engine = Engine::start(|number| match number {
        1 => vec![Step::Close],
        _ => vec![json("200 OK", "{}")],
    })
    .await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    assert_eq!(client.ask(chat("")).await.status, 200);
    let answer = client.ask(chat("")).await;
    answer.refuses(502, "backend_broke");
    assert_eq!(answer.header("x-should-retry"), Some("false"));
    assert_eq!((engine.requests().len(), engine.connections()), (2, 1));
    fleet.is_idle().await;
}

#[tokio::test]
async fn a_request_that_crashed_two_engines_is_refused() {
    let deadly = [
        Engine::always(vec![Step::Close]).await,
        Engine::always(vec![stream_head(), chunk("data: {}\n\n"), Step::Close]).await,
    ];
    let fleet = Fleet::start(&[&deadly[0], &deadly[1]]).await;
    let mut refused = None;
    for _ in 0..3 {
        let answer = fleet.client().await.ask(chat("")).await;
        fleet.is_idle().await;
        refused = Some(answer);
    }
    let refused = refused.unwrap();
    refused.refuses(422, "request_breaks_backends");
    assert_eq!(refused.header("x-should-retry"), Some("false"));
    let ran: usize = deadly.iter().map(|engine| engine.requests().len()).sum();
    assert_eq!(ran, 2);
    assert_eq!(fleet.metrics.suspects_refused.get(), 1);
    let other = fleet.client().await.ask(chat(",\"n\":1")).await;
    assert_ne!(other.status, 422, "it has broken nothing");
}

#[tokio::test]
async fn a_model_that_its_engine_lost_is_served_by_another() {
    let lost = r#"{"error":{"message":"The model `m` does not exist.","code":404}}"#;
    let other = Engine::always(vec![json("404 Not Found", lost)]).await;
    let alive = Engine::always(vec![json("200 OK", "{}")]).await;
    let fleet = Fleet::start(&[&other, &alive]).await;
    for _ in 0..4 {
        let answer = fleet.client().await.ask(chat("")).await;
        assert_eq!(
            (answer.status, answer.header("x-quorate-backend")),
            (200, Some("e1"))
        );
    }
    fleet.is_idle().await;
    let fleet = Fleet::start(&[&other]).await;
    let answer = fleet.client().await.ask(chat("")).await;
    assert_eq!((answer.status, &*answer.body), (404, lost));
    fleet.is_idle().await;
    let charged = fleet.charged().await;
    assert_eq!(
        charged.input_uncached + charged.input_cached + charged.output,
        0
    );

    // Nothing says that another engine would know more.
    let unknown = Engine::always(vec![json("404 Not Found", r#"{"detail":"Not Found"}"#)]).await;
    let unknown_too =
        Engine::always(vec![json("404 Not Found", r#"{"detail":"Not Found"}"#)]).await;
    let fleet = Fleet::start(&[&unknown, &unknown_too]).await;
    assert_eq!(fleet.client().await.ask(chat("")).await.status, 404);
    assert_eq!(unknown.requests().len() + unknown_too.requests().len(), 1);
}

#[tokio::test]
async fn a_request_that_succeeds_between_two_breaks_is_not_refused() {
    let engine = Engine::start(|number| match number % 2 {
        0 => vec![Step::Close],
        _ => vec![json("200 OK", "{}")],
    })
    .await;
    let fleet = Fleet::start(&[&engine]).await;
    for _ in 0..4 {
        assert_eq!(fleet.client().await.ask(chat("")).await.status, 502);
        assert_eq!(fleet.client().await.ask(chat("")).await.status, 200);
        fleet.is_idle().await;
        // No probe tells that the engine is back.
        fleet.assume_healthy();
    }
    assert_eq!(fleet.metrics.suspects_refused.get(), 0);
}

#[tokio::test]
async fn an_exhausted_retry_budget_ends_retries() {
    let refusal = || vec![json("503 Service Unavailable", "{}")];
    let full = [
        Engine::always(refusal()).await,
        Engine::always(refusal()).await,
    ];
    let fleet = Fleet::start_with(&[&full[0], &full[1]], Duration::ZERO, |settings| {
        settings.retry.budget_percent = 0;
        settings.retry.concurrency_min = 0;
    })
    .await;
    assert_eq!(fleet.client().await.ask(chat("")).await.status, 503);
    let asked: usize = full.iter().map(|engine| engine.requests().len()).sum();
    assert_eq!((asked, fleet.metrics.retries_refused.get()), (1, 1));
}

#[tokio::test]
async fn should_retry_is_false_for_requests_that_may_have_run() {
    for (status, told) in [
        ("500 Oops", Some("false")),
        ("501 No", None),
        ("400 Bad", None),
    ] {
        let engine = Engine::always(vec![json(status, "{}")]).await;
        let fleet = Fleet::start(&[&engine]).await;
        let answer = fleet.client().await.ask(chat("")).await;
        assert_eq!(answer.header("x-should-retry"), told, "{status}");
    }
}

#[tokio::test]
async fn chunked_encoding_overrides_content_length() {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n";
    let framed = format!("{head}content-length: 9\r\ntransfer-encoding: chunked\r\n\r\n");
    let whole = format!("{framed}2\r\n{{}}\r\n0\r\n\r\n").into_bytes();
    let engine = Engine::always(vec![Step::Send(whole)]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let answer = fleet.client().await.ask(chat("")).await;
    assert_eq!((answer.status, answer.body.as_str()), (200, "{}"));
    assert!(answer.is_complete);
}

#[tokio::test]
async fn a_request_that_killed_an_engine_is_not_retried() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mortal = Engine::at(listener.local_addr().unwrap());
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut buffer = vec![0; 64 * 1024];
        assert!(stream.read(&mut buffer).await.unwrap() > 0);
        let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";
        stream.write_all(answer).await.unwrap();
        assert!(stream.read(&mut buffer).await.unwrap() > 0);
        drop(listener);
    });
    let fleet = Fleet::start(&[&mortal]).await;
    let mut client = fleet.client().await;
    assert_eq!(client.ask(chat("")).await.status, 200);
    let answer = client.ask(chat("")).await;
    answer.refuses(502, "backend_broke");
    fleet.is_idle().await;
}

#[tokio::test]
async fn long_refusals_are_forwarded_and_unbounded_ones_replaced() {
    let long = "x".repeat(300 * 1024);
    for (body, expected) in [(long.clone(), Some(long)), ("x".repeat(2 << 20), None)] {
        let full = Engine::always(vec![json("503 Service Unavailable", &body)]).await;
        let fleet = Fleet::start(&[&full]).await;
        let answer = fleet.client().await.ask(chat("")).await;
        assert_eq!(answer.status, 503);
        match expected {
            Some(expected) => assert_eq!(answer.body, expected),
            None => assert_eq!(answer.error_code(), "backends_refuse"),
        }
        fleet.is_idle().await;
    }
}

#[tokio::test]
async fn a_reused_connection_broken_within_the_head_is_not_retried() {
    let engine = Engine::start(|number| match number {
        1 => vec![Step::Send(b"HTTP/1.1 200 OK\r\n".to_vec()), Step::Close],
        _ => vec![json("200 OK", "{}")],
    })
    .await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    assert_eq!(client.ask(chat("")).await.status, 200);
    assert_eq!(client.ask(chat("")).await.status, 502);
    assert_eq!(engine.requests().len(), 2);
}

#[tokio::test]
async fn a_broken_new_connection_is_not_retried() {
    let (engine, other) = (
        Engine::always(vec![Step::Close]).await,
        Engine::always(vec![Step::Close]).await,
    );
    let fleet = Fleet::start(&[&engine, &other]).await;
    let answer = fleet.client().await.ask(chat("")).await;
    answer.refuses(502, "backend_broke");
    assert_eq!(engine.requests().len() + other.requests().len(), 1);
    fleet.is_idle().await;
}

#[tokio::test]
async fn a_connection_closed_while_idle_is_not_used() {
    let engine = Engine::always(vec![json("200 OK", "{}"), Step::Close]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    for _ in 0..5 {
        assert_eq!(client.ask(chat("")).await.status, 200);
    }
    assert_eq!((engine.requests().len(), engine.connections()), (5, 5));
}
