//! ZMTP 3.0 as far as KV events need it: PUB, SUB, DEALER and ROUTER over one connection without
//! security.
//!
//! Source: the ZeroMQ specification 23/ZMTP. A library would reconnect on its own, hide whether a
//! connection broke in between, and allocate whatever length a peer announces. Here a break is an
//! error, and memory grows only with bytes received, up to [`MESSAGE_BYTES_MAX`]. Receiving and
//! sending can be cancelled at any await without losing or repeating a byte.

use std::io;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Maximum length of a message with all its frames, in bytes.
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;
/// Maximum number of frames in one message.
pub const FRAMES_MAX: usize = 16;
/// Maximum time to wait for a peer's greeting and its `READY`.
pub const HANDSHAKE_MAX: Duration = Duration::from_secs(5);

const GREETING_BYTES: usize = 64;
const READ_BYTES: usize = 16 << 10;
const FLAG_MORE: u8 = 1;
const FLAG_LONG: u8 = 2;
const FLAG_COMMAND: u8 = 4;

/// Type of a ZeroMQ socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketType {
    /// A publisher, which sends to all subscribers.
    Pub,
    /// A subscriber, which receives from publishers.
    Sub,
    /// A client, which sends requests.
    Dealer,
    /// A server, which responds to requests.
    Router,
}

impl SocketType {
    fn name(self) -> &'static str {
        match self {
            Self::Pub => "PUB",
            Self::Sub => "SUB",
            Self::Dealer => "DEALER",
            Self::Router => "ROUTER",
        }
    }

    fn talks_to(self, peer: &[u8]) -> bool {
        let peers: &[&[u8]] = match self {
            Self::Pub => &[b"SUB", b"XSUB"],
            Self::Sub => &[b"PUB", b"XPUB"],
            Self::Dealer => &[b"ROUTER", b"REP", b"DEALER"],
            Self::Router => &[b"DEALER", b"REQ", b"ROUTER"],
        };
        peers.contains(&peer)
    }
}

/// Reason why a connection is unusable.
#[derive(Debug, thiserror::Error)]
pub enum ZmtpError {
    /// The transport broke.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The peer closed the connection.
    #[error("connection closed")]
    Closed,
    /// The peer does not speak ZMTP 3 without security.
    #[error("handshake: {0}")]
    Handshake(&'static str),
    /// The peer did not finish its handshake in time.
    #[error("no handshake within {HANDSHAKE_MAX:?}")]
    Slow,
    /// A message is too large or malformed.
    #[error("message: {0}")]
    Message(&'static str),
}

/// A byte stream that carries a connection.
pub trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for T {}

/// A ZMTP connection after its handshake.
pub struct ZmtpConnection {
    stream: Box<dyn ByteStream>,
    input: BytesMut,
    output: BytesMut,
    /// Frames of the message being received.
    frames: Vec<Bytes>,
    frames_bytes: usize,
}

/// A frame on the wire.
struct ZmtpFrame {
    is_command: bool,
    has_more: bool,
    body: Bytes,
}

impl ZmtpConnection {
    /// Performs the handshake as a socket of `kind`.
    ///
    /// # Errors
    /// Returns a [`ZmtpError`] if the connection breaks, if the peer is not a ZMTP 3 socket that
    /// `kind` talks to, or after [`HANDSHAKE_MAX`].
    pub async fn open(
        stream: impl ByteStream + 'static,
        kind: SocketType,
    ) -> Result<Self, ZmtpError> {
        let mut connection = Self {
            stream: Box::new(stream),
            input: BytesMut::new(),
            output: BytesMut::new(),
            frames: Vec::new(),
            frames_bytes: 0,
        };
        match tokio::time::timeout(HANDSHAKE_MAX, connection.shake_hands(kind)).await {
            Ok(done) => done.map(|()| connection),
            Err(_) => Err(ZmtpError::Slow),
        }
    }

    async fn shake_hands(&mut self, kind: SocketType) -> Result<(), ZmtpError> {
        self.output.put_slice(&greeting());
        self.output.put_slice(&ready(kind));
        self.flush().await?;
        while self.input.len() < GREETING_BYTES {
            self.read_some().await?;
        }
        check_greeting(&self.input.split_to(GREETING_BYTES))?;
        let frame = self.read_frame().await?;
        if !frame.is_command {
            return Err(ZmtpError::Handshake("the peer sent no READY"));
        }
        check_ready(&frame.body, kind)
    }

    /// Subscribes to every topic.
    ///
    /// # Errors
    /// Returns a [`ZmtpError`] if the connection breaks.
    pub async fn subscribe_to_all(&mut self) -> Result<(), ZmtpError> {
        self.send(&[b"\x01"]).await
    }

    /// Sends `frames` as one message.
    ///
    /// # Errors
    /// Returns a [`ZmtpError`] if the connection breaks.
    pub async fn send(&mut self, frames: &[&[u8]]) -> Result<(), ZmtpError> {
        let last = frames.len().saturating_sub(1);
        for (place, body) in frames.iter().enumerate() {
            let more = if place < last { FLAG_MORE } else { 0 };
            put_frame(&mut self.output, more, body);
        }
        self.flush().await
    }

    /// Returns how much of a message has arrived that [`Self::receive`] has not returned yet.
    #[must_use]
    pub fn pending_bytes(&self) -> usize {
        self.input.len() + self.frames_bytes
    }

    /// Receives the next message and returns its frames.
    ///
    /// # Errors
    /// Returns a [`ZmtpError`] if the connection breaks or the peer exceeds a bound.
    pub async fn receive(&mut self) -> Result<Vec<Bytes>, ZmtpError> {
        loop {
            self.flush().await?;
            let frame = self.read_frame().await?;
            if frame.is_command {
                self.obey(&frame.body);
                continue;
            }
            self.frames_bytes += frame.body.len();
            if self.frames.len() >= FRAMES_MAX || self.frames_bytes > MESSAGE_BYTES_MAX {
                return Err(ZmtpError::Message("it is too large"));
            }
            self.frames.push(frame.body);
            if !frame.has_more {
                self.frames_bytes = 0;
                return Ok(std::mem::take(&mut self.frames));
            }
        }
    }

    /// Queues the response to a ping. Other commands need no action.
    fn obey(&mut self, body: &[u8]) {
        const PING: &[u8] = b"\x04PING";
        const TTL_BYTES: usize = 2;
        const CONTEXT_BYTES_MAX: usize = 16;
        if let Some(rest) = body.strip_prefix(PING) {
            let context = rest.get(TTL_BYTES..).unwrap_or_default();
            let context = &context[..context.len().min(CONTEXT_BYTES_MAX)];
            let pong = [b"\x04PONG", context].concat();
            put_frame(&mut self.output, FLAG_COMMAND, &pong);
        }
    }

    async fn read_frame(&mut self) -> Result<ZmtpFrame, ZmtpError> {
        loop {
            if let Some(frame) = take_frame(&mut self.input)? {
                return Ok(frame);
            }
            self.read_some().await?;
        }
    }

    async fn read_some(&mut self) -> Result<(), ZmtpError> {
        self.input.reserve(READ_BYTES);
        match self.stream.read_buf(&mut self.input).await? {
            0 => Err(ZmtpError::Closed),
            _ => Ok(()),
        }
    }

    async fn flush(&mut self) -> Result<(), ZmtpError> {
        while self.output.has_remaining() {
            if self.stream.write_buf(&mut self.output).await? == 0 {
                return Err(ZmtpError::Closed);
            }
        }
        Ok(self.stream.flush().await?)
    }
}

pub(crate) fn greeting() -> [u8; GREETING_BYTES] {
    let mut bytes = [0; GREETING_BYTES];
    bytes[0] = 0xff;
    bytes[9] = 0x7f;
    bytes[10] = 3;
    bytes[12..16].copy_from_slice(b"NULL");
    bytes
}

fn check_greeting(bytes: &[u8]) -> Result<(), ZmtpError> {
    if bytes[0] != 0xff || bytes[9] != 0x7f {
        return Err(ZmtpError::Handshake("the peer does not use ZMTP"));
    }
    if bytes[10] < 3 {
        return Err(ZmtpError::Handshake(
            "the peer uses a version of ZMTP before 3.0",
        ));
    }
    if !bytes[12..32].starts_with(b"NULL\0") {
        return Err(ZmtpError::Handshake("the peer wants security"));
    }
    Ok(())
}

pub(crate) fn ready(kind: SocketType) -> Vec<u8> {
    let mut body = b"\x05READY".to_vec();
    put_property(&mut body, b"Socket-Type", kind.name().as_bytes());
    if kind == SocketType::Dealer {
        put_property(&mut body, b"Identity", b"");
    }
    let mut frame = BytesMut::new();
    put_frame(&mut frame, FLAG_COMMAND, &body);
    frame.to_vec()
}

fn put_property(body: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    body.put_u8(u8::try_from(name.len()).expect("property names are short"));
    body.put_slice(name);
    body.put_u32(u32::try_from(value.len()).expect("property values are short"));
    body.put_slice(value);
}

fn check_ready(body: &[u8], kind: SocketType) -> Result<(), ZmtpError> {
    let Some(mut rest) = body.strip_prefix(b"\x05READY") else {
        return Err(ZmtpError::Handshake("the peer sent no READY"));
    };
    while let Some((name, value, after)) = take_property(rest) {
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return match kind.talks_to(value) {
                true => Ok(()),
                false => Err(ZmtpError::Handshake("the peer is another kind of socket")),
            };
        }
        rest = after;
    }
    Err(ZmtpError::Handshake(
        "the peer does not announce its socket type",
    ))
}

fn take_property(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let (length, rest) = bytes.split_first()?;
    let (name, rest) = rest.split_at_checked(usize::from(*length))?;
    let (length, rest) = rest.split_first_chunk::<4>()?;
    let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
    let (value, rest) = rest.split_at_checked(length)?;
    Some((name, value, rest))
}

pub(crate) fn put_frame(output: &mut BytesMut, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(length) => output.put_slice(&[flags, length]),
        Err(_) => {
            output.put_u8(flags | FLAG_LONG);
            output.put_u64(body.len() as u64);
        }
    }
    output.put_slice(body);
}

/// Takes a complete frame from the input; returns `None` if more bytes are needed.
fn take_frame(input: &mut BytesMut) -> Result<Option<ZmtpFrame>, ZmtpError> {
    let Some(&flags) = input.first() else {
        return Ok(None);
    };
    let (head, length) = if flags & FLAG_LONG == 0 {
        match input.get(1) {
            Some(length) => (2, u64::from(*length)),
            None => return Ok(None),
        }
    } else {
        match input[1..].first_chunk::<8>() {
            Some(length) => (9, u64::from_be_bytes(*length)),
            None => return Ok(None),
        }
    };
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    if length > MESSAGE_BYTES_MAX {
        return Err(ZmtpError::Message("it is too large"));
    }
    if input.len() < head + length {
        return Ok(None);
    }
    input.advance(head);
    Ok(Some(ZmtpFrame {
        is_command: flags & FLAG_COMMAND != 0,
        has_more: flags & FLAG_MORE != 0,
        body: input.split_to(length).freeze(),
    }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::io::duplex;

    use super::*;

    async fn pair(left: SocketType, right: SocketType) -> (ZmtpConnection, ZmtpConnection) {
        let (one, other) = duplex(256);
        let (one, other) = tokio::join!(
            ZmtpConnection::open(one, left),
            ZmtpConnection::open(other, right)
        );
        (one.unwrap(), other.unwrap())
    }

    #[tokio::test]
    async fn zmtp_messages_round_trip() {
        let (mut publisher, mut subscriber) = pair(SocketType::Pub, SocketType::Sub).await;
        subscriber.subscribe_to_all().await.unwrap();
        assert_eq!(publisher.receive().await.unwrap(), [&b"\x01"[..]]);
        let long = vec![7; 100_000];
        let frames: [&[u8]; 3] = [b"topic", b"", &long];
        let (sent, got) = tokio::join!(publisher.send(&frames), subscriber.receive());
        sent.unwrap();
        assert_eq!(got.unwrap(), frames);
    }

    #[tokio::test]
    async fn a_cancelled_receive_loses_nothing() {
        let (mut dealer, mut router) = pair(SocketType::Dealer, SocketType::Router).await;
        let body = vec![1; 10_000];
        let frames: [&[u8]; 2] = [b"", &body];
        let send = async { dealer.send(&frames).await.unwrap() };
        let receive = async {
            loop {
                tokio::select! {
                    biased;
                    got = router.receive() => break got.unwrap(),
                    () = tokio::task::yield_now() => {}
                }
            }
        };
        let ((), got) = tokio::join!(send, receive);
        assert_eq!(got, frames);
    }

    #[tokio::test]
    async fn a_zmtp_socket_of_another_kind_is_refused() {
        let (one, other) = duplex(256);
        let (one, other) = tokio::join!(
            ZmtpConnection::open(one, SocketType::Pub),
            ZmtpConnection::open(other, SocketType::Router)
        );
        assert!(one.is_err() && other.is_err());
    }

    #[tokio::test]
    async fn a_ping_is_answered() {
        let (mut subscriber, mut publisher) = pair(SocketType::Sub, SocketType::Pub).await;
        put_frame(&mut publisher.output, FLAG_COMMAND, b"\x04PING\x00\x0aabc");
        publisher.send(&[b"x"]).await.unwrap();
        assert_eq!(subscriber.receive().await.unwrap(), [&b"x"[..]]);
        subscriber.send(&[b"y"]).await.unwrap();
        let pong = publisher.read_frame().await.unwrap();
        assert_eq!(
            (pong.is_command, &pong.body[..]),
            (true, &b"\x04PONGabc"[..])
        );
    }

    #[tokio::test]
    async fn an_announced_length_allocates_no_memory() {
        let (one, mut other) = duplex(1024);
        let opened = tokio::spawn(ZmtpConnection::open(one, SocketType::Sub));
        other.write_all(&greeting()).await.unwrap();
        other.write_all(&ready(SocketType::Pub)).await.unwrap();
        let mut connection = opened.await.unwrap().unwrap();
        let mut frame = vec![FLAG_LONG];
        frame.extend((1_u64 << 50).to_be_bytes());
        other.write_all(&frame).await.unwrap();
        let refused = connection.receive().await.unwrap_err();
        assert_eq!(refused.to_string(), "message: it is too large");
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_frames_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let mut input = BytesMut::from(&bytes[..]);
            while let Ok(Some(_)) = take_frame(&mut input) {}
            drop(check_ready(&bytes, SocketType::Sub));
        }
    }
}
