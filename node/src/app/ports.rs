//! What `api` asks of the log and the cluster, answered by a raft replica.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use api::ports::{
    BoxFuture, ChangeFailure, Cluster, ClusterStatus, MemberStatus, Propose, ProposeFailure,
};
use raft::{ChangeError, ProposeError, Replica, Role};
use state::RouterState;
use state::command::{Command, Committed, Envelope, Lane, Origin};
use state::ids::{LogIndex, ReplicaId, SessionId};
use tokio::time::Instant;

use super::machine::Shared;

/// Sequence number, in a run's admin lane, of the command that forms a cluster; only one replica
/// proposes it, but all number their admin commands after it.
pub(super) const FIRST_COMMAND_SEQ: u64 = 1;
/// Longest wait for the fate of one proposal.
const PROPOSE_TIMEOUT: Duration = Duration::from_secs(3);
/// Longest time an admin command is repeated while its fate is unknown.
const SUBMIT_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between two tries of an admin command.
const SUBMIT_PAUSE: Duration = Duration::from_millis(100);

/// A replica of the log as `api` sees it.
pub(super) struct LogPort {
    id: ReplicaId,
    session: SessionId,
    replica: Replica,
    shared: Arc<Shared>,
    /// Last sequence number given to an admin command; held while one is under way.
    admin_seq: tokio::sync::Mutex<u64>,
}

impl LogPort {
    /// `replica` drives `shared`; both belong to this run of replica `id`.
    #[must_use]
    pub(super) fn new(
        id: ReplicaId,
        session: SessionId,
        replica: Replica,
        shared: Arc<Shared>,
    ) -> Self {
        Self {
            id,
            session,
            replica,
            shared,
            admin_seq: tokio::sync::Mutex::new(FIRST_COMMAND_SEQ),
        }
    }

    async fn submit(&self, command: Command) -> Result<Committed, ProposeFailure> {
        let mut seq = self.admin_seq.lock().await;
        *seq += 1;
        let origin = Origin {
            replica: self.id,
            session: self.session,
            lane: Lane::Admin,
            seq: *seq,
        };
        let envelope = Envelope {
            origin,
            proposed_at_ms: unix_ms(),
            command,
        };
        let deadline = Instant::now() + SUBMIT_TIMEOUT;
        let mut may_be_logged = false;
        loop {
            let failure = match self.propose(envelope.clone()).await {
                Err(failure @ ProposeFailure::Unavailable(_)) => failure,
                Err(failure @ ProposeFailure::Unknown(_)) => {
                    may_be_logged = true;
                    failure
                }
                settled => return settled,
            };
            if Instant::now() + SUBMIT_PAUSE >= deadline {
                // Only if no try may have reached a log is it safe to say that it did not happen.
                return Err(match failure {
                    ProposeFailure::Unavailable(why) if may_be_logged => {
                        ProposeFailure::Unknown(why)
                    }
                    failure => failure,
                });
            }
            tokio::time::sleep(SUBMIT_PAUSE).await;
        }
    }
}

/// Unix time in milliseconds by this machine's clock.
pub(super) fn unix_ms() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

impl Propose for LogPort {
    fn propose(&self, envelope: Envelope) -> BoxFuture<'_, Result<Committed, ProposeFailure>> {
        Box::pin(async move {
            let command = state::codec::encode_envelope(&envelope);
            let committed = self
                .replica
                .propose(command, PROPOSE_TIMEOUT)
                .await
                .map_err(propose_failure)?;
            let reply = state::codec::decode_reply(&committed.reply)
                .map_err(|error| ProposeFailure::Unknown(format!("decode reply: {error}")))?;
            Ok(Committed {
                index: LogIndex(committed.index),
                reply,
            })
        })
    }
}

fn propose_failure(error: ProposeError) -> ProposeFailure {
    match error {
        ProposeError::NoLeader => ProposeFailure::Unavailable("no leader is known".to_owned()),
        // Batches are cut far below the bound, so this is an admin command. It entered no log.
        error @ ProposeError::TooLarge { .. } => ProposeFailure::Unavailable(error.to_string()),
        ProposeError::Unknown(why) => ProposeFailure::Unknown(why),
        ProposeError::Stopped(_) => ProposeFailure::Stopping,
    }
}

fn change_failure(error: ChangeError) -> ChangeFailure {
    match error {
        ChangeError::Refused(why) => ChangeFailure::Refused(why),
        ChangeError::Unknown(why) => ChangeFailure::Unknown(why),
    }
}

impl Cluster for LogPort {
    fn submit(&self, command: Command) -> BoxFuture<'_, Result<Committed, ProposeFailure>> {
        Box::pin(LogPort::submit(self, command))
    }

    fn read_barrier(&self) -> BoxFuture<'_, Result<LogIndex, ProposeFailure>> {
        Box::pin(async move {
            let index = self.replica.read_barrier(PROPOSE_TIMEOUT).await;
            index.map(LogIndex).map_err(propose_failure)
        })
    }

    fn with_state(&self, read: &mut dyn FnMut(&RouterState)) {
        read(&self.shared.state());
    }

    fn status(&self) -> ClusterStatus {
        cluster_status(&self.replica.status(), self.session)
    }

    fn add_member(
        &self,
        id: ReplicaId,
        address: String,
    ) -> BoxFuture<'_, Result<u64, ChangeFailure>> {
        Box::pin(async move {
            self.replica
                .add_learner(id.0, address)
                .await
                .map_err(change_failure)
        })
    }

    fn promote_member(&self, id: ReplicaId) -> BoxFuture<'_, Result<u64, ChangeFailure>> {
        Box::pin(async move { self.replica.promote(id.0).await.map_err(change_failure) })
    }

    fn remove_member(&self, id: ReplicaId) -> BoxFuture<'_, Result<u64, ChangeFailure>> {
        Box::pin(async move { self.replica.remove(id.0).await.map_err(change_failure) })
    }

    fn transfer_leader(
        &self,
        to: Option<ReplicaId>,
    ) -> BoxFuture<'_, Result<ReplicaId, ChangeFailure>> {
        Box::pin(async move {
            let to = self.replica.transfer_leader(to.map(|to| to.0)).await;
            to.map(ReplicaId).map_err(change_failure)
        })
    }

    fn snapshot(&self) -> BoxFuture<'_, Result<u64, ChangeFailure>> {
        Box::pin(async move { self.replica.snapshot().await.map_err(change_failure) })
    }
}

/// A raft status in the admin API's words.
fn cluster_status(status: &raft::Status, session: SessionId) -> ClusterStatus {
    let member = |(id, member): (&u8, &raft::Member)| {
        let status = MemberStatus {
            peer: member.address.clone(),
            labels: member.labels.clone(),
            is_voter: member.is_voter,
            is_connected: member.is_connected,
            lag: member.lag,
        };
        (ReplicaId(*id), status)
    };
    ClusterStatus {
        id: ReplicaId(status.id),
        session,
        cluster_id: status.cluster_id.map(|id| format!("{id:032x}")),
        role: match status.role {
            Role::Leader => "leader",
            Role::Follower => "follower",
            Role::Candidate => "candidate",
            Role::Learner => "learner",
            Role::Forming => "forming",
            Role::Stopped => "stopped",
        },
        term: status.term,
        leader: status.leader.map(ReplicaId),
        has_quorum: status.has_quorum,
        committed_index: status.committed,
        applied_index: status.applied,
        snapshot_index: status.snapshot,
        caught_up: status.caught_up,
        fault: status.fault.clone(),
        version: env!("CARGO_PKG_VERSION"),
        members: status.members.iter().map(member).collect(),
    }
}
