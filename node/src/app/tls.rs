//! The certificates of a replica, by listener.

use std::fmt;
use std::sync::Arc;

use api::engines::backends::EngineDialer;
use api::net::tls::{
    CertificateSource, CertificateWatch, Certificates, ListenerFiles, PeerFiles, TlsSetupError,
};
use raft::{PeerTls, PeerTlsConfigs};

use crate::config::Config;

/// Certificates of a replica by use; `None` where it does not use TLS.
pub(super) struct ReplicaCertificates {
    pub(super) data: Option<Arc<Certificates<ListenerFiles>>>,
    pub(super) admin: Option<Arc<Certificates<ListenerFiles>>>,
    pub(super) picker: Option<Arc<Certificates<ListenerFiles>>>,
    pub(super) scaler: Option<Arc<Certificates<ListenerFiles>>>,
    pub(super) peer: Option<Arc<Certificates<PeerFiles>>>,
    pub(super) engines: EngineDialer,
    watch: CertificateWatch,
}

impl fmt::Debug for ReplicaCertificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReplicaCertificates")
    }
}

impl ReplicaCertificates {
    /// Reads all files that the config names.
    ///
    /// # Errors
    /// Fails if a file cannot be used, and names its setting.
    pub(super) fn load(config: &Config) -> Result<Self, TlsSetupError> {
        let mut watch = CertificateWatch::default();
        let data = config.tls.data.files();
        let peer = config.tls.peer.files(&config.cluster.name, config.id.0);
        let engines = taken("tls.backends", config.tls.backends.files(), &mut watch)?;
        let engines = engines.map_or_else(EngineDialer::default, EngineDialer::with_certificates);
        engines.expect_names(config.server_names.clone());
        engines.allow(config.engine_addresses.clone());
        Ok(Self {
            engines,
            data: taken("tls.data", data, &mut watch)?,
            admin: taken("tls.admin", config.tls.admin.files(), &mut watch)?,
            picker: taken("tls.picker", config.tls.picker.files(), &mut watch)?,
            scaler: taken("tls.admin", config.tls.admin.scaler_files(), &mut watch)?,
            peer: taken("tls.peer", peer, &mut watch)?,
            watch,
        })
    }

    /// Returns the setup for mutual TLS between replicas, if configured.
    pub(super) fn peer_tls(&self, cluster: &str) -> Option<PeerTls> {
        let peer = Arc::clone(self.peer.as_ref()?);
        Some(PeerTls::new(cluster, move || {
            let current = peer.current();
            PeerTlsConfigs {
                server: Arc::clone(&current.server),
                client: Arc::clone(&current.client),
            }
        }))
    }

    /// Returns all certificates, for reloading.
    pub(super) fn watch(&self) -> CertificateWatch {
        self.watch.clone()
    }
}

/// Reads the files of one section of the config and adds them to `watch`, if the section is
/// present.
fn taken<S: CertificateSource>(
    section: &'static str,
    source: Option<S>,
    watch: &mut CertificateWatch,
) -> Result<Option<Arc<Certificates<S>>>, TlsSetupError> {
    let Some(source) = source else {
        return Ok(None);
    };
    let certificates = Arc::new(Certificates::load(section, source)?);
    watch.add(Arc::clone(&certificates));
    Ok(Some(certificates))
}
