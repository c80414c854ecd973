//! Proposals and read barriers, made directly on the leader or forwarded to it.

use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use openraft::ReadPolicy;
use openraft::errors::{ClientWriteError, RaftError};
use tokio::time::{Instant, timeout_at};
use tonic::Code;

use super::{Replica, ReplicaInner};
use crate::COMMAND_BYTES_MAX;
use crate::determinism::watch;
use crate::error::{Committed, ProposeError};
use crate::machine::CommandSource;
use crate::net::{CallError, LinkLane};
use crate::options::Formation;
use crate::planted::{self, Bug};
use crate::status::Status;
use crate::types::{Command, applied_index, committed_index};
use crate::wire::proto;
use crate::wire::proto::propose_response::Result as Proposed;
use crate::wire::proto::read_barrier_response::Result as Barrier;

/// Maximum pause before a proposal or barrier is retried.
const RETRY: Duration = Duration::from_millis(20);
/// Time that a forwarded call may take beyond the leader's own timeout.
const WAY: Duration = Duration::from_millis(50);
/// Response of a replica that knows no leader.
const NO_LEADER: proto::NotLeader = proto::NotLeader { leader: 0 };

impl Replica {
    /// Commits a command and applies it on the leader, forwarding it if another replica leads.
    /// Waits at most `limit`.
    ///
    /// # Errors
    /// See [`ProposeError`]. Only `NoLeader`, `Refused` and `TooLarge` mean that the command is in
    /// no log.
    pub fn propose(
        &self,
        command: Vec<u8>,
        limit: Duration,
    ) -> BoxFuture<'_, Result<Committed, ProposeError>> {
        self.inner.propose(command.into(), limit).boxed()
    }

    /// Waits until this replica has applied everything committed when the call began, as confirmed
    /// by the leader and a quorum. Returns the log index up to which it waited.
    ///
    /// # Errors
    /// Fails if the replica stops, or if no leader confirms or the entries are not applied within
    /// `limit`.
    pub fn read_barrier(&self, limit: Duration) -> BoxFuture<'_, Result<u64, ProposeError>> {
        self.inner.read_barrier(limit).boxed()
    }
}

impl ReplicaInner {
    async fn propose(&self, command: Bytes, limit: Duration) -> Result<Committed, ProposeError> {
        if command.len() > COMMAND_BYTES_MAX {
            return Err(ProposeError::TooLarge {
                bytes: command.len(),
            });
        }
        self.check_command(&command, CommandSource::Own)
            .map_err(ProposeError::Refused)?;
        let end = Instant::now() + limit;
        let mut status = self.status.subscribe();
        loop {
            if let Some(why) = self.why_stopped() {
                return Err(ProposeError::Stopped(why));
            }
            let left = end.saturating_duration_since(Instant::now());
            let proposed = match self.leader() {
                Some(leader) if leader == self.links.identity.id => {
                    self.propose_here(command.clone(), left).await
                }
                Some(leader) => self.propose_to(leader, command.clone(), left).await?,
                None => Proposed::NotLeader(NO_LEADER),
            };
            match proposed {
                Proposed::Committed(committed) => {
                    return Ok(Committed {
                        index: committed.index,
                        reply: committed.reply.into(),
                    });
                }
                Proposed::Unknown(why) => return Err(ProposeError::Unknown(why)),
                Proposed::NotLeader(_) => wait(&mut status, end).await?,
            }
        }
    }

    /// Checks that every member can apply a command. Returns the reason if not.
    pub(crate) fn check_command(
        &self,
        command: &[u8],
        source: CommandSource,
    ) -> Result<(), String> {
        (self.check)(command, source, &|| self.status.borrow().clone())
    }

    /// Proposes a command on this replica, if it leads. The command must have been checked.
    pub(crate) async fn propose_here(&self, command: Bytes, limit: Duration) -> Proposed {
        // A machine in doubt cannot give a trustworthy reply.
        if self.why_stopped().is_some() || self.is_unfounded() || *self.is_state_suspect.borrow() {
            return Proposed::NotLeader(NO_LEADER);
        }
        let written = tokio::time::timeout(limit, self.raft.client_write(Command(command))).await;
        match written {
            Ok(Ok(response)) => Proposed::Committed(proto::Committed {
                index: response.log_id.index + 1,
                reply: response.data.0.into(),
            }),
            Ok(Err(RaftError::APIError(ClientWriteError::ForwardToLeader(forward)))) => {
                // openraft returns this only if it did not append the entry. An entry that it
                // appended and lost again is "discarded", which the next case handles.
                let leader = forward.leader_id.unwrap_or(0);
                Proposed::NotLeader(proto::NotLeader { leader })
            }
            Ok(Err(error)) => Proposed::Unknown(error.to_string()),
            Err(_) => Proposed::Unknown("not committed in time".to_owned()),
        }
    }

    /// Whether the cluster still lacks its first command, which must precede all others.
    fn is_unfounded(&self) -> bool {
        match &self.options.formation {
            Formation::Bootstrap { first_command, .. } => {
                !first_command.is_empty() && !self.machine.has_commands()
            }
            Formation::Join(_) => false,
        }
    }

    /// Proposes a command on `leader`. [`Proposed::NotLeader`] means that the command is in no log.
    async fn propose_to(
        &self,
        leader: u64,
        command: Bytes,
        limit: Duration,
    ) -> Result<Proposed, ProposeError> {
        let Some(peer) = self.links.peer(leader) else {
            return Ok(Proposed::NotLeader(NO_LEADER));
        };
        let request = proto::ProposeRequest {
            header: Some(peer.header()),
            command,
            timeout_ms: millis(limit),
        };
        let call = peer.call(LinkLane::Bulk, limit + WAY, |mut client| async move {
            client.propose(request).await
        });
        match call.await {
            Ok(answer) => Ok(answer
                .result
                .unwrap_or(Proposed::Unknown("a response without a result".to_owned()))),
            Err(CallError::NotSent(_)) => Ok(Proposed::NotLeader(NO_LEADER)),
            Err(CallError::Failed(status)) if status.code() == Code::InvalidArgument => {
                Err(ProposeError::Refused(status.message().to_owned()))
            }
            // The peer refused the call before it read the command.
            Err(CallError::Failed(status)) if status.code() == Code::FailedPrecondition => {
                Ok(Proposed::NotLeader(NO_LEADER))
            }
            Err(error) => Ok(Proposed::Unknown(error.to_string())),
        }
    }

    async fn read_barrier(&self, limit: Duration) -> Result<u64, ProposeError> {
        let end = Instant::now() + limit;
        let mut status = self.status.subscribe();
        let index = loop {
            if let Some(why) = self.why_stopped() {
                return Err(ProposeError::Stopped(why));
            }
            let left = end.saturating_duration_since(Instant::now());
            let confirmed = match self.leader() {
                Some(leader) if leader == self.links.identity.id => self.barrier_here(left).await,
                Some(leader) => self.barrier_from(leader, left).await,
                None => Barrier::NotLeader(NO_LEADER),
            };
            match confirmed {
                Barrier::Index(index) => break index,
                Barrier::NotLeader(_) => wait(&mut status, end).await?,
            }
        };
        if planted::is(Bug::BarrierNotAwaited) {
            return Ok(index);
        }
        let mut metrics = self.raft.metrics();
        let applied = async {
            tokio::select! {
                biased;
                applied = metrics.wait_for(|metrics| applied_index(metrics) >= index) => applied.is_ok(),
                _ = status.wait_for(|status| status.fault.is_some()) => false,
            }
        };
        match timeout_at(end, applied).await {
            Ok(true) => Ok(index),
            Ok(false) => Err(ProposeError::Stopped(
                self.why_stopped().unwrap_or_default(),
            )),
            Err(_) => Err(ProposeError::NotApplied {
                wanted: index,
                applied: self.with_metrics(applied_index),
            }),
        }
    }

    /// Returns an index that covers all commits, confirmed by a quorum, if this replica leads.
    pub(crate) async fn barrier_here(&self, limit: Duration) -> Barrier {
        if planted::is(Bug::BarrierWithoutQuorum) {
            return Barrier::Index(self.with_metrics(committed_index));
        }
        let confirming = self.raft.get_read_linearizer(ReadPolicy::ReadIndex);
        match tokio::time::timeout(limit, confirming).await {
            Ok(Ok(linearizer)) => Barrier::Index(linearizer.read_log_id().index() + 1),
            Ok(Err(_)) | Err(_) => Barrier::NotLeader(NO_LEADER),
        }
    }

    async fn barrier_from(&self, leader: u64, limit: Duration) -> Barrier {
        let Some(peer) = self.links.peer(leader) else {
            return Barrier::NotLeader(NO_LEADER);
        };
        let request = proto::ReadBarrierRequest {
            header: Some(peer.header()),
            timeout_ms: millis(limit),
        };
        let call = peer.call(LinkLane::Bulk, limit, |mut client| async move {
            client.read_barrier(request).await
        });
        call.await
            .ok()
            .and_then(|answer| answer.result)
            .unwrap_or(Barrier::NotLeader(NO_LEADER))
    }

    /// Returns the current leader, which may be this replica. `None` if none is known.
    pub(super) fn leader(&self) -> Option<u64> {
        self.with_metrics(|metrics| metrics.current_leader)
    }
}

/// Waits for a status change, but only briefly: the relevant change may not show there.
async fn wait(status: &mut watch::WatchReceiver<Status>, end: Instant) -> Result<(), ProposeError> {
    let now = Instant::now();
    if now >= end {
        return Err(ProposeError::NoLeader);
    }
    match timeout_at(end.min(now + RETRY), status.changed()).await {
        Ok(Err(_)) => Err(ProposeError::Stopped("replica is gone".to_owned())),
        Ok(Ok(())) | Err(_) => Ok(()),
    }
}

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
