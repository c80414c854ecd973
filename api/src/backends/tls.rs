//! TLS to engines whose URL says `https`. Their certificates are verified always: against the
//! authorities of this host and those of `tls.backends.ca_file`, for the host of the URL or the
//! name that the config gives.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, TlsStream};

use super::url::EngineUrl;
use crate::tls::{Certificates, ClientFiles, MaybeTls, TlsSetupError};

/// The protocol that is spoken inside.
const PROTOCOLS: &[&[u8]] = &[b"http/1.1"];

/// How engines with TLS are connected to. Clones are the same, and can be changed while used.
#[derive(Clone, Default)]
pub struct EngineTls(Arc<EngineTlsState>);

#[derive(Default)]
struct EngineTlsState {
    /// Read when an engine first needs it, if the config has no section: the authorities of a host
    /// are a large file.
    certificates: OnceLock<Arc<Certificates<ClientFiles>>>,
    /// Names to expect, by URL, where it is not the host of the URL.
    names: ArcSwap<BTreeMap<String, String>>,
}

impl fmt::Debug for EngineTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EngineTls")
    }
}

impl EngineTls {
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

    /// Runs the handshake with the engine at `url` if it has TLS. The caller bounds the wait.
    pub(crate) async fn connect(
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
