//! Port between replicas and the network.
//!
//! It sits below the generated gRPC clients and services and above HTTP/2, so that a simulation
//! handles whole calls, which it can lose, delay, repeat and reorder.

use std::io;
use std::net::SocketAddr;

use futures_util::future::BoxFuture;
use tokio_util::sync::CancellationToken;
use tower::util::BoxCloneSyncService;

/// Call to a peer; the body contains the caller's messages.
pub type PeerRequest = http::Request<tonic::body::Body>;
/// Response of a peer; the body contains the peer's messages.
pub type PeerResponse = http::Response<tonic::body::Body>;
/// Connection to a peer. An error means a broken connection, not that the peer refused the call.
pub type PeerChannel = BoxCloneSyncService<PeerRequest, PeerResponse, tonic::Status>;
/// Service that handles the calls of peers.
pub type PeerService = BoxCloneSyncService<PeerRequest, PeerResponse, std::convert::Infallible>;

/// Error of an attempt to connect to a peer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub struct ConnectError {
    /// Human-readable reason.
    pub why: String,
    /// Machine-readable reason.
    pub kind: ConnectFailure,
}

/// Kind of connection failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectFailure {
    /// The peer's host reports that nothing listens at the address, so the process is gone.
    /// Silence, in contrast, may be due to the network.
    Refused,
    /// The address is a name that does not resolve.
    UnknownName,
    /// The peer did not respond within the timeout.
    TimedOut,
    /// The two sides do not share a secret.
    Secret,
    /// The two sides do not trust each other's certificates, or only one side has any.
    Certificate,
    /// The peer is configured for another cluster.
    OtherCluster,
    /// The connection failed for any other reason.
    Other,
}

impl ConnectError {
    /// Whether the connection failed because nothing listens at the address.
    #[must_use]
    pub fn is_refused(&self) -> bool {
        self.kind == ConnectFailure::Refused
    }
}

impl From<String> for ConnectError {
    fn from(why: String) -> Self {
        Self {
            why,
            kind: ConnectFailure::Other,
        }
    }
}

/// Network that carries calls between replicas.
pub trait Transport: Send + Sync + 'static {
    /// Returns the address at which peers are served.
    fn local_addr(&self) -> SocketAddr;

    /// Connects to the replica that listens at `address` (host and port). The caller applies the
    /// timeout.
    ///
    /// # Errors
    /// Returns why the connection failed.
    fn connect(&self, address: String) -> BoxFuture<'static, Result<PeerChannel, ConnectError>>;

    /// Connects to the replica `id`, like [`Transport::connect`]. Refuses another replica at the
    /// address if replicas prove their identity.
    ///
    /// # Errors
    /// Returns why the connection failed.
    fn connect_to(
        &self,
        _id: u64,
        address: String,
    ) -> BoxFuture<'static, Result<PeerChannel, ConnectError>> {
        self.connect(address)
    }

    /// Serves peers with `service` until `stop` is cancelled, then finishes the calls in flight.
    /// Called once.
    ///
    /// # Errors
    /// Fails if it can no longer serve peers.
    fn serve(
        &self,
        service: PeerService,
        stop: CancellationToken,
    ) -> BoxFuture<'static, io::Result<()>>;
}
