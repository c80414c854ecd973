//! Certificates, private keys and authorities in files.

use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::error::TlsSetupError;
use super::provider;
use crate::files::text::without_mark;

/// Maximum length of a file, in bytes. A bundle of all public authorities is a quarter of it.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Permission bits for users outside the owner's group. A key with any of them is rejected. The
/// group may read a key, because containers mount keys that way.
const EVERYBODY: u32 = 0o007;

const A_CHAIN: &str = "a certificate in PEM, followed by those between it and its authority";
const A_KEY: &str = "a private key in PEM that others may not read (chmod 600)";
const ITS_KEY: &str = "the private key of the certificate";
const AUTHORITIES: &str = "certificates of authorities in PEM, one or more";

/// A file with the config key that names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedFile {
    /// Config key, such as `tls.data.cert_file`.
    pub key: String,
    /// Path of the file.
    pub path: PathBuf,
}

/// Facts that a certificate states about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFacts {
    /// Common name of the subject; empty if it has none.
    pub subject: String,
    /// DNS names and IP addresses in the subject alternative name. Other kinds of names are left
    /// out, because they may look like these and not every authority verifies them.
    pub names: Vec<String>,
    /// Time of expiry, in Unix seconds.
    pub not_after_s: i64,
}

/// A certificate with its private key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFiles {
    /// PEM file with the certificate, followed by the intermediate ones.
    pub cert: NamedFile,
    /// PEM file with the private key of the certificate.
    pub key: NamedFile,
}

impl NamedFile {
    /// Creates a named file.
    #[must_use]
    pub fn new(key: &str, path: &Path) -> Self {
        Self {
            key: key.to_owned(),
            path: path.to_owned(),
        }
    }

    /// Returns an error about the file: `why` it is unusable, and what was `expected`.
    pub(crate) fn error(&self, why: &str, expected: &str) -> TlsSetupError {
        TlsSetupError {
            key: self.key.clone(),
            problem: format!("{}: {:?}: {why}", self.key, self.path),
            expected: expected.to_owned(),
        }
    }

    fn read(&self, expected: &str) -> Result<Vec<u8>, TlsSetupError> {
        let mut bytes = Vec::new();
        let read = std::fs::File::open(&self.path)
            .and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes));
        match read {
            Err(error) => Err(self.error(&error.to_string(), expected)),
            Ok(read) if read as u64 > FILE_BYTES_MAX => {
                Err(self.error("longer than 1 MiB", expected))
            }
            Ok(_) => Ok(without_mark(&bytes).to_vec()),
        }
    }

    fn certificates(&self, expected: &str) -> Result<Vec<CertificateDer<'static>>, TlsSetupError> {
        let bytes = self.read(expected)?;
        let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
        match certificates {
            Ok(certificates) if certificates.is_empty() => {
                Err(self.error("holds no certificate in PEM", expected))
            }
            Ok(certificates) => Ok(certificates),
            Err(error) => Err(self.error(&format!("is not PEM: {error}"), expected)),
        }
    }

    fn private_key(&self) -> Result<PrivateKeyDer<'static>, TlsSetupError> {
        let bytes = self.read(A_KEY)?;
        let mode = std::fs::metadata(&self.path).map(|found| found.mode() & 0o777);
        if let Ok(mode) = mode
            && mode & EVERYBODY != 0
        {
            return Err(self.error(&format!("everybody may use it (mode {mode:03o})"), A_KEY));
        }
        let key = PrivateKeyDer::from_pem_slice(&bytes);
        key.map_err(|_| self.error("holds no private key in PEM", A_KEY))
    }

    /// Reads the certificates of authorities in the file.
    ///
    /// # Errors
    /// Fails if the file cannot be read, has no certificate, or contains an invalid one.
    pub fn authorities(&self) -> Result<RootCertStore, TlsSetupError> {
        let mut roots = RootCertStore::empty();
        for (nth, certificate) in self.certificates(AUTHORITIES)?.into_iter().enumerate() {
            roots.add(certificate).map_err(|error| {
                self.error(&format!("certificate {}: {error}", nth + 1), AUTHORITIES)
            })?;
        }
        Ok(roots)
    }
}

impl CertificateFiles {
    /// Reads both files and checks that they match.
    ///
    /// # Errors
    /// Fails if a file cannot be read or is invalid, if others may read the key, or if the key
    /// belongs to another certificate.
    pub(crate) fn load(&self) -> Result<(Arc<CertifiedKey>, CertificateFacts), TlsSetupError> {
        let chain = self.cert.certificates(A_CHAIN)?;
        let facts = CertificateFacts::of_chain(&chain);
        let facts = facts.map_err(|why| self.cert.error(&why, A_CHAIN))?;
        let key = self.key.private_key()?;
        let loaded = CertifiedKey::from_der(chain, key, &provider());
        let loaded = loaded.map_err(|error| match error {
            rustls::Error::InconsistentKeys(_) => {
                let why = format!("is not the key of {:?}", self.cert.path);
                self.key.error(&why, ITS_KEY)
            }
            error => self.key.error(&error.to_string(), ITS_KEY),
        })?;
        Ok((Arc::new(loaded), facts))
    }

    /// Returns the paths of both files.
    pub(crate) fn paths(&self) -> [PathBuf; 2] {
        [self.cert.path.clone(), self.key.path.clone()]
    }
}

impl CertificateFacts {
    /// Reads the first certificate of a chain. The expiry is the earliest one in the chain.
    fn of_chain(chain: &[CertificateDer<'_>]) -> Result<Self, String> {
        let mut facts: Option<Self> = None;
        for (nth, certificate) in chain.iter().enumerate() {
            let read = X509Certificate::from_der(certificate);
            let (_, read) = read.map_err(|error| format!("certificate {}: {error}", nth + 1))?;
            let not_after_s = read.validity().not_after.timestamp();
            match &mut facts {
                None => facts = Some(Self::of(&read)),
                Some(facts) => facts.not_after_s = facts.not_after_s.min(not_after_s),
            }
        }
        facts.ok_or_else(|| "holds no certificate".to_owned())
    }

    /// Parses a certificate that a peer presented; `None` if it is invalid.
    #[must_use]
    pub fn of_der(certificate: &CertificateDer<'_>) -> Option<Self> {
        let (_, read) = X509Certificate::from_der(certificate).ok()?;
        Some(Self::of(&read))
    }

    fn of(certificate: &X509Certificate<'_>) -> Self {
        let subject = certificate.subject().iter_common_name().next();
        let subject = subject.and_then(|name| name.as_str().ok());
        let names = certificate.subject_alternative_name().ok().flatten();
        let names = names.map_or(&[][..], |names| &names.value.general_names);
        Self {
            subject: subject.unwrap_or_default().to_owned(),
            names: names.iter().filter_map(shown).collect(),
            not_after_s: certificate.validity().not_after.timestamp(),
        }
    }

    /// Returns the days until expiry; negative once it has expired.
    #[must_use]
    pub fn days_left(&self, now: SystemTime) -> f64 {
        self.seconds_left(now) as f64 / 86_400.0
    }

    /// Returns the seconds until expiry; negative once it has expired.
    #[must_use]
    pub fn seconds_left(&self, now: SystemTime) -> i64 {
        let now_s = now.duration_since(UNIX_EPOCH);
        let now_s = now_s.map_or(0, |since| {
            i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
        });
        self.not_after_s.saturating_sub(now_s)
    }
}

fn shown(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => match **bytes {
            [a, b, c, d] => Some(std::net::Ipv4Addr::new(a, b, c, d).to_string()),
            _ => {
                let bytes: [u8; 16] = (*bytes).try_into().ok()?;
                Some(std::net::Ipv6Addr::from(bytes).to_string())
            }
        },
        _ => None,
    }
}
