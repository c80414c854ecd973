//! Authentication by certificate: TLS below HTTP/2, always mutual.
//!
//! The cluster's certificate authorities certify replicas. The names in a certificate state which
//! replica it is for. The dialer expects the name of the intended replica, or that of any replica
//! if it knows only an address. The listener ties a connection to the ids that the caller's
//! certificate names.

use std::fmt;
use std::io;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};
use tonic::Status;

use super::handshake::HandshakeError;
use super::names;
use crate::net::sender::PeerSender;

/// TLS configs for new connections between replicas.
#[derive(Clone)]
pub struct PeerTlsConfigs {
    /// Config for accepting peers. It must request client certificates.
    pub server: Arc<ServerConfig>,
    /// Config for connecting to peers.
    pub client: Arc<ClientConfig>,
}

/// Proof of identity by certificate, for both sides of a connection.
#[derive(Clone)]
pub struct PeerTls {
    current: Arc<dyn Fn() -> PeerTlsConfigs + Send + Sync>,
    cluster_name: Arc<str>,
}

impl fmt::Debug for PeerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerTls of {}", self.cluster_name)
    }
}

impl PeerTls {
    /// Creates the proof. Each new connection calls `current` for its configs, so that certificates
    /// can be replaced at run time.
    pub fn new(
        cluster_name: &str,
        current: impl Fn() -> PeerTlsConfigs + Send + Sync + 'static,
    ) -> Self {
        Self {
            current: Arc::new(current),
            cluster_name: cluster_name.into(),
        }
    }

    /// Runs the dialer's side of TLS on a stream. `id` is the intended replica; `None` if only its
    /// address is known.
    pub(super) async fn connect<S>(
        &self,
        stream: S,
        id: Option<u64>,
    ) -> Result<Box<TlsStream<S>>, HandshakeError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let name = match id {
            Some(id) => names::one_replica(&self.cluster_name, id),
            None => names::any_replica(&self.cluster_name),
        };
        let expected = ServerName::try_from(name).map_err(|_| HandshakeError::Malformed)?;
        let connector = TlsConnector::from((self.current)().client);
        let connected = connector.connect(expected, stream).await;
        let tls = connected.map_err(|error| failure(error, HandshakeError::HasNoTls))?;
        Ok(Box::new(TlsStream::Client(tls)))
    }

    /// Runs the listener's side of TLS. A caller whose certificate has the right authority but
    /// names no replica of this cluster is still served HTTP/2, where every call fails with that
    /// reason.
    pub(super) async fn accept<S>(
        &self,
        stream: S,
    ) -> Result<(Box<TlsStream<S>>, PeerSender), HandshakeError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let acceptor = TlsAcceptor::from((self.current)().server);
        let accepted = acceptor.accept(stream).await;
        let tls = accepted.map_err(|error| {
            let broken = HandshakeError::Io(io::ErrorKind::ConnectionReset.into());
            failure(error, broken)
        })?;
        let shown = tls.get_ref().1.peer_certificates().unwrap_or_default();
        let cluster = &self.cluster_name;
        let ids = shown.first().map(|shown| names::ids(shown, cluster));
        let sender = match ids {
            Some(ids) if !ids.is_empty() => PeerSender::certified(ids, cluster),
            _ => PeerSender::refused(Status::permission_denied(format!(
                "its certificate names no replica of cluster {cluster:?}; expected a name such as \
                 {}",
                names::one_replica(cluster, 1)
            ))),
        };
        Ok((Box::new(TlsStream::Server(tls)), sender))
    }
}

/// Tells TLS errors from network errors. `gone` is the error for a peer that hangs up.
fn failure(error: io::Error, gone: HandshakeError) -> HandshakeError {
    let fault = error.get_ref().and_then(|it| it.downcast_ref());
    match (fault, error.kind()) {
        // The peer responded with the first frame of HTTP/2.
        (Some(rustls::Error::InvalidMessage(_)), _)
        | (None, io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset) => gone,
        (Some(fault), _) => HandshakeError::Certificate(fault.to_string()),
        (None, _) => HandshakeError::Io(error),
    }
}

/// Connects to the replica at `address` over TCP.
pub(super) async fn connect(address: &str) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}
