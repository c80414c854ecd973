//! Implements the ports of `api` over a Raft replica.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use api::ports::{
    BoxFuture, ChangeError, Cluster, ClusterStatus, Propose, ProposeError, QuestionTopic,
};
use bytes::Bytes;
use raft::Replica;
use state::RouterState;
use state::command::{Command, Committed, Envelope, Lane, Origin, Rejection, Reply};
use state::ids::{LogIndex, ReplicaId, SessionId};
use tokio::time::Instant;

use super::clocks::ClusterClocks;
use super::cluster_status::cluster_status;
use super::machine::SharedState;
use super::scaling::Scaling;
use crate::planted::{self, Bug};

/// Sequence number of the command that forms a cluster, in a session's lane for admin commands.
/// Only one replica proposes it, but all number their admin commands after it.
pub(super) const FIRST_COMMAND_SEQ: u64 = 1;
/// Maximum time to wait for the outcome of one proposal.
const PROPOSE_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum time to wait for a peer's answer to a question outside the log.
const ASK_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum duration of an admin command, including the wait for earlier ones and retries while its
/// outcome is unknown.
const SUBMIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of sessions under which one admin command is proposed.
const SESSIONS_MAX: u32 = 3;
/// Pause between two attempts of an admin command.
const SUBMIT_PAUSE: Duration = Duration::from_millis(100);

/// Reason for rejecting proposals before the cluster is formed.
const NOT_FORMED: &str = "the state here is not that of a cluster yet";
/// Reason for rejecting proposals right after the start.
const CLOCKS_UNHEARD: &str = "the clocks of the other members are not known yet";
/// Reason for reporting an outcome as unknown although the leader has replied.
const LEADER_IS_WRONG: &str = "the leader has lost its state";

/// Port through which `api` uses the log.
pub(super) struct LogPort {
    id: ReplicaId,
    /// Session by which the cluster knows this process. Its successor replaces it if the outbox or
    /// an admin command finds that the cluster has seen another session of this replica's id.
    session: Mutex<SessionId>,
    replica: Replica,
    shared: Arc<SharedState>,
    /// Last sequence number of an admin command. The lock is held while a command is in progress.
    admin_seq: tokio::sync::Mutex<u64>,
    clocks: Arc<ClusterClocks>,
    scaling: Option<Arc<Scaling>>,
}

impl LogPort {
    /// Creates the port of this session of replica `id`. `replica` applies the log to `shared`.
    #[must_use]
    pub(super) fn new(
        id: ReplicaId,
        session: SessionId,
        replica: Replica,
        shared: Arc<SharedState>,
        clocks: Arc<ClusterClocks>,
    ) -> Self {
        Self {
            id,
            session: Mutex::new(session),
            replica,
            shared,
            admin_seq: tokio::sync::Mutex::new(FIRST_COMMAND_SEQ),
            clocks,
            scaling: None,
        }
    }

    /// Adds the component that scales the membership, if there is one.
    #[must_use]
    pub(super) fn scaled(self, scaling: Option<Arc<Scaling>>) -> Self {
        Self { scaling, ..self }
    }

    /// Loses the replicated state, see
    /// [`ReplicaCore::state_loss`](super::replica_core::ReplicaCore::state_loss).
    pub(super) fn lose_state(&self) {
        let mut state = self.shared.state();
        let mut empty = RouterState::new();
        empty.skip(state.applied());
        let mut bytes = Vec::new();
        let written = empty.freeze().write_to(&mut bytes);
        written.expect("writing into memory cannot fail");
        let restored = state.restore(&mut &*bytes);
        restored.expect("what was written can be read");
    }

    async fn submit(&self, command: Command) -> Result<Committed, ProposeError> {
        let deadline = Instant::now() + SUBMIT_TIMEOUT;
        let Ok(mut seq) = tokio::time::timeout_at(deadline, self.admin_seq.lock()).await else {
            let why = "an earlier write of this replica is still in progress";
            return Err(ProposeError::Unavailable(why.to_owned()));
        };
        *seq += 1;
        let origin = Origin {
            replica: self.id,
            session: *self.session(),
            lane: Lane::Admin,
            seq: *seq,
        };
        let mut envelope = Envelope {
            origin,
            // Each proposal sets the sequence number.
            proposed_at_ms: 0,
            command,
        };
        let mut may_be_logged = false;
        let mut sessions = 1;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let limit = left.min(PROPOSE_TIMEOUT);
            let failure = match self.propose_within(envelope.clone(), limit).await {
                Ok(committed) if is_stale(&committed.reply) && may_be_logged => {
                    let why = "another session of this replica has begun in the meantime";
                    return Err(ProposeError::Unknown(why.to_owned()));
                }
                Ok(committed) if is_stale(&committed.reply) => {
                    if sessions == SESSIONS_MAX {
                        let why = "another process uses this replica's id";
                        return Err(ProposeError::Unavailable(why.to_owned()));
                    }
                    sessions += 1;
                    envelope.origin.session = self.session_after(envelope.origin.session);
                    // The next attempt may depend on entries that this replica has not applied yet.
                    tokio::time::sleep(SUBMIT_PAUSE).await;
                    continue;
                }
                Err(failure @ ProposeError::Unavailable(_)) => failure,
                Err(ProposeError::Unknown(_)) if planted::is(Bug::UnknownAcknowledged) => {
                    let (index, reply) = (self.shared.state().applied(), Reply::Applied);
                    return Ok(Committed { index, reply });
                }
                Err(failure @ ProposeError::Unknown(_)) => {
                    may_be_logged = true;
                    if planted::is(Bug::UnknownRenumbered) {
                        *seq += 1;
                        envelope.origin.seq = *seq;
                    }
                    failure
                }
                settled => return settled,
            };
            if Instant::now() + SUBMIT_PAUSE >= deadline {
                // "It did not happen" is only safe to report if no attempt may have reached a log.
                return Err(match failure {
                    ProposeError::Unavailable(why) if may_be_logged => ProposeError::Unknown(why),
                    failure => failure,
                });
            }
            tokio::time::sleep(SUBMIT_PAUSE).await;
        }
    }
}

impl LogPort {
    async fn propose_within(
        &self,
        mut envelope: Envelope,
        limit: Duration,
    ) -> Result<Committed, ProposeError> {
        let origin = envelope.origin;
        if !is_formed(&self.shared.state()) {
            return Err(ProposeError::Unavailable(NOT_FORMED.to_owned()));
        }
        let others = || self.replica.status().members.len().saturating_sub(1);
        if !self.clocks.is_settled(others) {
            return Err(ProposeError::Unavailable(CLOCKS_UNHEARD.to_owned()));
        }
        let clock_ms = self.clocks.unix_ms();
        envelope.proposed_at_ms = {
            let state = self.shared.state();
            state.stamp_ms(origin.replica, origin.session, clock_ms)
        };
        let command = state::codec::encode_envelope(&envelope);
        let committed = self.replica.propose(command, limit).await;
        let committed = committed.map_err(propose_error)?;
        let reply = state::codec::decode_reply(&committed.reply)
            .map_err(|error| ProposeError::Unknown(format!("decode reply: {error}")))?;
        if is_not_formed(&reply) {
            return Err(ProposeError::Unknown(LEADER_IS_WRONG.to_owned()));
        }
        if origin.lane == Lane::Outbox && !is_stale(&reply) {
            // The outbox detects the end of its session itself; admin commands must use the same
            // session.
            *self.session() = origin.session;
        }
        Ok(Committed {
            index: LogIndex(committed.index),
            reply,
        })
    }

    fn session(&self) -> MutexGuard<'_, SessionId> {
        // A number cannot be half written, so a poisoned lock is harmless.
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the session to use after the session `stale` was rejected.
    fn session_after(&self, stale: SessionId) -> SessionId {
        let mut session = self.session();
        if *session == stale {
            *session = stale.successor();
            tracing::error!(
                replica = self.id.0,
                "the cluster has another session of this replica's id; is a second process using it?"
            );
        }
        *session
    }
}

/// Whether a command was rejected because its session has ended.
fn is_stale(reply: &Reply) -> bool {
    match reply {
        Reply::Rejected(Rejection::StaleSession { .. }) => true,
        Reply::Repeated(first) => is_stale(first),
        Reply::Rejected(_) | Reply::Applied | Reply::Batch(_) => false,
    }
}

/// Whether the command that forms the cluster is applied. Nothing is proposed before it. Later
/// proposals follow it in the log, so they are never rejected because it is missing.
fn is_formed(state: &RouterState) -> bool {
    state.view().registry().initialised
}

/// Whether a command was rejected for preceding the formation of the cluster. After [`is_formed`],
/// only a leader that has lost its state replies so. The others may have applied the command and
/// would apply it again under another number.
fn is_not_formed(reply: &Reply) -> bool {
    match reply {
        Reply::Rejected(reject) => *reject == Rejection::NotInitialised,
        Reply::Repeated(first) => is_not_formed(first),
        Reply::Applied | Reply::Batch(_) => false,
    }
}

impl Propose for LogPort {
    fn propose(&self, envelope: Envelope) -> BoxFuture<'_, Result<Committed, ProposeError>> {
        Box::pin(self.propose_within(envelope, PROPOSE_TIMEOUT))
    }
}

fn propose_error(error: raft::ProposeError) -> ProposeError {
    match error {
        raft::ProposeError::NoLeader => ProposeError::Unavailable("no leader is known".to_owned()),
        // A member cannot decode it yet, or it is an admin command above the size limit (batches
        // stay far below it). It did not enter any log.
        error @ (raft::ProposeError::Refused(_)
        | raft::ProposeError::TooLarge { .. }
        | raft::ProposeError::NotApplied { .. }) => ProposeError::Unavailable(error.to_string()),
        raft::ProposeError::Unknown(why) => ProposeError::Unknown(why),
        raft::ProposeError::Stopped(_) => ProposeError::Stopping,
    }
}

fn change_error(error: raft::ChangeError) -> ChangeError {
    match error {
        raft::ChangeError::Refused(why) => ChangeError::Refused(why),
        raft::ChangeError::Unknown(why) => ChangeError::Unknown(why),
    }
}

impl Cluster for LogPort {
    fn peers(&self) -> Vec<ReplicaId> {
        let status = self.replica.status();
        let ids = status.members.keys().filter(|id| **id != self.id.0);
        ids.map(|id| ReplicaId(*id)).collect()
    }

    fn ask(
        &self,
        peer: ReplicaId,
        topic: QuestionTopic,
        question: Bytes,
    ) -> BoxFuture<'_, Result<Bytes, String>> {
        let question = [&[topic as u8][..], &question].concat();
        self.replica.ask(peer.0, question.into(), ASK_TIMEOUT)
    }

    fn submit(&self, command: Command) -> BoxFuture<'_, Result<Committed, ProposeError>> {
        Box::pin(LogPort::submit(self, command))
    }

    fn read_barrier(&self) -> BoxFuture<'_, Result<LogIndex, ProposeError>> {
        Box::pin(async move {
            let index = self.replica.read_barrier(PROPOSE_TIMEOUT).await;
            index.map(LogIndex).map_err(propose_error)
        })
    }

    fn with_state(&self, read: &mut dyn FnMut(&RouterState)) {
        read(&self.shared.state());
    }

    fn status(&self) -> ClusterStatus {
        let mut status = cluster_status(&self.replica.status(), *self.session());
        status.scaling = self
            .scaling
            .as_ref()
            .and_then(|scaling| scaling.blocked_reason());
        for (id, skew_ms) in self.clocks.skews_ms() {
            if let Some(member) = status.members.get_mut(&ReplicaId(id)) {
                member.clock_skew_ms = Some(skew_ms);
            }
        }
        // The leader knows the members' logs, the other replicas what members reported.
        let mut applied = self.replica.peers_applied();
        applied.insert(status.id.0, status.applied_index);
        for (id, member) in &mut status.members {
            let behind = |applied: &u64| status.committed_index.saturating_sub(*applied);
            member.lag = member.lag.or_else(|| applied.get(&id.0).map(behind));
        }
        status
    }

    fn add_member(
        &self,
        id: ReplicaId,
        address: String,
    ) -> BoxFuture<'_, Result<u64, ChangeError>> {
        Box::pin(async move {
            self.replica
                .add_learner(id.0, address)
                .await
                .map_err(change_error)
        })
    }

    fn promote_member(&self, id: ReplicaId) -> BoxFuture<'_, Result<u64, ChangeError>> {
        Box::pin(async move { self.replica.promote(id.0).await.map_err(change_error) })
    }

    fn remove_member(&self, id: ReplicaId) -> BoxFuture<'_, Result<u64, ChangeError>> {
        Box::pin(async move { self.replica.remove(id.0).await.map_err(change_error) })
    }

    fn transfer_leader(
        &self,
        to: Option<ReplicaId>,
    ) -> BoxFuture<'_, Result<ReplicaId, ChangeError>> {
        Box::pin(async move {
            let to = self.replica.transfer_leader(to.map(|to| to.0)).await;
            to.map(ReplicaId).map_err(change_error)
        })
    }

    fn snapshot(&self) -> BoxFuture<'_, Result<u64, ChangeError>> {
        Box::pin(async move { self.replica.snapshot().await.map_err(change_error) })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicU64, Ordering};

    use api::base::clock::Clock;
    use raft::{Formation, MemoryDisk, PeerHandler, Peers, ReplicaOptions, Storage};
    use state::command::{Founding, UserSettings};
    use tokio::net::TcpListener;

    use super::*;
    use crate::app::machine::RouterMachine;

    /// Initial time of the clock.
    const NOW_MS: u64 = 1_000_000;

    struct IgnoreMessages;

    impl PeerHandler for IgnoreMessages {
        fn message(&self, _from: u8, _bytes: &[u8]) {}
    }

    fn envelope(session: u64, lane: Lane, seq: u64, command: Command) -> Envelope {
        Envelope {
            origin: Origin {
                replica: ReplicaId(1),
                session: SessionId(session),
                lane,
                seq,
            },
            proposed_at_ms: NOW_MS,
            command,
        }
    }

    fn batch(session: u64) -> Envelope {
        let items = Vec::new();
        let command = Command::Batch {
            base_attempt: state::ids::AttemptId(1),
            items,
        };
        envelope(session, Lane::Outbox, 1, command)
    }

    /// Returns the port of a cluster of one under session 1.
    async fn port(data_dir: &std::path::Path) -> LogPort {
        port_at(data_dir, Arc::new(AtomicU64::new(NOW_MS))).await
    }

    /// Returns the port of a cluster of one under session 1, with a settable clock.
    async fn port_at(data_dir: &std::path::Path, now_ms: Arc<AtomicU64>) -> LogPort {
        let init = Command::from(Founding::of_seed(
            1,
            state::policy::PolicyConfig::LeastRequest,
        ));
        let init = envelope(1, Lane::Admin, FIRST_COMMAND_SEQ, init);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let advertise = listener.local_addr().unwrap().to_string();
        let options = ReplicaOptions {
            id: 1,
            data_dir: data_dir.to_path_buf(),
            advertise: advertise.clone(),
            cluster_name: raft::DEFAULT_NAME.to_owned(),
            labels: BTreeMap::new(),
            formation: Formation::Bootstrap {
                peers: Peers::List(vec![advertise]),
                expect: 1,
                first_command: state::codec::encode_envelope(&init),
            },
            replaces_lost: false,
            promotion: None,
            heartbeat: Duration::from_millis(50),
            election_timeout: Duration::from_millis(150)..Duration::from_millis(300),
            snapshot_every_entries: 1000,
            snapshot_every_bytes: 1 << 20,
            storage: Storage::Memory(MemoryDisk::default()),
        };
        let shared = Arc::new(SharedState::default());
        let machine = RouterMachine::new(Arc::clone(&shared), None);
        let transport = Arc::new(raft::Tcp::new(listener).unwrap());
        let replica = Replica::start(
            options,
            transport,
            Box::new(machine),
            Arc::new(IgnoreMessages),
        );
        let replica = replica.await.unwrap();
        let view = shared.state().view();
        let mut status = replica.watch();
        status
            .wait_for(|_| view.registry().initialised)
            .await
            .unwrap();
        LogPort::new(
            ReplicaId(1),
            SessionId(1),
            replica,
            shared,
            Arc::new(ClusterClocks::new(Clock::of(move || {
                now_ms.load(Ordering::Relaxed)
            }))),
        )
    }

    #[tokio::test(start_paused = true)]
    async fn unanswered_writes_time_out_together() {
        let folder = tempfile::tempdir().unwrap();
        let port = port(folder.path()).await;
        // A replica without a cluster's state proposes nothing.
        port.lose_state();
        let put = || Command::PutPolicy(state::policy::PolicyConfig::LeastRequest);
        let began = Instant::now();
        let (first, second) = tokio::join!(port.submit(put()), port.submit(put()));
        for refused in [first, second] {
            assert!(
                matches!(refused, Err(ProposeError::Unavailable(_))),
                "{refused:?}"
            );
        }
        assert!(began.elapsed() <= SUBMIT_TIMEOUT, "{:?}", began.elapsed());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_clock_set_back_delays_no_command() {
        let folder = tempfile::tempdir().unwrap();
        let now_ms = Arc::new(AtomicU64::new(NOW_MS));
        let port = port_at(folder.path(), Arc::clone(&now_ms)).await;
        // The previous session, when the clock was half a minute ahead.
        now_ms.store(NOW_MS + 30_000, Ordering::Relaxed);
        port.clocks.turn();
        port.propose(batch(2)).await.unwrap();
        now_ms.store(NOW_MS, Ordering::Relaxed);
        port.clocks.turn();
        let put = Command::configure_user("ada", UserSettings::of_weight(1000));
        assert_eq!(port.submit(put).await.unwrap().reply, Reply::Applied);
        port.replica.shutdown().await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_replica_that_lost_its_state_proposes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let port = port(folder.path()).await;
        port.propose(batch(2)).await.unwrap();
        port.lose_state();
        let before = port.shared.state().applied();
        let failure = port.propose(batch(2)).await.unwrap_err();
        assert_eq!(failure, ProposeError::Unavailable(NOT_FORMED.to_owned()));
        assert_eq!(port.shared.state().applied(), before);
        port.replica.shutdown().await;
    }

    #[test]
    fn rejections_of_an_unformed_leader_are_retried() {
        let refused = Reply::Rejected(Rejection::NotInitialised);
        assert!(is_not_formed(&refused));
        assert!(is_not_formed(&Reply::Repeated(Box::new(refused))));
        assert!(!is_not_formed(&Reply::Rejected(Rejection::TooManyUsers)));
        assert!(!is_not_formed(&Reply::Applied));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn admin_commands_continue_after_a_newer_session_of_this_id() {
        let folder = tempfile::tempdir().unwrap();
        let port = port(folder.path()).await;
        let put = || Command::configure_user("ada", UserSettings::of_weight(1000));
        assert_eq!(port.submit(put()).await.unwrap().reply, Reply::Applied);

        // Another process under the same id.
        let theirs = state::codec::encode_envelope(&batch(2));
        port.replica.propose(theirs, PROPOSE_TIMEOUT).await.unwrap();
        assert_eq!(port.submit(put()).await.unwrap().reply, Reply::Applied);
        let next = SessionId(1).successor();
        assert_eq!(port.status().session, next);

        // The outbox also finds its session over, and arrives at the same successor: both are one
        // session again.
        assert!(is_stale(&port.propose(batch(1)).await.unwrap().reply));
        assert!(!is_stale(&port.propose(batch(next.0)).await.unwrap().reply));
        assert_eq!(port.submit(put()).await.unwrap().reply, Reply::Applied);
        assert_eq!(port.status().session, next);
        port.replica.shutdown().await;
    }
}
