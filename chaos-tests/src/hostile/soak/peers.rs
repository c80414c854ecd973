//! Hand-written gRPC that a stranger sends to the peer port.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use bytes::{BufMut as _, Bytes, BytesMut};
use http::Request;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::time::{interval, timeout};
use tokio_util::task::AbortOnDropHandle;

use super::SoakContext;
use super::kinds::ClientKind;
use crate::hostile::client;
use crate::processes::access::ClientAccess;

const PAUSE: Duration = Duration::from_millis(500);
const PATIENCE: Duration = Duration::from_secs(5);
const FROM: Ipv4Addr = Ipv4Addr::new(127, 0, 9, 6);
/// Replica id that no member has.
const STRANGER: u64 = 9;
/// Command that no release can decode.
const UNDECODABLE: &[u8] = &[0xff, 0x67, 0x61, 0x72, 0x62, 0x61, 0x67, 0x65];

/// Encoder of a protobuf message.
#[derive(Debug, Clone, Default)]
struct ProtobufMessage(BytesMut);

impl ProtobufMessage {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.put_u8(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.put_u8(value as u8);
    }

    fn number(mut self, field: u64, value: u64) -> Self {
        self.varint(field << 3);
        self.varint(value);
        self
    }

    fn bytes(mut self, field: u64, value: &[u8]) -> Self {
        self.varint(field << 3 | 2);
        self.varint(value.len() as u64);
        self.0.put_slice(value);
        self
    }

    fn message(self, field: u64, value: &Self) -> Self {
        self.bytes(field, &value.0.clone())
    }
}

/// Returns the integer fields of a protobuf message, with their field numbers.
fn numbers(mut bytes: &[u8]) -> Option<Vec<(u64, u64)>> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes)?;
        match key & 7 {
            0 => found.push((key >> 3, varint(&mut bytes)?)),
            2 => {
                let length = usize::try_from(varint(&mut bytes)?).ok()?;
                bytes = bytes.get(length..)?;
            }
            _ => return None,
        }
    }
    Some(found)
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for at in 0..10 {
        let (first, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(first & 0x7f) << (7 * at);
        if first & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// Facts about the replica behind a peer port.
#[derive(Debug, Clone, Copy)]
struct KnownPeer {
    id: u64,
    store: u64,
    cluster: (u64, u64),
}

/// Tries every trick on every replica until the phase is over.
pub(super) async fn run(scene: Arc<SoakContext>) {
    let mut ticks = interval(PAUSE);
    while scene.unless_over(ticks.tick()).await.is_some() {
        for to in &scene.peer {
            let played = timeout(PATIENCE, play(&scene, *to)).await;
            let how = match played {
                Ok(Ok(())) => "played",
                Ok(Err(_)) => "no way in",
                Err(_) => "no answer in 5 s",
            };
            scene.book(ClientKind::Peers).count(how);
        }
    }
}

async fn play(scene: &SoakContext, to: SocketAddr) -> anyhow::Result<()> {
    let info = call(&scene.stranger, to, "Info", &ProtobufMessage::default()).await?;
    let fields = numbers(&info).context("not an answer to Info")?;
    let of = |field| {
        let mut fields = fields.iter();
        fields
            .find(|(it, _)| *it == field)
            .map_or(0, |(_, value)| *value)
    };
    let known = KnownPeer {
        id: of(1),
        store: of(2),
        cluster: (of(4), of(5)),
    };
    scene.book(ClientKind::Peers).count("told who it is");
    for (name, method, message) in tricks(known) {
        scene.book(ClientKind::Peers).asked += 1;
        let answered = call(&scene.stranger, to, method, &message).await;
        let mut book = scene.book(ClientKind::Peers);
        match answered {
            Ok(answer) if is_taken(method, &answer) => book.harm(name.to_owned()),
            Ok(_) => book.count("answered, not taken"),
            Err(_) => book.count("refused"),
        }
    }
    Ok(())
}

/// Returns whether the response shows that the call took effect.
fn is_taken(method: &str, answer: &[u8]) -> bool {
    let first = answer.first().map(|key| key >> 3);
    match method {
        // Committed.
        "Propose" => first == Some(1),
        // Success, or a granted vote.
        "Append" => first == Some(1),
        "Vote" => numbers(answer).is_some_and(|it| it.contains(&(2, 1))),
        _ => false,
    }
}

/// Returns the tricks: calls with an undecodable command, and with terms that cannot be exceeded.
fn tricks(known: KnownPeer) -> Vec<(&'static str, &'static str, ProtobufMessage)> {
    let header = ProtobufMessage::default()
        .number(1, known.cluster.0)
        .number(2, known.cluster.1)
        .number(3, STRANGER)
        .number(4, known.id)
        .number(5, known.store);
    let vote = ProtobufMessage::default()
        .number(1, u64::MAX)
        .number(2, STRANGER);
    let propose = ProtobufMessage::default()
        .message(1, &header)
        .bytes(2, UNDECODABLE)
        .number(3, 1000);
    let append = ProtobufMessage::default()
        .message(1, &header)
        .message(2, &vote.clone().number(3, 1));
    let elect = ProtobufMessage::default()
        .message(1, &header)
        .message(2, &vote)
        .number(4, 1);
    vec![
        (
            "a command that nobody knows was committed",
            "Propose",
            propose,
        ),
        ("a stranger's entries were taken", "Append", append),
        ("a stranger was voted for", "Vote", elect),
    ]
}

async fn call(
    stranger: &ClientAccess,
    to: SocketAddr,
    method: &str,
    message: &ProtobufMessage,
) -> anyhow::Result<Bytes> {
    let socket = client::connect(FROM.into(), to).await?;
    let socket = stranger.secure(socket, to).await?;
    let (mut send, connection) =
        http2::handshake(TokioExecutor::new(), TokioIo::new(socket)).await?;
    let _connection = AbortOnDropHandle::new(tokio::spawn(connection));
    let mut body = BytesMut::new();
    body.put_u8(0);
    body.put_u32(u32::try_from(message.0.len())?);
    body.put_slice(&message.0);
    let request = Request::post(format!("http://{to}/quorate.peer.v1.Peer/{method}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(Full::new(body.freeze()))?;
    let response = send.send_request(request).await?;
    let body = response.into_body().collect().await?.to_bytes();
    body.get(5..).context("no message")?;
    Ok(body.slice(5..))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protobuf_numbers_round_trip() {
        let message = ProtobufMessage::default()
            .number(1, u64::MAX)
            .bytes(6, b"10.0.0.1:7")
            .number(8, 300);
        let read = numbers(&message.0);
        assert_eq!(read, Some(vec![(1, u64::MAX), (8, 300)]));
        assert_eq!(numbers(&message.0[..5]), None);
    }
}
