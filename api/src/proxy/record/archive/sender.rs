//! Tasks of the archive: one writes the queue to disk, and one per peer sends it what the ring has
//! of this replica.
//!
//! A message to a peer is two places of the sender's ring, start and end (eight bytes each,
//! little-endian), then the frames between them that are the sender's own. The answer is the place
//! up to which the peer has them, so the sender remembers nothing over a restart. A peer that was
//! away, or joins, gets what the ring still holds.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use state::ids::ReplicaId;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::{BATCH_RECORDS_MAX, DecisionArchive, GATHER, lock};
use crate::files::ring::RingPosition;
use crate::ports::{Cluster, QuestionTopic};
use crate::proxy::record::peer_question::PeerQuestion;
use crate::proxy::record::request_record::RequestRecord;

/// Interval at which new peers are noticed, and after which a peer is tried again.
const PEERS_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum time that peers get for the last records of a replica that stops.
const FINISH_TIMEOUT: Duration = Duration::from_secs(1);

/// How far a peer has this replica's records.
#[derive(Debug, Clone, Copy)]
struct SentUpTo {
    /// Place from which this replica reads on: nothing between `heard` and here is for the peer.
    read: RingPosition,
    /// Place that the peer has told.
    heard: RingPosition,
}

impl DecisionArchive {
    /// Writes queued records and sends them to peers until `stop`, then what is left.
    pub(in crate::proxy::record) async fn run(
        self: Arc<Self>,
        cluster: Arc<dyn Cluster>,
        stop: CancellationToken,
    ) {
        let Some(mut inbox) = lock(&self.inbox).take() else {
            return;
        };
        // Opens the ring, which may take a second, before the first records arrive.
        self.blocking(|archive| drop(archive.size())).await;
        let finish = CancellationToken::new();
        let (mut senders, mut served) = (JoinSet::new(), BTreeSet::new());
        let mut look = tokio::time::interval(PEERS_INTERVAL);
        let mut batch = Vec::new();
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(Ok(gone)) = senders.join_next() => drop(served.remove(&gone)),
                _ = look.tick() => {
                    let peers = cluster.peers().into_iter();
                    for peer in peers.filter(|peer| served.insert(*peer)) {
                        let (archive, cluster) = (Arc::clone(&self), Arc::clone(&cluster));
                        senders.spawn(archive.serve(peer, cluster, finish.clone()));
                    }
                }
                _ = inbox.recv_many(&mut batch, BATCH_RECORDS_MAX) => {
                    if batch.len() < BATCH_RECORDS_MAX {
                        stop.run_until_cancelled(tokio::time::sleep(GATHER)).await;
                    }
                    self.write(&mut batch, &mut inbox).await;
                }
            }
        }
        inbox.close();
        while !inbox.is_empty() || !batch.is_empty() {
            self.write(&mut batch, &mut inbox).await;
        }
        finish.cancel();
        let last = async { while senders.join_next().await.is_some() {} };
        if tokio::time::timeout(FINISH_TIMEOUT, last).await.is_err() {
            tracing::debug!("a peer lacks the last decisions of this replica");
        }
    }

    /// Writes `batch` after adding what the queue has, up to the size of a batch.
    async fn write(
        self: &Arc<Self>,
        batch: &mut Vec<Arc<RequestRecord>>,
        inbox: &mut mpsc::Receiver<Arc<RequestRecord>>,
    ) {
        while batch.len() < BATCH_RECORDS_MAX
            && let Ok(record) = inbox.try_recv()
        {
            batch.push(record);
        }
        let records = std::mem::take(batch);
        self.blocking(move |archive| archive.store(&records)).await;
    }

    /// Sends this replica's records to `peer` while it is a member, and after `finish` those that
    /// are left. Returns the peer's id.
    async fn serve(
        self: Arc<Self>,
        peer: ReplicaId,
        cluster: Arc<dyn Cluster>,
        finish: CancellationToken,
    ) -> ReplicaId {
        let mut ends = self.end.subscribe();
        let mut reached = None;
        while cluster.peers().contains(&peer) {
            let is_last = finish.is_cancelled();
            let end = *ends.borrow_and_update();
            let sent = self.send(&*cluster, peer, reached).await;
            reached = sent;
            match sent {
                None if is_last => return peer,
                None => {
                    let pause = tokio::time::sleep(PEERS_INTERVAL);
                    finish.run_until_cancelled(pause).await;
                }
                // The pause bounds what a peer that was away takes of the network.
                Some(at) if at.read < end && !is_last => tokio::time::sleep(GATHER).await,
                Some(at) if at.read < end => {}
                Some(_) if is_last => return peer,
                Some(_) => {
                    let changed = ends.changed();
                    finish.run_until_cancelled(changed).await;
                }
            }
        }
        peer
    }

    /// Sends the next records after `reached`, or asks for it if it is `None`. Returns what the peer
    /// has then; `None` if it did not answer.
    async fn send(
        self: &Arc<Self>,
        cluster: &dyn Cluster,
        peer: ReplicaId,
        reached: Option<SentUpTo>,
    ) -> Option<SentUpTo> {
        let (frames, end) = match reached {
            None => (Vec::new(), RingPosition::default()),
            Some(SentUpTo { read, .. }) => {
                let next = move |archive: &Self| archive.own_after(read);
                self.blocking(next).await??
            }
        };
        if let (Some(reached), true) = (reached, frames.is_empty()) {
            return Some(SentUpTo {
                read: end,
                ..reached
            });
        }
        let start = reached.map_or_else(RingPosition::default, |it| it.heard);
        let question = PeerQuestion::Store {
            start,
            end,
            frames: &frames,
        };
        let answer = cluster.ask(
            peer,
            QuestionTopic::Decisions,
            Bytes::from(question.write()),
        );
        let answer = answer.await.ok()?;
        let place = answer.first_chunk()?;
        let heard = RingPosition(u64::from_le_bytes(*place));
        Some(SentUpTo { read: heard, heard })
    }

    /// Runs `work` on a thread that may block. Returns `None` if it panics.
    async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> Option<T> {
        let archive = Arc::clone(self);
        let done = tokio::task::spawn_blocking(move || work(&archive));
        done.await.ok()
    }
}
