//! TLS of listeners and of connections to engines and peers: configurations made from certificate
//! files, and remade when they change. One cryptography provider serves the whole process.
//!
//! | module | what |
//! | --- | --- |
//! | `error` | which setting is at fault, and what it should be |
//! | `files` | certificates, keys and authorities, as files hold them |
//! | `server` | how a listener proves itself, and whom it asks to |
//! | `client` | whom a replica trusts where it connects to others, and what it shows them |
//! | `certificates` | the current config of a place, which new connections take |
//! | `watch` | reads all of them again: when files change, and when told to |
//! | `accept` | the handshake of a listener, and what speaks no TLS |
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

/// The provider that every config uses; none is installed as the default of the process.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::clone(&PROVIDER)
}
