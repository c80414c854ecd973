//! Requests over connections of their own, from an address of one's own: leaving is closing.
//!
//! On loopback every address of 127.0.0.0/8 is ours, so that whoever is counted by address can be
//! told apart.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::processes::access::ClientAccess;

/// Most of an answer that is kept.
const ANSWER_BYTES_MAX: usize = 4 << 20;

/// Bytes that the kernel keeps for a reader with little room.
const LITTLE_ROOM_BYTES: u32 = 4096;

/// Where a connection comes from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SourceAddress {
    pub(crate) address: Ipv4Addr,
    /// Whether hardly anything is read before it is asked for.
    pub(crate) has_little_room: bool,
}

impl std::convert::From<Ipv4Addr> for SourceAddress {
    fn from(address: Ipv4Addr) -> Self {
        Self {
            address,
            has_little_room: false,
        }
    }
}

/// A connection from an address of one's own.
pub(crate) async fn connect(from: SourceAddress, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    if from.has_little_room {
        socket.set_recv_buffer_size(LITTLE_ROOM_BYTES)?;
    }
    socket.bind((from.address, 0).into())?;
    socket.connect(to).await
}

/// A request to be sent.
pub(crate) struct OutgoingRequest {
    pub(crate) method: Method,
    pub(crate) path: &'static str,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl OutgoingRequest {
    /// JSON, with a key.
    pub(crate) fn post(path: &'static str, key: &str, body: Bytes) -> Self {
        let mut ask = Self {
            method: Method::POST,
            path,
            headers: HeaderMap::new(),
            body,
        };
        ask.set(CONTENT_TYPE, "application/json");
        ask.set(AUTHORIZATION, &format!("Bearer {key}"));
        ask
    }

    /// Sets a header.
    pub(crate) fn set(&mut self, name: HeaderName, value: &str) {
        let value = HeaderValue::from_str(value).expect("headers are made of visible ascii");
        self.headers.insert(name, value);
    }
}

/// The beginning of an answer. Dropping it closes the connection.
pub(crate) struct ResponseHead {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    body: Incoming,
    asked: Instant,
    _connection: AbortOnDropHandle<()>,
}

/// How a request came to nothing.
#[derive(Debug)]
pub(crate) enum RequestError {
    /// No connection, or none that lasted to the answer.
    Early(String),
    /// The answer did not come to its end.
    Late(String),
}

/// An answer that came to its end.
#[derive(Debug, Default)]
pub(crate) struct WholeAnswer {
    /// From asking to the first of its body.
    pub(crate) first: Duration,
    /// Tokens that came.
    pub(crate) tokens: u64,
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Early(why) => write!(f, "no answer: {why}"),
            Self::Late(why) => write!(f, "cut off: {why}"),
        }
    }
}

/// Sends a request on a new connection and waits for the answer's head.
pub(crate) async fn ask(
    access: &ClientAccess,
    from: impl Into<SourceAddress>,
    to: SocketAddr,
    ask: OutgoingRequest,
) -> Result<ResponseHead, RequestError> {
    let early = |error: &dyn fmt::Display| RequestError::Early(error.to_string());
    let asked = Instant::now();
    let socket = connect(from.into(), to)
        .await
        .map_err(|error| early(&error))?;
    let secured = access.secure(socket, to).await;
    let socket = secured.map_err(|error| early(&error))?;
    let shaken = http1::handshake(TokioIo::new(socket)).await;
    let (mut send, connection) = shaken.map_err(|error| early(&error))?;
    let connection = AbortOnDropHandle::new(tokio::spawn(async move {
        // What breaks it shows in the answer.
        let _ = connection.await;
    }));
    let mut request = Request::new(Full::new(ask.body));
    *request.method_mut() = ask.method;
    *request.uri_mut() = ask.path.parse().expect("paths are constants");
    *request.headers_mut() = ask.headers;
    if !request.headers().contains_key(HOST) {
        let host = HeaderValue::from_str(&to.to_string()).expect("an address is visible ascii");
        request.headers_mut().insert(HOST, host);
    }
    let response = send.send_request(request).await;
    let (head, body) = response.map_err(|error| early(&error))?.into_parts();
    Ok(ResponseHead {
        status: head.status,
        headers: head.headers,
        body,
        asked,
        _connection: connection,
    })
}

impl ResponseHead {
    /// The next piece of the body; `None` at its end.
    pub(crate) async fn piece(&mut self) -> Result<Option<Bytes>, RequestError> {
        loop {
            match self.body.frame().await {
                None => return Ok(None),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
                Some(Err(error)) => return Err(RequestError::Late(error.to_string())),
            }
        }
    }

    /// The answer to its end: a document, or a stream that says that it is done.
    pub(crate) async fn whole(&mut self) -> Result<WholeAnswer, RequestError> {
        let (mut all, mut first) = (Vec::new(), None);
        while let Some(piece) = self.piece().await? {
            first.get_or_insert_with(|| self.asked.elapsed());
            let room = ANSWER_BYTES_MAX.saturating_sub(all.len());
            all.extend_from_slice(&piece[..piece.len().min(room)]);
        }
        let is_stream = self
            .headers
            .get(CONTENT_TYPE)
            .is_some_and(|it| it.as_bytes().starts_with(b"text/event-stream"));
        if is_stream && !all.ends_with(b"data: [DONE]\n\n") {
            let end = &all[all.len().saturating_sub(80)..];
            return Err(RequestError::Late(format!(
                "ends with {:?}",
                String::from_utf8_lossy(end)
            )));
        }
        Ok(WholeAnswer {
            first: first.unwrap_or_default(),
            tokens: all.windows(5).filter(|it| *it == b"word ").count() as u64,
        })
    }

    /// How long the client is to wait before it tries again.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        let seconds = self.headers.get("retry-after")?.to_str().ok()?;
        seconds.parse().ok().map(Duration::from_secs)
    }

    /// Whether the client is told not to try again.
    pub(crate) fn is_final(&self) -> bool {
        self.headers
            .get("x-should-retry")
            .is_some_and(|it| it == "false")
    }
}
