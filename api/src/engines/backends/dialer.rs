//! Connections to engines: only to allowed addresses, and with TLS if the URL says `https`.
//! Certificates are always verified, against the authorities of this host and those of
//! `tls.backends.ca_file`. The expected name is the host of the URL or one from the config.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use rustls::pki_types::ServerName;
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::{TlsConnector, TlsStream};

use super::addresses::{EngineAddressError, EngineAddressRules, EnginePlace};
use super::url::EngineUrl;
use crate::net::tls::{Certificates, ClientFiles, MaybeTls, TlsSetupError};

/// Protocols offered in the TLS handshake (ALPN).
const PROTOCOLS: &[&[u8]] = &[b"http/1.1"];

/// How to connect to engines. Clones share their settings, which can be changed while in use.
#[derive(Clone, Default)]
pub struct EngineDialer(Arc<EngineDialerState>);

#[derive(Default)]
struct EngineDialerState {
    /// Authorities and the replica's certificate. Without a config section they are loaded when an
    /// engine first needs them, because a host's authorities are a large file.
    certificates: OnceLock<Arc<Certificates<ClientFiles>>>,
    /// Expected certificate names by URL, where they differ from the host of the URL.
    names: ArcSwap<BTreeMap<String, String>>,
    /// Rules for the addresses of engines.
    addresses: ArcSwap<EngineAddressRules>,
    /// Number of changes to the address rules so far.
    changes: AtomicU64,
}

/// Identifies a version of the address rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RulesId(u64);

impl fmt::Debug for EngineDialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EngineDialer")
    }
}

impl EngineDialer {
    /// Creates a dialer that uses `certificates` for TLS connections.
    #[must_use]
    pub fn with_certificates(certificates: Arc<Certificates<ClientFiles>>) -> Self {
        let tls = Self::default();
        // This cannot fail, because the cell was created just now.
        drop(tls.0.certificates.set(certificates));
        tls
    }

    /// Sets the expected certificate names by URL. Other URLs expect their host.
    pub fn expect_names(&self, names: BTreeMap<String, String>) {
        self.0.names.store(Arc::new(names));
    }

    /// Sets the address rules for new connections. Open connections finish their current requests
    /// and serve no others.
    pub fn allow(&self, rules: EngineAddressRules) {
        if **self.0.addresses.load() != rules {
            self.0.addresses.store(Arc::new(rules));
            self.0.changes.fetch_add(1, Ordering::Release);
        }
    }

    /// Returns the id of the current address rules. Call before connecting, to tag the connection.
    pub(crate) fn rules(&self) -> RulesId {
        RulesId(self.0.changes.load(Ordering::Acquire))
    }

    /// Checks the location of an engine.
    ///
    /// # Errors
    /// Returns an [`EngineAddressError`] if no rule allows it.
    pub(crate) fn check_place(&self, place: &EnginePlace) -> Result<(), EngineAddressError> {
        self.0.addresses.load().check_place(place)
    }

    /// Checks an address announced by a source of engines.
    ///
    /// # Errors
    /// Returns an [`EngineAddressError`] if no rule allows it.
    pub(crate) fn check_told(&self, address: IpAddr) -> Result<(), EngineAddressError> {
        self.0.addresses.load().check_told(address)
    }

    /// Connects to a Unix socket of an engine. The caller applies the timeout.
    pub(crate) async fn reach_socket(&self, path: &Path) -> io::Result<UnixStream> {
        let judged = self.0.addresses.load().check_socket(path);
        judged.map_err(|refused| io::Error::new(io::ErrorKind::PermissionDenied, refused))?;
        UnixStream::connect(path).await
    }

    /// Connects to the host of `url`. The caller applies the timeout.
    pub(crate) async fn reach(&self, url: &EngineUrl) -> io::Result<TcpStream> {
        self.reach_at(url.host(), url.port()).await
    }

    /// Connects to `host` and `port`. The caller applies the timeout.
    pub(crate) async fn reach_at(&self, host: &str, port: u16) -> io::Result<TcpStream> {
        let rules = self.0.addresses.load_full();
        rules.connect(host, port).await
    }

    /// Runs the TLS handshake with the engine at `url`, if needed. The caller applies the timeout.
    pub(crate) async fn secure(
        &self,
        url: &EngineUrl,
        stream: TcpStream,
    ) -> io::Result<MaybeTls<TcpStream>> {
        if !url.is_tls() {
            return Ok(MaybeTls::Clear(stream));
        }
        let names = self.0.names.load();
        let name = names.get(url.as_str()).map_or(url.host(), String::as_str);
        let name = ServerName::try_from(name.to_owned()).map_err(io::Error::other)?;
        let config = self.certificates()?.current();
        let connecting = TlsConnector::from(config).connect(name, stream);
        let connected = connecting.await.map_err(|error| match error.get_ref() {
            // The error contains the expected and the presented names.
            Some(why) => io::Error::new(io::ErrorKind::InvalidData, format!("tls: {why}")),
            None => error,
        })?;
        Ok(MaybeTls::Tls(Box::new(TlsStream::Client(connected))))
    }

    fn certificates(&self) -> io::Result<&Certificates<ClientFiles>> {
        if let Some(certificates) = self.0.certificates.get() {
            return Ok(certificates);
        }
        let certificates = Certificates::load("tls.backends", engine_files(None, None));
        let certificates = certificates.map_err(|error: TlsSetupError| io::Error::other(error))?;
        Ok(self.0.certificates.get_or_init(|| Arc::new(certificates)))
    }
}

/// Returns the files for TLS connections to engines: the authorities to trust besides the system's
/// and the replica's certificate, each if there are any.
#[must_use]
pub fn engine_files(
    authorities: Option<crate::net::tls::NamedFile>,
    certificate: Option<crate::net::tls::CertificateFiles>,
) -> ClientFiles {
    ClientFiles {
        authorities,
        trusts_system: true,
        certificate,
        protocols: PROTOCOLS,
    }
}
