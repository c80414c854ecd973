//! KV events: what the engines' caches hold, followed by all replicas through the log.
//!
//! Each engine has one reader, at a replica that does not change. As the router's hash of a block is
//! the engine's own, the events need no text.

use state::command::{Command, Envelope, Item, Lane, Origin};
use state::ids::{AttemptId, BackendRef, BlockHash, EngineHash, ReplicaId, SessionId};
use state::kv_events::{KV_BLOCKS_PER_BATCH_MAX, KvBatch, KvEvent, KvMessage, KvUpdate, LowerTier};

use super::SimWorld;
use crate::engine::cache::BlockEvent;
use crate::engine::offload::{OffloadEvent, OffloadTier};
use crate::simulate::clock::EPOCH_MS;
use crate::simulate::engine::SimEngine;
use crate::simulate::replica::state_of;

/// Id of the only run of each engine.
const PUBLISHER: u64 = 1;

/// Reader of an engine's events.
#[derive(Debug, Clone, Copy)]
pub(super) struct SimEventReader {
    backend: BackendRef,
    /// Sequence number of the next message.
    next_seq: u64,
}

impl SimEventReader {
    fn news(self, news: KvUpdate) -> KvBatch {
        KvBatch {
            backend: self.backend,
            rank: 0,
            publisher: PUBLISHER,
            news,
        }
    }

    /// Returns the next message of `engine`, in parts; nothing if its caches have not changed.
    fn message(&mut self, engine: &mut SimEngine) -> Vec<KvBatch> {
        let (blocks, below) = engine.take_events();
        let below = below.into_iter().flat_map(below_gpu);
        let mut parts: Vec<Vec<KvEvent>> = Vec::new();
        let mut room = 0;
        for event in blocks.into_iter().flat_map(on_gpu).chain(below) {
            let blocks = block_count(&event);
            if blocks > room || parts.is_empty() {
                parts.push(Vec::new());
                room = KV_BLOCKS_PER_BATCH_MAX;
            }
            room -= blocks;
            parts.last_mut().expect("pushed above").push(event);
        }
        if parts.is_empty() {
            return Vec::new();
        }
        let (seq, last) = (self.next_seq, parts.len() - 1);
        self.next_seq += 1;
        let part = |(nth, events)| {
            self.news(KvUpdate::Message(KvMessage {
                seq,
                mark: seq,
                part: u16::try_from(nth).expect("engines hold few blocks"),
                is_last: nth == last,
                is_after_loss: false,
                events,
            }))
        };
        parts.into_iter().enumerate().map(part).collect()
    }
}

/// Returns readers that have read what `engines` hold, and the entries of the log `setup`, followed
/// by those from which the state learns this.
pub(super) fn begin(
    engines: &mut [SimEngine],
    mut setup: Vec<Envelope>,
) -> (Vec<SimEventReader>, Vec<Envelope>) {
    let registry = state_of(&setup).view().registry();
    let (mut readers, mut seq) = (Vec::new(), 0);
    for (engine, backend) in engines.iter_mut().zip(&registry.backends) {
        let mut reader = SimEventReader {
            backend: backend.handle,
            next_seq: 0,
        };
        let mut news = vec![reader.news(KvUpdate::Begin)];
        news.extend(reader.message(engine));
        let newest = reader.next_seq.checked_sub(1);
        news.push(reader.news(KvUpdate::Current { seq: newest }));
        setup.extend(news.into_iter().map(|batch| {
            seq += 1;
            entry(seq, batch)
        }));
        readers.push(reader);
    }
    (readers, setup)
}

fn entry(seq: u64, batch: KvBatch) -> Envelope {
    Envelope {
        origin: Origin {
            replica: ReplicaId(u8::MAX),
            session: SessionId(1),
            lane: Lane::Outbox,
            seq,
        },
        proposed_at_ms: EPOCH_MS,
        command: Command::Batch {
            base_attempt: AttemptId(0),
            items: vec![Item::KvEvents(batch)],
        },
    }
}

impl SimWorld<'_> {
    /// Publishes the changes of an engine's caches, if replicas follow them.
    pub(super) fn publish(&mut self, engine: usize) {
        let Some(reader) = self.readers.get_mut(engine) else {
            drop(self.engines[engine].take_events());
            return;
        };
        let news = reader.message(&mut self.engines[engine]);
        if news.is_empty() {
            return;
        }
        let place = engine % self.places.len();
        let outbox = self.places[place].replica.outbox();
        for batch in news {
            let is_noted = outbox.note(Item::KvEvents(batch));
            assert!(is_noted, "the log keeps up with engine {engine}");
        }
        self.changed(place);
    }
}

fn block_count(event: &KvEvent) -> usize {
    match event {
        KvEvent::Stored { blocks, .. } | KvEvent::TierStored { blocks, .. } => blocks.len(),
        KvEvent::Removed { blocks }
        | KvEvent::TierCopied { blocks, .. }
        | KvEvent::TierRemoved { blocks, .. } => blocks.len(),
        KvEvent::Cleared | KvEvent::LeftOut { .. } => 0,
    }
}

/// Returns an event of the GPU's cache, cut so that each part fits a batch.
fn on_gpu(event: BlockEvent) -> Vec<KvEvent> {
    match event {
        BlockEvent::Stored { hashes, parent } => {
            let mut before = parent;
            let stored = |blocks: &[u64]| KvEvent::Stored {
                parent: std::mem::replace(&mut before, blocks.last().copied()).map(EngineHash),
                blocks: blocks
                    .iter()
                    .map(|hash| (EngineHash(*hash), BlockHash(*hash)))
                    .collect(),
            };
            hashes.chunks(KV_BLOCKS_PER_BATCH_MAX).map(stored).collect()
        }
        BlockEvent::Removed { hash } => vec![KvEvent::Removed {
            blocks: vec![EngineHash(hash)],
        }],
        BlockEvent::Cleared => vec![KvEvent::Cleared],
    }
}

/// Returns an event of a tier, which only names its blocks, like vLLM's by default, cut so that each
/// part fits a batch.
fn below_gpu(event: OffloadEvent) -> Vec<KvEvent> {
    let tier_of = |tier| match tier {
        OffloadTier::Cpu => LowerTier::Cpu,
        OffloadTier::Disk => LowerTier::Disk,
    };
    let cut = |hashes: Vec<u64>, event: fn(LowerTier, Vec<EngineHash>) -> KvEvent, tier| {
        let parts = hashes.chunks(KV_BLOCKS_PER_BATCH_MAX);
        let named = parts.map(|part| part.iter().copied().map(EngineHash).collect());
        named.map(|part| event(tier_of(tier), part)).collect()
    };
    match event {
        OffloadEvent::Stored(tier, blocks) => {
            let hashes = blocks.iter().map(|block| block.hash).collect();
            cut(
                hashes,
                |tier, blocks| KvEvent::TierCopied { tier, blocks },
                tier,
            )
        }
        OffloadEvent::Removed(tier, hashes) => cut(
            hashes,
            |tier, blocks| KvEvent::TierRemoved { tier, blocks },
            tier,
        ),
    }
}
