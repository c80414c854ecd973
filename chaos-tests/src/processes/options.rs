//! Options of a cluster of processes.

use std::net::SocketAddr;

use super::access::is_secure_by_default;

/// Where the processes run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Site {
    /// On loopback, with different ports.
    Loopback,
    /// Each replica on its own host ([`crate::netns`]), all engines on another.
    Namespaces,
}

/// Size and settings of a cluster.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClusterOptions {
    /// Where the processes run.
    pub site: Site,
    /// Whether peers authenticate each other, data and admin listeners use TLS, operators have a
    /// token and users an API key each. By default the environment decides
    /// (`QUORATE_TEST_SECURE=1`).
    pub is_secure: bool,
    /// Number of replicas, all of them voters.
    pub replicas: u8,
    /// Number of places for replicas that join later.
    pub spares: u8,
    /// Number of engines.
    pub engines: u8,
    /// Speed of an engine's model, as a multiple of its configured timing.
    pub engine_speed: f64,
    /// Additional flags of `quorate engine`.
    pub engine_args: &'static [&'static str],
    /// Additional tables of every replica's config, in TOML.
    pub config: &'static str,
    /// Additional keys of its `[cluster]`, one per line.
    pub cluster_config: &'static str,
    /// Additional keys of its `[users]`, one per line.
    pub users_config: &'static str,
    /// Additional keys of every engine's `[[backends]]` entry, one per line. `$N` is the number of
    /// the engine, from 0.
    pub backend_config: &'static str,
    /// Megabytes of an in-memory disk of the last of `replicas`; `None` if it uses a disk like the
    /// others. Needs root.
    pub small_disk_mb: Option<u32>,
    /// Engines started by others, in addition to `engines`.
    pub outside_engines: &'static [SocketAddr],
    /// Whether replicas also serve gateways as endpoint pickers.
    pub has_pickers: bool,
    /// Maximum file descriptors of a replica; `None` for the limit of this process.
    pub descriptors: Option<u32>,
}

impl Default for ClusterOptions {
    fn default() -> Self {
        Self {
            site: Site::Loopback,
            is_secure: is_secure_by_default(),
            replicas: 3,
            spares: 0,
            engines: 4,
            engine_speed: 50.0,
            engine_args: &[],
            config: "",
            cluster_config: "",
            users_config: "",
            backend_config: "",
            small_disk_mb: None,
            outside_engines: &[],
            has_pickers: false,
            descriptors: None,
        }
    }
}

/// Addresses of one replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Addresses {
    pub(super) data: SocketAddr,
    pub(super) admin: SocketAddr,
    /// Listener for gateways, if it is a picker.
    pub(super) epp: SocketAddr,
    /// Address that it binds for peers.
    pub(super) peer: SocketAddr,
    /// Host that it announces to peers in place of the bound address.
    pub(super) peer_host: String,
}

impl Addresses {
    /// Returns the host and port announced to peers.
    pub(super) fn peer_name(&self) -> String {
        format!("{}:{}", self.peer_host, self.peer.port())
    }
}
