//! The KV events of an engine: its cache as a tree of blocks, and its published and remembered
//! messages. Payloads are vLLM's positional msgpack, as written by engines up to 0.27.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use rmp::encode as pack;
use state::ids::BlockHash;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::oracle::observation::EngineCache;
use crate::sim::plan::BLOCK_SIZE;

/// Maximum number of messages that can be replayed. It is low, so that a reader that is away for
/// long loses some.
const REMEMBERED_MESSAGES_MAX: usize = 40;
/// Cache capacity, in blocks.
const CAPACITY_BLOCKS: usize = 60;
/// Capacity of the host's memory, in blocks.
const OFFLOADED_BLOCKS: usize = 90;
const WRITES: &str = "writing to memory does not fail";

/// One run of an engine's publisher, with the engine's cache.
#[derive(Debug)]
pub(super) struct PublisherRun {
    /// Number that distinguishes this run's hashes and payloads from those of other runs.
    salt: u64,
    cached: BTreeMap<BlockHash, CachedBlock>,
    /// Blocks copied to memory of the host, oldest first, each with the one before it; `None` for
    /// engines without that tier.
    offloaded: Option<VecDeque<(BlockHash, Option<BlockHash>)>>,
    /// Whether any block was copied there since the cache was cleared.
    has_offloaded: bool,
    uses: u64,
    next_seq: u64,
    messages: VecDeque<PublishedMessage>,
}

/// A published message of KV events.
#[derive(Debug, Clone)]
pub(super) struct PublishedMessage {
    pub(super) seq: u64,
    pub(super) payload: Bytes,
    /// All blocks in the cache after the message.
    pub(super) cached: Arc<EngineCache>,
}

#[derive(Debug)]
struct CachedBlock {
    parent: Option<BlockHash>,
    children: u32,
    used: u64,
}

impl PublisherRun {
    /// Creates a run with an empty cache.
    pub(super) fn new(salt: u64) -> Self {
        Self {
            salt,
            cached: BTreeMap::new(),
            offloaded: salt.is_multiple_of(2).then(VecDeque::new),
            has_offloaded: false,
            uses: 0,
            next_seq: 0,
            messages: VecDeque::new(),
        }
    }

    /// Returns the number of the next message.
    pub(super) fn next_seq(&self) -> u64 {
        self.next_seq
    }

    /// Returns the remembered messages from `seq` on.
    pub(super) fn since(&self, seq: u64) -> impl Iterator<Item = &PublishedMessage> {
        self.messages.iter().filter(move |it| it.seq >= seq)
    }

    /// Adds a prompt to the cache and publishes the change. Returns the number of leading blocks
    /// that were cached before, and the message if there was a change. `chain` contains the
    /// router's hashes of the blocks of `ids`.
    pub(super) fn take(
        &mut self,
        chain: &[BlockHash],
        ids: &[u32],
    ) -> (u64, Option<PublishedMessage>) {
        self.uses += 1;
        let found = chain
            .iter()
            .take_while(|it| self.cached.contains_key(it))
            .count();
        let loaded = chain[found..].iter().take_while(|it| self.is_offloaded(it));
        let loaded = loaded.count();
        let mut events: Vec<Vec<u8>> = Vec::new();
        let fits = chain.len().min(CAPACITY_BLOCKS);
        for hash in &chain[..found.min(fits)] {
            if let Some(cached) = self.cached.get_mut(hash) {
                cached.used = self.uses;
            }
        }
        for at in found..fits {
            let parent = at.checked_sub(1).map(|before| chain[before]);
            while self.cached.len() >= CAPACITY_BLOCKS {
                let Some(gone) = self.evict(parent) else {
                    break;
                };
                events.extend(self.offload(gone));
                events.push(self.removed(gone.0, None));
            }
            if let Some(parent) = parent.and_then(|parent| self.cached.get_mut(&parent)) {
                parent.children += 1;
            }
            let cached = CachedBlock {
                parent,
                children: 0,
                used: self.uses,
            };
            self.cached.insert(chain[at], cached);
            let block = BLOCK_SIZE as usize;
            events.push(self.stored(chain[at], parent, &ids[at * block..(at + 1) * block]));
        }
        let message = (!events.is_empty()).then(|| self.publish(&events));
        ((found + loaded) as u64, message)
    }

    /// Empties the cache, and publishes and returns the message about this.
    pub(super) fn clear(&mut self) -> PublishedMessage {
        self.cached.clear();
        self.offloaded.iter_mut().for_each(VecDeque::clear);
        self.has_offloaded = false;
        let mut event = Vec::new();
        pack::write_array_len(&mut event, 1).expect(WRITES);
        pack::write_str(&mut event, "AllBlocksCleared").expect(WRITES);
        self.publish(&[event])
    }

    fn is_offloaded(&self, block: &BlockHash) -> bool {
        let offloaded = self.offloaded.iter().flatten();
        offloaded.into_iter().any(|(it, _)| it == block)
    }

    /// Copies an evicted block to memory of the host, if the engine uses it. Returns the events: what
    /// makes room there, and the copy, by name only.
    fn offload(&mut self, (block, parent): (BlockHash, Option<BlockHash>)) -> Vec<Vec<u8>> {
        if self.is_offloaded(&block) {
            return Vec::new();
        }
        let Some(offloaded) = &mut self.offloaded else {
            return Vec::new();
        };
        offloaded.push_back((block, parent));
        self.has_offloaded = true;
        let gone = (offloaded.len() > OFFLOADED_BLOCKS).then(|| offloaded.pop_front());
        let gone = gone
            .flatten()
            .map(|(gone, _)| self.removed(gone, Some("CPU")));
        gone.into_iter().chain([self.copied(block)]).collect()
    }

    /// Returns what a request can find in the cache.
    fn contents(&self) -> EngineCache {
        let mut parents: BTreeMap<_, _> = (self.offloaded.iter().flatten().copied()).collect();
        parents.extend(self.cached.iter().map(|(block, it)| (*block, it.parent)));
        let is_reached = |block: &&BlockHash| {
            let mut at = Some(**block);
            while let Some(parent) = at.and_then(|it| parents.get(&it)) {
                at = *parent;
            }
            at.is_none()
        };
        let with_cpu = parents.keys().filter(is_reached).copied();
        EngineCache {
            gpu: self.cached.keys().copied().collect(),
            with_cpu: match self.has_offloaded {
                true => with_cpu.collect(),
                false => BTreeSet::new(),
            },
        }
    }

    /// Evicts the least recently used block that has no successor and is not `kept`. Returns it with
    /// the one before it.
    fn evict(&mut self, kept: Option<BlockHash>) -> Option<(BlockHash, Option<BlockHash>)> {
        let free = self.cached.iter();
        let free = free.filter(|(hash, it)| it.children == 0 && Some(**hash) != kept);
        let (&gone, _) = free.min_by_key(|(hash, it)| (it.used, **hash))?;
        let cached = self.cached.remove(&gone)?;
        if let Some(parent) = cached.parent.and_then(|it| self.cached.get_mut(&it)) {
            parent.children -= 1;
        }
        Some((gone, cached.parent))
    }

    fn publish(&mut self, events: &[Vec<u8>]) -> PublishedMessage {
        let mut payload = Vec::new();
        pack::write_array_len(&mut payload, 3).expect(WRITES);
        // Makes every payload unique.
        let at_s = (self.salt % 1_000_000_007) as f64 + self.next_seq as f64 / 1e4;
        pack::write_f64(&mut payload, at_s).expect(WRITES);
        let length = u32::try_from(events.len()).expect("a prompt has few blocks");
        pack::write_array_len(&mut payload, length).expect(WRITES);
        for event in events {
            payload.extend(event);
        }
        pack::write_uint(&mut payload, 0).expect(WRITES);
        let message = PublishedMessage {
            seq: self.next_seq,
            payload: payload.into(),
            cached: Arc::new(self.contents()),
        };
        self.next_seq += 1;
        self.messages.push_back(message.clone());
        if self.messages.len() > REMEMBERED_MESSAGES_MAX {
            self.messages.pop_front();
        }
        message
    }

    fn stored(&self, hash: BlockHash, parent: Option<BlockHash>, ids: &[u32]) -> Vec<u8> {
        let mut event = Vec::new();
        pack::write_array_len(&mut event, 6).expect(WRITES);
        pack::write_str(&mut event, "BlockStored").expect(WRITES);
        pack::write_array_len(&mut event, 1).expect(WRITES);
        pack::write_uint(&mut event, self.name(hash)).expect(WRITES);
        match parent {
            Some(parent) => drop(pack::write_uint(&mut event, self.name(parent)).expect(WRITES)),
            None => pack::write_nil(&mut event).expect(WRITES),
        }
        let length = u32::try_from(ids.len()).expect("a block has few tokens");
        pack::write_array_len(&mut event, length).expect(WRITES);
        for id in ids {
            pack::write_uint(&mut event, u64::from(*id)).expect(WRITES);
        }
        pack::write_uint(&mut event, u64::from(BLOCK_SIZE)).expect(WRITES);
        pack::write_nil(&mut event).expect(WRITES);
        event
    }

    /// Returns the event that a block was copied to memory of the host, as vLLM's offloading connector
    /// publishes it.
    fn copied(&self, hash: BlockHash) -> Vec<u8> {
        let mut event = Vec::new();
        pack::write_array_len(&mut event, 7).expect(WRITES);
        pack::write_str(&mut event, "BlockStored").expect(WRITES);
        pack::write_array_len(&mut event, 1).expect(WRITES);
        pack::write_uint(&mut event, self.name(hash)).expect(WRITES);
        pack::write_nil(&mut event).expect(WRITES);
        pack::write_array_len(&mut event, 0).expect(WRITES);
        pack::write_uint(&mut event, 0).expect(WRITES);
        pack::write_nil(&mut event).expect(WRITES);
        pack::write_str(&mut event, "CPU").expect(WRITES);
        event
    }

    fn removed(&self, hash: BlockHash, medium: Option<&str>) -> Vec<u8> {
        let mut event = Vec::new();
        let length = 2 + u32::from(medium.is_some());
        pack::write_array_len(&mut event, length).expect(WRITES);
        pack::write_str(&mut event, "BlockRemoved").expect(WRITES);
        pack::write_array_len(&mut event, 1).expect(WRITES);
        pack::write_uint(&mut event, self.name(hash)).expect(WRITES);
        if let Some(medium) = medium {
            pack::write_str(&mut event, medium).expect(WRITES);
        }
        event
    }

    /// Returns the engine's own hash of a block.
    fn name(&self, hash: BlockHash) -> u64 {
        xxh3_64_with_seed(&hash.0.to_le_bytes(), self.salt)
    }
}
