//! Sends messages outside the log: one stream to every other member carries the newest message.
//! Questions are calls of their own, each with an answer.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, stream};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::determinism::watch;
use crate::machine::PeerHandler;
use crate::net::{CallError, LinkLane};
use crate::replica::ReplicaInner;
use crate::types::{Metrics, applied_index};
use crate::wire::proto;

const OPEN_TIMEOUT: Duration = Duration::from_secs(2);
const RETRY: Duration = Duration::from_millis(100);

/// Asks the peer `id` something outside the log. An error describes why there is no answer.
pub(crate) async fn ask(
    inner: &ReplicaInner,
    id: u64,
    bytes: Bytes,
    limit: Duration,
) -> Result<Bytes, String> {
    let peer = inner.links.peer(id).ok_or("unknown replica")?;
    let header = Some(peer.header());
    let question = proto::Question { header, bytes };
    let asking = peer.call(LinkLane::Bulk, limit, |mut client| async move {
        client.ask(question).await
    });
    match asking.await {
        Ok(answer) => Ok(answer.bytes),
        Err(error) => Err(error.to_string()),
    }
}

/// Keeps a stream open to every other member.
pub(crate) async fn keep_streams(inner: Arc<ReplicaInner>) {
    let mut status = inner.status.subscribe();
    let mut streams: BTreeMap<u64, DropGuard> = BTreeMap::new();
    loop {
        let members = status.borrow_and_update().members.clone();
        streams.retain(|id, _| members.keys().any(|member| u64::from(*member) == *id));
        for id in members.into_keys().map(u64::from) {
            if id != inner.links.identity.id && !streams.contains_key(&id) {
                let stop = inner.cancel.child_token();
                let stream = keep_stream(inner.clone(), id, stop.clone());
                inner.tasks.spawn(stream);
                streams.insert(id, stop.drop_guard());
            }
        }
        if status.changed().await.is_err() {
            return;
        }
    }
}

async fn keep_stream(inner: Arc<ReplicaInner>, id: u64, stop: CancellationToken) {
    while !stop.is_cancelled() {
        let ended = stop.run_until_cancelled(run_stream(&inner, id)).await;
        inner
            .connected
            .send_if_modified(|connected| connected.remove(&id));
        if let Some(reason) = ended {
            tracing::debug!(peer = id, reason, "peer stream ended");
        }
        stop.run_until_cancelled(tokio::time::sleep(RETRY)).await;
    }
}

/// Runs one stream until it breaks. Returns the reason.
async fn run_stream(inner: &Arc<ReplicaInner>, id: u64) -> String {
    let Some(peer) = inner.links.peer(id) else {
        return "unknown replica".to_owned();
    };
    let outgoing = outgoing(
        peer.header(),
        inner.outgoing.subscribe(),
        inner.raft.metrics(),
        inner.handler.clone(),
    );
    let opened: Result<_, CallError> = peer
        .call(LinkLane::Bulk, OPEN_TIMEOUT, |mut client| async move {
            client.messages(outgoing).await
        })
        .await;
    let mut answers = match opened {
        Ok(answers) => answers,
        Err(error) => return error.to_string(),
    };
    inner
        .connected
        .send_if_modified(|connected| connected.insert(id));
    loop {
        match answers.message().await {
            Ok(Some(_)) => {}
            Ok(None) => return "closed by the peer".to_owned(),
            Err(status) => return status.message().to_owned(),
        }
    }
}

/// Yields the header, then the newest message whenever the network is ready for one.
fn outgoing(
    header: proto::Header,
    newest: watch::WatchReceiver<Bytes>,
    metrics: watch::WatchReceiver<Metrics>,
    handler: Arc<dyn PeerHandler>,
) -> impl Stream<Item = proto::PeerMessage> + Send + 'static {
    let first = proto::PeerMessage {
        header: Some(header),
        ..proto::PeerMessage::default()
    };
    stream::unfold(
        (Some(first), newest, metrics, handler),
        |(mut first, mut newest, metrics, handler)| async move {
            if let Some(first) = first.take() {
                return Some((first, (None, newest, metrics, handler)));
            }
            newest.changed().await.ok()?;
            let message = proto::PeerMessage {
                header: None,
                bytes: newest.borrow_and_update().clone(),
                unix_ms: handler.unix_ms(),
                applied: applied_index(&metrics.borrow()),
            };
            Some((message, (None, newest, metrics, handler)))
        },
    )
}
