//! gRPC itself at a picker: methods that it does not have, compressed messages, and limits that
//! change while connections are open.

use api::proxy::ProxyLimits;
use api::proxy::picker::PickedOutcome;
use api::proxy::picker::ext_proc::BodySendMode;
use bytes::Bytes;
use http::{HeaderMap, Request};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tonic::{Code, Status};

use super::fleet::eventually;
use super::picking::{Listening, engines, head, modes, start, start_with, upload};

const PROCESS: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";

async fn connected(listening: &Listening) -> SendRequest<Full<Bytes>> {
    let stream = TcpStream::connect(listening.address).await.unwrap();
    let handshake = http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
    let (sender, connection) = handshake.await.unwrap();
    tokio::spawn(connection);
    sender
}

/// Calls a method with a framed message. Returns the status of the call, with its headers.
async fn called(
    sender: &mut SendRequest<Full<Bytes>>,
    path: &str,
    message: &'static [u8],
) -> (Status, HeaderMap) {
    let request = Request::post(format!("http://picker{path}"))
        .header("content-type", "application/grpc")
        .header("grpc-encoding", "gzip")
        .body(Full::new(Bytes::from_static(message)));
    let response = sender.send_request(request.unwrap()).await.unwrap();
    assert_eq!(response.status(), 200, "{path}");
    let (head, body) = response.into_parts();
    let body = body.collect().await.unwrap();
    let trailers = body.trailers().cloned().unwrap_or_default();
    let status = { Status::from_header_map(&head.headers) }
        .or_else(|| Status::from_header_map(&trailers))
        .expect("each call has a status");
    (status, head.headers)
}

#[tokio::test]
async fn an_unknown_method_is_unimplemented() {
    let engines = engines().await;
    let (fleet, _) = start(&engines).await;
    let listening = Listening::of(&fleet).await;
    let mut sender = connected(&listening).await;
    for path in [
        "/",
        "/envoy.service.ext_proc.v3.ExternalProcessor/Another",
        "/envoy.service.auth.v3.Authorization/Check",
        "/grpc.health.v1.Health/Another",
    ] {
        let (status, _) = called(&mut sender, path, &[0, 0, 0, 0, 0]).await;
        assert_eq!(status.code(), Code::Unimplemented, "{path}");
    }
    assert_eq!(listening.metrics.streams.get(), 0);
}

#[tokio::test]
async fn compressed_messages_are_refused_with_their_reason() {
    let engines = engines().await;
    let (fleet, _) = start(&engines).await;
    let listening = Listening::of(&fleet).await;
    let mut sender = connected(&listening).await;
    let (status, headers) = called(&mut sender, PROCESS, &[1, 0, 0, 0, 2, 7, 7]).await;
    assert_eq!(status.code(), Code::Unimplemented, "{status}");
    assert!(status.message().contains("compress"), "{status}");
    assert_eq!(headers["grpc-accept-encoding"], "identity");
    let (status, _) = called(&mut sender, PROCESS, &[0, 0, 0, 0, 2, 7]).await;
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    eventually("both are counted", || {
        listening.metrics.requests(PickedOutcome::Broken) == 2
    })
    .await;
    fleet.is_idle().await;
}

#[tokio::test]
async fn a_changed_body_limit_holds_for_open_connections() {
    let engines = engines().await;
    let limits = ProxyLimits {
        body_bytes_max: 200,
        ..ProxyLimits::default()
    };
    let (fleet, picking) = start_with(&engines, |settings| settings.limits = limits).await;
    let long = "x".repeat(3 << 20);
    let buffered = BodySendMode::Buffered;
    // A body that is not too long is no JSON.
    for (body_bytes_max, expected) in [(200, 413), (8 << 20, 400), (200, 413)] {
        fleet.proxy.replace_limits(ProxyLimits {
            body_bytes_max,
            ..limits
        });
        let mut talk = picking.open();
        talk.say_with(head(), modes(buffered, buffered, false))
            .await;
        talk.next().await;
        talk.say(upload(&long, true)).await;
        let (status, body) = talk.refused().await;
        assert_eq!(status, expected, "{body_bytes_max}: {body}");
    }
    fleet.is_idle().await;
}
