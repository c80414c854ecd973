//! Drain: requests that have begun are finished, no others begin.

use std::sync::Arc;
use std::time::Duration;

use api::proxy::DrainResult;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use super::client::chat;
use super::engine::{DONE, Engine, Step, chunk, delta, json, last_chunk, stream_head};
use super::fleet::{Fleet, eventually};

#[tokio::test]
async fn draining_finishes_streams_closes_idle_connections_and_accepts_nothing() {
    let gate = Arc::new(Semaphore::new(0));
    let stream = vec![
        stream_head(),
        chunk(&delta("a", 1)),
        Step::Await(gate.clone()),
        chunk(DONE),
        last_chunk(),
    ];
    let engine = Engine::start(move |n| {
        if n == 0 {
            vec![json("200 OK", "{}")]
        } else {
            stream.clone()
        }
    })
    .await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut idle = fleet.client().await;
    assert_eq!(idle.ask(chat("")).await.status, 200);
    let mut streaming = fleet.client().await;
    streaming.send(chat(",\"stream\":true")).await;
    streaming.read_until("\"a\"").await;
    fleet.drain.cancel();
    assert!(idle.is_closed().await);
    assert!(TcpStream::connect(fleet.address).await.is_err());
    assert_eq!(fleet.running(), 1);
    gate.add_permits(1);
    let answer = streaming.answer().await;
    assert!(answer.is_complete && answer.body.ends_with(DONE));
    assert!(streaming.is_closed().await);
    fleet.is_idle().await;
    assert_eq!(fleet.server.await.unwrap(), DrainResult { cut: 0 });
}

#[tokio::test]
async fn new_requests_during_a_drain_are_sent_elsewhere() {
    let stream = vec![stream_head(), chunk(DONE), last_chunk()];
    let engine = Engine::start(move |n| match n {
        2 => stream.clone(),
        _ => vec![json("200 OK", "{}")],
    })
    .await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut known = fleet.client().await;
    assert_eq!(known.ask(chat("")).await.header("connection"), None);
    fleet.leaving.cancel();
    // Old and new connections still accept requests; each is the last one of its connection.
    let answer = known.ask(chat("")).await;
    assert_eq!(
        (answer.status, answer.header("connection")),
        (200, Some("close"))
    );
    assert!(known.is_closed().await);
    for request in [
        chat(",\"stream\":true"),
        "GET /v1/models HTTP/1.1\r\n\r\n".to_owned(),
    ] {
        let mut new = fleet.client().await;
        let answer = new.ask(request).await;
        assert_eq!(answer.header("connection"), Some("close"));
        assert!(answer.is_complete);
        assert!(new.is_closed().await);
    }
    fleet.drain.cancel();
    assert_eq!(fleet.server.await.unwrap(), DrainResult { cut: 0 });
}

#[tokio::test]
async fn http2_streams_are_charged_before_the_drain_ends() {
    let engine = Engine::start(|number| match number {
        0 => vec![Step::Hang],
        _ => vec![stream_head(), chunk(&delta("a", 1)), Step::Hang],
    })
    .await;
    let fleet = Fleet::start_with(&[&engine], Duration::from_millis(20), |_| {}).await;
    let stream = TokioIo::new(TcpStream::connect(fleet.address).await.unwrap());
    let (mut sender, connection) = http2::handshake(TokioExecutor::new(), stream)
        .await
        .unwrap();
    let connection = tokio::spawn(connection);
    let request = || {
        let body = chat(",\"stream\":true")
            .split_once("\r\n\r\n")
            .unwrap()
            .1
            .to_owned();
        http::Request::post("http://router/v1/chat/completions")
            .body(Full::new(bytes::Bytes::from(body)))
            .unwrap()
    };
    let prefill = tokio::spawn(sender.clone().send_request(request()));
    eventually("it is running", || engine.requests().len() == 1).await;
    let streaming = sender.send_request(request()).await.unwrap();
    fleet.drain.cancel();
    assert_eq!(fleet.server.await.unwrap(), DrainResult { cut: 1 });
    assert_eq!(fleet.metrics.in_flight.get(), 0);
    assert!(prefill.await.unwrap().is_err());
    assert!(streaming.collect().await.is_err());
    // The result depends on what was in flight.
    let _ = connection.await.unwrap();
}

#[tokio::test]
async fn a_request_sent_before_the_drain_is_answered() {
    let engine = Engine::always(vec![json("200 OK", "{}")]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut used = fleet.client().await;
    assert_eq!(used.ask(chat("")).await.status, 200);
    let mut new = fleet.client().await;
    fleet.drain.cancel();
    for client in [&mut used, &mut new] {
        let answer = client.ask(chat("")).await;
        assert_eq!(
            (answer.status, answer.header("connection")),
            (200, Some("close"))
        );
        assert!(client.is_closed().await);
    }
    assert_eq!(fleet.server.await.unwrap(), DrainResult { cut: 0 });
}

#[tokio::test]
async fn unfinished_requests_are_cut_at_the_drain_deadline() {
    let engine = Engine::always(vec![stream_head(), chunk(&delta("a", 1)), Step::Hang]).await;
    let fleet = Fleet::start_with(&[&engine], Duration::from_millis(20), |_| {}).await;
    let mut client = fleet.client().await;
    client.send(chat(",\"stream\":true")).await;
    client.read_until("\"a\"").await;
    fleet.drain.cancel();
    assert!(!client.answer().await.is_complete);
    eventually("the engine is left", || engine.abandoned() == 1).await;
    fleet.is_idle().await;
    assert_eq!(fleet.server.await.unwrap(), DrainResult { cut: 1 });
}
