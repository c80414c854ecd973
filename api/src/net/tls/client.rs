//! Authentication of connections to other servers: trusted authorities and own certificates.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::client::Resumption;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::pki_types::{ServerName, UnixTime};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, RootCertStore, ServerConfig, client::WebPkiServerVerifier,
};

use super::certificates::{CertificateSource, LoadedConfig};
use super::error::TlsSetupError;
use super::files::{CertificateFiles, NamedFile};
use super::provider;

/// Files for connections to servers that are identified by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClientFiles {
    /// File with trusted authorities; `None` for none but the system's.
    pub authorities: Option<NamedFile>,
    /// Whether the system's authorities are trusted as well.
    pub trusts_system: bool,
    /// Certificate for servers that request one; `None` to present none.
    pub certificate: Option<CertificateFiles>,
    /// Application protocols for ALPN, the preferred one first.
    pub protocols: &'static [&'static [u8]],
}

impl CertificateSource for ClientFiles {
    type Config = ClientConfig;

    fn paths(&self) -> Vec<PathBuf> {
        let mut paths = Vec::new();
        paths.extend(self.authorities.iter().map(|file| file.path.clone()));
        paths.extend(self.certificate.iter().flat_map(CertificateFiles::paths));
        paths
    }

    fn load(&self) -> Result<LoadedConfig<ClientConfig>, TlsSetupError> {
        let mut roots = match &self.authorities {
            None => RootCertStore::empty(),
            Some(file) => file.authorities()?,
        };
        if self.trusts_system {
            // A host may have no authorities, and some of them may be unparsable.
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
        let builder = ClientConfig::builder_with_provider(provider());
        let builder = builder
            .with_safe_default_protocol_versions()
            .expect("the provider has suites of both versions")
            .with_root_certificates(roots);
        let (mut config, certificate) = match &self.certificate {
            None => (builder.with_no_client_auth(), None),
            Some(files) => {
                let (certificate, facts) = files.load()?;
                let resolver = Arc::new(SingleCertAndKey::from(certificate));
                (builder.with_client_cert_resolver(resolver), Some(facts))
            }
        };
        config.alpn_protocols = self.protocols.iter().map(|name| name.to_vec()).collect();
        Ok(LoadedConfig {
            config: Arc::new(config),
            certificate,
        })
    }
}

/// Files for connections between replicas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerFiles {
    /// Certificate of this replica.
    pub certificate: CertificateFiles,
    /// Authorities of the cluster's replicas; two during a rotation.
    pub authorities: NamedFile,
    /// Names that the certificate must have, because peers would reject it otherwise.
    pub names: [String; 2],
}

/// Configs for both sides of connections between replicas.
pub struct PeerConfigs {
    /// Config for connections from peers.
    pub server: Arc<ServerConfig>,
    /// Config for connections to peers.
    pub client: Arc<ClientConfig>,
}

impl CertificateSource for PeerFiles {
    type Config = PeerConfigs;

    fn paths(&self) -> Vec<PathBuf> {
        let mut paths = self.certificate.paths().to_vec();
        paths.push(self.authorities.path.clone());
        paths
    }

    fn load(&self) -> Result<LoadedConfig<PeerConfigs>, TlsSetupError> {
        let (certificate, facts) = self.certificate.load()?;
        let roots = Arc::new(self.authorities.authorities()?);
        self.check(&certificate, &roots)?;
        let resolver = Arc::new(SingleCertAndKey::from(certificate));
        let fault = |error: &dyn std::error::Error| {
            let expected = "certificates of authorities in PEM";
            self.authorities.error(&error.to_string(), expected)
        };
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), provider()).build();
        let mut server = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| fault(&error))?
            .with_client_cert_verifier(verifier.map_err(|error| fault(&error))?)
            .with_cert_resolver(resolver.clone());
        let mut client = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| fault(&error))?
            .with_root_certificates(roots)
            .with_client_cert_resolver(resolver);
        // Each connection must present its certificates, which a resumed session would not do.
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        client.resumption = Resumption::disabled();
        server.alpn_protocols = vec![b"h2".to_vec()];
        client.alpn_protocols = vec![b"h2".to_vec()];
        let (server, client) = (Arc::new(server), Arc::new(client));
        Ok(LoadedConfig {
            config: Arc::new(PeerConfigs { server, client }),
            certificate: Some(facts),
        })
    }
}

impl PeerFiles {
    /// Verifies the certificate as peers with the same authorities will do on either side of a
    /// connection. Accepts an expired certificate, which only the log reports.
    fn check(
        &self,
        certificate: &CertifiedKey,
        roots: &Arc<RootCertStore>,
    ) -> Result<(), TlsSetupError> {
        let expected = format!(
            "a certificate for {} and {}, of an authority in {:?}",
            self.names[0], self.names[1], self.authorities.path
        );
        let fault = |error: &dyn std::error::Error| {
            let file = &self.certificate.cert;
            file.error(&error.to_string(), &expected)
        };
        let judge = |judged: Result<(), rustls::Error>| match judged {
            Err(rustls::Error::InvalidCertificate(
                CertificateError::Expired | CertificateError::ExpiredContext { .. },
            ))
            | Ok(()) => Ok(()),
            Err(error) => Err(fault(&error)),
        };
        let Some((own, between)) = certificate.cert.split_first() else {
            return Ok(());
        };
        let now = UnixTime::now();
        let verifier = WebPkiServerVerifier::builder_with_provider(roots.clone(), provider());
        let verifier = verifier.build().map_err(|error| fault(&error))?;
        for name in &self.names {
            let name = ServerName::try_from(name.as_str()).map_err(|error| fault(&error))?;
            let judged = verifier.verify_server_cert(own, between, &name, &[], now);
            judge(judged.map(drop))?;
        }
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider());
        let verifier = verifier.build().map_err(|error| fault(&error))?;
        judge(verifier.verify_client_cert(own, between, now).map(drop))
    }
}
