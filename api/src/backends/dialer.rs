//! Connections to engines: only to addresses that they may have, and in TLS where the URL says
//! `https`. Certificates are verified always: against the authorities of this host and those of
//! `tls.backends.ca_file`, for the host of the URL or the name that the config gives.

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
use crate::tls::{Certificates, ClientFiles, MaybeTls, TlsSetupError};

/// The protocol that is spoken inside.
const PROTOCOLS: &[&[u8]] = &[b"http/1.1"];

/// How engines are connected to. Clones are the same, and can be changed while used.
#[derive(Clone, Default)]
pub struct EngineDialer(Arc<EngineDialerState>);

#[derive(Default)]
struct EngineDialerState {
    /// Read when an engine first needs it, if the config has no section: the authorities of a host
    /// are a large file.
    certificates: OnceLock<Arc<Certificates<ClientFiles>>>,
    /// Names to expect, by URL, where it is not the host of the URL.
    names: ArcSwap<BTreeMap<String, String>>,
    /// Which addresses they may have.
    addresses: ArcSwap<EngineAddressRules>,
    /// How often these have changed.
    changes: AtomicU64,
}

/// Which rules of addresses held at some moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RulesId(u64);

impl fmt::Debug for EngineDialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EngineDialer")
    }
}

impl EngineDialer {
    /// Uses these certificates and authorities.
    #[must_use]
    pub fn with_certificates(certificates: Arc<Certificates<ClientFiles>>) -> Self {
        let tls = Self::default();
        // It was made just now.
        drop(tls.0.certificates.set(certificates));
        tls
    }

    /// Expects these names, by URL, and for other URLs their host.
    pub fn expect_names(&self, names: BTreeMap<String, String>) {
        self.0.names.store(Arc::new(names));
    }

    /// Connects from here on to engines at these addresses only. Connections that are open serve
    /// the requests that they have, and no others.
    pub fn allow(&self, rules: EngineAddressRules) {
        if **self.0.addresses.load() != rules {
            self.0.addresses.store(Arc::new(rules));
            self.0.changes.fetch_add(1, Ordering::Release);
        }
    }

    /// Returns which rules hold. Ask before connecting: a connection is of the rules that held then.
    pub(crate) fn rules(&self) -> RulesId {
        RulesId(self.0.changes.load(Ordering::Acquire))
    }

    /// Judges where an engine is.
    ///
    /// # Errors
    /// [`EngineAddressError`].
    pub(crate) fn check_place(&self, place: &EnginePlace) -> Result<(), EngineAddressError> {
        self.0.addresses.load().check_place(place)
    }

    /// Judges an address that a source of engines tells of.
    ///
    /// # Errors
    /// [`EngineAddressError`].
    pub(crate) fn check_told(&self, address: IpAddr) -> Result<(), EngineAddressError> {
        self.0.addresses.load().check_told(address)
    }

    /// Connects to a Unix socket of an engine. The caller bounds the wait.
    pub(crate) async fn reach_socket(&self, path: &Path) -> io::Result<UnixStream> {
        let judged = self.0.addresses.load().check_socket(path);
        judged.map_err(|refused| io::Error::new(io::ErrorKind::PermissionDenied, refused))?;
        UnixStream::connect(path).await
    }

    /// Connects to the host of `url`. The caller bounds the wait.
    pub(crate) async fn reach(&self, url: &EngineUrl) -> io::Result<TcpStream> {
        self.reach_at(url.host(), url.port()).await
    }

    /// The same with a host and a port of the engine.
    pub(crate) async fn reach_at(&self, host: &str, port: u16) -> io::Result<TcpStream> {
        let rules = self.0.addresses.load_full();
        rules.connect(host, port).await
    }

    /// Runs the handshake with the engine at `url` if it has TLS. The caller bounds the wait.
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
            // Which name was expected, and which were found, is in it.
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

/// What a replica trusts and shows where it connects to engines.
#[must_use]
pub fn engine_files(
    authorities: Option<crate::tls::NamedFile>,
    certificate: Option<crate::tls::CertificateFiles>,
) -> ClientFiles {
    ClientFiles {
        authorities,
        trusts_system: true,
        certificate,
        protocols: PROTOCOLS,
    }
}
