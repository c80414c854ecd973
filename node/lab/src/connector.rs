//! Connector from commands to replicas: TCP, and TLS for `https` URLs.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use api::net::tls::{ClientConfig, MaybeTls};
use futures_util::future::BoxFuture;
use http::Uri;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::ServerName;
use rustls::{CertificateError, Error as TlsFault};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, TlsStream};
use tower::{Service, ServiceExt as _};

/// Connector to the listeners of replicas, over TCP or TLS.
#[derive(Debug, Clone)]
pub struct ReplicaConnector {
    tcp: HttpConnector,
    /// TLS trust and client certificate. If `None`, `https` URLs fail.
    tls: Option<Arc<ClientConfig>>,
}

/// Reason for the failure of a TLS connection, in words for operators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsConnectError(String);

impl fmt::Display for TlsConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for TlsConnectError {}

/// Connection to a replica.
pub type ReplicaStream = TokioIo<MaybeTls<TcpStream>>;
type AnyError = Box<dyn std::error::Error + Send + Sync>;

impl ReplicaConnector {
    /// Creates a connector that supports `https` if `tls` is given.
    #[must_use]
    pub fn new(tls: Option<Arc<ClientConfig>>) -> Self {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        Self { tcp, tls }
    }

    /// Limits the time to connect to `limit`, and disables Nagle's algorithm.
    #[must_use]
    pub fn within(mut self, limit: Duration) -> Self {
        self.tcp.set_nodelay(true);
        self.tcp.set_connect_timeout(Some(limit));
        self
    }

    /// Returns a client that opens a connection per request, because replicas come and go.
    #[must_use]
    pub fn client<B>(&self) -> Client<Self, B>
    where
        B: hyper::body::Body + Send,
        B::Data: Send,
    {
        let mut builder = Client::builder(TokioExecutor::new());
        builder.pool_max_idle_per_host(0).build(self.clone())
    }

    async fn secure(&self, uri: &Uri, stream: TcpStream) -> Result<MaybeTls<TcpStream>, AnyError> {
        let Some(config) = self.tls.clone().filter(|_| is_tls(uri)) else {
            return match is_tls(uri) {
                true => Err(TlsConnectError("https is not spoken here".to_owned()).into()),
                false => Ok(MaybeTls::Clear(stream)),
            };
        };
        let host = uri.host().unwrap_or_default();
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let connected = secured(&config, host, stream).await;
        connected.map_err(|error| TlsConnectError(told(host, &error)).into())
    }
}

impl Service<Uri> for ReplicaConnector {
    type Response = ReplicaStream;
    type Error = AnyError;
    type Future = BoxFuture<'static, Result<ReplicaStream, AnyError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), AnyError>> {
        // Each call waits until its own clone of the connector is ready.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connector = self.clone();
        Box::pin(async move {
            let stream = connector.tcp.clone().oneshot(uri.clone()).await?;
            let stream = connector.secure(&uri, stream.into_inner()).await?;
            Ok(TokioIo::new(stream))
        })
    }
}

/// Performs a TLS handshake over `stream` with the listener at `host`, a name or an IP address.
///
/// # Errors
/// If `host` is not a name or address, or the handshake fails.
pub async fn secured<S: AsyncRead + AsyncWrite + Unpin>(
    config: &Arc<ClientConfig>,
    host: &str,
    stream: S,
) -> io::Result<MaybeTls<S>> {
    let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
    let connector = TlsConnector::from(Arc::clone(config));
    let tls = connector.connect(name, stream).await?;
    Ok(MaybeTls::Tls(Box::new(TlsStream::Client(tls))))
}

fn is_tls(uri: &Uri) -> bool {
    uri.scheme_str() == Some("https")
}

/// Returns the TLS error inside an I/O error, if TLS caused it.
pub fn tls_fault(error: &io::Error) -> Option<&TlsFault> {
    error.get_ref()?.downcast_ref()
}

/// Describes why a handshake with `host` failed.
fn told(host: &str, error: &io::Error) -> String {
    match tls_fault(error) {
        Some(TlsFault::InvalidCertificate(CertificateError::NotValidForNameContext {
            presented,
            ..
        })) => {
            let found = presented.join(" or ");
            format!("expected a certificate for {host:?}, found one for {found}")
        }
        Some(TlsFault::InvalidCertificate(CertificateError::UnknownIssuer)) => {
            "its certificate is of an authority that is not trusted here: --ca-file FILE or \
             QUORATE_CA_FILE names the right one"
                .to_owned()
        }
        Some(TlsFault::InvalidMessage(_)) => "it does not use TLS: use http://".to_owned(),
        Some(TlsFault::AlertReceived(alert)) => refused(&format!("{alert:?}")),
        Some(fault) => fault.to_string(),
        None => format!("the handshake broke off: {error}"),
    }
}

/// Describes the TLS alert with which a listener refused this client. With TLS 1.3, the alert
/// arrives only at the first read after the handshake.
pub fn refused(alert: &str) -> String {
    format!("it refuses this client (--cert-file FILE or QUORATE_CERT_FILE): {alert}")
}
