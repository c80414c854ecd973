//! Requests over separate connections, each from a chosen address. A client leaves by closing its
//! connection.
//!
//! On loopback, every address of 127.0.0.0/8 is available, so servers that count clients by address
//! see different clients.

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

/// Maximum number of bytes kept of a response.
const ANSWER_BYTES_MAX: usize = 4 << 20;

/// Size of a slow reader's receive buffer, in bytes.
const LITTLE_ROOM_BYTES: u32 = 4096;

/// Source address and receive buffer of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SourceAddress {
    pub(crate) address: Ipv4Addr,
    /// Whether the receive buffer is small, so that the socket holds little that is not read.
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

/// Opens a connection to `to` from the given source address.
pub(crate) async fn connect(from: SourceAddress, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    if from.has_little_room {
        socket.set_recv_buffer_size(LITTLE_ROOM_BYTES)?;
    }
    socket.bind((from.address, 0).into())?;
    socket.connect(to).await
}

/// An HTTP request to send.
pub(crate) struct OutgoingRequest {
    pub(crate) method: Method,
    pub(crate) path: &'static str,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl OutgoingRequest {
    /// Creates a `POST` request with a JSON body and an API key.
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

    /// Sets a header, in place of an earlier value.
    pub(crate) fn set(&mut self, name: HeaderName, value: &str) {
        let value = HeaderValue::from_str(value).expect("headers are made of visible ascii");
        self.headers.insert(name, value);
    }
}

/// The head of a response. Dropping it closes the connection.
pub(crate) struct ResponseHead {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    body: Incoming,
    asked: Instant,
    _connection: AbortOnDropHandle<()>,
}

/// Stage at which a request failed, and the reason.
#[derive(Debug)]
pub(crate) enum RequestError {
    /// No connection could be made, or it broke before the response.
    Early(String),
    /// The response broke off before its end.
    Late(String),
}

/// Time and tokens of a complete response.
#[derive(Debug, Default)]
pub(crate) struct WholeAnswer {
    /// Time from the request to the first byte of the body.
    pub(crate) first: Duration,
    /// Number of output tokens, counted as occurrences of `word ` in the body.
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

/// Sends a request on a new connection and waits for the head of the response.
///
/// # Errors
/// [`RequestError::Early`] if there is no connection or no response.
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
        // A failure also shows in the response.
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
    /// Returns the next chunk of the body; `None` at its end.
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

    /// Reads the response to its end. An event stream without its end marker is an error.
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

    /// Returns the pause that `Retry-After` requests; `None` unless it is a number of seconds.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        let seconds = self.headers.get("retry-after")?.to_str().ok()?;
        seconds.parse().ok().map(Duration::from_secs)
    }

    /// Returns whether the response forbids a retry.
    pub(crate) fn is_final(&self) -> bool {
        self.headers
            .get("x-should-retry")
            .is_some_and(|it| it == "false")
    }
}
