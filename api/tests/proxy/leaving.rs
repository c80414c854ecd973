//! Clients that leave: the engine learns of it at once, and nothing is left behind.

use api::proxy::RequestOutcome;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::client::{chat, post};
use super::engine::{DONE, Engine, Step, chunk, delta, stream_head};
use super::fleet::{Fleet, eventually};

async fn is_left(engine: &Engine, fleet: &Fleet) {
    eventually("the engine's connection is closed", || {
        engine.abandoned() == 1
    })
    .await;
    fleet.is_idle().await;
}

#[tokio::test]
async fn a_disconnect_during_prefill_closes_the_engine_connection() {
    let engine = Engine::always(vec![Step::Hang]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    client.send(chat("")).await;
    eventually("it is running", || engine.requests().len() == 1).await;
    assert_eq!(fleet.running(), 1);
    drop(client);
    is_left(&engine, &fleet).await;
    assert_eq!(fleet.count(RequestOutcome::ClientLeft, 0), 1);
}

#[tokio::test]
async fn a_disconnect_in_mid_stream_closes_the_engine_connection() {
    let engine = Engine::always(vec![stream_head(), chunk(&delta("a", 1)), Step::Hang]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    client.send(chat(",\"stream\":true")).await;
    client.read_until("\"a\"").await;
    drop(client);
    is_left(&engine, &fleet).await;
    assert_eq!(fleet.count(RequestOutcome::ClientLeft, 200), 1);
}

/// SDKs close their connection at the last event, which may be before the end of the body.
#[tokio::test]
async fn a_disconnect_after_the_last_event_counts_as_finished() {
    let typed = |kind: &str| format!("event: {kind}\ndata: {{\"type\":\"{kind}\"}}\n\n");
    let body = r#"{"model":"m","stream":true,"max_tokens":9,"input":"hi","messages":[{"role":"user","content":"hi"}]}"#;
    for (path, last) in [
        ("/v1/chat/completions", DONE.to_owned()),
        ("/v1/responses", typed("response.completed")),
        ("/v1/messages", typed("message_stop")),
    ] {
        let events = [delta("a", 1), last.clone()].concat();
        let engine = Engine::always(vec![stream_head(), chunk(&events), Step::Hang]).await;
        let fleet = Fleet::start(&[&engine]).await;
        let mut client = fleet.client().await;
        client.send(post(path, "", body)).await;
        client.read_until(last.trim_end()).await;
        drop(client);
        is_left(&engine, &fleet).await;
        assert_eq!(fleet.count(RequestOutcome::ClientLeft, 200), 0, "{path}");
        assert_eq!(fleet.count(RequestOutcome::Finished, 200), 1, "{path}");
    }
}

#[tokio::test]
async fn a_reset_counts_as_a_disconnect() {
    let engine = Engine::always(vec![Step::Hang]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    client.send(chat("")).await;
    eventually("it is running", || engine.requests().len() == 1).await;
    client.stream.set_zero_linger().unwrap();
    drop(client);
    is_left(&engine, &fleet).await;
}

#[tokio::test]
async fn a_half_closed_client_counts_as_disconnected() {
    for (fields, steps) in [
        ("", vec![Step::Hang]),
        (
            ",\"stream\":true",
            vec![stream_head(), chunk(&delta("a", 1)), Step::Hang],
        ),
    ] {
        let engine = Engine::always(steps).await;
        let fleet = Fleet::start(&[&engine]).await;
        let mut client = fleet.client().await;
        client.send(chat(fields)).await;
        eventually("it is running", || engine.requests().len() == 1).await;
        client.stream.shutdown().await.unwrap();
        is_left(&engine, &fleet).await;
        assert!(!client.answer().await.is_complete);
    }
}

#[tokio::test]
async fn a_disconnect_within_the_body_leaves_nothing_behind() {
    let engine = Engine::always(vec![Step::Hang]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    let request = chat("");
    client.send(&request[..request.len() - 5]).await;
    eventually("it is being read", || fleet.metrics.reading.get() == 1).await;
    drop(client);
    fleet.is_idle().await;
    assert_eq!(engine.requests().len(), 0);
}

#[tokio::test]
async fn an_http2_stream_that_is_reset_closes_the_engines_connection() {
    for steps in [
        vec![Step::Hang],
        vec![stream_head(), chunk(&delta("a", 1)), Step::Hang],
    ] {
        let is_streaming = steps.len() > 1;
        let engine = Engine::always(steps).await;
        let fleet = Fleet::start(&[&engine]).await;
        let stream = TokioIo::new(TcpStream::connect(fleet.address).await.unwrap());
        let (mut sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), stream)
                .await
                .unwrap();
        let connection = tokio::spawn(connection);
        let body = chat(",\"stream\":true")
            .split_once("\r\n\r\n")
            .unwrap()
            .1
            .to_owned();
        let request = http::Request::post("http://router/v1/chat/completions")
            .body(Full::new(bytes::Bytes::from(body)))
            .unwrap();
        let response = sender.send_request(request);
        if is_streaming {
            let mut body = response.await.unwrap().into_body();
            body.frame().await.unwrap().unwrap();
            drop(body);
        } else {
            let response = tokio::spawn(response);
            eventually("it is running", || engine.requests().len() == 1).await;
            response.abort();
        }
        is_left(&engine, &fleet).await;
        assert!(!connection.is_finished());
    }
}

#[tokio::test]
async fn disconnects_at_any_moment_leave_nothing_behind() {
    let engine = Engine::start(|number| match number % 2 {
        0 => vec![Step::Hang],
        _ => vec![stream_head(), chunk(&delta("a", 1)), Step::Hang],
    })
    .await;
    let fleet = Fleet::start(&[&engine]).await;
    let request = chat(",\"stream\":true");
    let mut clients = Vec::new();
    for number in 0..60 {
        let mut client = fleet.client().await;
        // From a part of the headers to the whole request.
        client
            .send(&request[..request.len() * (number % 6 + 1) / 6])
            .await;
        clients.push(client);
    }
    eventually("the whole requests arrived", || {
        engine.requests().len() == 10
    })
    .await;
    drop(clients);
    eventually("the engine is left", || engine.abandoned() == 10).await;
    eventually("no connection", || fleet.metrics.connections.get() == 0).await;
    fleet.is_idle().await;
}
