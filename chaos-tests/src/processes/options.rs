//! Options of a cluster of processes.

use std::net::SocketAddr;

use super::access::is_secure_by_default;

/// Where the processes run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Site {
    /// On loopback, each at ports of its own.
    Loopback,
    /// Each replica on a host of its own ([`crate::netns`]), the engines together on another.
    Namespaces,
}

/// How many of each, and how the engines behave.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClusterOptions {
    /// Where.
    pub site: Site,
    /// Whether peers prove their ids to each other, data and admin listeners speak TLS, operators
    /// have a token and users a key each. By default the environment says so
    /// (`QUORATE_TEST_SECURE=1`).
    pub is_secure: bool,
    /// Replicas, all of them voters.
    pub replicas: u8,
    /// Places for replicas that join later.
    pub spares: u8,
    /// Engines.
    pub engines: u8,
    /// How many times faster than its timing an engine's model runs.
    pub engine_speed: f64,
    /// Further flags of `quorate engine`.
    pub engine_args: &'static [&'static str],
    /// Further tables of every replica's config, in TOML.
    pub config: &'static str,
    /// Further keys of its `[cluster]`, a line each.
    pub cluster_config: &'static str,
    /// Further keys of its `[users]`, a line each.
    pub users_config: &'static str,
    /// Further keys of every engine's `[[backends]]` entry, a line each; `$N` is 0 for the first
    /// engine, 1 for the next.
    pub backend_config: &'static str,
    /// Megabytes of a disk in memory that the last of `replicas` has; `None`: it has one as the
    /// others. Needs root.
    pub small_disk_mb: Option<u32>,
    /// Engines that somebody else runs, beside `engines`.
    pub outside_engines: &'static [SocketAddr],
    /// Whether replicas are endpoint pickers for gateways too.
    pub has_pickers: bool,
    /// Descriptors that a replica may have; `None`: as many as this process.
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

/// Where one replica listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Addresses {
    pub(super) data: SocketAddr,
    pub(super) admin: SocketAddr,
    /// For gateways, if it is a picker.
    pub(super) epp: SocketAddr,
    /// What it binds for peers.
    pub(super) peer: SocketAddr,
    /// What it tells peers in place of the address.
    pub(super) peer_host: String,
}

impl Addresses {
    /// Host and port that peers are told.
    pub(super) fn peer_name(&self) -> String {
        format!("{}:{}", self.peer_host, self.peer.port())
    }
}
