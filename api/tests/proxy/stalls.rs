//! Clients that stay and stop reading.

use std::time::Duration;

use api::proxy::Outcome;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;

use super::client::chat;
use super::engine::{Engine, Step, chunk, stream_head};
use super::fleet::{Fleet, eventually};

const STREAM: &str = ",\"stream\":true";

/// More than all buffers between an engine and a client hold.
fn endless() -> Vec<Step> {
    let piece = chunk(&format!("data: {}\n\n", "x".repeat(1024 * 1024)));
    let mut steps = vec![stream_head()];
    steps.extend(std::iter::repeat_n(piece, 256));
    steps.push(Step::Hang);
    steps
}

async fn impatient(engine: &Engine) -> Fleet {
    Fleet::start_with(&[engine], Duration::ZERO, |settings| {
        settings.timeouts.untaken = Duration::from_millis(50);
    })
    .await
}

#[tokio::test]
async fn a_client_that_stops_reading_is_left() {
    let engine = Engine::always(endless()).await;
    let fleet = impatient(&engine).await;
    let mut client = fleet.client().await;
    client.send(chat(STREAM)).await;
    eventually("it is running", || fleet.running() == 1).await;
    fleet.is_idle().await;
    eventually("no connection", || fleet.metrics.connections.get() == 0).await;
    assert_eq!(fleet.count(Outcome::ClientLeft, 200), 1);
    assert!(!client.answer().await.is_complete);
}

#[tokio::test]
async fn an_http2_stream_that_stands_still_is_left_and_the_others_go_on() {
    let engine = Engine::start(|number| match number {
        0 => endless(),
        _ => vec![super::engine::json("200 OK", "{}")],
    })
    .await;
    let fleet = impatient(&engine).await;
    let stream = TokioIo::new(TcpStream::connect(fleet.address).await.unwrap());
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), stream)
            .await
            .unwrap();
    let connection = tokio::spawn(connection);
    let request = || {
        let body = chat(STREAM).split_once("\r\n\r\n").unwrap().1.to_owned();
        http::Request::post("http://router/v1/chat/completions")
            .body(Full::new(bytes::Bytes::from(body)))
            .unwrap()
    };
    let standing = sender.send_request(request()).await.unwrap();
    assert_eq!(standing.status(), 200);
    fleet.is_idle().await;
    assert_eq!(fleet.count(Outcome::ClientLeft, 200), 1);
    let other = sender.send_request(request()).await.unwrap();
    assert_eq!(other.collect().await.unwrap().to_bytes(), "{}");
    assert!(standing.collect().await.is_err(), "it never looks whole");
    assert!(!connection.is_finished());
}
