//! `[tls]`: certificates of listeners and of connections to others.

use std::path::{Path, PathBuf};

use api::engines::backends::engine_files;
use api::net::tls::{
    CertificateFiles, ClientCertificates, ClientFiles, ListenerFiles, NamedFile, PeerFiles,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Keys of `[tls]`: a section per listener, and one for connections to engines.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TlsConfig {
    /// TLS for clients.
    pub data: DataTlsConfig,
    /// TLS for operators.
    pub admin: AdminTlsConfig,
    /// TLS for gateways that ask for endpoints.
    pub picker: PickerTlsConfig,
    /// TLS between replicas.
    pub peer: PeerTlsConfig,
    /// TLS to engines with an `https` URL. Their certificates are always verified.
    pub backends: BackendsTlsConfig,
}

/// Keys of `[tls.data]`: TLS between clients and the data listener.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DataTlsConfig {
    /// Certificate of the data listener in PEM, followed by its intermediates. With it, the
    /// listener speaks TLS only. Reloaded when the file changes.
    #[schemars(extend("x-basic" = true))]
    pub cert_file: Option<PathBuf>,
    /// Private key of the certificate. Other users must not be able to read the file.
    #[schemars(extend("x-basic" = true))]
    pub key_file: Option<PathBuf>,
    /// Authorities in PEM. With it, every client must present a certificate from one of them.
    pub client_ca_file: Option<PathBuf>,
}

/// Keys of `[tls.admin]`: TLS and client certificates of the admin listener.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AdminTlsConfig {
    /// Certificate of the admin listener in PEM, followed by its intermediates. With it, the
    /// listener speaks TLS only. Reloaded when the file changes.
    #[schemars(extend("x-basic" = true))]
    pub cert_file: Option<PathBuf>,
    /// Private key of the certificate. Other users must not be able to read the file.
    #[schemars(extend("x-basic" = true))]
    pub key_file: Option<PathBuf>,
    /// Authorities in PEM. A client needs no token if it presents a certificate from one of them
    /// that names an operator of this cluster, as made by `quorate cert client NAME --role ROLE`.
    pub client_ca_file: Option<PathBuf>,
    /// A proxy in front of the admin listener terminates TLS, so the listener may run without TLS
    /// off loopback. Make sure that only the proxy can reach it.
    pub terminated_upstream: bool,
}

/// Keys of `[tls.picker]`: TLS between gateways and the endpoint picker.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PickerTlsConfig {
    /// Certificate of the listener for gateways in PEM, followed by its intermediates. Reloaded
    /// when the file changes. Default: a self-signed one, created at each start, for gateways that
    /// do not verify certificates, which is the default of most.
    pub cert_file: Option<PathBuf>,
    /// Private key of the certificate. Other users must not be able to read the file.
    pub key_file: Option<PathBuf>,
    /// Authorities in PEM. With it, every gateway must present a certificate from one of them.
    pub client_ca_file: Option<PathBuf>,
    /// Do not use TLS, for gateways that do not use it either.
    pub in_the_clear: bool,
}

impl PickerTlsConfig {
    /// Returns the files of the listener; `None` if it has none.
    #[must_use]
    pub fn files(&self) -> Option<ListenerFiles> {
        let certificate = certificate(
            "tls.picker",
            self.cert_file.as_ref(),
            self.key_file.as_ref(),
        )?;
        let clients = self.client_ca_file.as_ref();
        Some(ListenerFiles {
            certificate,
            clients: clients.map_or(ClientCertificates::Ignored, |file| {
                ClientCertificates::Required(NamedFile::new("tls.picker.client_ca_file", file))
            }),
            protocols: &[b"h2"],
        })
    }
}

/// Keys of `[tls.peer]`: the certificate by which replicas know each other.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PeerTlsConfig {
    /// Certificate of this replica in PEM, followed by its intermediates. With it, replicas speak
    /// TLS only, and each proves its identity to the other: the certificate must be for
    /// `replica-ID.CLUSTER.quorate.internal` and `replica.CLUSTER.quorate.internal`, as made by
    /// `quorate cert node`. Reloaded when the file changes.
    pub cert_file: Option<PathBuf>,
    /// Private key of the certificate. Other users must not be able to read the file.
    pub key_file: Option<PathBuf>,
    /// Authorities of this cluster's replicas in PEM; two during a change from one to the other.
    pub ca_file: Option<PathBuf>,
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

/// Keys of `[tls.backends]`: which engines' certificates are trusted, and which one they are shown.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct BackendsTlsConfig {
    /// Authorities in PEM to trust for engines, in addition to those that this host trusts.
    pub ca_file: Option<PathBuf>,
    /// Certificate in PEM, followed by its intermediates, that this replica presents to engines
    /// that ask for one. Reloaded when the file changes.
    pub cert_file: Option<PathBuf>,
    /// Private key of the certificate. Other users must not be able to read the file.
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

    /// Returns the files of the scaler's listener; `None` if it has no TLS. What it tells, `/metrics`
    /// tells everybody, so it asks for no certificates.
    #[must_use]
    pub fn scaler_files(&self) -> Option<ListenerFiles> {
        Some(ListenerFiles {
            clients: ClientCertificates::Ignored,
            protocols: &[b"h2"],
            ..self.files()?
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
