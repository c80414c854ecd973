//! Options of a replica.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use crate::storage::Storage;

/// How a replica is started.
#[derive(Debug, Clone)]
pub struct ReplicaOptions {
    /// `1..=255`.
    pub id: u8,
    /// Log, vote and snapshots live below it.
    pub data_dir: PathBuf,
    /// Host and port at which peers reach this replica's peer listener.
    pub advertise: String,
    /// The cluster's name: replicas with different names refuse each other.
    pub cluster_name: String,
    /// Free `key=value` facts told to peers and shown in [`crate::Status`] (`admin`, `data`,
    /// `version`).
    pub labels: BTreeMap<String, String>,
    /// How this replica gets into a cluster.
    pub formation: Formation,
    /// Whether this replica, when it leads, lets one that lost its store take the place of the
    /// member that it was.
    pub replaces_lost: bool,
    /// When this replica, while it leads, makes learners voters by itself; `None`: never.
    pub promotion: Option<Promotion>,
    /// The leader's heartbeat interval.
    pub heartbeat: Duration,
    /// The range from which election timeouts are drawn.
    pub election_timeout: Range<Duration>,
    /// Log entries between snapshots.
    pub snapshot_every_entries: u64,
    /// Log bytes between snapshots; whichever limit is reached first counts.
    pub snapshot_every_bytes: u64,
    /// Where log, identity and snapshots are kept: [`Storage::Sled`] outside of tests.
    pub storage: Storage,
}

/// When a leader makes learners voters by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Promotion {
    /// How long a learner must have kept up with the log.
    pub after: Duration,
    /// Most voters that there are by it.
    pub voters_max: usize,
}

/// How a replica finds its cluster when its data directory is empty.
#[derive(Debug, Clone)]
pub enum Formation {
    /// Form a cluster once `expect` replicas answer, this one included, and none of them is in one;
    /// otherwise join that cluster. The replica with the lowest id initialises.
    Bootstrap {
        /// Where peers are found.
        peers: Peers,
        /// How many voters the cluster starts with: more than half of the peers, so that two
        /// disjoint sets of founders cannot form two clusters.
        expect: usize,
        /// The cluster's first command, proposed by the replica that initialises.
        first_command: Vec<u8>,
    },
    /// Join an existing cluster as a learner through any of these members.
    Join(Peers),
}

/// Where peers are found.
#[derive(Debug, Clone)]
pub enum Peers {
    /// Each as `host:port`.
    List(Vec<String>),
    /// One `host:port` that resolves to all peers; looked up at each attempt.
    Dns(String),
}
