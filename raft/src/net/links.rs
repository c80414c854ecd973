//! Connections to peers, with reconnect backoff.
//!
//! A peer that does not respond is retried at growing intervals, no matter how many calls want to
//! reach it. Until the next attempt is due, calls fail at once without touching the network. The
//! error of a failed call shows whether the peer may have received it, because a proposal that was
//! never sent is safe to retry.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::{Instant, timeout, timeout_at};
use tonic::{Code, Response, Status};

use super::reachability::Reachability;
use super::transport::{ConnectError, ConnectFailure, PeerChannel, Transport};
use super::{CONNECT_TIMEOUT, MESSAGE_BYTES_MAX};
use crate::determinism::watch;
use crate::identity::ReplicaIdentity;
use crate::locks::lock;
use crate::types::Node;
use crate::wire::proto;

/// Generated gRPC client, on a connection of the transport.
pub(crate) type PeerClient = proto::peer_client::PeerClient<PeerChannel>;

const RETRY_FIRST: Duration = Duration::from_millis(20);
const RETRY_MAX: Duration = Duration::from_millis(500);

/// One of the two connections to a peer. Raft's own calls never queue behind large ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LinkLane {
    /// Connection for appends, votes and leadership transfers.
    Raft,
    /// Connection for proposals, snapshots, messages and membership changes.
    Bulk,
}

/// Reason why a call got no response.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// The call was never sent.
    #[error("not sent: {0}")]
    NotSent(String),
    /// The peer refused the call, or the connection failed after the peer may have received it.
    #[error("{}: {}", .0.code(), .0.message())]
    Failed(Status),
    /// The peer may have received the call, but did not respond in time.
    #[error("no response within {0:?}")]
    TimedOut(Duration),
}

/// Reason why a call on a connection of its own got no response.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallOnceError {
    #[error("{0}")]
    NotConnected(ConnectError),
    #[error("{}", .0.message())]
    Failed(Status),
    #[error("no response in time")]
    TimedOut,
}

/// Links to all known peers by id, at their newest known address.
pub(crate) struct PeerLinks {
    pub(crate) identity: Arc<ReplicaIdentity>,
    /// Which replicas reach which, for choosing a leader.
    pub(crate) reachability: Reachability,
    transport: Arc<dyn Transport>,
    peers: Mutex<BTreeMap<u64, Arc<Peer>>>,
    attempts: Arc<AtomicU64>,
}

/// Peer at a given address, with the connections to it.
pub(crate) struct Peer {
    pub(crate) id: u64,
    pub(crate) address: String,
    pub(crate) store: u64,
    identity: Arc<ReplicaIdentity>,
    raft: Arc<PeerLink>,
    bulk: Arc<PeerLink>,
}

struct PeerLink {
    id: u64,
    address: String,
    transport: Arc<dyn Transport>,
    state: watch::WatchSender<LinkState>,
    /// Number of connection attempts over the links to all peers.
    attempts: Arc<AtomicU64>,
    /// Whether the last attempt was refused because nothing listens at the peer's address.
    is_refused: AtomicBool,
}

#[derive(Debug, Clone)]
enum LinkState {
    /// The link is not connected; `retry` determines the next attempt.
    Down {
        retry: ReconnectBackoff,
        why: String,
    },
    /// A connection is being established.
    Connecting,
    /// The link is connected. The number distinguishes successive connections.
    Up { channel: PeerChannel, number: u64 },
}

/// Schedule of reconnection attempts: at doubling intervals, up to a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ReconnectBackoff {
    failures: u32,
    due: Option<Instant>,
}

impl ReconnectBackoff {
    const AT_ONCE: Self = Self {
        failures: 0,
        due: None,
    };

    fn is_due(self, now: Instant) -> bool {
        self.due.is_none_or(|due| due <= now)
    }

    fn after_failure(self, now: Instant) -> Self {
        let wait = RETRY_FIRST
            .saturating_mul(1 << self.failures.min(16))
            .min(RETRY_MAX);
        Self {
            failures: self.failures.saturating_add(1),
            due: Some(now + wait),
        }
    }
}

impl PeerLinks {
    pub(crate) fn new(identity: Arc<ReplicaIdentity>, transport: Arc<dyn Transport>) -> Self {
        Self {
            identity,
            reachability: Reachability::default(),
            transport,
            peers: Mutex::default(),
            attempts: Arc::default(),
        }
    }

    /// Returns the number of attempts to connect to peers so far.
    pub(crate) fn attempts(&self) -> u64 {
        self.attempts.load(Ordering::Relaxed)
    }

    /// Returns the peer `id` with the address and store of `node`. Creates new links if the peer is
    /// unknown or either has changed.
    pub(crate) fn learn(&self, id: u64, node: &Node) -> Arc<Peer> {
        let mut peers = lock(&self.peers);
        if let Some(peer) = peers.get(&id)
            && peer.address == node.address
            && peer.store == node.store
        {
            return peer.clone();
        }
        let link = || {
            let (transport, attempts) = (self.transport.clone(), self.attempts.clone());
            Arc::new(PeerLink::new((id, &node.address), transport, attempts))
        };
        let peer = Arc::new(Peer {
            id,
            address: node.address.clone(),
            store: node.store,
            identity: self.identity.clone(),
            raft: link(),
            bulk: link(),
        });
        peers.insert(id, peer.clone());
        peer
    }

    /// Returns the peer `id`; `None` if it was never learned.
    pub(crate) fn peer(&self, id: u64) -> Option<Arc<Peer>> {
        lock(&self.peers).get(&id).cloned()
    }

    /// Records a call from the peer `id`. It is up, so the next call to it may connect at once.
    pub(crate) fn heard_from(&self, id: u64) {
        self.reachability.heard(id);
        if let Some(peer) = self.peer(id) {
            peer.raft.retry_now();
            peer.bulk.retry_now();
        }
    }

    /// Makes one call to `address` on a connection of its own. The address need not be that of a
    /// known peer.
    ///
    /// # Errors
    /// The peer's error, or the reason why there is no connection or response within `limit`.
    pub(crate) async fn call_once<T>(
        &self,
        address: &str,
        limit: Duration,
        call: impl AsyncFnOnce(PeerClient) -> Result<Response<T>, Status>,
    ) -> Result<T, CallOnceError> {
        let answer = timeout(limit, async {
            let channel = connect(self.transport.connect(address.to_owned())).await;
            let channel = channel.map_err(CallOnceError::NotConnected)?;
            call(client(channel)).await.map_err(CallOnceError::Failed)
        });
        match answer.await {
            Ok(answer) => answer.map(Response::into_inner),
            Err(_) => Err(CallOnceError::TimedOut),
        }
    }
}

impl Peer {
    /// Builds the header of a call to this peer.
    pub(crate) fn header(&self) -> proto::Header {
        self.identity.header(self.id, self.store)
    }

    /// Whether the last connection attempt found that nothing listens at the peer's address.
    pub(crate) fn is_refusing(&self) -> bool {
        self.bulk.is_refused()
    }

    /// Makes a call on a connection of the given lane, and connects first if necessary, within
    /// `limit`.
    ///
    /// # Errors
    /// Returns why there was no response; see [`CallError`].
    pub(crate) async fn call<T, F>(
        &self,
        lane: LinkLane,
        limit: Duration,
        call: impl FnOnce(PeerClient) -> F,
    ) -> Result<T, CallError>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let end = Instant::now() + limit;
        let link = match lane {
            LinkLane::Raft => &self.raft,
            LinkLane::Bulk => &self.bulk,
        };
        let (channel, number) = timeout_at(end, link.channel())
            .await
            .map_err(|_| CallError::NotSent(format!("no connection within {limit:?}")))??;
        match timeout_at(end, call(client(channel))).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => {
                if is_broken(&status) {
                    link.down(number, status.message());
                }
                Err(CallError::Failed(status))
            }
            Err(_) => {
                // After a partition heals, an old connection may take long to recover, a new one
                // does not. On the bulk lane a slow response does not indicate a broken connection.
                if lane == LinkLane::Raft {
                    link.down(number, "no response in time");
                }
                Err(CallError::TimedOut(limit))
            }
        }
    }
}

impl PeerLink {
    fn new(
        (id, address): (u64, &str),
        transport: Arc<dyn Transport>,
        attempts: Arc<AtomicU64>,
    ) -> Self {
        let state = LinkState::Down {
            retry: ReconnectBackoff::AT_ONCE,
            why: "not tried".into(),
        };
        Self {
            id,
            address: address.to_owned(),
            transport,
            state: watch::WatchSender::new(state),
            attempts,
            is_refused: AtomicBool::new(false),
        }
    }

    async fn channel(self: &Arc<Self>) -> Result<(PeerChannel, u64), CallError> {
        let mut changes = self.state.subscribe();
        loop {
            let state = changes.borrow_and_update().clone();
            match state {
                LinkState::Up { channel, number } => return Ok((channel, number)),
                LinkState::Connecting => {}
                LinkState::Down { retry, why } if !retry.is_due(Instant::now()) => {
                    return Err(CallError::NotSent(why));
                }
                LinkState::Down { retry, .. } => self.connect(retry),
            }
            if changes.changed().await.is_err() {
                return Err(CallError::NotSent("link closed".into()));
            }
        }
    }

    /// Connects on a separate task, so that a caller that gives up does not abort the attempt.
    fn connect(self: &Arc<Self>, retry: ReconnectBackoff) {
        let began = self.state.send_if_modified(|state| {
            let is_down = matches!(state, LinkState::Down { .. });
            if is_down {
                *state = LinkState::Connecting;
            }
            is_down
        });
        if !began {
            return;
        }
        let number = self.attempts.fetch_add(1, Ordering::Relaxed);
        let link = self.clone();
        tokio::spawn(async move {
            let dialing = link.transport.connect_to(link.id, link.address.clone());
            let connected = connect(dialing).await;
            let is_refused = connected.as_ref().is_err_and(ConnectError::is_refused);
            link.is_refused.store(is_refused, Ordering::Relaxed);
            let next = match connected {
                Ok(channel) => LinkState::Up { channel, number },
                Err(error) => LinkState::Down {
                    retry: retry.after_failure(Instant::now()),
                    why: format!("connect to {}: {error}", link.address),
                },
            };
            link.state.send_replace(next);
        });
    }

    fn down(&self, broken: u64, why: &str) {
        self.state.send_if_modified(|state| {
            let is_it = matches!(state, LinkState::Up { number, .. } if *number == broken);
            if is_it {
                let retry = ReconnectBackoff::AT_ONCE.after_failure(Instant::now());
                *state = LinkState::Down {
                    retry,
                    why: why.to_owned(),
                };
            }
            is_it
        });
    }

    fn is_refused(&self) -> bool {
        self.is_refused.load(Ordering::Relaxed)
    }

    fn retry_now(&self) {
        self.state.send_if_modified(|state| {
            if let LinkState::Down { retry, .. } = state {
                retry.due = None;
            }
            false
        });
    }
}

/// Whether `status` means that the connection failed, as opposed to the peer refusing the call.
fn is_broken(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Internal
    )
}

pub(crate) fn client(channel: PeerChannel) -> PeerClient {
    PeerClient::new(channel)
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX)
}

async fn connect(
    dialing: impl Future<Output = Result<PeerChannel, ConnectError>>,
) -> Result<PeerChannel, ConnectError> {
    timeout(CONNECT_TIMEOUT, dialing).await.unwrap_or_else(|_| {
        Err(ConnectError {
            why: "no response in time".to_owned(),
            kind: ConnectFailure::TimedOut,
        })
    })
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;
    use crate::net::Tcp;

    #[test]
    fn connection_attempts_back_off_to_a_limit() {
        let now = Instant::now();
        let mut retry = ReconnectBackoff::AT_ONCE;
        assert!(retry.is_due(now));
        let mut waits = Vec::new();
        for _ in 0..8 {
            retry = retry.after_failure(now);
            let due = retry.due.unwrap();
            assert!(!retry.is_due(now) && retry.is_due(due));
            waits.push((due - now).as_millis());
        }
        assert_eq!(waits, [20, 40, 80, 160, 320, 500, 500, 500]);
    }

    #[tokio::test]
    async fn more_calls_do_not_dial_a_dead_peer_more_often() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = free.local_addr().unwrap().to_string();
        drop(free);
        let attempts = Arc::new(AtomicU64::new(0));
        let here = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let tcp = Arc::new(Tcp::new(here).unwrap());
        let link = Arc::new(PeerLink::new((2, &address), tcp, attempts.clone()));
        assert!(link.channel().await.is_err());
        assert!(link.is_refused(), "its host answers that nobody listens");
        assert_eq!(attempts.load(Ordering::Relaxed), 1);
        // Until the next attempt is due, no number of calls causes one.
        let LinkState::Down { retry, why } = link.state.borrow().clone() else {
            panic!("not down")
        };
        let due = Some(Instant::now() + Duration::from_secs(3600));
        link.state.send_replace(LinkState::Down {
            retry: ReconnectBackoff { due, ..retry },
            why,
        });
        for _ in 0..1000 {
            assert!(link.channel().await.is_err());
        }
        assert_eq!(attempts.load(Ordering::Relaxed), 1);
        link.retry_now();
        assert!(link.channel().await.is_err());
        assert_eq!(attempts.load(Ordering::Relaxed), 2);
        // The peer listens again.
        let _back = TcpListener::bind(&address).await.unwrap();
        link.retry_now();
        // Nothing accepts the connection: it stays without a response, which is no refusal.
        assert!(link.channel().await.is_ok());
        assert!(!link.is_refused());
    }
}
