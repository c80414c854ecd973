//! One engine that publishes what it caches, and readers that tell of it badly: they leave messages
//! out, say some again, and lose some for good.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rand::Rng;
use state::command::{Command, Item};
use state::exact::{KvBatch, KvEvent, KvMessage, KvNews};
use state::ids::{AttemptId, BackendRef, BlockHash, EngineHash};

use super::operator::backend;
use super::{CONVERSATIONS, StateCluster, conversation};
use crate::invariants::PropertyError;

/// The backend with an engine behind it whose events are read.
const FOLLOWED: u32 = 0;

/// One life of an engine: rank 0 of one publisher.
pub(super) struct EngineLife {
    backend: BackendRef,
    publisher: u64,
    /// What it caches, each block with the one before it.
    cached: BTreeMap<BlockHash, Option<BlockHash>>,
    /// All it ever said, by number.
    said: Vec<KvMessage>,
    /// Messages below are lost: nobody can read them any more.
    lost_below: u64,
    has_begun: bool,
}

impl StateCluster {
    /// The engine says something, and a reader tells of what it hears.
    pub(super) fn publish(&mut self, who: usize) -> Result<(), PropertyError> {
        let state = &self.replicas[who].state;
        let Some(handle) = state.backend(&backend(FOLLOWED)).map(|it| it.handle) else {
            return Ok(());
        };
        let at = self.engine_of(handle);
        for _ in 0..self.rng.random_range(1..4) {
            self.say(at);
        }
        let items = self.tell(at, who);
        let command = Command::Batch {
            base_attempt: AttemptId(0),
            items,
        };
        let envelope = self.envelope(who, command);
        self.propose(who, &envelope)?;
        Ok(())
    }

    /// The engine behind a backend's present life.
    fn engine_of(&mut self, backend: BackendRef) -> usize {
        let known = self.engines.iter();
        let at = known.rev().position(|it| it.backend == backend);
        if let Some(from_the_end) = at {
            return self.engines.len() - 1 - from_the_end;
        }
        let publisher = 1 + self.engines.len() as u64;
        self.engines.push(EngineLife {
            backend,
            publisher,
            cached: BTreeMap::new(),
            said: Vec::new(),
            lost_below: 0,
            has_begun: false,
        });
        self.engines.len() - 1
    }

    /// The engine's cache changes, and it says so.
    fn say(&mut self, at: usize) {
        let number = self.rng.random_range(0..CONVERSATIONS);
        let chain = conversation(number, self.rng.random_range(1..10));
        let engine = &mut self.engines[at];
        let event = match self.rng.random_range(0..20) {
            0 => engine.clear(),
            1..8 => engine.evict(),
            _ => engine.store(&chain),
        };
        let seq = engine.said.len() as u64;
        let mark = seq ^ engine.publisher << 32;
        engine.said.push(KvMessage {
            seq,
            mark,
            part: 0,
            is_last: true,
            is_after_loss: false,
            events: event.into_iter().collect(),
        });
        let cached = Arc::new(engine.cached.keys().copied().collect());
        let observation = &mut self.record.observation;
        observation.published(seq, mark, cached);
    }

    /// What a reader makes of it.
    fn tell(&mut self, at: usize, who: usize) -> Vec<Item> {
        let engine = &mut self.engines[at];
        let slot = engine.backend.slot;
        let positions = self.replicas[who].state.kv_positions(slot);
        let followed = positions.iter().find(|it| it.rank == 0);
        let followed = followed.filter(|it| it.publisher == engine.publisher);
        let next = followed
            .and_then(|it| it.last)
            .map_or(0, |(seq, _)| seq + 1);
        let mut news = Vec::new();
        if !engine.has_begun {
            engine.has_begun = true;
            news.push(KvNews::Begin);
        }
        if self.rng.random_bool(0.06) {
            engine.lost_below = engine.said.len() as u64 - 1;
        }
        let again = self.rng.random_range(0..8_u64).saturating_sub(5);
        let from = next.saturating_sub(again).max(engine.lost_below);
        for message in &engine.said[from as usize..] {
            if self.rng.random_bool(0.08) {
                continue;
            }
            let is_after_loss = message.seq == engine.lost_below && message.seq > next;
            news.push(KvNews::Message(KvMessage {
                is_after_loss,
                ..message.clone()
            }));
        }
        if self.rng.random_bool(0.7) {
            let seq = engine.said.len() as u64 - 1;
            news.push(KvNews::Current { seq: Some(seq) });
        }
        let (backend, publisher) = (engine.backend, engine.publisher);
        let item = |news| {
            Item::KvEvents(KvBatch {
                backend,
                rank: 0,
                publisher,
                news,
            })
        };
        news.into_iter().map(item).collect()
    }
}

impl EngineLife {
    /// Caches what is missing of a chain.
    fn store(&mut self, chain: &[BlockHash]) -> Option<KvEvent> {
        let known = chain.iter().take_while(|it| self.cached.contains_key(it));
        let known = known.count();
        let (before, new) = chain.split_at(known);
        let parent = before.last().copied();
        let mut behind = parent;
        for block in new {
            self.cached.insert(*block, behind);
            behind = Some(*block);
        }
        (!new.is_empty()).then(|| KvEvent::Stored {
            parent: parent.map(engine_hash),
            blocks: new.iter().map(|it| (engine_hash(*it), *it)).collect(),
        })
    }

    /// Gives up a block that none follows.
    fn evict(&mut self) -> Option<KvEvent> {
        let parents: BTreeSet<BlockHash> = self.cached.values().flatten().copied().collect();
        let mut leaves = self.cached.keys().filter(|it| !parents.contains(it));
        let leaf = leaves.next().copied()?;
        self.cached.remove(&leaf);
        let blocks = vec![engine_hash(leaf)];
        Some(KvEvent::Removed { blocks })
    }

    fn clear(&mut self) -> Option<KvEvent> {
        self.cached.clear();
        Some(KvEvent::Cleared)
    }
}

/// What the engine calls a block.
fn engine_hash(block: BlockHash) -> EngineHash {
    EngineHash(block.0.rotate_left(17) ^ 0xe1)
}
