//! The status of a replica and its cluster.

use std::collections::BTreeMap;

/// What a replica knows about its cluster. Log indexes start at 1; 0 means none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
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
    /// Whether the leader is heard and a quorum answers it, as far as this replica can tell.
    pub has_quorum: bool,
    /// Last index known to be committed.
    pub committed: u64,
    /// Last index applied.
    pub applied: u64,
    /// Last index in the local log.
    pub last_log: u64,
    /// Index of the newest snapshot.
    pub snapshot: Option<u64>,
    /// First index the log still holds.
    pub purged: u64,
    /// Whether everything is applied that the leader had committed when this replica started.
    pub caught_up: bool,
    /// Whether it was removed from the cluster, according to a member with a newer membership.
    pub is_removed: bool,
    /// Why the replica stopped for good (storage fault, machine stopped).
    pub fault: Option<String>,
    /// Why it is in no cluster yet, as far as it knows. It keeps trying.
    pub unjoined: Option<String>,
    /// While it is in no cluster: what it found at the addresses of its config. While it hears no
    /// quorum: what it found at those of the other members.
    pub peers: Vec<PeerFinding>,
    /// Why nothing can be written to its log at present (disk full). It resumes by itself.
    pub waiting: Option<String>,
    /// All members, this one included.
    pub members: BTreeMap<u8, Member>,
}

/// What a replica is in its cluster.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
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
    #[default]
    Forming,
    /// Was a member and no longer is one, see [`Status::is_removed`].
    Removed,
    /// Stopped for good, see [`Status::fault`].
    Stopped,
}

/// What a replica without a quorum found at an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerFinding {
    /// Host and port, or the name to be resolved.
    pub address: String,
    /// What was found, for programs.
    pub state: PeerState,
    /// What was found, for people.
    pub detail: String,
}

/// What is at an address where a replica expects a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerState {
    /// The replica itself.
    Own,
    /// A replica that is in no cluster either.
    Free,
    /// A member of a cluster.
    Member,
    /// Nothing listens there.
    Refused,
    /// The name does not resolve.
    UnknownName,
    /// No answer in time.
    TimedOut,
    /// It is configured for another cluster.
    OtherCluster,
    /// It has the id of this replica or of another peer.
    SameId,
    /// The two do not share `cluster.secret_file`.
    WrongSecret,
    /// One of the two has no certificate that the other one trusts.
    WrongCertificate,
    /// A replica that does not belong there: another id, or without the member's store.
    OtherReplica,
    /// This replica's own address, which the config does not list.
    OwnMissing,
    /// It answers, but not as a peer.
    Failed,
}

impl PeerState {
    /// Its name in answers of the admin API.
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

    /// Whether it keeps nobody from forming a cluster.
    #[must_use]
    pub fn is_fine(self) -> bool {
        matches!(self, Self::Own | Self::Free | Self::Member)
    }
}

/// A member of the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Host and port of its peer listener.
    pub address: String,
    /// What it tells about itself.
    pub labels: BTreeMap<String, String>,
    /// Whether it counts for the quorum.
    pub is_voter: bool,
    /// Whether the stream of messages to it is open, as seen from here.
    pub is_connected: bool,
    /// Whether its host answers that nothing listens at its address: its process is gone.
    pub is_refusing: bool,
    /// How many entries it is behind; known on the leader only, see
    /// [`Replica::peers_applied`](crate::Replica::peers_applied).
    pub lag: Option<u64>,
}
