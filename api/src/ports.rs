//! Ports: the traits this crate needs, which `node` implements over `raft` and `state`.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;

use state::RouterState;
use state::command::{Command, Committed, Envelope};
use state::ids::{LogIndex, ReplicaId, SessionId};

/// A boxed future, as object-safe traits need it.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Why a command is not known to have taken effect.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    /// It did not enter any log: it can be proposed again, or given up.
    #[error("no quorum: {0}")]
    Unavailable(String),
    /// It may yet take effect. The same envelope may be proposed again, nothing else.
    #[error("outcome unknown: {0}")]
    Unknown(String),
    /// This replica is stopping.
    #[error("replica is stopping")]
    Stopping,
}

/// Puts commands into the log.
pub trait Propose: Send + Sync + 'static {
    /// Proposes one envelope and waits for its fate.
    fn propose(&self, envelope: Envelope) -> BoxFuture<'_, Result<Committed, ProposeError>>;
}

/// What the admin API asks of the cluster beside its state.
pub trait Cluster: Send + Sync + 'static {
    /// Proposes an admin command under this replica's admin lane: one at a time, repeated under the
    /// same sequence number until its fate is known or ten seconds have passed.
    fn submit(&self, command: Command) -> BoxFuture<'_, Result<Committed, ProposeError>>;

    /// Waits until everything committed when the call began is applied here.
    fn read_barrier(&self) -> BoxFuture<'_, Result<LogIndex, ProposeError>>;

    /// Runs `read` on the state between two applies. Keep it short: `apply` waits meanwhile.
    fn with_state(&self, read: &mut dyn FnMut(&RouterState));

    /// The present view of the cluster.
    fn status(&self) -> ClusterStatus;

    /// Adds a learner; answers the log index.
    fn add_member(&self, id: ReplicaId, address: String)
    -> BoxFuture<'_, Result<u64, ChangeError>>;
    /// Makes a learner a voter; answers the log index.
    fn promote_member(&self, id: ReplicaId) -> BoxFuture<'_, Result<u64, ChangeError>>;
    /// Removes a member; answers the log index.
    fn remove_member(&self, id: ReplicaId) -> BoxFuture<'_, Result<u64, ChangeError>>;
    /// Hands leadership over; answers the new leader.
    fn transfer_leader(
        &self,
        to: Option<ReplicaId>,
    ) -> BoxFuture<'_, Result<ReplicaId, ChangeError>>;
    /// Takes a snapshot; answers its index.
    fn snapshot(&self) -> BoxFuture<'_, Result<u64, ChangeError>>;
}

/// Why a change of membership or leadership did not take place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// It cannot be done as things are; says why.
    #[error("{0}")]
    Refused(String),
    /// Not known to have taken place.
    #[error("outcome unknown: {0}")]
    Unknown(String),
}

/// A replica's view of its cluster, as `GET /admin/v1/cluster` shows it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct ClusterStatus {
    /// This replica.
    pub id: ReplicaId,
    /// Its run.
    #[serde(skip)]
    pub session: SessionId,
    /// 32 hex digits; `None` before the cluster is formed.
    pub cluster_id: Option<String>,
    /// `leader`, `follower`, `candidate`, `learner`, `forming`, `removed` or `stopped`.
    pub role: &'static str,
    /// Raft term.
    pub term: u64,
    /// The leader it follows.
    pub leader: Option<ReplicaId>,
    /// Whether a quorum answers, as far as can be told here.
    pub has_quorum: bool,
    /// Last index known committed.
    pub committed_index: u64,
    /// Last index applied.
    pub applied_index: u64,
    /// Index of the newest snapshot.
    pub snapshot_index: Option<u64>,
    /// Whether it has caught up with what the cluster had when it started.
    pub caught_up: bool,
    /// Whether this replica was removed from the cluster, as a member told it.
    pub is_removed: bool,
    /// A storage fault, in words.
    pub fault: Option<String>,
    /// Why the log takes nothing at present, in words; it goes on by itself.
    pub waiting: Option<String>,
    /// `CARGO_PKG_VERSION` of this replica.
    pub version: &'static str,
    /// All members by id.
    pub members: BTreeMap<ReplicaId, MemberStatus>,
}

/// One member of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct MemberStatus {
    /// Host and port of its peer listener.
    pub peer: String,
    /// What it told about itself: `admin`, `data` (URLs) and `version`.
    pub labels: BTreeMap<String, String>,
    /// Whether it counts for the quorum.
    pub is_voter: bool,
    /// Whether it is heard from.
    pub is_connected: bool,
    /// Entries it is behind; known on the leader only.
    pub lag: Option<u64>,
    /// How far its wall clock is ahead of this replica's, milliseconds; of this replica and of who is
    /// not heard from it is not known.
    pub clock_skew_ms: Option<i64>,
}
