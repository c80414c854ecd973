//! `[tls]`: certificates of listeners and of connections to others.

use std::path::{Path, PathBuf};

use api::backends::engine_files;
use api::tls::{
    CertificateFiles, ClientCertificates, ClientFiles, ListenerFiles, NamedFile, PeerFiles,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `[tls]`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TlsConfig {
    /// TLS for clients.
    pub data: DataTlsConfig,
    /// TLS for operators.
    pub admin: AdminTlsConfig,
    /// TLS for gateways that ask for endpoints.
    pub epp: EppTlsConfig,
    /// TLS between replicas.
    pub peer: PeerTlsConfig,
    /// TLS to engines with an `https` URL. Without this section too their certificates are verified.
    pub backends: BackendsTlsConfig,
}

/// `[tls.data]`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DataTlsConfig {
    /// Certificate of the data listener in PEM, followed by those between it and its authority. With
    /// it the listener speaks TLS only. It is read again when the file changes.
    pub cert_file: Option<PathBuf>,
    /// Private key of the certificate, which others may not read.
    pub key_file: Option<PathBuf>,
    /// Authorities in PEM. With it every client must show a certificate of one of them.
    pub client_ca_file: Option<PathBuf>,
}

/// `[tls.admin]`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AdminTlsConfig {
    /// Certificate of the admin listener in PEM, followed by those between it and its authority.
    /// With it the listener speaks TLS only. It is read again when the file changes.
    pub cert_file: Option<PathBuf>,
    /// Private key of the certificate, which others may not read.
    pub key_file: Option<PathBuf>,
    /// Authorities in PEM. Who shows a certificate of one of them that names an operator of this
    /// cluster, as `quorate cert client NAME --role ROLE` makes it, needs no token.
    pub client_ca_file: Option<PathBuf>,
    /// A proxy in front of the admin listener ends TLS, so that the listener may be in the clear
    /// off loopback. Nobody but the proxy may reach it then.
    pub terminated_upstream: bool,
}

/// `[tls.epp]`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EppTlsConfig {
    /// Certificate of the listener for gateways in PEM, followed by those between it and its
    /// authority. It is read again when the file changes. Default: one that this replica makes and
    /// signs itself at each start, which gateways take that do not verify certificates, as most do
    /// by default.
    pub cert_file: Option<PathBuf>,
    /// Private key of the certificate, which others may not read.
    pub key_file: Option<PathBuf>,
    /// Authorities in PEM. With it every gateway must show a certificate of one of them.
    pub client_ca_file: Option<PathBuf>,
    /// Speak without TLS, to gateways that do the same.
    pub in_the_clear: bool,
}

impl EppTlsConfig {
    /// Returns the files of the listener; `None` if it has none.
    #[must_use]
    pub fn files(&self) -> Option<ListenerFiles> {
        let certificate = certificate("tls.epp", self.cert_file.as_ref(), self.key_file.as_ref())?;
        let clients = self.client_ca_file.as_ref();
        Some(ListenerFiles {
            certificate,
            clients: clients.map_or(ClientCertificates::Ignored, |file| {
                ClientCertificates::Required(NamedFile::new("tls.epp.client_ca_file", file))
            }),
            protocols: &[b"h2"],
        })
    }
}

/// `[tls.peer]`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PeerTlsConfig {
    /// Certificate of this replica in PEM, followed by those between it and its authority. With it
    /// replicas speak TLS only, and each proves to the other which one it is: the certificate must
    /// be for `replica-ID.CLUSTER.quorate.internal` and `replica.CLUSTER.quorate.internal`, as
    /// `quorate cert node` makes it. It is read again when the file changes.
    pub cert_file: Option<PathBuf>,
    /// Private key of the certificate, which others may not read.
    pub key_file: Option<PathBuf>,
    /// Authorities of the replicas of this cluster in PEM; two while one follows the other.
    pub ca_file: Option<PathBuf>,
    /// Also talk to replicas that have no certificate yet: with `cluster.secret_file` if it is set,
    /// else in the clear. Only for moving a running cluster to certificates
    /// (docs/guide/security.md).
    pub optional: bool,
}

impl PeerTlsConfig {
    /// Returns the files of the replica `id` of a cluster; `None` if replicas have no TLS.
    #[must_use]
    pub fn files(&self, cluster: &str, id: u8) -> Option<PeerFiles> {
        let certificate = certificate("tls.peer", self.cert_file.as_ref(), self.key_file.as_ref())?;
        Some(PeerFiles {
            certificate,
            authorities: NamedFile::new("tls.peer.ca_file", self.ca_file.as_ref()?),
            names: raft::certificate_names(cluster, id),
        })
    }
}

/// `[tls.backends]`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct BackendsTlsConfig {
    /// Authorities in PEM whose engines are trusted, besides those that this host trusts.
    pub ca_file: Option<PathBuf>,
    /// Certificate in PEM that this replica shows engines that ask for one, followed by those
    /// between it and its authority. It is read again when the file changes.
    pub cert_file: Option<PathBuf>,
    /// Private key of the certificate, which others may not read.
    pub key_file: Option<PathBuf>,
}

impl BackendsTlsConfig {
    /// Returns the files; `None` if there are none.
    #[must_use]
    pub fn files(&self) -> Option<ClientFiles> {
        let (cert, key) = (self.cert_file.as_ref(), self.key_file.as_ref());
        let certificate = certificate("tls.backends", cert, key);
        let authorities = self.ca_file.as_ref();
        let authorities = authorities.map(|file| NamedFile::new("tls.backends.ca_file", file));
        let is_set = certificate.is_some() || authorities.is_some();
        is_set.then(|| engine_files(authorities, certificate))
    }
}

impl DataTlsConfig {
    /// Returns the files of the data listener; `None` if it has no TLS.
    #[must_use]
    pub fn files(&self) -> Option<ListenerFiles> {
        let certificate = certificate("tls.data", self.cert_file.as_ref(), self.key_file.as_ref())?;
        let clients = self.client_ca_file.as_ref();
        Some(ListenerFiles {
            certificate,
            clients: clients.map_or(ClientCertificates::Ignored, |file| {
                ClientCertificates::Required(NamedFile::new("tls.data.client_ca_file", file))
            }),
            protocols: &[b"h2", b"http/1.1"],
        })
    }
}

impl AdminTlsConfig {
    /// Returns the files of the admin listener; `None` if it has no TLS. Who shows no certificate
    /// may have a token, or ask for what is open.
    #[must_use]
    pub fn files(&self) -> Option<ListenerFiles> {
        let (cert, key) = (self.cert_file.as_ref(), self.key_file.as_ref());
        let clients = self.client_ca_file.as_ref();
        Some(ListenerFiles {
            certificate: certificate("tls.admin", cert, key)?,
            clients: clients.map_or(ClientCertificates::Ignored, |file| {
                ClientCertificates::Asked(NamedFile::new("tls.admin.client_ca_file", file))
            }),
            protocols: &[b"http/1.1"],
        })
    }

    /// Whether what operators send can be read by nobody else, as far as the config tells.
    #[must_use]
    pub fn is_encrypted(&self) -> bool {
        self.cert_file.is_some() || self.terminated_upstream
    }
}

fn certificate(
    section: &str,
    cert: Option<&PathBuf>,
    key: Option<&PathBuf>,
) -> Option<CertificateFiles> {
    let named = |name: &str, file: &Path| NamedFile::new(&format!("{section}.{name}"), file);
    Some(CertificateFiles {
        cert: named("cert_file", cert?),
        key: named("key_file", key?),
    })
}
