//! Options of a replica.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use crate::storage::Storage;

/// Options for starting a replica.
#[derive(Debug, Clone)]
pub struct ReplicaOptions {
    /// Id of the replica, `1..=255`.
    pub id: u8,
    /// Directory below which the log, vote and snapshots live.
    pub data_dir: PathBuf,
    /// Host and port of this replica's peer listener, as peers reach it.
    pub advertise: String,
    /// Name of the cluster. Replicas with different names refuse each other.
    pub cluster_name: String,
    /// Arbitrary `key=value` facts announced to peers and shown in [`crate::Status`] (`admin`,
    /// `data`, `version`).
    pub labels: BTreeMap<String, String>,
    /// How this replica enters a cluster.
    pub formation: Formation,
    /// Whether this replica, as the leader, lets a replica that lost its store replace its former
    /// member.
    pub replaces_lost: bool,
    /// When this replica, as the leader, promotes learners by itself; `None` for never.
    pub promotion: Option<Promotion>,
    /// Heartbeat interval of the leader.
    pub heartbeat: Duration,
    /// Range from which election timeouts are drawn.
    pub election_timeout: Range<Duration>,
    /// Maximum number of log entries between snapshots.
    pub snapshot_every_entries: u64,
    /// Maximum log bytes between snapshots; the limit reached first applies.
    pub snapshot_every_bytes: u64,
    /// Where the log, identity and snapshots are stored: [`Storage::Sled`] outside of tests.
    pub storage: Storage,
}

/// When a leader promotes learners to voters by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Promotion {
    /// How long a learner must have kept up with the log.
    pub after: Duration,
    /// Maximum number of voters that promotion may reach.
    pub voters_max: usize,
}

/// How a replica finds its cluster when its data directory is empty.
#[derive(Debug, Clone)]
pub enum Formation {
    /// Form a cluster once `expect` replicas respond, including this one, and none of them is in a
    /// cluster; otherwise join theirs. The replica with the lowest id initialises.
    Bootstrap {
        /// Where peers are found.
        peers: Peers,
        /// Number of initial voters: more than half of the peers, so that two disjoint sets of
        /// founders cannot form two clusters.
        expect: usize,
        /// First command of the cluster, proposed by the replica that initialises.
        first_command: Vec<u8>,
    },
    /// Join an existing cluster as a learner through any of these members.
    Join(Peers),
}

/// Where to find peers.
#[derive(Debug, Clone)]
pub enum Peers {
    /// A list of `host:port` addresses.
    List(Vec<String>),
    /// One `host:port` that resolves to all peers; resolved on every attempt.
    Dns(String),
}
