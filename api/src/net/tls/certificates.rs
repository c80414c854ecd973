//! The current TLS config of a listener or client. A connection keeps the config with which it
//! began, so a new config does not affect open connections.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use arc_swap::ArcSwap;

use super::error::TlsSetupError;
use super::files::CertificateFacts;
use crate::files::file_stamp::FileStamp;

/// Builder of a TLS config from files.
pub trait CertificateSource: Send + Sync + 'static {
    /// Type of the config.
    type Config: Send + Sync + 'static;

    /// Returns the files that [`CertificateSource::load`] reads.
    fn paths(&self) -> Vec<PathBuf>;

    /// Reads the files and builds the config.
    ///
    /// # Errors
    /// Returns an error that names the setting at fault.
    fn load(&self) -> Result<LoadedConfig<Self::Config>, TlsSetupError>;
}

/// A config with the facts about its certificate.
pub struct LoadedConfig<T> {
    /// The TLS config.
    pub config: Arc<T>,
    /// The replica's own certificate in the config; `None` if there is none.
    pub certificate: Option<CertificateFacts>,
}

/// Holder of the current config of a listener or client.
pub struct Certificates<S: CertificateSource> {
    section: &'static str,
    source: S,
    current: ArcSwap<LoadedConfig<S::Config>>,
    /// Attributes of the files when they were last read.
    seen: Mutex<Vec<Option<FileStamp>>>,
}

impl<S: CertificateSource> Certificates<S> {
    /// Reads the files for the first time. `section` is that of the config, such as `tls.data`.
    ///
    /// # Errors
    /// Returns an error that names the setting at fault.
    pub fn load(section: &'static str, source: S) -> Result<Self, TlsSetupError> {
        // The attributes are read first, so that files that change meanwhile are read again.
        let seen = stamps(&source);
        let loaded = source.load()?;
        Ok(Self {
            section,
            source,
            current: ArcSwap::from_pointee(loaded),
            seen: Mutex::new(seen),
        })
    }

    /// Returns the config for a new connection.
    #[must_use]
    pub fn current(&self) -> Arc<S::Config> {
        Arc::clone(&self.current.load().config)
    }
}

fn stamps(source: &impl CertificateSource) -> Vec<Option<FileStamp>> {
    let paths = source.paths();
    paths.iter().map(|path| FileStamp::of(path)).collect()
}

/// [`Certificates`] with any type of source, as needed for reloading.
pub(super) trait Reload: Send + Sync {
    /// Returns the section of the config.
    fn section(&self) -> &'static str;

    /// Returns the replica's own certificate; `None` if there is none.
    fn certificate(&self) -> Option<CertificateFacts>;

    /// Reads the files again for new connections. Fails, without any change, if a file is invalid
    /// or the certificate has expired.
    fn reload(&self) -> Result<(), TlsSetupError>;

    /// Whether the files have changed since they were last read.
    fn is_stale(&self) -> bool;
}

impl<S: CertificateSource> Reload for Certificates<S> {
    fn section(&self) -> &'static str {
        self.section
    }

    fn certificate(&self) -> Option<CertificateFacts> {
        self.current.load().certificate.clone()
    }

    fn reload(&self) -> Result<(), TlsSetupError> {
        // The lock is held until the config is replaced, so that the later of two reloads takes
        // effect.
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        *seen = stamps(&self.source);
        let loaded = self.source.load()?;
        if let Some(certificate) = &loaded.certificate
            && certificate.days_left(SystemTime::now()) < 0.0
        {
            let section = self.section;
            return Err(TlsSetupError {
                key: format!("{section}.cert_file"),
                problem: format!("{section}.cert_file: the certificate has expired"),
                expected: "a certificate that is valid".to_owned(),
            });
        }
        self.current.store(Arc::new(loaded));
        Ok(())
    }

    fn is_stale(&self) -> bool {
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) != stamps(&self.source)
    }
}
