//! Authentication of a listener, and requirements for its clients.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::crypto::ring::Ticketer;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::sign::SingleCertAndKey;

use super::certificates::{CertificateSource, LoadedConfig};
use super::error::TlsSetupError;
use super::files::{CertificateFiles, NamedFile};
use super::provider;

/// Whether clients must authenticate with certificates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientCertificates {
    /// No certificate is requested.
    Ignored,
    /// A certificate is optional and must come from these authorities.
    Asked(NamedFile),
    /// A certificate from these authorities is required.
    Required(NamedFile),
}

/// Files of a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenerFiles {
    /// Certificate of the listener.
    pub certificate: CertificateFiles,
    /// Requirement for client certificates.
    pub clients: ClientCertificates,
    /// Application protocols for ALPN, the preferred one first.
    pub protocols: &'static [&'static [u8]],
}

impl CertificateSource for ListenerFiles {
    type Config = ServerConfig;

    fn paths(&self) -> Vec<PathBuf> {
        let mut paths = self.certificate.paths().to_vec();
        match &self.clients {
            ClientCertificates::Ignored => {}
            ClientCertificates::Asked(file) | ClientCertificates::Required(file) => {
                paths.push(file.path.clone());
            }
        }
        paths
    }

    fn load(&self) -> Result<LoadedConfig<ServerConfig>, TlsSetupError> {
        let (certificate, facts) = self.certificate.load()?;
        let fault = |error: rustls::Error| {
            let expected = "a certificate for a server";
            self.certificate.cert.error(&error.to_string(), expected)
        };
        let builder = ServerConfig::builder_with_provider(provider());
        let builder = builder.with_safe_default_protocol_versions();
        let builder = builder.map_err(fault)?;
        let builder = match self.verifier()? {
            None => builder.with_no_client_auth(),
            Some(verifier) => builder.with_client_cert_verifier(verifier),
        };
        let resolver = SingleCertAndKey::from(certificate);
        let mut config = builder.with_cert_resolver(Arc::new(resolver));
        config.alpn_protocols = self.protocols.iter().map(|name| name.to_vec()).collect();
        match self.clients {
            ClientCertificates::Ignored => config.ticketer = Ticketer::new().map_err(fault)?,
            // A resumed session would not verify the client's certificate again. Meanwhile it may
            // have expired, or its authority may no longer be trusted.
            ClientCertificates::Asked(_) | ClientCertificates::Required(_) => {
                config.session_storage = Arc::new(NoServerSessionStorage {});
                config.send_tls13_tickets = 0;
            }
        }
        Ok(LoadedConfig {
            config: Arc::new(config),
            certificate: Some(facts),
        })
    }
}

impl ListenerFiles {
    fn verifier(
        &self,
    ) -> Result<Option<Arc<dyn rustls::server::danger::ClientCertVerifier>>, TlsSetupError> {
        let (file, is_required) = match &self.clients {
            ClientCertificates::Ignored => return Ok(None),
            ClientCertificates::Asked(file) => (file, false),
            ClientCertificates::Required(file) => (file, true),
        };
        let roots = Arc::new(file.authorities()?);
        let builder = WebPkiClientVerifier::builder_with_provider(roots, provider());
        let builder = match is_required {
            true => builder,
            false => builder.allow_unauthenticated(),
        };
        let verifier = builder.build().map_err(|error| {
            file.error(&error.to_string(), "certificates of authorities in PEM")
        })?;
        Ok(Some(verifier))
    }
}
