//! Clients without a key: silent connections, bodies that never arrive, refused requests, and bytes
//! that are not HTTP.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http::{Request, StatusCode};
use http_body_util::StreamBody;
use hyper::body::Frame;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{interval, sleep, timeout};

use super::SoakContext;
use super::kinds::ClientKind;
use crate::hostile::client::{self, OutgoingRequest};
use crate::processes::access::ClientAccess;

/// Number of silent connections to each data port. Each other port gets half as many.
const IDLE: usize = 160;
/// Number of HTTP/2 connections to each data port, and number of streams per connection.
const BODIES: (usize, usize) = (5, 90);
/// Pause between two requests of a sender without a key.
const KEYLESS_PAUSE: Duration = Duration::from_millis(40);
/// Pause between two writes of garbage to each port.
const GARBAGE_PAUSE: Duration = Duration::from_millis(150);
/// Pause before a closed connection is reopened. The aim is to hold places, not to cause work.
const REOPEN: Duration = Duration::from_secs(3);
/// Maximum wait for a response.
const PATIENCE: Duration = Duration::from_secs(5);

const IDLE_FROM: Ipv4Addr = Ipv4Addr::new(127, 0, 9, 1);
const BODIES_FROM: Ipv4Addr = Ipv4Addr::new(127, 0, 9, 2);
const KEYLESS_FROM: Ipv4Addr = Ipv4Addr::new(127, 0, 9, 3);
const GARBAGE_FROM: Ipv4Addr = Ipv4Addr::new(127, 0, 9, 4);

/// Holds idle connections, and reopens those that are closed, until the phase is over.
pub(super) async fn idle(scene: Arc<SoakContext>) {
    let mut all = JoinSet::new();
    for number in 0..IDLE {
        let silent: &[u8] = match number % 3 {
            0 => b"",
            1 => b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n",
            _ => b"PRI * HTTP/2.0\r\n",
        };
        let ports = scene.data.iter().copied();
        let others = scene.admin.iter().chain(&scene.peer).copied();
        let others = others.filter(|_| number % 2 == 0);
        // Some of them do a TLS handshake first.
        let access = match number % 4 {
            0 => scene.access.clone(),
            _ => ClientAccess::default(),
        };
        for to in ports.chain(others) {
            let (scene, access) = (scene.clone(), access.clone());
            all.spawn(async move {
                while !scene.over.is_cancelled() {
                    scene.book(ClientKind::Idle).asked += 1;
                    let opened = client::connect(IDLE_FROM.into(), to).await;
                    let how = match opened {
                        Ok(socket) => hold(&scene, (&access, to), socket, silent).await,
                        Err(_) => "refused",
                    };
                    scene.book(ClientKind::Idle).count(how);
                    scene.unless_over(sleep(REOPEN)).await;
                }
            });
        }
    }
    while all.join_next().await.is_some() {}
}

async fn hold(
    scene: &SoakContext,
    (access, to): (&ClientAccess, SocketAddr),
    socket: TcpStream,
    said: &[u8],
) -> &'static str {
    let secured = scene.unless_over(access.secure(socket, to)).await;
    let mut socket = match secured {
        None => return "held to the end",
        Some(Ok(socket)) => socket,
        Some(Err(_)) => return "closed",
    };
    if socket.write_all(said).await.is_err() {
        return "closed";
    }
    let mut answer = [0; 512];
    loop {
        let read = scene.unless_over(socket.read(&mut answer)).await;
        match read {
            None => return "held to the end",
            Some(Ok(0) | Err(_)) => return "closed",
            Some(Ok(_)) => {}
        }
    }
}

/// Opens streams whose bodies never arrive, until the phase is over.
pub(super) async fn bodies(scene: Arc<SoakContext>) {
    let mut all = JoinSet::new();
    for to in &scene.data {
        for _ in 0..BODIES.0 {
            let (scene, to) = (scene.clone(), *to);
            all.spawn(async move {
                while !scene.over.is_cancelled() {
                    let how = match client::connect(BODIES_FROM.into(), to).await {
                        Ok(socket) => open_streams(&scene, to, socket).await,
                        Err(_) => "refused",
                    };
                    scene.book(ClientKind::Bodies).count(how);
                    scene.unless_over(sleep(REOPEN)).await;
                }
            });
        }
    }
    while all.join_next().await.is_some() {}
}

async fn open_streams(scene: &SoakContext, to: SocketAddr, socket: TcpStream) -> &'static str {
    let Ok(socket) = scene.access.speaking(b"h2").secure(socket, to).await else {
        return "closed";
    };
    let shaken = http2::handshake(TokioExecutor::new(), TokioIo::new(socket)).await;
    let Ok((send, connection)) = shaken else {
        return "closed";
    };
    let connection = tokio_util::task::AbortOnDropHandle::new(tokio::spawn(connection));
    let mut streams = JoinSet::new();
    for _ in 0..BODIES.1 {
        let mut send = send.clone();
        scene.book(ClientKind::Bodies).asked += 1;
        streams.spawn(async move {
            let never = stream::pending::<Result<Frame<Bytes>, std::convert::Infallible>>();
            let request = Request::post("http://soaked/v1/chat/completions")
                .header("content-type", "application/json")
                .header("content-length", "1000");
            let request = request.body(StreamBody::new(never));
            let response = send
                .send_request(request.expect("the parts are valid"))
                .await;
            response.map(|response| response.status())
        });
    }
    while let Some(Some(ended)) = scene.unless_over(streams.join_next()).await {
        let mut book = scene.book(ClientKind::Bodies);
        match ended {
            Ok(Ok(status)) if status.is_success() => {
                book.harm("answered without a body".to_owned());
            }
            Ok(Ok(status)) => book.count(status.as_str()),
            Ok(Err(_)) | Err(_) => book.count("stream reset"),
        }
    }
    drop(connection);
    "connection over"
}

/// Sends requests without a key or with a wrong one until the phase is over.
pub(super) async fn keyless(scene: Arc<SoakContext>) {
    let mut all = JoinSet::new();
    for replica in 0..scene.data.len() {
        for has_key in [false, true] {
            let scene = scene.clone();
            all.spawn(async move {
                let mut ticks = interval(KEYLESS_PAUSE);
                while scene.unless_over(ticks.tick()).await.is_some() {
                    refused_once(&scene, replica, has_key).await;
                }
            });
        }
    }
    while all.join_next().await.is_some() {}
}

async fn refused_once(scene: &SoakContext, replica: usize, has_key: bool) {
    let body =
        Bytes::from_static(br#"{"model":"soaked","messages":[{"role":"user","content":"hello"}]}"#);
    let mut ask = OutgoingRequest::post("/v1/chat/completions", "wrong", body);
    if !has_key {
        ask.headers.remove(http::header::AUTHORIZATION);
    }
    scene.book(ClientKind::Keyless).asked += 1;
    let asked = timeout(
        PATIENCE,
        client::ask(&scene.access, KEYLESS_FROM, scene.data[replica], ask),
    )
    .await;
    let mut book = scene.book(ClientKind::Keyless);
    match asked {
        Ok(Ok(reply)) if reply.status == StatusCode::OK => {
            book.harm("served without a key".to_owned());
        }
        Ok(Ok(reply)) => book.count(reply.status.as_str()),
        Ok(Err(_)) => book.count("broke"),
        Err(_) => book.count("no answer in 5 s"),
    }
}

/// Writes bytes that are not valid HTTP until the phase is over.
pub(super) async fn garbage(scene: Arc<SoakContext>) {
    let mut random = SmallRng::seed_from_u64(scene.seed ^ 0x6a7b);
    let mut ticks = interval(GARBAGE_PAUSE);
    let ports: Vec<_> = scene
        .data
        .iter()
        .chain(&scene.admin)
        .chain(&scene.peer)
        .copied()
        .collect();
    while scene.unless_over(ticks.tick()).await.is_some() {
        for to in &ports {
            let bytes = handful(&mut random);
            scene.book(ClientKind::Garbage).asked += 1;
            let said = timeout(PATIENCE, async {
                let mut socket = client::connect(GARBAGE_FROM.into(), *to).await?;
                socket.write_all(&bytes).await?;
                socket.shutdown().await?;
                let mut answer = Vec::new();
                socket.read_to_end(&mut answer).await
            });
            let how = match said.await {
                Ok(Ok(0)) => "closed",
                Ok(Ok(_)) => "refused with an answer",
                Ok(Err(_)) => "reset",
                Err(_) => "no end in 5 s",
            };
            scene.book(ClientKind::Garbage).count(how);
        }
    }
}

fn handful(random: &mut SmallRng) -> Vec<u8> {
    let beginning: &[u8] = match random.random_range(0..5) {
        0 => b"",
        1 => b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        2 => b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        3 => b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\ntransfer-encoding: chunked, x\r\n\r\n",
        _ => b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    };
    let length = random.random_range(0..2048);
    let noise = (0..length).map(|_| random.random::<u8>());
    beginning.iter().copied().chain(noise).collect()
}
