//! Implements the gRPC service for peers. [`super::guard`] admits the calls between members. The
//! calls that replicas in no cluster make too (`info`, `claim`, `change`) have their own checks.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, stream};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, TransferLeaderError, TransferLeaderRequest,
    VoteRequest,
};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::guard::{CallPurpose, check_store, known_node};
use crate::COMMAND_BYTES_MAX;
use crate::machine::CommandSource;
use crate::net::snapshot_stream::{self, PartReader, first_part, write_parts};
use crate::net::validate::{check_entries, check_head};
use crate::net::{MESSAGE_BYTES_MAX, PeerSender, PeerService, Transport};
use crate::replica::ReplicaInner;
use crate::snapshot::SnapshotFile;
use crate::types::{Config, LogId, Vote};
use crate::wire::proto::peer_server::{Peer, PeerServer};
use crate::wire::{self, MalformedMessageError, proto};

type ServedSnapshot =
    openraft::Snapshot<crate::types::LeaderId, u64, crate::types::Node, SnapshotFile>;
type Parts = Pin<Box<dyn Stream<Item = Result<proto::SnapshotPart, Status>> + Send>>;
type Acks = Pin<Box<dyn Stream<Item = Result<proto::PeerMessageAck, Status>> + Send>>;

/// Serves peers until the replica stops.
pub(crate) async fn serve(inner: Arc<ReplicaInner>, transport: Arc<dyn Transport>) {
    let stop = inner.cancel.clone();
    let service = PeerServer::new(PeerRpc(inner))
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX);
    let served = transport.serve(PeerService::new(service), stop).await;
    if let Err(error) = served {
        tracing::error!(%error, "peer listener failed");
    }
}

pub(super) struct PeerRpc(Arc<ReplicaInner>);

impl From<MalformedMessageError> for Status {
    fn from(malformed: MalformedMessageError) -> Self {
        Self::invalid_argument(malformed.to_string())
    }
}

fn stopped(error: impl std::fmt::Display) -> Status {
    // Not "unavailable", which would make the caller doubt its connection.
    Status::aborted(format!("replica stopped: {error}"))
}

fn vote_of(vote: Option<proto::Vote>) -> Result<Vote, Status> {
    Ok(vote.ok_or(MalformedMessageError("no vote"))?.into())
}

/// Splits a request into its sender (`None` if the transport does not provide it) and its message.
fn split<T>(request: Request<T>) -> (Option<PeerSender>, T) {
    let sender = request.extensions().get::<PeerSender>().cloned();
    (sender, request.into_inner())
}

fn log_id_of(log_id: Option<proto::LogId>) -> Option<LogId> {
    log_id.map(Into::into)
}

impl PeerRpc {
    /// Creates a service without a listener.
    #[cfg(feature = "fuzzing")]
    pub(super) fn new(inner: Arc<ReplicaInner>) -> Self {
        Self(inner)
    }
}

/// Writes the machine's current state to `file` and sends it. A failure ends the stream.
async fn lend(
    inner: &ReplicaInner,
    file: &SnapshotFile,
    parts: &mpsc::Sender<Result<proto::SnapshotPart, Status>>,
) {
    let (host, to) = (inner.machine.clone(), file.clone());
    let lent = async {
        let opened = inner.blocking.try_run(move || {
            host.write_state(&to)?;
            PartReader::open(&to, proto::SnapshotStart::default())
        });
        opened.await?.send(parts, Ok, inner.blocking).await
    };
    if let Err(error) = lent.await {
        tracing::warn!(%error, "could not send state to peer");
        // The receiver may be gone.
        drop(parts.send(Err(Status::aborted(error.to_string()))).await);
    }
}

#[tonic::async_trait]
impl Peer for PeerRpc {
    async fn append(
        &self,
        request: Request<proto::AppendRequest>,
    ) -> Result<Response<proto::AppendResponse>, Status> {
        let (sender, request) = split(request);
        let vote = vote_of(request.vote)?;
        self.0
            .admit(sender, request.header.as_ref(), CallPurpose::Lead(vote))?;
        let committed = log_id_of(request.committed);
        let previous = log_id_of(request.previous);
        let entries: Result<Vec<_>, MalformedMessageError> =
            request.entries.into_iter().map(TryInto::try_into).collect();
        let entries = entries?;
        check_entries(vote, previous, committed, &entries)?;
        let rpc = AppendEntriesRequest::<Config> {
            vote,
            prev_log_id: previous,
            entries,
            leader_commit: committed,
        };
        let arrived = Instant::now();
        let answer = self.0.raft.append_entries(rpc).await.map_err(stopped)?;
        if !matches!(answer, AppendEntriesResponse::HigherVote(_)) {
            let has_quorum = request.has_quorum;
            self.0.heard.append(arrived, vote, committed, has_quorum);
        }
        let result = match answer {
            AppendEntriesResponse::Success => {
                proto::append_response::Result::Success(proto::Success {})
            }
            AppendEntriesResponse::PartialSuccess(last) => {
                let last = last.map(Into::into);
                proto::append_response::Result::Partial(proto::PartialSuccess { last })
            }
            AppendEntriesResponse::Conflict => {
                proto::append_response::Result::Conflict(proto::Conflict {})
            }
            AppendEntriesResponse::HigherVote(vote) => {
                proto::append_response::Result::HigherVote(vote.into())
            }
        };
        let mut hears: Vec<u64> = self.0.links.reachability.hears().into_iter().collect();
        hears.push(self.0.links.identity.id);
        Ok(Response::new(proto::AppendResponse {
            result: Some(result),
            hears,
            stands_back: self.0.refuses_leadership().is_some(),
        }))
    }

    async fn vote(
        &self,
        request: Request<proto::VoteRequest>,
    ) -> Result<Response<proto::VoteResponse>, Status> {
        let (sender, request) = split(request);
        let vote = vote_of(request.vote)?;
        self.0
            .admit(sender, request.header.as_ref(), CallPurpose::Elect(vote))?;
        let last = log_id_of(request.last);
        check_entries(vote, last, None, &[])?;
        let mut rpc = VoteRequest::<Config>::new(vote, last);
        rpc.leadership_transfer = request.leadership_transfer;
        let answer = if request.pre_vote {
            self.0.raft.pre_vote(rpc).await
        } else {
            self.0.raft.vote(rpc).await
        };
        let answer = answer.map_err(stopped)?;
        Ok(Response::new(proto::VoteResponse {
            vote: Some(answer.vote.into()),
            granted: answer.vote_granted,
            last: answer.last_log_id.map(Into::into),
        }))
    }

    async fn install_snapshot(
        &self,
        request: Request<Streaming<proto::SnapshotPart>>,
    ) -> Result<Response<proto::SnapshotResponse>, Status> {
        let (sender, mut parts) = split(request);
        let start = first_part(&mut parts).await?;
        let vote = vote_of(start.vote)?;
        self.0
            .admit(sender, start.header.as_ref(), CallPurpose::Lead(vote))?;
        let head = start
            .meta
            .ok_or(MalformedMessageError("a snapshot without meta"))?;
        let meta = check_head(vote, &head)?;
        let ours = self.0.own_vote();
        if vote < ours {
            // The sender no longer leads: write none of it.
            let vote = Some(ours.into());
            return Ok(Response::new(proto::SnapshotResponse { vote }));
        }
        let (snapshot, turn) = (
            self.0.machine.unfinished_snapshot(),
            self.0.installing.begin(),
        );
        let file = snapshot_stream::PartialFile::new(snapshot.clone());
        tokio::select! {
            biased;
            () = turn.overtaken() => {
                return Err(Status::aborted("another snapshot arrived in the meantime"));
            }
            written = write_parts(&snapshot, head, parts, self.0.blocking) => written?,
        }
        // From here on the file is Raft's: it is installed even if this call is dropped because the
        // connection breaks.
        file.hand_over();
        let inner = self.0.clone();
        let installed = self.0.tasks.spawn(async move {
            let served = ServedSnapshot {
                meta,
                snapshot: snapshot.clone(),
            };
            let answer = inner.raft.install_full_snapshot(vote, served).await;
            // If it was installed it has another name by now; if it was too old it is not needed.
            snapshot_stream::remove(&snapshot, inner.blocking).await;
            answer
        });
        let answer = installed.await.map_err(stopped)?.map_err(stopped)?;
        Ok(Response::new(proto::SnapshotResponse {
            vote: Some(answer.vote.into()),
        }))
    }

    async fn transfer_leader(
        &self,
        request: Request<proto::TransferLeaderRequest>,
    ) -> Result<Response<proto::TransferLeaderResponse>, Status> {
        let (sender, request) = split(request);
        let from = vote_of(request.from_leader)?;
        self.0
            .admit(sender, request.header.as_ref(), CallPurpose::Lead(from))?;
        // openraft would start an election even if elections are disabled here.
        if request.to == self.0.links.identity.id
            && let Some(why) = self.0.refuses_leadership()
        {
            return Ok(Response::new(proto::TransferLeaderResponse {
                refused: why.to_owned(),
                ..proto::TransferLeaderResponse::default()
            }));
        }
        let rpc = TransferLeaderRequest::new(from, request.to, log_id_of(request.last));
        let answer = self
            .0
            .raft
            .handle_transfer_leader(rpc)
            .await
            .map_err(stopped)?;
        let answer = match answer {
            Ok(()) => proto::TransferLeaderResponse::default(),
            Err(error) => {
                let refused = error.to_string();
                let (changed_vote, flushed) = match error {
                    TransferLeaderError::VoteChanged { actual, .. } => (Some(actual.into()), None),
                    TransferLeaderError::LogNotFlushed { actual, .. } => {
                        (None, actual.map(Into::into))
                    }
                };
                proto::TransferLeaderResponse {
                    refused,
                    changed_vote,
                    flushed,
                }
            }
        };
        Ok(Response::new(answer))
    }

    async fn propose(
        &self,
        request: Request<proto::ProposeRequest>,
    ) -> Result<Response<proto::ProposeResponse>, Status> {
        let (sender, request) = split(request);
        self.0
            .admit(sender, request.header.as_ref(), CallPurpose::Member)?;
        if request.command.len() > COMMAND_BYTES_MAX {
            return Err(MalformedMessageError("a command above the limit").into());
        }
        // Once committed it reaches every replica, and one that cannot decode it stops.
        self.0
            .check_command(&request.command, CommandSource::Peer)
            .map_err(Status::invalid_argument)?;
        let limit = Duration::from_millis(request.timeout_ms);
        let result = self.0.propose_here(request.command, limit).await;
        Ok(Response::new(proto::ProposeResponse {
            result: Some(result),
        }))
    }

    async fn read_barrier(
        &self,
        request: Request<proto::ReadBarrierRequest>,
    ) -> Result<Response<proto::ReadBarrierResponse>, Status> {
        let (sender, request) = split(request);
        self.0
            .admit(sender, request.header.as_ref(), CallPurpose::Member)?;
        let limit = Duration::from_millis(request.timeout_ms);
        let result = self.0.barrier_here(limit).await;
        Ok(Response::new(proto::ReadBarrierResponse {
            result: Some(result),
        }))
    }

    async fn change(
        &self,
        request: Request<proto::ChangeRequest>,
    ) -> Result<Response<proto::ChangeResponse>, Status> {
        let (sender, request) = split(request);
        self.0.check_name(&request.cluster_name)?;
        let theirs = wire::join_optional(request.cluster_high, request.cluster_low);
        let ours = self.0.links.identity.cluster();
        let is_join = matches!(request.change, Some(proto::change_request::Change::Join(_)));
        if ours.is_none() || (!is_join && theirs != ours) {
            return Err(self.0.other_cluster(theirs.unwrap_or(0)));
        }
        if let Some(sender) = sender.filter(|_| request.hops == 0) {
            sender.bind(request.from)?;
        }
        let result = self.0.pass_change(request).await;
        Ok(Response::new(proto::ChangeResponse {
            result: Some(result),
        }))
    }

    async fn info(
        &self,
        request: Request<proto::InfoRequest>,
    ) -> Result<Response<proto::InfoResponse>, Status> {
        let request = request.into_inner();
        self.0.check_name(&request.cluster_name)?;
        Ok(Response::new(self.0.introduce(&request)))
    }

    async fn claim(
        &self,
        request: Request<proto::ClaimRequest>,
    ) -> Result<Response<proto::ClaimResponse>, Status> {
        let (sender, request) = split(request);
        self.0.check_name(&request.cluster_name)?;
        if let Some(sender) = sender {
            sender.bind(request.from)?;
        }
        let identity = &self.0.links.identity;
        let cluster = wire::join_optional(request.cluster_high, request.cluster_low);
        let cluster = cluster.ok_or(MalformedMessageError("no cluster"))?;
        let is_us = (request.to, request.to_store) == (identity.id, identity.store);
        let granted = is_us
            && !self.0.is_member()
            && identity.claim(cluster, request.from).map_err(stopped)?;
        Ok(Response::new(proto::ClaimResponse { granted }))
    }

    type FetchStateStream = Parts;

    async fn fetch_state(
        &self,
        request: Request<proto::FetchStateRequest>,
    ) -> Result<Response<Parts>, Status> {
        let (sender, request) = split(request);
        self.0
            .admit(sender, request.header.as_ref(), CallPurpose::Member)?;
        // A state may take gigabytes of disk and minutes of bandwidth: one transfer at a time.
        let Ok(turn) = self.0.state_transfer_permit.clone().try_acquire_owned() else {
            return Err(Status::resource_exhausted(
                "another replica fetches the state",
            ));
        };
        let (parts, stream) = snapshot_stream::channel();
        let inner = self.0.clone();
        self.0.tasks.spawn(async move {
            let file = inner.machine.unfinished_snapshot();
            tokio::select! {
                biased;
                () = inner.cancel.cancelled() => {}
                () = lend(&inner, &file, &parts) => {}
            }
            snapshot_stream::remove(&file, inner.blocking).await;
            drop(turn);
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    type MessagesStream = Acks;

    async fn messages(
        &self,
        request: Request<Streaming<proto::PeerMessage>>,
    ) -> Result<Response<Acks>, Status> {
        let (sender, mut messages) = split(request);
        let first = messages.message().await?;
        let header = first.as_ref().and_then(|first| first.header.as_ref());
        let from = self.0.admit(sender, header, CallPurpose::Member)?;
        let store = header.map_or(0, |header| header.from_store);
        let from = u8::try_from(from).map_err(|_| MalformedMessageError("an id above 255"))?;
        // The response stream carries nothing. While it is open the sender knows that it is heard,
        // and polling it reads the messages.
        let answers = stream::unfold(
            (self.0.clone(), messages),
            move |(inner, mut messages)| async move {
                loop {
                    let message = tokio::select! {
                        biased;
                        () = inner.cancel.cancelled() => return None,
                        message = messages.message() => message.ok()??,
                    };
                    // The sender may have been removed or replaced in the meantime.
                    let is_member = inner.with_metrics(|metrics| {
                        let node = known_node(metrics, from.into());
                        node.is_some_and(|node| check_store(from.into(), node, store).is_ok())
                    });
                    if !is_member {
                        return None;
                    }
                    inner.links.reachability.heard(from.into());
                    inner
                        .links
                        .reachability
                        .applied(from.into(), message.applied);
                    if message.unix_ms != 0 {
                        inner.handler.clock(from, message.unix_ms);
                    }
                    inner.handler.message(from, &message.bytes);
                }
            },
        );
        Ok(Response::new(Box::pin(answers)))
    }

    async fn ask(
        &self,
        request: Request<proto::Question>,
    ) -> Result<Response<proto::Answer>, Status> {
        let (sender, request) = split(request);
        let from = self
            .0
            .admit(sender, request.header.as_ref(), CallPurpose::Member)?;
        let from = u8::try_from(from).map_err(|_| MalformedMessageError("an id above 255"))?;
        let handler = self.0.handler.clone();
        let answer = move || handler.answer(from, &request.bytes);
        let answer = self.0.blocking.run(answer).await.map_err(stopped)?;
        let bytes = answer.ok_or_else(|| Status::not_found("no answer"))?;
        Ok(Response::new(proto::Answer {
            bytes: bytes.into(),
        }))
    }
}
