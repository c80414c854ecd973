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
    /// Host and port peers reach this replica's peer listener at.
    pub advertise: String,
    /// What the cluster is called: replicas of other names have nothing to do with each other.
    pub cluster_name: String,
    /// Free `key=value` facts told to peers and shown in [`crate::Status`] (`admin`, `data`,
    /// `version`).
    pub labels: BTreeMap<String, String>,
    /// How a cluster comes to be.
    pub formation: Formation,
    /// Leader's heartbeat interval.
    pub heartbeat: Duration,
    /// Range an election timeout is drawn from.
    pub election_timeout: Range<Duration>,
    /// Log entries between snapshots.
    pub snapshot_every_entries: u64,
    /// Log bytes between snapshots, whichever comes first.
    pub snapshot_every_bytes: u64,
    /// Where log, identity and snapshots are kept: [`Storage::Sled`] outside of tests.
    pub storage: Storage,
}

/// How a replica finds its cluster when its data directory is empty.
#[derive(Debug, Clone)]
pub enum Formation {
    /// Form a cluster once `expect` peers (this one included) answer and none of them has state;
    /// if one of them is in a cluster already, join that. The lowest id initialises.
    Bootstrap {
        /// Where peers are looked for.
        peers: Peers,
        /// How many voters begin: more than half of the peers, so that there cannot be two sets of
        /// them that do not know of each other.
        expect: usize,
        /// Command proposed as the cluster's first, by whoever initialises.
        first_command: Vec<u8>,
    },
    /// Join an existing cluster as a learner through any of these members.
    Join(Peers),
}

/// Where peers are looked for.
#[derive(Debug, Clone)]
pub enum Peers {
    /// `host:port` each.
    List(Vec<String>),
    /// One `host:port` that resolves to every peer; looked up anew at each try.
    Dns(String),
}
