//! Options of a replica.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use crate::storage::Storage;

/// Options for starting a replica.
#[derive(Debug, Clone)]
pub struct ReplicaOptions {
    /// Id of the replica, from 1 to 255.
    pub id: u8,
    /// Directory below which the log, the vote and the snapshots are stored.
    pub data_dir: PathBuf,
    /// Host and port of this replica's peer listener, as peers reach it.
    pub advertise: String,
    /// Name of the cluster. Replicas with different names refuse each other.
    pub cluster_name: String,
    /// Arbitrary `key=value` pairs (with keys such as `admin`, `data`, `version`) that the replica
    /// announces to peers and shows in [`crate::Status`].
    pub labels: BTreeMap<String, String>,
    /// Way in which this replica finds or founds its cluster.
    pub formation: Formation,
    /// Whether this replica, as the leader, lets a replica that lost its store replace its former
    /// member.
    pub replaces_lost: bool,
    /// Conditions under which this replica promotes learners as the leader; `None` for never.
    pub promotion: Option<Promotion>,
    /// Heartbeat interval of the leader.
    pub heartbeat: Duration,
    /// Range from which election timeouts are drawn.
    pub election_timeout: Range<Duration>,
    /// Maximum number of log entries between snapshots.
    pub snapshot_every_entries: u64,
    /// Maximum number of command bytes between snapshots; the limit reached first applies.
    pub snapshot_every_bytes: u64,
    /// Storage of the log, identity and snapshots: [`Storage::Sled`] outside of tests.
    pub storage: Storage,
}

/// Conditions under which a leader promotes learners to voters by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Promotion {
    /// Time for which a learner must have kept up with the log.
    pub after: Duration,
    /// Maximum number of voters up to which learners are promoted.
    pub voters_max: usize,
}

/// Way in which a replica with an empty data directory finds its cluster.
#[derive(Debug, Clone)]
pub enum Formation {
    /// Forms a cluster once `expect` replicas respond, including this one, and none of them is in a
    /// cluster; otherwise joins theirs. The replica with the lowest id initialises.
    Bootstrap {
        /// Where to find the peers.
        peers: Peers,
        /// Number of initial voters: more than half of the peers, so that two disjoint sets of
        /// founders cannot form two clusters.
        expect: usize,
        /// First command of the cluster. The leader proposes it before all others; empty for none.
        first_command: Vec<u8>,
    },
    /// Joins an existing cluster as a learner through any of the given members.
    Join(Peers),
}

/// Addresses at which peers are found.
#[derive(Debug, Clone)]
pub enum Peers {
    /// List of `host:port` addresses.
    List(Vec<String>),
    /// Single `host:port` that resolves to all peers; resolved on every attempt.
    Dns(String),
}
