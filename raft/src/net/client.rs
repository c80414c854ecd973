//! Raft's calls to peers.
//!
//! Appends are sequential unary calls, which openraft drives as a stream: it reads more entries
//! while a call is in flight, so batches grow with the load. A streaming call that fails before it
//! takes its first request would bypass openraft's backoff; a unary call never does.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, select};
use openraft::errors::{NetworkError, RPCError, ReplicationClosed, StreamingError, Unreachable};
use openraft::network::{RPCOption, RaftNetworkFactory, RaftNetworkV2};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderError,
    TransferLeaderRequest, TransferLeaderResponse, VoteRequest, VoteResponse,
};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;

use super::links::{CallError, LinkLane, Peer, PeerLinks};
use super::reachability::PeerReport;
use super::snapshot_stream::{self, PartReader, SNAPSHOT_TIMEOUT};
use super::validate::term_max;
use crate::determinism::blocking::BlockingMode;
use crate::determinism::timeout::patient;
use crate::determinism::watch;
use crate::snapshot::SnapshotFile;
use crate::types::{Config, LeaderId, Node, Vote};
use crate::wire::proto;

type ReceivedSnapshot = openraft::Snapshot<LeaderId, u64, Node, SnapshotFile>;

/// Timeout of appends and votes, which wait for the peer's disk. A slower peer counts as gone.
const DISK_TIMEOUT: Duration = Duration::from_secs(2);

/// Factory of Raft's clients for peers.
#[derive(Clone)]
pub(crate) struct Network {
    links: Arc<PeerLinks>,
    /// Whether this replica leads and hears from a quorum. Sent to followers with every append.
    has_quorum: watch::WatchReceiver<bool>,
    blocking: BlockingMode,
}

/// Raft's client for one peer.
pub(crate) struct Client {
    network: Network,
    target: u64,
}

impl Network {
    pub(crate) fn new(
        links: Arc<PeerLinks>,
        has_quorum: watch::WatchReceiver<bool>,
        blocking: BlockingMode,
    ) -> Self {
        Self {
            links,
            has_quorum,
            blocking,
        }
    }
}

impl RaftNetworkFactory<Config> for Network {
    type Network = Client;

    async fn new_client(&mut self, target: u64, node: &Node) -> Client {
        self.links.learn(target, node);
        Client {
            network: self.clone(),
            target,
        }
    }
}

impl Client {
    /// Returns the peer at its newest known address. Fails if no address is known.
    fn peer(&self) -> Result<Arc<Peer>, Unreachable<Config>> {
        self.network
            .links
            .peer(self.target)
            .ok_or_else(|| Unreachable::from_string("unknown replica"))
    }

    async fn ask(
        &self,
        rpc: VoteRequest<Config>,
        pre_vote: bool,
        limit: Duration,
    ) -> Result<VoteResponse<Config>, RPCError<Config>> {
        let peer = self.peer()?;
        let request = proto::VoteRequest {
            header: Some(peer.header()),
            vote: Some(rpc.vote.into()),
            last: rpc.last_log_id.map(Into::into),
            leadership_transfer: rpc.leadership_transfer,
            pre_vote,
        };
        let call = peer.call(LinkLane::Raft, limit, |mut client| async move {
            client.vote(request).await
        });
        let answer = call.await.map_err(|error| rpc_error(&error))?;
        let vote = believed(answer.vote.ok_or_else(|| missing("vote"))?, rpc.vote)?;
        Ok(VoteResponse::new(
            vote,
            answer.last.map(Into::into),
            answer.granted,
        ))
    }
}

impl RaftNetworkV2<Config> for Client {
    type SnapshotData = SnapshotFile;

    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<Config>,
        _option: RPCOption,
    ) -> Result<AppendEntriesResponse<Config>, RPCError<Config>> {
        let (peer, asked) = (self.peer()?, rpc.vote);
        let request = proto::AppendRequest {
            header: Some(peer.header()),
            vote: Some(rpc.vote.into()),
            previous: rpc.prev_log_id.map(Into::into),
            entries: rpc.entries.into_iter().map(Into::into).collect(),
            committed: rpc.leader_commit.map(Into::into),
            has_quorum: *self.network.has_quorum.borrow(),
        };
        let call = peer.call(LinkLane::Raft, DISK_TIMEOUT, |mut client| async move {
            client.append(request).await
        });
        let answer = call.await.map_err(|error| rpc_error(&error))?;
        let report = PeerReport {
            hears: answer.hears.into_iter().collect(),
            refuses_leadership: answer.stands_back,
        };
        self.network
            .links
            .reachability
            .reported(self.target, report);
        match answer.result.ok_or_else(|| missing("result"))? {
            proto::append_response::Result::Success(_) => Ok(AppendEntriesResponse::Success),
            proto::append_response::Result::Conflict(_) => Ok(AppendEntriesResponse::Conflict),
            proto::append_response::Result::HigherVote(vote) => {
                Ok(AppendEntriesResponse::HigherVote(believed(vote, asked)?))
            }
            proto::append_response::Result::Partial(partial) => Ok(
                AppendEntriesResponse::PartialSuccess(partial.last.map(Into::into)),
            ),
        }
    }

    async fn vote(
        &mut self,
        rpc: VoteRequest<Config>,
        _option: RPCOption,
    ) -> Result<VoteResponse<Config>, RPCError<Config>> {
        let until = Instant::now() + DISK_TIMEOUT;
        patient(until, self.ask(rpc, false, DISK_TIMEOUT)).await
    }

    async fn pre_vote(
        &mut self,
        rpc: VoteRequest<Config>,
        option: RPCOption,
    ) -> Result<VoteResponse<Config>, RPCError<Config>> {
        self.ask(rpc, true, option.soft_ttl()).await
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: ReceivedSnapshot,
        cancel: impl Future<Output = ReplicationClosed> + Send + 'static,
        _option: RPCOption,
    ) -> Result<SnapshotResponse<Config>, StreamingError<Config>> {
        let peer = self.peer()?;
        let (parts, stream) = snapshot_stream::channel();
        let start = proto::SnapshotStart {
            header: Some(peer.header()),
            vote: Some(vote.into()),
            meta: None,
        };
        let blocking = self.network.blocking;
        let reading = tokio::spawn(async move {
            let last = snapshot.meta.last_log_id;
            let opened = blocking.try_run(move || PartReader::open(&snapshot.snapshot, start));
            let reader = opened.await?;
            assert_eq!(
                reader.meta.last_log_id, last,
                "a snapshot file changed its content"
            );
            reader.send(&parts, |part| part, blocking).await
        });
        let call = peer.call(LinkLane::Bulk, SNAPSHOT_TIMEOUT, |mut client| async move {
            client.install_snapshot(ReceiverStream::new(stream)).await
        });
        let answer = match select(Box::pin(call), Box::pin(cancel)).await {
            Either::Left((answer, _)) => answer,
            Either::Right((closed, _)) => return Err(closed.into()),
        };
        match answer {
            Ok(answer) => {
                let answered = answer.vote.ok_or_else(|| missing("vote"))?;
                Ok(SnapshotResponse::new(believed(answered, vote)?))
            }
            Err(error) => {
                // If reading the file failed, only the reader knows, and it has ended by now.
                if reading.is_finished()
                    && let Ok(Err(unread)) = reading.await
                {
                    tracing::error!(error = %unread, "could not read snapshot for a peer");
                }
                Err(rpc_error(&error).into())
            }
        }
    }

    async fn transfer_leader(
        &mut self,
        rpc: TransferLeaderRequest<Config>,
        option: RPCOption,
    ) -> Result<TransferLeaderResponse<Config>, RPCError<Config>> {
        let peer = self.peer()?;
        let request = proto::TransferLeaderRequest {
            header: Some(peer.header()),
            from_leader: Some((*rpc.from_leader()).into()),
            to: *rpc.to_node_id(),
            last: rpc.last_log_id().copied().map(Into::into),
        };
        let call = peer.call(LinkLane::Raft, option.soft_ttl(), |mut client| async move {
            client.transfer_leader(request).await
        });
        let answer = call.await.map_err(|error| rpc_error(&error))?;
        if answer.refused.is_empty() {
            return Ok(Ok(()));
        }
        Ok(Err(match answer.changed_vote {
            Some(actual) => TransferLeaderError::VoteChanged {
                expected: *rpc.from_leader(),
                actual: actual.into(),
            },
            None => TransferLeaderError::LogNotFlushed {
                expected: rpc.last_log_id().copied(),
                actual: answer.flushed.map(Into::into),
            },
        }))
    }
}

fn rpc_error(error: &CallError) -> RPCError<Config> {
    match error {
        // Makes openraft back off at once: the peer is away or refuses this replica.
        CallError::NotSent(_) | CallError::Failed(_) => Unreachable::new(error).into(),
        CallError::TimedOut(_) => NetworkError::new(error).into(),
    }
}

/// Returns the vote in a response, unless it would make this replica jump to a far higher term.
fn believed(answered: proto::Vote, requested: Vote) -> Result<Vote, Unreachable<Config>> {
    let term = answered.term;
    if term <= term_max(requested.leader_id.term) {
        return Ok(answered.into());
    }
    tracing::warn!(term, "peer responded with an impossible term");
    Err(Unreachable::from_string(format!(
        "an answer of term {term}"
    )))
}

fn missing(what: &'static str) -> NetworkError<Config> {
    NetworkError::from_string(format!("an answer without {what}"))
}
