//! The [`Transport`] over HTTP/2 and TCP, encrypted if the cluster has a secret or certificates.
//!
//! | module | purpose |
//! | --- | --- |
//! | `incoming` | accepts a limited number of connections, and fails those that stay silent |
//! | `accept` | detects the protocol of a connection and runs the handshake on either side |
//! | `certified` | authentication by certificate |
//! | `names` | names of replicas in certificates |
//! | `handshake` | the cluster's secret, and how two replicas prove that they know it |
//! | `encrypted` | the encrypted connection that a handshake establishes |

mod accept;
mod certified;
mod encrypted;
mod handshake;
mod incoming;
mod names;

use std::error::Error as StdError;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream, lookup_host};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint, Error, Server};
use tower::{ServiceExt, service_fn};

use self::accept::{PeerConnection, PeerProof};
pub use self::certified::{PeerTls, PeerTlsConfigs};
use self::handshake::HandshakeError;
pub use self::handshake::{PeerSecret, Secret};
#[cfg(feature = "fuzzing")]
pub(crate) use self::handshake::{read_first, write_first};
pub use self::names::certificate_names;
use super::CONNECT_TIMEOUT;
use super::transport::{ConnectError, ConnectFailure, PeerChannel, PeerService, Transport};
use crate::locks::lock;
use crate::log_throttle::LogThrottle;

/// Maximum number of accepted connections that are not served yet.
const ACCEPTED_MAX: usize = 16;
/// Interval between pings. A connection is closed if a ping is not answered within the timeout.
const PING_EVERY: Duration = Duration::from_secs(1);
const PING_TIMEOUT: Duration = Duration::from_secs(2);
/// HTTP/2 flow control window: number of bytes that a peer may send before they are read.
const WINDOW_BYTES: u32 = 4 * 1024 * 1024;

/// Transport over HTTP/2 and TCP.
#[derive(Debug)]
pub struct Tcp {
    local_addr: SocketAddr,
    /// Listener for peers; `None` once they are served.
    listener: Mutex<Option<TcpListener>>,
    /// Method by which both sides of a connection prove their identity.
    proof: PeerProof,
    refusals: Arc<LogThrottle>,
}

impl Tcp {
    /// Creates a transport that serves peers on `listener`.
    ///
    /// # Errors
    /// Fails if the listener has no address.
    pub fn new(listener: TcpListener) -> io::Result<Self> {
        Ok(Self {
            local_addr: listener.local_addr()?,
            listener: Mutex::new(Some(listener)),
            proof: PeerProof::Nothing,
            refusals: Arc::default(),
        })
    }

    /// Requires both sides of every connection to prove that they know a secret, and encrypts the
    /// connection.
    #[must_use]
    pub fn with_secret(mut self, secret: PeerSecret) -> Self {
        self.proof = PeerProof::Secret(Arc::new(secret));
        self
    }

    /// Requires both sides of every connection to prove their identity with certificates, and
    /// encrypts the connection.
    #[must_use]
    pub fn with_certificates(mut self, tls: PeerTls) -> Self {
        self.proof = PeerProof::Certificates(tls, None);
        self
    }

    /// Requires certificates like [`Tcp::with_certificates`], but lets peers without one prove
    /// their identity as configured before this call. For rolling out certificates to a running
    /// cluster.
    #[must_use]
    pub fn with_optional_certificates(mut self, tls: PeerTls) -> Self {
        let others = std::mem::replace(&mut self.proof, PeerProof::Nothing);
        self.proof = PeerProof::Certificates(tls, Some(Box::new(others)));
        self
    }

    fn dial(
        &self,
        id: Option<u64>,
        address: String,
    ) -> BoxFuture<'static, Result<PeerChannel, ConnectError>> {
        let (proof, refusals) = (self.proof.clone(), self.refusals.clone());
        Box::pin(async move {
            let endpoint = endpoint(&address)?;
            let channel = match proof {
                PeerProof::Nothing => endpoint.connect().await,
                PeerProof::Secret(_) | PeerProof::Certificates(..) => {
                    let connection = match accept::dial(&address, id, &proof).await {
                        Ok(connection) => connection,
                        Err(why) => {
                            accept::log_failure(&refusals, &address, &why);
                            return Err(connect_error(&address, &why).await);
                        }
                    };
                    speak(endpoint, connection).await
                }
            };
            let channel = match channel {
                Ok(channel) => channel,
                Err(error) => return Err(connect_error(&address, &error).await),
            };
            let broken = |error| tonic::Status::from_error(Box::new(error));
            Ok(PeerChannel::new(channel.map_err(broken)))
        })
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

/// Starts HTTP/2 on an established stream. The resulting connection cannot reconnect.
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

/// Returns the error for a failed connection. Resolves the name only now, because that takes as
/// long as the attempt did.
async fn connect_error(
    address: &str,
    error: &(dyn StdError + Send + Sync + 'static),
) -> ConnectError {
    let (kind, why) = failure(error);
    if kind == ConnectFailure::Other
        && let Err(unresolved) = lookup_host(address).await
    {
        return ConnectError {
            why: format!("name not found: {unresolved}"),
            kind: ConnectFailure::UnknownName,
        };
    }
    ConnectError { why, kind }
}

/// Returns the kind of a connection failure and its root cause, which is the most specific one.
fn failure(error: &(dyn StdError + 'static)) -> (ConnectFailure, String) {
    let mut causes = std::iter::successors(Some(error), |error| (*error).source());
    let first = causes.clone().last().unwrap_or(error).to_string();
    let io = causes.find_map(|cause| match cause.downcast_ref::<HandshakeError>() {
        Some(HandshakeError::Io(io)) => Some(io),
        _ => cause.downcast_ref::<io::Error>(),
    });
    let kind = match (
        error.downcast_ref::<HandshakeError>(),
        io.map(io::Error::kind),
    ) {
        (_, Some(io::ErrorKind::ConnectionRefused)) => ConnectFailure::Refused,
        (_, Some(io::ErrorKind::TimedOut)) => ConnectFailure::TimedOut,
        (Some(HandshakeError::OtherName { .. }), _) => ConnectFailure::OtherCluster,
        (
            Some(HandshakeError::Differs | HandshakeError::HasNone | HandshakeError::WeHaveNone),
            _,
        ) => ConnectFailure::Secret,
        (
            Some(
                HandshakeError::HasNoTls
                | HandshakeError::WeHaveNoTls
                | HandshakeError::Certificate(_),
            ),
            _,
        ) => ConnectFailure::Certificate,
        (Some(HandshakeError::Malformed | HandshakeError::Io(_)) | None, _) => {
            ConnectFailure::Other
        }
    };
    (kind, first)
}

impl Transport for Tcp {
    fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    fn connect(&self, address: String) -> BoxFuture<'static, Result<PeerChannel, ConnectError>> {
        self.dial(None, address)
    }

    fn connect_to(
        &self,
        id: u64,
        address: String,
    ) -> BoxFuture<'static, Result<PeerChannel, ConnectError>> {
        self.dial(Some(id), address)
    }

    fn serve(
        &self,
        service: PeerService,
        stop: CancellationToken,
    ) -> BoxFuture<'static, io::Result<()>> {
        let listener = lock(&self.listener).take();
        let proof = self.proof.clone();
        Box::pin(async move {
            let listener = listener.ok_or_else(|| io::Error::other("served already"))?;
            let (accepted, incoming) = mpsc::channel(ACCEPTED_MAX);
            let accepting = stop.clone().run_until_cancelled_owned(accept::accept(
                incoming::incoming(listener),
                proof,
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
