//! Requests that are rejected while their body is being sent: the client can read the response.
//!
//! Over HTTP/2 some clients (curl 7.88: error 92) drop a response if its stream is reset while they
//! send, whatever the reset code.

use std::convert::Infallible;
use std::time::Duration;

use api::proxy::{ApiKeys, ProxySettings};
use bytes::Bytes;
use futures_util::stream;
use http::{Request, Response};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use super::client::post;
use super::engine::{Engine, json};
use super::fleet::{Fleet, PATIENT, eventually};

const CHAT: &str = "/v1/chat/completions";
/// More than the windows of a stream and its connection: the server must read to receive it.
const LONG: usize = 4 * 1024 * 1024;
const PIECE: usize = 16 * 1024;

/// Starts a fleet that rejects clients without a key, and reads on for this long.
async fn refusing(reads_on: Duration) -> (Engine, Fleet) {
    start(|settings| {
        let mut keys = ApiKeys::default();
        keys.add("sk-right", None);
        settings.api_keys = Some(keys);
        settings.timeouts.refused_body = reads_on;
    })
    .await
}

async fn start(change: impl FnOnce(&mut ProxySettings)) -> (Engine, Fleet) {
    let engine = Engine::always(vec![json("200 OK", "{}")]).await;
    let fleet = Fleet::start_with(&[&engine], PATIENT, change).await;
    (engine, fleet)
}

/// A response to a request whose body is not complete.
struct EarlyAnswer {
    response: Response<Incoming>,
    /// Sends the rest of the body.
    body: mpsc::Sender<Bytes>,
    _connection: AbortOnDropHandle<Result<(), hyper::Error>>,
}

/// Sends the headers of a request over HTTP/2 and waits for the response.
async fn early(fleet: &Fleet, length: Option<usize>) -> EarlyAnswer {
    let stream = TokioIo::new(TcpStream::connect(fleet.address).await.unwrap());
    let (mut sender, connection) = http2::handshake(TokioExecutor::new(), stream)
        .await
        .unwrap();
    let connection = AbortOnDropHandle::new(tokio::spawn(connection));
    let (body, pieces) = mpsc::channel(1);
    let pieces = stream::unfold(pieces, |mut pieces: mpsc::Receiver<Bytes>| async move {
        let piece = pieces.recv().await?;
        Some((Ok::<_, Infallible>(Frame::data(piece)), pieces))
    });
    let mut request = Request::post(format!("http://router{CHAT}"));
    if let Some(length) = length {
        request = request.header("content-length", length);
    }
    let request = request.body(StreamBody::new(Box::pin(pieces))).unwrap();
    EarlyAnswer {
        response: sender.send_request(request).await.unwrap(),
        body,
        _connection: connection,
    }
}

/// Checks the status, reads the whole response, then sends a long body to its end.
async fn is_read_to_the_end(early: EarlyAnswer, status: u16) {
    assert_eq!(early.response.status(), status);
    let answer = early.response.collect().await.unwrap().to_bytes();
    assert!(answer.starts_with(b"{\"error\""), "{answer:?}");
    for sent in 0..LONG / PIECE {
        let piece = Bytes::from_static(&[b' '; PIECE]);
        let taken = early.body.send(piece).await;
        assert!(taken.is_ok(), "reset after {sent} pieces");
    }
}

#[tokio::test]
async fn the_body_of_a_refused_http2_request_is_still_read() {
    let (engine, fleet) = refusing(PATIENT).await;
    is_read_to_the_end(early(&fleet, Some(LONG)).await, 401).await;
    is_read_to_the_end(early(&fleet, None).await, 401).await;
    assert!(engine.requests().is_empty());
    fleet.is_idle().await;

    let (_engine, fleet) = start(|settings| {
        settings.limits.body_bytes_max = LONG as u64;
        settings.timeouts.refused_body = PATIENT;
    })
    .await;
    is_read_to_the_end(early(&fleet, Some(LONG + 1)).await, 413).await;

    let (_engine, fleet) = start(|settings| {
        settings.trusted_proxies.clear();
        settings.limits.requests_per_address_max = Some(0);
        settings.timeouts.refused_body = PATIENT;
    })
    .await;
    is_read_to_the_end(early(&fleet, Some(LONG)).await, 429).await;
}

#[tokio::test]
async fn a_refused_body_that_never_arrives_is_abandoned() {
    let (_engine, fleet) = refusing(Duration::from_millis(20)).await;
    let early = early(&fleet, Some(LONG)).await;
    assert_eq!(early.response.status(), 401);
    // The stream is reset, and the sender notices.
    early.body.closed().await;
    let answer = early.response.collect().await.unwrap().to_bytes();
    assert!(answer.starts_with(b"{\"error\""), "{answer:?}");
    eventually("nothing is left", || fleet.metrics.reading.get() == 0).await;
}

#[tokio::test]
async fn an_address_at_its_limit_can_read_its_refusal() {
    let (_engine, fleet) = start(|settings| {
        settings.trusted_proxies.clear();
        settings.limits.requests_per_address_max = Some(0);
        settings.timeouts.refused_body = PATIENT;
    })
    .await;
    let mut client = fleet.client().await;
    // More than socket buffers hold: the client can send all of it only if the server reads.
    let body = " ".repeat(4 * LONG);
    client.send(post(CHAT, "", &body)).await;
    let answer = client.answer().await;
    answer.refuses(429, "too_many_requests_at_once");
}
