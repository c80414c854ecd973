//! One replica as a value: built from a config, started, and run until asked to leave.
//!
//! All wiring is here: the state behind the log, the router over both, the data plane, the admin
//! API, and the loops that carry load and digests between replicas. Several apps can run in one
//! process; each has its own sockets, state and metrics.

mod clocks;
mod cluster_status;
mod divergence;
mod events;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod gossip;
mod intervals;
mod key_file;
mod leadership;
mod log_format;
mod log_metrics;
mod machine;
pub mod offline;
mod options;
mod picker;
mod ports;
mod ranks;
mod readers;
mod registration;
mod reloading;
pub mod replica_core;
mod replica_stats;
pub mod scaling;
mod server;
mod session_expiry;
mod shutdown;
mod sockets;
mod tls;
mod warmup;

pub(crate) use key_file::{read_admin_tokens, read_api_keys};
pub use reloading::ReloadHandle;
pub use server::RunningReplica;
pub use shutdown::ShutdownHandle;
pub use sockets::{Addresses, BoundSockets};

use admin::{LogLevelControl, ReloadRequests};
use api::net::tls::CertificateWatch;
use api::settings::SharedFileSettings;

use self::tls::ReplicaCertificates;
use crate::config::Config;

/// A replica whose sockets are bound, but which is not started yet.
pub struct App {
    config: Config,
    sockets: BoundSockets,
    addresses: Addresses,
    file: SharedFileSettings,
    reload: ReloadHandle,
    reload_requests: Option<ReloadRequests>,
    log_level: Option<LogLevelControl>,
    tls: ReplicaCertificates,
}

impl App {
    /// Binds the config's addresses. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// Fails if an address cannot be bound, or a certificate cannot be read.
    pub fn build(config: Config) -> anyhow::Result<Self> {
        let sockets = BoundSockets::bind(&config.listen)?;
        Self::on(config, sockets)
    }

    /// Uses existing sockets instead of binding the config's addresses, for several replicas that
    /// must know each other's ports before any of them starts.
    ///
    /// # Errors
    /// Fails if the system does not report their addresses, or a certificate cannot be read.
    pub fn on(config: Config, sockets: BoundSockets) -> anyhow::Result<Self> {
        let addresses = sockets.addresses()?;
        let file = SharedFileSettings::new(config.file.clone());
        let tls = ReplicaCertificates::load(&config)?;
        Ok(Self {
            tls,
            config,
            sockets,
            addresses,
            file,
            reload: ReloadHandle::default(),
            reload_requests: None,
            log_level: None,
        })
    }

    /// Returns the listening addresses.
    #[must_use]
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// Returns the settings that `GET /admin/v1/config` shows. Update them when the config is
    /// reloaded.
    #[must_use]
    pub fn file_settings(&self) -> SharedFileSettings {
        self.file.clone()
    }

    /// Returns a handle that applies a reloaded config.
    #[must_use]
    pub fn reload_handle(&self) -> ReloadHandle {
        self.reload.clone()
    }

    /// Sends a request through `requests` whenever an operator asks for a reload of the config.
    #[must_use]
    pub fn reloading_by(self, requests: ReloadRequests) -> Self {
        Self {
            reload_requests: Some(requests),
            ..self
        }
    }

    /// Changes the log level through `control` whenever an operator asks for it.
    #[must_use]
    pub fn logging_by(self, control: LogLevelControl) -> Self {
        Self {
            log_level: Some(control),
            ..self
        }
    }

    /// Returns the certificates, to reload them together with the config.
    #[must_use]
    pub fn certificates(&self) -> CertificateWatch {
        self.tls.watch()
    }

    /// Opens the store and starts the replica.
    ///
    /// # Errors
    /// Fails if the store cannot be opened or is damaged.
    pub async fn start(self) -> anyhow::Result<RunningReplica> {
        Box::pin(server::start(self)).await
    }

    /// Starts the replica, serves until `shutdown` requests a drain, then leaves.
    ///
    /// # Errors
    /// Fails if the replica cannot start, see [`App::start`].
    pub async fn run(self, shutdown: ShutdownHandle) -> anyhow::Result<()> {
        self.start().await?.until(&shutdown).await;
        Ok(())
    }
}
