//! Ports: the traits that this crate needs, implemented by `node` over `raft` and `state`.

use bytes::Bytes;
use schemars::JsonSchema;
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;

use state::RouterState;
use state::command::{Command, Committed, Envelope};
use state::ids::{LogIndex, ReplicaId, SessionId};

/// A boxed future, for object-safe traits.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Reason why a command is not known to have taken effect.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    /// The command did not enter any log, so it can be proposed again or abandoned.
    #[error("no quorum: {0}")]
    Unavailable(String),
    /// The command may still take effect. Only the same envelope may be proposed again.
    #[error("outcome unknown: {0}")]
    Unknown(String),
    /// This replica is stopping.
    #[error("replica is stopping")]
    Stopping,
}

/// Proposes commands to the log.
pub trait Propose: Send + Sync + 'static {
    /// Proposes one envelope and waits for its outcome.
    fn propose(&self, envelope: Envelope) -> BoxFuture<'_, Result<Committed, ProposeError>>;
}

/// The admin API's access to the cluster.
pub trait Cluster: Send + Sync + 'static {
    /// Proposes an admin command in this replica's admin lane, one at a time. Repeats it under the
    /// same sequence number until its outcome is known or five seconds have passed.
    fn submit(&self, command: Command) -> BoxFuture<'_, Result<Committed, ProposeError>>;

    /// Waits until everything committed before the call is applied here, and returns the index.
    fn read_barrier(&self) -> BoxFuture<'_, Result<LogIndex, ProposeError>>;

    /// Calls `read` on the state between two applies. Keep it short, because `apply` waits
    /// meanwhile.
    fn with_state(&self, read: &mut dyn FnMut(&RouterState));

    /// Returns the current view of the cluster.
    fn status(&self) -> ClusterStatus;

    /// Adds a learner and returns the log index.
    fn add_member(&self, id: ReplicaId, address: String)
    -> BoxFuture<'_, Result<u64, ChangeError>>;
    /// Makes a learner a voter and returns the log index.
    fn promote_member(&self, id: ReplicaId) -> BoxFuture<'_, Result<u64, ChangeError>>;
    /// Removes a member and returns the log index.
    fn remove_member(&self, id: ReplicaId) -> BoxFuture<'_, Result<u64, ChangeError>>;
    /// Transfers leadership to `to`, or with `None` to the voter with the longest log, and returns
    /// the new leader.
    fn transfer_leader(
        &self,
        to: Option<ReplicaId>,
    ) -> BoxFuture<'_, Result<ReplicaId, ChangeError>>;
    /// Takes a snapshot and returns its index.
    fn snapshot(&self) -> BoxFuture<'_, Result<u64, ChangeError>>;

    /// Returns the other members.
    fn peers(&self) -> Vec<ReplicaId> {
        Vec::new()
    }

    /// Asks a peer something outside the log. An error describes why there is no answer.
    fn ask(
        &self,
        _peer: ReplicaId,
        _topic: QuestionTopic,
        _question: Bytes,
    ) -> BoxFuture<'_, Result<Bytes, String>> {
        Box::pin(std::future::ready(Err("no peers".to_owned())))
    }
}

/// Subject of a question to a peer, and its first byte on the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuestionTopic {
    /// Past decisions, see [`DecisionLog::answer`](crate::proxy::DecisionLog::answer).
    Decisions = 1,
    /// Permits of users, see [`Permits::answer`](crate::routing::Permits::answer).
    Permits = 2,
}

impl QuestionTopic {
    /// Returns the topic with this first byte, if there is one.
    #[must_use]
    pub fn of(byte: u8) -> Option<Self> {
        [Self::Decisions, Self::Permits]
            .into_iter()
            .find(|topic| *topic as u8 == byte)
    }
}

/// Reason why a change of membership or leadership did not take place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// The change is not possible in the current state of the cluster.
    #[error("{0}")]
    Refused(String),
    /// It is unknown whether the change took place.
    #[error("outcome unknown: {0}")]
    Unknown(String),
}

/// A replica's view of its cluster, as `GET /admin/v1/cluster` shows it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, JsonSchema)]
pub struct ClusterStatus {
    /// Id of this replica.
    pub id: ReplicaId,
    /// Session of this replica.
    #[serde(skip)]
    pub session: SessionId,
    /// Id of the cluster, 32 hex digits; `null` before the cluster is formed.
    pub cluster_id: Option<String>,
    /// `leader`, `follower`, `candidate` (seeks a quorum), `learner`, `forming`, `removed` or
    /// `stopped`.
    pub role: &'static str,
    /// Raft term.
    pub term: u64,
    /// Leader that a quorum follows, as far as this replica knows; `null`: there is none.
    pub leader: Option<ReplicaId>,
    /// Whether a quorum responds, as far as this replica knows.
    pub has_quorum: bool,
    /// Last index known to be committed.
    pub committed_index: u64,
    /// Last index applied.
    pub applied_index: u64,
    /// Index of the newest snapshot; `null`: there is none.
    pub snapshot_index: Option<u64>,
    /// Whether this replica has applied everything that the cluster's log contained when it
    /// started.
    pub caught_up: bool,
    /// Whether a member has reported that this replica was removed from the cluster.
    pub is_removed: bool,
    /// Description of this replica's storage fault, if any.
    pub fault: Option<String>,
    /// Why this replica is not in a cluster yet; `null`: it is in one, or the reason is not known.
    pub unjoined: Option<String>,
    /// Findings at the addresses of its config while it is in no cluster, or at those of the other
    /// members while it hears no quorum.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<PeerFinding>,
    /// Why the log is waiting, for example for disk space; it resumes without intervention.
    pub waiting: Option<String>,
    /// Why the membership does not match the desired scale yet, if this replica is responsible for
    /// it.
    pub scaling: Option<String>,
    /// `CARGO_PKG_VERSION` of this replica.
    pub version: &'static str,
    /// All members by id.
    pub members: BTreeMap<ReplicaId, MemberStatus>,
}

impl ClusterStatus {
    /// Returns how many more voters may fail, of those that this replica is connected to, before
    /// the quorum is lost; `None` if there is no quorum.
    #[must_use]
    pub fn failures_survived(&self) -> Option<usize> {
        let voters = || self.members.iter().filter(|(_, member)| member.is_voter);
        let is_there =
            |(id, member): &(&ReplicaId, &MemberStatus)| member.is_connected || **id == self.id;
        let needed = voters().count() / 2 + 1;
        let there = voters().filter(is_there).count();
        self.has_quorum.then(|| there.saturating_sub(needed))
    }

    /// Names the other members that do not answer this replica, and since when.
    pub fn silent_members(&self) -> impl Iterator<Item = String> {
        let others = self.members.iter().filter(|(id, _)| **id != self.id);
        others.filter_map(|(id, member)| {
            let seconds = member.silent_ms? / 1000;
            Some(match member.is_refusing {
                true => format!("replica {id} has stopped: no answer for {seconds} s"),
                false => format!("replica {id} has not answered for {seconds} s"),
            })
        })
    }
}

/// Finding of a replica without a quorum at the address of a peer.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, JsonSchema)]
pub struct PeerFinding {
    /// Host and port, or the DNS name to resolve.
    pub address: String,
    /// `this-replica`, `answers`, `member`, `refused`, `name-not-found`, `timed-out`,
    /// `other-cluster`, `same-id`, `other-replica`, `wrong-secret`, `wrong-certificate`,
    /// `own-address-missing` or `failed`.
    pub state: &'static str,
    /// Whether the finding prevents this replica from reaching a quorum, or from forming or joining
    /// a cluster.
    pub is_hindrance: bool,
    /// Description of the finding.
    pub detail: String,
}

/// One member of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, JsonSchema)]
pub struct MemberStatus {
    /// Host and port of the member's peer listener.
    pub peer: String,
    /// Labels that the member announced: the URLs `admin` and `data`, and `version`.
    pub labels: BTreeMap<String, String>,
    /// Whether the member is a voter.
    pub is_voter: bool,
    /// Whether the member is connected to this replica; `true` for this replica itself.
    pub is_connected: bool,
    /// Time since this replica noticed that the member is not connected, in milliseconds; `null`:
    /// it is.
    pub silent_ms: Option<u64>,
    /// Whether the member's host refuses connections at its address, which means that its process
    /// is gone.
    pub is_refusing: bool,
    /// Number of entries that the member lags behind: in the log if the leader responds, else in
    /// what it has applied. `null` if it is not heard.
    pub lag: Option<u64>,
    /// Lead of the member's wall clock over this replica's, in milliseconds. `null` for this
    /// replica, for members that are not heard, and while the delay of messages may explain why a
    /// clock looks late.
    pub clock_skew_ms: Option<i64>,
}
