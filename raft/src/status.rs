//! Status of a replica and its cluster.

use std::collections::BTreeMap;

use tokio::time::Instant;

/// A replica's view of its cluster. Log indexes start at 1; 0 means none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Status {
    /// Id of this replica.
    pub id: u8,
    /// Random id of the cluster; `None` before it is formed or joined.
    pub cluster_id: Option<u128>,
    /// Current role of this replica.
    pub role: Role,
    /// Current Raft term.
    pub term: u64,
    /// Leader that this replica follows; `None` if it knows none.
    pub leader: Option<u8>,
    /// Whether, as far as this replica knows, there is a leader in contact with a quorum.
    pub has_quorum: bool,
    /// Index of the last entry known to be committed.
    pub committed: u64,
    /// Index of the last applied entry.
    pub applied: u64,
    /// Index of the last entry in the local log.
    pub last_log: u64,
    /// Index of the newest snapshot; `None` without a snapshot.
    pub snapshot: Option<u64>,
    /// First index that the log still holds.
    pub purged: u64,
    /// Whether this replica has applied everything that the leader had committed when the two first
    /// were in contact.
    pub caught_up: bool,
    /// Whether this replica was removed, as reported by a member with a newer membership.
    pub is_removed: bool,
    /// Reason why the replica stopped for good (storage fault or machine stopped); `None` while it
    /// runs.
    pub fault: Option<String>,
    /// Reason why this replica is in no cluster yet, if known; `None` for a member. The replica
    /// keeps trying.
    pub unjoined: Option<String>,
    /// State of the peers: those in the config while this replica is in no cluster, the other
    /// members while it is not in contact with a quorum. Empty otherwise.
    pub peers: Vec<PeerFinding>,
    /// Reason why the log currently cannot be written (disk full); `None` if it can. Writing
    /// resumes by itself.
    pub waiting: Option<String>,
    /// All members, including this one.
    pub members: BTreeMap<u8, Member>,
}

/// Role of a replica in its cluster.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Role {
    /// Leader, which orders the log entries.
    Leader,
    /// Voter that follows the leader.
    Follower,
    /// Voter that requests votes to become the leader.
    Candidate,
    /// Member that follows the leader without a vote.
    Learner,
    /// Replica that is not in a cluster yet.
    #[default]
    Forming,
    /// Replica that is no longer a member; see [`Status::is_removed`].
    Removed,
    /// Replica that stopped for good; see [`Status::fault`].
    Stopped,
}

/// Result of contacting a peer's address, recorded while a replica has no cluster or no quorum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerFinding {
    /// Host and port, or a name that is still to be resolved.
    pub address: String,
    /// Machine-readable state of the address.
    pub state: PeerState,
    /// Human-readable detail about the state.
    pub detail: String,
}

/// State of an address at which a replica expects a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerState {
    /// The address is that of the replica itself.
    Own,
    /// The peer is in no cluster.
    Free,
    /// The peer is a member of a cluster.
    Member,
    /// The host refuses connections: nothing listens at the address.
    Refused,
    /// The name does not resolve.
    UnknownName,
    /// The peer did not respond within the timeout.
    TimedOut,
    /// The peer is configured for another cluster.
    OtherCluster,
    /// The peer has the id of this replica or of another peer.
    SameId,
    /// The two replicas do not share `cluster.secret_file`.
    WrongSecret,
    /// One of the two replicas has no certificate that the other one trusts.
    WrongCertificate,
    /// The peer does not belong at this address: it has another id, or lacks the member's store.
    OtherReplica,
    /// The address is this replica's own, and the config does not list it.
    OwnMissing,
    /// The listener responds, but not as a peer does.
    Failed,
}

impl PeerState {
    /// Returns the state's name in responses of the admin API.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Own => "this-replica",
            Self::Free => "answers",
            Self::Member => "member",
            Self::Refused => "refused",
            Self::UnknownName => "name-not-found",
            Self::TimedOut => "timed-out",
            Self::OtherCluster => "other-cluster",
            Self::SameId => "same-id",
            Self::OtherReplica => "other-replica",
            Self::WrongSecret => "wrong-secret",
            Self::WrongCertificate => "wrong-certificate",
            Self::OwnMissing => "own-address-missing",
            Self::Failed => "failed",
        }
    }

    /// Whether an address in this state is no obstacle to forming a cluster.
    #[must_use]
    pub fn is_fine(self) -> bool {
        matches!(self, Self::Own | Self::Free | Self::Member)
    }
}

/// Member of the cluster, as this replica sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Host and port of the member's peer listener.
    pub address: String,
    /// `key=value` pairs that the member announces about itself.
    pub labels: BTreeMap<String, String>,
    /// Whether the member counts toward the quorum.
    pub is_voter: bool,
    /// Whether this replica's message stream to the member is open; true for this replica itself.
    pub is_connected: bool,
    /// Time at which this replica noticed that the member is not connected; `None` if it is.
    pub silent_since: Option<Instant>,
    /// Whether the member's host refuses connections at its address, because the process is gone.
    pub is_refusing: bool,
    /// Number of entries by which the member's log is behind the leader's; `None` except on the
    /// leader. On any replica, [`Replica::peers_applied`](crate::Replica::peers_applied) returns
    /// what members have applied.
    pub lag: Option<u64>,
}
