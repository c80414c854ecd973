//! Clients that stay connected and stop reading.

use std::time::Duration;

use api::proxy::RequestOutcome;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;

use super::client::{Client, chat};
use super::engine::{DONE, Engine, Step, chunk, last_chunk, stream_head, usage_chunk};
use super::fleet::{Fleet, eventually};

const STREAM: &str = ",\"stream\":true";

/// Returns a response longer than all buffers between an engine and a client, without an end.
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
async fn a_client_that_stops_reading_is_disconnected() {
    let engine = Engine::always(endless()).await;
    let fleet = impatient(&engine).await;
    let mut client = fleet.client().await;
    client.send(chat(STREAM)).await;
    eventually("it is running", || fleet.running() == 1).await;
    fleet.is_idle().await;
    eventually("no connection", || fleet.metrics.connections.get() == 0).await;
    assert_eq!(fleet.count(RequestOutcome::ClientLeft, 200), 1);
    assert!(!client.answer().await.is_complete);
}

#[tokio::test]
async fn a_stalled_http2_stream_is_reset_and_others_continue() {
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
    assert_eq!(fleet.count(RequestOutcome::ClientLeft, 200), 1);
    let other = sender.send_request(request()).await.unwrap();
    assert_eq!(other.collect().await.unwrap().to_bytes(), "{}");
    assert!(standing.collect().await.is_err(), "it never looks whole");
    assert!(!connection.is_finished());
}

/// Number of events of 1 MiB in a response that fits into the read-ahead, but not into the buffers
/// between the engine and the client.
const LONG: usize = 48;

fn long(usage: &str) -> Vec<Step> {
    let piece = chunk(&format!("data: {}\n\n", "x".repeat(1024 * 1024)));
    let mut steps = vec![stream_head()];
    steps.extend(std::iter::repeat_n(piece, LONG));
    steps.extend([chunk(usage), chunk(DONE), last_chunk()]);
    steps
}

async fn far_sighted(engine: &Engine) -> Fleet {
    Fleet::start_with(&[engine], Duration::ZERO, |settings| {
        settings.limits.read_ahead_bytes_max = 64 * 1024 * 1024;
    })
    .await
}

/// Returns a client that has read nothing of a response that the engine has finished.
async fn unread() -> (Engine, Fleet, Client) {
    let engine = Engine::always(long(usage_chunk())).await;
    let fleet = far_sighted(&engine).await;
    let mut client = fleet.client().await;
    client.send(chat(STREAM)).await;
    eventually("the engine's place is free", || {
        engine.requests().len() == 1 && fleet.running() == 0
    })
    .await;
    (engine, fleet, client)
}

#[tokio::test]
async fn a_finished_engine_is_free_while_its_client_reads() {
    let (_engine, fleet, mut client) = unread().await;
    assert_eq!(fleet.metrics.in_flight.get(), 1, "its bytes wait");
    let answer = client.answer().await;
    assert!(answer.is_complete);
    assert!(answer.body.len() > LONG * 1024 * 1024);
    assert!(answer.body.ends_with(DONE));
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::Finished, 200), 1);
    let charge = fleet.charged().await;
    assert_eq!((charge.input_uncached, charge.output), (7, 2));
}

#[tokio::test]
async fn a_client_that_reads_nothing_is_charged_for_the_output() {
    let (_engine, fleet, client) = unread().await;
    drop(client);
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::ClientLeft, 200), 1);
    let charge = fleet.charged().await;
    assert_eq!((charge.input_uncached, charge.output), (7, 2));
}

#[tokio::test]
async fn a_client_blocking_its_engine_is_disconnected_first() {
    let engine = Engine::always(endless()).await;
    let fleet = Fleet::start_with(&[&engine], Duration::ZERO, |settings| {
        settings.timeouts.untaken = Duration::from_secs(600);
        settings.timeouts.held_back = Duration::from_millis(50);
    })
    .await;
    let mut client = fleet.client().await;
    client.send(chat(STREAM)).await;
    eventually("it is running", || fleet.running() == 1).await;
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::ClientLeft, 200), 1);
    assert!(!client.answer().await.is_complete);
}

#[tokio::test]
async fn buffered_bytes_of_all_answers_are_bounded() {
    let engine = Engine::always(long(usage_chunk())).await;
    let fleet = Fleet::start_with(&[&engine], Duration::ZERO, |settings| {
        settings.limits.read_ahead_bytes_max = 64 * 1024 * 1024;
        settings.limits.held_bytes_max = Some(1024 * 1024);
        settings.timeouts.held_back = Duration::from_millis(50);
    })
    .await;
    let mut client = fleet.client().await;
    client.send(chat(STREAM)).await;
    eventually("it is running", || fleet.running() == 1).await;
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::ClientLeft, 200), 1);
}
