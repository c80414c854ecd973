//! The current TLS config of one place. A connection takes it when it begins and keeps it: a config
//! that replaces it changes nothing for connections that are open.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use arc_swap::ArcSwap;

use super::error::TlsSetupError;
use super::files::CertificateFacts;
use crate::file_stamp::FileStamp;

/// Makes a TLS config of files.
pub trait CertificateSource: Send + Sync + 'static {
    /// What it makes.
    type Config: Send + Sync + 'static;

    /// The files that it reads.
    fn paths(&self) -> Vec<PathBuf>;

    /// Reads them.
    ///
    /// # Errors
    /// Says which setting is at fault.
    fn load(&self) -> Result<LoadedConfig<Self::Config>, TlsSetupError>;
}

/// A config, and what is known of its certificate.
pub struct LoadedConfig<T> {
    /// The config.
    pub config: Arc<T>,
    /// The own certificate in it; `None` if it has none.
    pub certificate: Option<CertificateFacts>,
}

/// The current config of one place.
pub struct Certificates<S: CertificateSource> {
    section: &'static str,
    source: S,
    current: ArcSwap<LoadedConfig<S::Config>>,
    /// The files when they were last read.
    seen: Mutex<Vec<Option<FileStamp>>>,
}

impl<S: CertificateSource> Certificates<S> {
    /// Reads the files for the first time. `section` is the config's, such as `tls.data`.
    ///
    /// # Errors
    /// Says which setting is at fault.
    pub fn load(section: &'static str, source: S) -> Result<Self, TlsSetupError> {
        // Files that change meanwhile are read again.
        let seen = stamps(&source);
        let loaded = source.load()?;
        Ok(Self {
            section,
            source,
            current: ArcSwap::from_pointee(loaded),
            seen: Mutex::new(seen),
        })
    }

    /// The config for a new connection.
    #[must_use]
    pub fn current(&self) -> Arc<S::Config> {
        Arc::clone(&self.current.load().config)
    }
}

fn stamps(source: &impl CertificateSource) -> Vec<Option<FileStamp>> {
    let paths = source.paths();
    paths.iter().map(|path| FileStamp::of(path)).collect()
}

/// [`Certificates`] of any kind, to be read again.
pub(super) trait Reload: Send + Sync {
    /// The config's section.
    fn section(&self) -> &'static str;

    /// The own certificate; `None` if there is none.
    fn certificate(&self) -> Option<CertificateFacts>;

    /// Reads the files again and takes them for new connections. A fault changes nothing.
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
        // Held until the config is replaced, so that of two reloads the later one counts.
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
