//! Options of a cluster of processes.

use std::net::SocketAddr;

use super::access::is_secure_by_default;

/// Place where the processes run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Site {
    /// All processes run on loopback, with different ports.
    Loopback,
    /// Each replica runs on its own host ([`crate::netns`]), all engines on another.
    Namespaces,
}

/// Size and settings of a cluster.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClusterOptions {
    /// Place where the processes run.
    pub site: Site,
    /// Whether peers authenticate each other, data and admin listeners use TLS, operators have a
    /// token and users an API key each. By default the environment decides
    /// (`QUORATE_TEST_SECURE=1`).
    pub is_secure: bool,
    /// Number of replicas, all of them voters.
    pub replicas: u8,
    /// Number of spare places, for replicas that join later.
    pub spares: u8,
    /// Number of engines.
    pub engines: u8,
    /// Speed of the engines, as a multiple of their configured timing.
    pub engine_speed: f64,
    /// Additional flags of `quorate engine`.
    pub engine_args: &'static [&'static str],
    /// Additional tables of every replica's config, in TOML.
    pub config: &'static str,
    /// Additional keys of the `[cluster]` table in every replica's config, one per line.
    pub cluster_config: &'static str,
    /// Additional keys of the `[users]` table in every replica's config, one per line.
    pub users_config: &'static str,
    /// Additional keys of every engine's `[[backends]]` entry, one per line. `$N` is the number of
    /// the engine, from 0.
    pub backend_config: &'static str,
    /// Size of an in-memory disk for the last of `replicas`, in MB; `None` if it uses a disk like
    /// the others. Needs root.
    pub small_disk_mb: Option<u32>,
    /// Addresses of engines that run already, in addition to `engines`.
    pub outside_engines: &'static [SocketAddr],
    /// Whether replicas also serve gateways as endpoint pickers.
    pub has_pickers: bool,
    /// Maximum number of file descriptors of a replica; `None` for the limit of this process.
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
    /// Listening address for gateways, if the replica is a picker.
    pub(super) picker: SocketAddr,
    /// Listening address for peers.
    pub(super) peer: SocketAddr,
    /// Host that the replica announces to peers, in place of the bound address.
    pub(super) peer_host: String,
}

impl Addresses {
    /// Returns the host and port that the replica announces to peers.
    pub(super) fn peer_name(&self) -> String {
        format!("{}:{}", self.peer_host, self.peer.port())
    }
}
