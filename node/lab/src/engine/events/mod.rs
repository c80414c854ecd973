//! KV events as vLLM publishes them over ZeroMQ: changes of the blocks in the cache.
//!
//! Changes of the tiers below the GPU follow those of the GPU in the message of the same step.
//!
//! Source: vLLM's `distributed/kv_events.py` and streams recorded from 0.12 and 0.32. A PUB socket
//! sends topic, sequence number and payload; numbers start at 0 in each run. A ROUTER socket
//! replays the last ten thousand messages from a given number on. A subscriber that does not keep
//! up loses the messages that exceed its queue. [`PublisherFaults`] lose, repeat, reorder and delay
//! messages only at the PUB socket. They can also reset the cache or restart the engine; a restart
//! leaves nothing to replay.

mod encode;
mod faults;
mod serve;

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::cache::BlockEvent;
use super::offload::OffloadEvent;
use super::text::BlockContent;
pub use encode::EventEncoding;
pub(super) use encode::OffloadMedia;
pub use faults::{FaultKind, PublisherFaults};

/// Number of messages that can be replayed: vLLM's default.
pub(super) const REPLAY_MESSAGES: usize = 10_000;
/// Maximum number of messages queued for a subscriber: vLLM's default high-water mark.
const QUEUE_MESSAGES_MAX: usize = 100_000;
/// Topic of every message.
pub(super) const TOPIC: &str = "kv-events";

/// Options of an engine's publisher.
#[derive(Debug, Clone, PartialEq)]
pub struct EventsOptions {
    /// Address of the PUB socket. Port 0 selects a free port.
    pub events: SocketAddr,
    /// Address of the ROUTER socket; `None` for no replays.
    pub replay: Option<SocketAddr>,
    /// Encoding of the events.
    pub form: EventEncoding,
    /// Faults to inject into the published messages.
    pub faults: PublisherFaults,
}

/// Changes of an engine's caches in one step.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct StepEvents {
    /// Changes of the GPU's cache.
    pub blocks: Vec<BlockEvent>,
    /// Contents of the [`BlockEvent::Stored`]s, in their order; none of them if sequences do not
    /// remember theirs.
    pub contents: Vec<BlockContent>,
    /// Changes of the tiers below the GPU.
    pub offloaded: Vec<OffloadEvent>,
}

/// What all messages of a publisher have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EventSource {
    /// Number of tokens per block.
    pub block_tokens: u32,
    /// Data-parallel rank of the publisher.
    pub rank: u16,
    /// Names of the tiers below the GPU.
    pub media: OffloadMedia,
}

/// Message with its sequence number.
#[derive(Debug, Clone)]
struct PublishedMessage {
    seq: u64,
    payload: Bytes,
}

/// Publisher of an engine's KV events.
#[derive(Debug)]
pub(super) struct Publisher {
    form: EventEncoding,
    source: EventSource,
    events_at: SocketAddr,
    replay_at: Option<SocketAddr>,
    inner: Mutex<PublisherInner>,
}

#[derive(Debug)]
struct PublisherInner {
    next_seq: u64,
    recent: VecDeque<PublishedMessage>,
    subscribers: Vec<mpsc::Sender<PublishedMessage>>,
    faults: PublisherFaults,
    /// Number of messages published over all runs.
    published: u64,
}

impl Publisher {
    /// Binds the sockets and serves them in the background until `stop` is cancelled.
    pub(super) async fn start(
        options: &EventsOptions,
        source: EventSource,
        stop: &CancellationToken,
        tasks: &TaskTracker,
    ) -> io::Result<Arc<Self>> {
        let events = TcpListener::bind(options.events).await?;
        let replay = match options.replay {
            Some(replay) => Some(TcpListener::bind(replay).await?),
            None => None,
        };
        let publisher = Arc::new(Self {
            form: options.form,
            source,
            events_at: events.local_addr()?,
            replay_at: replay.as_ref().map(TcpListener::local_addr).transpose()?,
            inner: Mutex::new(PublisherInner {
                next_seq: 0,
                recent: VecDeque::new(),
                subscribers: Vec::new(),
                faults: options.faults.clone(),
                published: 0,
            }),
        });
        let serving = serve::subscribers(events, publisher.clone(), stop.clone(), tasks.clone());
        tasks.spawn(stop.clone().run_until_cancelled_owned(serving));
        if let Some(replay) = replay {
            let serving = serve::replays(replay, publisher.clone(), stop.clone(), tasks.clone());
            tasks.spawn(stop.clone().run_until_cancelled_owned(serving));
        }
        Ok(publisher)
    }

    /// Returns the address of the PUB socket.
    pub(super) fn events_at(&self) -> SocketAddr {
        self.events_at
    }

    /// Returns the address of the ROUTER socket, if there is one.
    pub(super) fn replay_at(&self) -> Option<SocketAddr> {
        self.replay_at
    }

    /// Publishes a step's events as one message, if there are any. Returns the fault to inject into
    /// the engine.
    pub(super) fn publish(&self, at_s: f64, events: StepEvents) -> FaultKind {
        if events.blocks.is_empty() && events.offloaded.is_empty() {
            return FaultKind::Nothing;
        }
        let payload = encode::payload(self.form, self.source, at_s, events);
        let mut inner = self.lock();
        let message = PublishedMessage {
            seq: inner.next_seq,
            payload,
        };
        inner.next_seq += 1;
        if inner.recent.len() >= REPLAY_MESSAGES {
            inner.recent.pop_front();
        }
        inner.recent.push_back(message.clone());
        let PublisherInner {
            subscribers,
            faults,
            ..
        } = &mut *inner;
        for sent in faults.send(message) {
            // A full queue drops the message, like a PUB socket beyond its high-water mark.
            subscribers.retain(|queue| {
                !matches!(
                    queue.try_send(sent.clone()),
                    Err(mpsc::error::TrySendError::Closed(_))
                )
            });
        }
        inner.published += 1;
        inner.faults.fate(inner.published)
    }

    /// Starts a new run, like a restarted engine: sequence numbers start at 0, nothing can be
    /// replayed, and subscribers are disconnected.
    pub(super) fn restart(&self) {
        let mut inner = self.lock();
        inner.next_seq = 0;
        inner.recent.clear();
        inner.faults.forget();
        // The connections of the old process break.
        inner.subscribers.clear();
    }

    fn subscribe(&self) -> mpsc::Receiver<PublishedMessage> {
        let (queue, messages) = mpsc::channel(QUEUE_MESSAGES_MAX);
        self.lock().subscribers.push(queue);
        messages
    }

    /// Returns the messages that can be replayed, from sequence number `from` on.
    fn from(&self, from: u64) -> Vec<PublishedMessage> {
        let inner = self.lock();
        let recent = inner.recent.iter();
        recent
            .filter(|message| message.seq >= from)
            .cloned()
            .collect()
    }

    fn stall(&self) -> Option<std::time::Duration> {
        self.lock().faults.stall()
    }

    fn lock(&self) -> MutexGuard<'_, PublisherInner> {
        // No statement leaves the data inconsistent, so a poisoned lock is usable.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
