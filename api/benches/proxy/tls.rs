//! The proxy's certificate, and the configurations that trust it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use api::net::tls::{
    CertificateFiles, Certificates, ClientCertificates, ClientConfig, ClientFiles, ListenerFiles,
    NamedFile,
};
use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustls::client::Resumption;
use tempfile::TempDir;

/// Host name of the proxy.
pub(super) const HOST: &str = "localhost";

/// A certificate in files.
pub(super) struct TestCertificate {
    folder: TempDir,
}

impl TestCertificate {
    pub(super) fn new() -> Self {
        let folder = TempDir::new().expect("a folder can be made");
        let CertifiedKey { cert, signing_key } =
            generate_simple_self_signed([HOST.to_owned()]).expect("a certificate can be made");
        let key = folder.path().join("key.pem");
        fs::write(folder.path().join("cert.pem"), cert.pem()).expect("it can be written");
        fs::write(&key, signing_key.serialize_pem()).expect("it can be written");
        fs::set_permissions(key, PermissionsExt::from_mode(0o600)).expect("it is ours");
        Self { folder }
    }

    fn file(&self, name: &str) -> NamedFile {
        NamedFile::new(name, &self.folder.path().join(name))
    }

    /// Returns the proxy's configuration.
    pub(super) fn listener(&self) -> Arc<Certificates<ListenerFiles>> {
        let files = ListenerFiles {
            certificate: CertificateFiles {
                cert: self.file("cert.pem"),
                key: self.file("key.pem"),
            },
            clients: ClientCertificates::Ignored,
            protocols: &[b"h2", b"http/1.1"],
        };
        Arc::new(Certificates::load("tls.data", files).expect("the files are good"))
    }

    /// Returns a client's configuration that resumes sessions.
    pub(super) fn client(&self) -> Arc<ClientConfig> {
        let files = ClientFiles {
            authorities: Some(self.file("cert.pem")),
            protocols: &[b"http/1.1"],
            ..ClientFiles::default()
        };
        let certificates = Certificates::load("client", files).expect("the files are good");
        certificates.current()
    }

    /// Returns a client's configuration that starts each session anew.
    pub(super) fn forgetful_client(&self) -> Arc<ClientConfig> {
        let mut config = ClientConfig::clone(&self.client());
        config.resumption = Resumption::disabled();
        Arc::new(config)
    }
}
