//! TLS of listeners and of connections to engines and peers: configs built from certificate files,
//! and rebuilt when the files change. One cryptography provider serves the whole process.
//!
//! | module | what |
//! | --- | --- |
//! | `error` | the setting at fault, and what was expected |
//! | `files` | certificates, keys and authorities in files |
//! | `server` | authentication of a listener and of its clients |
//! | `client` | authentication of connections to other servers |
//! | `certificates` | the current config of a listener or client, for new connections |
//! | `watch` | reloads all of them: when files change, and on request |
//! | `accept` | the handshake of a listener, and clients without TLS |
//! | `stream` | a connection, with or without TLS |

mod accept;
mod certificates;
mod client;
mod error;
mod files;
mod server;
mod stream;
mod watch;

use std::sync::{Arc, LazyLock};

use rustls::crypto::{CryptoProvider, ring};

pub use accept::{ClearRejection, TlsAcceptError, accept};
pub use certificates::{CertificateSource, Certificates, LoadedConfig};
pub use client::{ClientFiles, PeerConfigs, PeerFiles};
pub use error::TlsSetupError;
pub use files::{CertificateFacts, CertificateFiles, NamedFile};
pub use rustls::{ClientConfig, ServerConfig};
pub use server::{ClientCertificates, ListenerFiles};
pub use stream::MaybeTls;
pub use watch::{CertificateMetrics, CertificateWatch};

static PROVIDER: LazyLock<Arc<CryptoProvider>> =
    LazyLock::new(|| Arc::new(ring::default_provider()));

/// Returns the cryptography provider of every config. The process has no default provider.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::clone(&PROVIDER)
}
