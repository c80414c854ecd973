//! Proposals and read barriers, on the leader and through it.

use std::time::Duration;

use bytes::Bytes;
use openraft::ReadPolicy;
use openraft::async_runtime::WatchReceiver;
use openraft::errors::{ClientWriteError, RaftError};
use tokio::time::{Instant, timeout_at};
use tonic::Code;

use super::ReplicaInner;
use crate::COMMAND_BYTES_MAX;
use crate::determinism::watch;
use crate::error::{Committed, ProposeError};
use crate::net::{CallError, LinkLane};
use crate::options::Formation;
use crate::planted::{self, Bug};
use crate::status::Status;
use crate::types::Command;
use crate::wire::proto;
use crate::wire::proto::propose_response::Result as Proposed;
use crate::wire::proto::read_barrier_response::Result as Barrier;

/// Longest wait for a sign that trying again may help.
const RETRY: Duration = Duration::from_millis(20);
/// What a forwarded call may take longer than the leader's own limit.
const WAY: Duration = Duration::from_millis(50);

/// How one try ended that decided nothing.
struct TryAgain;

impl ReplicaInner {
    pub(super) async fn propose(
        &self,
        command: Bytes,
        limit: Duration,
    ) -> Result<Committed, ProposeError> {
        if command.len() > COMMAND_BYTES_MAX {
            return Err(ProposeError::TooLarge {
                bytes: command.len(),
            });
        }
        self.check_command(&command)
            .map_err(ProposeError::Refused)?;
        let end = Instant::now() + limit;
        let mut status = self.status.subscribe();
        loop {
            if let Some(why) = self.why_stopped() {
                return Err(ProposeError::Stopped(why));
            }
            let tried = match self.leader() {
                Some(leader) if leader == self.links.identity.id => {
                    let left = end.saturating_duration_since(Instant::now());
                    outcome(self.propose_here(command.clone(), left).await)
                }
                Some(leader) => self.propose_to(leader, command.clone(), end).await,
                None => Err(TryAgain),
            };
            match tried {
                Ok(result) => return result,
                Err(TryAgain) => wait(&mut status, end).await?,
            }
        }
    }

    /// Says what is wrong with a command that not every member could apply.
    pub(crate) fn check_command(&self, command: &[u8]) -> Result<(), String> {
        (self.check)(command, &|| self.status.borrow().clone())
    }

    /// Proposes on this replica, if it leads. The command is checked already.
    pub(crate) async fn propose_here(&self, command: Bytes, limit: Duration) -> Proposed {
        // What a machine answers that may be wrong is no answer.
        if self.why_stopped().is_some() || self.is_unfounded() || *self.is_doubtful.borrow() {
            return Proposed::NotLeader(proto::NotLeader { leader: 0 });
        }
        let written = tokio::time::timeout(limit, self.raft.client_write(Command(command))).await;
        match written {
            Ok(Ok(response)) => Proposed::Committed(proto::Committed {
                index: response.log_id.index + 1,
                reply: response.data.0.into(),
            }),
            Ok(Err(RaftError::APIError(ClientWriteError::ForwardToLeader(forward)))) => {
                // openraft says so only for what it did not append; what it appended and lost
                // again is discarded, which is the next case.
                let leader = forward.leader_id.unwrap_or(0);
                Proposed::NotLeader(proto::NotLeader { leader })
            }
            Ok(Err(error)) => Proposed::Unknown(error.to_string()),
            Err(_) => Proposed::Unknown("not committed in time".to_owned()),
        }
    }

    /// Whether the cluster still lacks its first command, which nothing may precede.
    fn is_unfounded(&self) -> bool {
        match &self.options.formation {
            Formation::Bootstrap { first_command, .. } => {
                !first_command.is_empty() && !self.machine.has_commands()
            }
            Formation::Join(_) => false,
        }
    }

    async fn propose_to(
        &self,
        leader: u64,
        command: Bytes,
        end: Instant,
    ) -> Result<Result<Committed, ProposeError>, TryAgain> {
        let peer = self.links.peer(leader).ok_or(TryAgain)?;
        let left = end.saturating_duration_since(Instant::now());
        let request = proto::ProposeRequest {
            header: Some(peer.header()),
            command,
            timeout_ms: millis(left),
        };
        let call = peer.call(LinkLane::Bulk, left + WAY, |mut client| async move {
            client.propose(request).await
        });
        match call.await {
            Ok(answer) => match answer.result {
                Some(result) => outcome(result),
                None => Ok(Err(ProposeError::Unknown(
                    "an answer without result".to_owned(),
                ))),
            },
            Err(CallError::NotSent(_)) => Err(TryAgain),
            Err(CallError::Failed(status)) if status.code() == Code::InvalidArgument => {
                Ok(Err(ProposeError::Refused(status.message().to_owned())))
            }
            // Turned away before anybody looked at it.
            Err(CallError::Failed(status)) if status.code() == Code::FailedPrecondition => {
                Err(TryAgain)
            }
            Err(error) => Ok(Err(ProposeError::Unknown(error.to_string()))),
        }
    }

    pub(super) async fn read_barrier(&self, limit: Duration) -> Result<u64, ProposeError> {
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
                None => Barrier::NotLeader(proto::NotLeader { leader: 0 }),
            };
            match confirmed {
                Barrier::Index(index) => break index,
                Barrier::NotLeader(_) => wait(&mut status, end).await?,
            }
        };
        if planted::is(Bug::BarrierNotAwaited) {
            return Ok(index);
        }
        let applied = status.wait_for(|status| status.applied >= index || status.fault.is_some());
        match timeout_at(end, applied).await {
            Ok(Ok(status)) if status.applied >= index => Ok(index),
            Ok(_) => Err(ProposeError::Stopped(
                self.why_stopped().unwrap_or_default(),
            )),
            Err(_) => Err(ProposeError::NoLeader),
        }
    }

    /// The index everything committed is covered by, confirmed by a quorum; if this replica leads.
    pub(crate) async fn barrier_here(&self, limit: Duration) -> Barrier {
        let not_leader = Barrier::NotLeader(proto::NotLeader { leader: 0 });
        if planted::is(Bug::BarrierWithoutQuorum) {
            return Barrier::Index(self.status.borrow().committed);
        }
        let confirming = self.raft.get_read_linearizer(ReadPolicy::ReadIndex);
        match tokio::time::timeout(limit, confirming).await {
            Ok(Ok(linearizer)) => Barrier::Index(linearizer.read_log_id().index() + 1),
            Ok(Err(_)) | Err(_) => not_leader,
        }
    }

    async fn barrier_from(&self, leader: u64, limit: Duration) -> Barrier {
        let not_leader = Barrier::NotLeader(proto::NotLeader { leader: 0 });
        let Some(peer) = self.links.peer(leader) else {
            return not_leader;
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
            .unwrap_or(not_leader)
    }

    /// The leader this replica follows or is.
    pub(super) fn leader(&self) -> Option<u64> {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        metrics.current_leader
    }
}

/// What a leader's answer means to who proposed.
fn outcome(result: Proposed) -> Result<Result<Committed, ProposeError>, TryAgain> {
    match result {
        Proposed::Committed(committed) => Ok(Ok(Committed {
            index: committed.index,
            reply: committed.reply.into(),
        })),
        Proposed::NotLeader(_) => Err(TryAgain),
        Proposed::Unknown(why) => Ok(Err(ProposeError::Unknown(why))),
    }
}

/// Waits for a change of the status, but not long: not all that helps is seen there.
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
