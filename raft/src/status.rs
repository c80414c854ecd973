//! Status of a replica and its cluster.

use std::collections::BTreeMap;

/// What a replica knows of its cluster. Log indexes count from 1; 0 stands for none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// This replica.
    pub id: u8,
    /// Random id of the cluster; `None` before it is formed or joined.
    pub cluster_id: Option<u128>,
    /// What this replica is at the moment.
    pub role: Role,
    /// Raft term.
    pub term: u64,
    /// The leader it follows.
    pub leader: Option<u8>,
    /// Whether the leader is heard from and a quorum answers it, as far as this replica can tell.
    pub has_quorum: bool,
    /// Last index known committed.
    pub committed: u64,
    /// Last index applied.
    pub applied: u64,
    /// Last index in the local log.
    pub last_log: u64,
    /// Index of the newest snapshot.
    pub snapshot: Option<u64>,
    /// First index the log still holds.
    pub purged: u64,
    /// Whether what the leader had committed when this replica started is applied.
    pub caught_up: bool,
    /// Whether it was removed from the cluster, as a member says that knows a newer membership.
    pub is_removed: bool,
    /// Why the replica stopped for good (storage fault, machine stopped).
    pub fault: Option<String>,
    /// Why its log takes nothing at present (disk full). Nothing was begun: it goes on by itself.
    pub waiting: Option<String>,
    /// All members, this one included.
    pub members: BTreeMap<u8, Member>,
}

/// What a replica is in its cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Orders the log.
    Leader,
    /// Votes and follows.
    Follower,
    /// Asks for votes.
    Candidate,
    /// Follows without a vote.
    Learner,
    /// Not in a cluster yet.
    Forming,
    /// Was a member and is one no more, see [`Status::is_removed`].
    Removed,
    /// Over, see [`Status::fault`].
    Stopped,
}

/// A member of the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Host and port of its peer listener.
    pub address: String,
    /// What it told about itself.
    pub labels: BTreeMap<String, String>,
    /// Whether it counts for the quorum.
    pub is_voter: bool,
    /// Whether its peer stream is up, as seen from here.
    pub is_connected: bool,
    /// Entries it is behind; known on the leader only.
    pub lag: Option<u64>,
}
