//! How calls reach peers: the port, and TCP behind it.
//!
//! The port lies below the generated clients and services and above HTTP/2, so that a simulation
//! sees whole calls, which it can lose, delay, repeat and put in another order.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll};

use futures_util::TryStreamExt;
use futures_util::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Connected;
use tonic::transport::{Endpoint, Server};
use tower::ServiceExt;
use tower::util::BoxCloneSyncService;

use super::door::{self, Incoming};
use super::guard::Sender;
use super::{CONNECT_TIMEOUT, PING_EVERY, PING_TIMEOUT, WINDOW_BYTES};

/// A call to a peer; its body is the messages of the caller.
pub type PeerRequest = http::Request<tonic::body::Body>;
/// What a peer answers; its body is the messages of the peer.
pub type PeerResponse = http::Response<tonic::body::Body>;
/// A connection to a peer. An error says that the connection is broken, not what the peer thinks.
pub type PeerChannel = BoxCloneSyncService<PeerRequest, PeerResponse, tonic::Status>;
/// Answers the calls of peers.
pub type PeerService = BoxCloneSyncService<PeerRequest, PeerResponse, std::convert::Infallible>;

/// Carries calls between replicas.
pub trait Transport: Send + Sync + 'static {
    /// Where peers are served.
    fn local_addr(&self) -> SocketAddr;

    /// Connects to whoever listens at `address` (host and port). The caller bounds the wait.
    ///
    /// # Errors
    /// Says why there is no connection.
    fn connect(&self, address: String) -> BoxFuture<'static, Result<PeerChannel, String>>;

    /// Serves peers until `stop`, then until the calls under way have ended. Called once.
    ///
    /// # Errors
    /// When nobody can be served any more.
    fn serve(
        &self,
        service: PeerService,
        stop: CancellationToken,
    ) -> BoxFuture<'static, io::Result<()>>;
}

/// A connection that was accepted, and whose it is.
struct Accepted {
    stream: Incoming,
    sender: Sender,
}

impl Connected for Accepted {
    type ConnectInfo = Sender;

    fn connect_info(&self) -> Sender {
        self.sender.clone()
    }
}

impl AsyncRead for Accepted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Accepted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// HTTP/2 over TCP.
#[derive(Debug)]
pub struct Tcp {
    local_addr: SocketAddr,
    /// Until it is served on.
    listener: Mutex<Option<TcpListener>>,
}

impl Tcp {
    /// Serves peers on `listener`.
    ///
    /// # Errors
    /// When the listener has no address.
    pub fn new(listener: TcpListener) -> io::Result<Self> {
        Ok(Self {
            local_addr: listener.local_addr()?,
            listener: Mutex::new(Some(listener)),
        })
    }
}

impl Transport for Tcp {
    fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    fn connect(&self, address: String) -> BoxFuture<'static, Result<PeerChannel, String>> {
        Box::pin(async move {
            let endpoint = Endpoint::from_shared(format!("http://{address}"))
                .map_err(|error| format!("address {address}: {error}"))?
                .connect_timeout(CONNECT_TIMEOUT)
                .tcp_nodelay(true)
                .http2_keep_alive_interval(PING_EVERY)
                .keep_alive_timeout(PING_TIMEOUT)
                .keep_alive_while_idle(true)
                .initial_stream_window_size(WINDOW_BYTES)
                .initial_connection_window_size(WINDOW_BYTES);
            let channel = endpoint
                .connect()
                .await
                .map_err(|error| format!("connect to {address}: {error}"))?;
            let broken = |error| tonic::Status::from_error(Box::new(error));
            Ok(PeerChannel::new(channel.map_err(broken)))
        })
    }

    fn serve(
        &self,
        service: PeerService,
        stop: CancellationToken,
    ) -> BoxFuture<'static, io::Result<()>> {
        let listener = self
            .listener
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        Box::pin(async move {
            let listener = listener.ok_or_else(|| io::Error::other("served already"))?;
            Server::builder()
                .initial_stream_window_size(WINDOW_BYTES)
                .initial_connection_window_size(WINDOW_BYTES)
                .http2_keepalive_interval(Some(PING_EVERY))
                .http2_keepalive_timeout(Some(PING_TIMEOUT))
                .serve_with_incoming_shutdown(
                    service,
                    door::incoming(listener).map_ok(|stream| Accepted {
                        stream,
                        sender: Sender::default(),
                    }),
                    stop.cancelled_owned(),
                )
                .await
                .map_err(io::Error::other)
        })
    }
}
