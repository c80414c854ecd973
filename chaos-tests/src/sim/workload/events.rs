//! Runs the product's own readers of KV events over simulated sockets: connections break with or
//! without an error, messages are lost or duplicated, and replays have holes and end too soon.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use api::engines::kv_transport::endpoint::{KvAddress, ListeningSide};
use api::engines::kv_transport::socket::{SocketMessage, Sockets};
use api::kv_events::reader::{self, ReaderParts};
use api::ports::BoxFuture;
use bytes::Bytes;
use lab::rng::Rng;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio_util::sync::CancellationToken;

use super::ReplicaHandles;

/// Label of the sockets' draws, which separates them from those of other kinds of clients.
const KIND: u64 = 5;
/// Interval at which a subscriber polls an engine's messages.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// Pause before a subscriber dials an engine again.
const DIAL_EVERY: Duration = Duration::from_millis(60);
/// Number of messages of a replay that are never dropped: the queue of an engine's ROUTER socket.
/// Far shorter than a real one, as the replays are.
const ROUTER_QUEUE: u64 = 12;
/// Time after which a replay from an engine that does not respond fails.
const SILENCE: Duration = Duration::from_secs(3);

/// Reads the streams of KV events that are assigned to this replica, until it stops.
pub(super) async fn read(handles: ReplicaHandles) {
    let parts = ReaderParts {
        cluster: Arc::clone(&handles.cluster),
        view: Arc::clone(&handles.view),
        outbox: Arc::clone(handles.router.outbox()),
        reader: Arc::clone(handles.router.reader()),
        clock: handles.router.clock().clone(),
        backends: Arc::clone(&handles.backends),
        sockets: Arc::new(SimSockets {
            rng: Arc::new(Mutex::new(handles.rng(KIND, 0))),
            handles,
        }),
        board: Arc::default(),
    };
    reader::run(parts, CancellationToken::new()).await;
}

/// Simulated sockets of one replica.
struct SimSockets {
    handles: ReplicaHandles,
    rng: Arc<Mutex<Rng>>,
}

/// Route from one socket of a replica to an engine.
struct SocketRoute {
    handles: ReplicaHandles,
    url: String,
    rng: Arc<Mutex<Rng>>,
}

impl SimSockets {
    fn line(&self, address: &KvAddress) -> SocketRoute {
        let host = match address {
            KvAddress::Tcp { host, .. } => host.clone().unwrap_or_default(),
            KvAddress::Ipc(path) => path.display().to_string(),
        };
        SocketRoute {
            handles: self.handles.clone(),
            url: format!("http://{host}:8000"),
            rng: Arc::clone(&self.rng),
        }
    }
}

impl Sockets for SimSockets {
    fn subscribe(
        &self,
        _: ListeningSide,
        address: KvAddress,
        queue: mpsc::Sender<SocketMessage>,
    ) -> BoxFuture<'static, ()> {
        let line = self.line(&address);
        Box::pin(async move {
            while line.follow(&queue).await {
                tokio::time::sleep(DIAL_EVERY).await;
            }
        })
    }

    fn replay(
        &self,
        address: KvAddress,
        from: u64,
        queue: mpsc::Sender<SocketMessage>,
    ) -> BoxFuture<'static, Result<(), String>> {
        let line = self.line(&address);
        Box::pin(async move { line.replay(from, &queue).await })
    }
}

impl SocketRoute {
    fn one_in(&self, of: u64) -> bool {
        !self.handles.context.is_over() && self.below(of) == 0
    }

    fn below(&self, of: u64) -> u64 {
        let mut rng = self.rng.lock().unwrap_or_else(PoisonError::into_inner);
        rng.below(of)
    }

    /// Follows one subscription until it breaks. Returns whether the receiver still listens.
    async fn follow(&self, queue: &mpsc::Sender<SocketMessage>) -> bool {
        let publisher = self.handles.context.engines().publisher(&self.url);
        let Some((run, mut next)) = publisher else {
            return queue.send(broke("connection refused")).await.is_ok();
        };
        if queue.send(SocketMessage::Connected).await.is_err() {
            return false;
        }
        // Number of further polls whose messages are lost without an error.
        let mut deaf_looks = 0;
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let messages = self
                .handles
                .context
                .engines()
                .messages(&self.url, run, next);
            let Some(messages) = messages else {
                return queue.send(broke("connection reset")).await.is_ok();
            };
            deaf_looks = match deaf_looks {
                0 if self.one_in(1000) => self.below(400),
                looks => looks - looks.min(1),
            };
            for (seq, payload) in messages {
                next = seq + 1;
                if deaf_looks > 0 || self.one_in(40) {
                    continue;
                }
                let copies = 1 + u64::from(self.one_in(40));
                for _ in 0..copies {
                    // A publisher drops messages that a slow subscriber does not fetch.
                    let sent = queue.try_send(SocketMessage::Message(seq, payload.clone()));
                    if let Err(TrySendError::Closed(_)) = sent {
                        return false;
                    }
                }
            }
            if self.one_in(1500) {
                return queue.send(broke("connection reset")).await.is_ok();
            }
        }
    }

    async fn replay(&self, from: u64, queue: &mpsc::Sender<SocketMessage>) -> Result<(), String> {
        tokio::time::sleep(Duration::from_millis(1 + self.below(60))).await;
        let engine = self.handles.context.engines().publisher(&self.url);
        let (run, _) = engine.ok_or("connection refused")?;
        if self.one_in(25) {
            tokio::time::sleep(SILENCE).await;
            return Err("timed out".to_owned());
        }
        let messages = self
            .handles
            .context
            .engines()
            .messages(&self.url, run, from);
        let messages: Vec<(u64, Bytes)> = messages.ok_or("connection reset")?;
        let sent = match self.one_in(15) {
            true => self.below(messages.len() as u64 + 1) as usize,
            false => messages.len(),
        };
        let hole = self.hole(sent as u64);
        for (place, (seq, payload)) in (0..).zip(&messages[..sent]) {
            if hole.contains(&place) {
                continue;
            }
            if queue
                .send(SocketMessage::Message(*seq, payload.clone()))
                .await
                .is_err()
            {
                return Ok(());
            }
        }
        match sent == messages.len() {
            true => Ok(()),
            false => Err("connection reset".to_owned()),
        }
    }

    /// Returns the places of the messages that a replay of `sent` messages lacks. The last one is
    /// none of them, so that the hole shows.
    fn hole(&self, sent: u64) -> Range<u64> {
        if sent <= ROUTER_QUEUE + 1 || !self.one_in(8) {
            return 0..0;
        }
        let first = ROUTER_QUEUE + self.below(sent - 1 - ROUTER_QUEUE);
        first..first + 1 + self.below(sent - 1 - first)
    }
}

fn broke(why: &str) -> SocketMessage {
    SocketMessage::Broke(why.to_owned())
}
