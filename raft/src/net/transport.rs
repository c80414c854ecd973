//! The port between replicas and the network.
//!
//! It sits below the generated gRPC clients and services and above HTTP/2, so that a simulation
//! sees whole calls, which it can lose, delay, repeat and reorder.

use std::io;
use std::net::SocketAddr;

use futures_util::future::BoxFuture;
use tokio_util::sync::CancellationToken;
use tower::util::BoxCloneSyncService;

/// A call to a peer; its body is the caller's messages.
pub type PeerRequest = http::Request<tonic::body::Body>;
/// A peer's answer; its body is the peer's messages.
pub type PeerResponse = http::Response<tonic::body::Body>;
/// A connection to a peer. An error means that the connection is broken, not that the peer refused.
pub type PeerChannel = BoxCloneSyncService<PeerRequest, PeerResponse, tonic::Status>;
/// Answers the calls of peers.
pub type PeerService = BoxCloneSyncService<PeerRequest, PeerResponse, std::convert::Infallible>;

/// Why there is no connection to a peer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub struct ConnectError {
    /// The reason, for people.
    pub why: String,
    /// The reason, for programs.
    pub kind: ConnectFailure,
}

/// Kind of a failure to connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectFailure {
    /// The peer's host answered that nothing listens at the address: the process is gone, whereas
    /// silence may be the network's.
    Refused,
    /// The address is a name that does not resolve.
    UnknownName,
    /// Nobody answered.
    TimedOut,
    /// The two sides do not share a secret.
    Secret,
    /// The two sides do not trust each other's certificates, or only one has any.
    Certificate,
    /// The peer is configured for another cluster.
    OtherCluster,
    /// Anything else.
    Other,
}

impl ConnectError {
    /// Whether nothing listens at the address.
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

/// Carries calls between replicas.
pub trait Transport: Send + Sync + 'static {
    /// The address at which peers are served.
    fn local_addr(&self) -> SocketAddr;

    /// Connects to the replica that listens at `address` (host and port). The caller bounds the
    /// wait.
    ///
    /// # Errors
    /// Says why there is no connection.
    fn connect(&self, address: String) -> BoxFuture<'static, Result<PeerChannel, ConnectError>>;

    /// As [`Transport::connect`], to the replica `id`: another one at the address is refused where
    /// replicas prove who they are.
    ///
    /// # Errors
    /// Says why there is no connection.
    fn connect_to(
        &self,
        _id: u64,
        address: String,
    ) -> BoxFuture<'static, Result<PeerChannel, ConnectError>> {
        self.connect(address)
    }

    /// Serves peers until `stop`, then finishes the calls in flight. Called once.
    ///
    /// # Errors
    /// When it cannot serve peers any longer.
    fn serve(
        &self,
        service: PeerService,
        stop: CancellationToken,
    ) -> BoxFuture<'static, io::Result<()>>;
}
