//! Transport of peer calls: the port, and TCP behind it.
//!
//! The port lies below the generated clients and services and above HTTP/2, so that a simulation
//! sees whole calls, which it can lose, delay, repeat and put in another order.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::BoxFuture;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint, Error, Server};
use tower::util::BoxCloneSyncService;
use tower::{ServiceExt, service_fn};

use super::accept::{self, PeerConnection};
use super::door;
use super::secret::PeerSecret;
use super::{CONNECT_TIMEOUT, PING_EVERY, PING_TIMEOUT, WINDOW_BYTES};
use crate::seldom::LogThrottle;

/// Connections that were accepted and are not served yet.
const ACCEPTED_MAX: usize = 16;

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

/// HTTP/2 over TCP.
#[derive(Debug)]
pub struct Tcp {
    local_addr: SocketAddr,
    /// Until it is served on.
    listener: Mutex<Option<TcpListener>>,
    /// What both sides of a connection prove to know.
    secret: Option<Arc<PeerSecret>>,
    refusals: Arc<LogThrottle>,
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
            secret: None,
            refusals: Arc::default(),
        })
    }

    /// Has both sides of every connection prove that they know a secret, and encrypts what follows.
    #[must_use]
    pub fn with_secret(mut self, secret: PeerSecret) -> Self {
        self.secret = Some(Arc::new(secret));
        self
    }
}

fn endpoint(address: &str) -> Result<Endpoint, String> {
    Ok(Endpoint::from_shared(format!("http://{address}"))
        .map_err(|error| format!("address {address}: {error}"))?
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES))
}

/// HTTP/2 over a connection that is made already; another one it cannot make.
async fn speak(
    endpoint: Endpoint,
    connection: PeerConnection<TcpStream>,
) -> Result<Channel, Error> {
    let mut made = Some(TokioIo::new(connection));
    let connector = service_fn(move |_: http::Uri| {
        let made = made.take();
        std::future::ready(made.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected)))
    });
    endpoint.connect_with_connector(connector).await
}

impl Transport for Tcp {
    fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    fn connect(&self, address: String) -> BoxFuture<'static, Result<PeerChannel, String>> {
        let (secret, refusals) = (self.secret.clone(), self.refusals.clone());
        Box::pin(async move {
            let endpoint = endpoint(&address)?;
            let channel = match secret {
                None => endpoint.connect().await,
                Some(secret) => {
                    let connection = accept::dial(&address, &secret).await;
                    let connection = connection.map_err(|why| {
                        accept::say(&refusals, &address, &why);
                        format!("connect to {address}: {why}")
                    })?;
                    speak(endpoint, connection).await
                }
            };
            let channel = channel.map_err(|error| format!("connect to {address}: {error}"))?;
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
        let secret = self.secret.clone();
        Box::pin(async move {
            let listener = listener.ok_or_else(|| io::Error::other("served already"))?;
            let (accepted, incoming) = mpsc::channel(ACCEPTED_MAX);
            let accepting = stop.clone().run_until_cancelled_owned(accept::accept(
                door::incoming(listener),
                secret,
                accepted,
            ));
            let serving = Server::builder()
                .initial_stream_window_size(WINDOW_BYTES)
                .initial_connection_window_size(WINDOW_BYTES)
                .http2_keepalive_interval(Some(PING_EVERY))
                .http2_keepalive_timeout(Some(PING_TIMEOUT))
                .serve_with_incoming_shutdown(
                    accept::for_proven(service),
                    ReceiverStream::new(incoming),
                    stop.cancelled_owned(),
                );
            let (_, served) = futures_util::future::join(accepting, serving).await;
            served.map_err(io::Error::other)
        })
    }
}
