//! Translates an engine's KV events into the router's block hashes.
//!
//! The router's hash of a block follows from its parent's hash and its tokens, so the engine's own
//! hash function does not matter: its hashes are only names. Blocks on tiers below the GPU are told
//! by their names alone where the event does not describe them, or not fully; the state knows them
//! from the GPU. The following are left out: groups of layers without full attention (their blocks come and go by other
//! rules, and the full ones bound a prompt's hit); and blocks with further keys, such as media. A
//! block with an unknown parent is set aside, within bounds, until the parent arrives: it is never
//! taken for the start of a prompt. The cluster is told of the parent, because it may know it.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, VecDeque};

use bytes::Bytes;
use state::ids::{BlockHash, EngineHash};
use state::kv_events::{KV_BLOCKS_PER_BATCH_MAX, KvEvent, KvRejection, LowerTier};
use state::prefix::BlockHasher;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{StreamContext, StreamCounts};
use crate::engines::kv_transport::wire::{
    self, BlockKeys, BlockRemoved, BlockStored, CacheLocation, CacheMedium, EngineEvent,
};
use crate::prompt::{TokenScope, chain_of_tokens};

/// Number of hashes that are remembered at least, besides those in the replicated state: from
/// messages not applied yet, and of likely parents. Up to twice as many are.
const REMEMBERED_MIN: usize = 65_536;
/// Maximum number of blocks set aside until their parent is known.
const ORPHANS_MAX: usize = 2048;
/// Base of the seeds from which the names of an engine block's parts are derived; the part's number
/// is added.
const PART_SEED: u64 = 0x7061_7274;
/// Maximum number of groups of layers that can be distinguished.
const GROUPS_MAX: usize = 64;

/// Everything besides tokens that hashes depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HashIdentity {
    /// The cluster's hash seed and secret.
    pub hashing: BlockHasher,
    /// Model of blocks without an adapter.
    pub model: String,
    /// Whether requests name an adapter as `model:adapter`, while events name only the adapter.
    pub has_qualified_adapters: bool,
    /// Tokens per block in the router's hashing of this model and of models served as its adapters.
    pub block_size: u32,
    /// Number of router blocks per engine block, as known at the start: 1 until the engine has
    /// reported its block size.
    pub parts: u32,
}

impl HashIdentity {
    /// Returns the model that requests for blocks with this adapter name.
    fn model_of(&self, adapter: Option<&str>) -> Cow<'_, str> {
        match adapter {
            None => Cow::Borrowed(&self.model),
            Some(adapter) if self.has_qualified_adapters => {
                Cow::Owned(format!("{}:{adapter}", self.model))
            }
            Some(adapter) => Cow::Owned(adapter.to_owned()),
        }
    }
}

/// Error for events that cannot be used, with the reason.
#[derive(Debug)]
pub(super) struct UnusableEventsError(pub(super) KvRejection);

/// Consecutive blocks whose first parent is unknown.
#[derive(Debug)]
struct OrphanBlocks {
    parent: EngineHash,
    hashes: Vec<EngineHash>,
    tokens: Vec<u32>,
}

/// Blocks that a publisher has reported, as far as they are remembered.
#[derive(Debug)]
pub(super) struct PublishedBlocks {
    identity: HashIdentity,
    remembered: HashMap<EngineHash, BlockHash>,
    /// Hashes remembered before `remembered` was last full.
    remembered_before: HashMap<EngineHash, BlockHash>,
    /// Blocks set aside, oldest first.
    orphans: VecDeque<OrphanBlocks>,
    orphans_len: usize,
    /// Whether each group of layers has full attention.
    groups: BTreeMap<u32, bool>,
    /// Number of router blocks per engine block.
    parts: usize,
}

/// Events of a message for the cluster, split into parts of bounded size.
struct MessageParts<'a> {
    parts: Vec<Vec<KvEvent>>,
    /// Number of blocks in the last part so far.
    blocks: usize,
    counts: &'a mut StreamCounts,
}

impl<'a> MessageParts<'a> {
    fn new(counts: &'a mut StreamCounts) -> Self {
        Self {
            parts: vec![Vec::new()],
            blocks: 0,
            counts,
        }
    }

    /// Returns the part that the next block goes to, and the number of blocks that still fit into
    /// it.
    fn open(&mut self) -> (&mut Vec<KvEvent>, usize) {
        if self.blocks >= KV_BLOCKS_PER_BATCH_MAX {
            self.parts.push(Vec::new());
            self.blocks = 0;
        }
        let room = KV_BLOCKS_PER_BATCH_MAX - self.blocks;
        let part = self.parts.last_mut().expect("a cut begins with one part");
        (part, room)
    }

    fn store(&mut self, mut parent: Option<EngineHash>, mut blocks: &[(EngineHash, BlockHash)]) {
        while !blocks.is_empty() {
            let (part, room) = self.open();
            let (now, later) = blocks.split_at(room.min(blocks.len()));
            match part.last_mut() {
                Some(KvEvent::Stored { blocks, .. })
                    if parent.is_some() && blocks.last().map(|(last, _)| *last) == parent =>
                {
                    blocks.extend_from_slice(now);
                }
                _ => part.push(KvEvent::Stored {
                    parent,
                    blocks: now.to_vec(),
                }),
            }
            parent = now.last().map(|(engine, _)| *engine);
            self.blocks += now.len();
            blocks = later;
        }
    }

    fn remove(&mut self, hash: EngineHash) {
        let (part, _) = self.open();
        match part.last_mut() {
            Some(KvEvent::Removed { blocks }) => blocks.push(hash),
            _ => part.push(KvEvent::Removed { blocks: vec![hash] }),
        }
        self.blocks += 1;
    }

    /// Adds what `event` makes of up to as many `blocks` as still fit into a part, until all are in.
    fn add_in_parts<T>(&mut self, mut blocks: &[T], mut event: impl FnMut(&[T]) -> KvEvent) {
        while !blocks.is_empty() {
            let (part, room) = self.open();
            let (now, later) = blocks.split_at(room.min(blocks.len()));
            part.push(event(now));
            self.blocks += now.len();
            blocks = later;
        }
    }

    fn clear(&mut self) {
        self.open().0.push(KvEvent::Cleared);
        self.blocks += 1;
    }

    fn leave_out(&mut self, parent: EngineHash) {
        self.open().0.push(KvEvent::LeftOut { parent });
        self.blocks += 1;
    }
}

impl PublishedBlocks {
    pub(super) fn new(identity: HashIdentity) -> Self {
        Self {
            parts: identity.parts.max(1) as usize,
            identity,
            remembered: HashMap::new(),
            remembered_before: HashMap::new(),
            orphans: VecDeque::new(),
            orphans_len: 0,
            groups: BTreeMap::new(),
        }
    }

    /// Forgets all blocks. Groups stay, because they belong to the model.
    pub(super) fn forget(&mut self) {
        self.remembered.clear();
        self.remembered_before.clear();
        self.orphans.clear();
        self.orphans_len = 0;
    }

    /// Learns the groups of layers and the block size from a message that was reported before.
    pub(super) fn learn_groups(&mut self, payload: &Bytes) {
        for event in wire::decode(payload).unwrap_or_default().events {
            if let EngineEvent::Stored(stored) = event
                && stored.place.medium == CacheMedium::Gpu
            {
                self.learn_group(&stored.place);
                self.learn_parts(stored.block_size);
            }
        }
    }

    /// Converts a message's events into at least one part for the cluster. Fails if the engine's
    /// block size is not a multiple of the router's.
    pub(super) fn convert(
        &mut self,
        events: Vec<EngineEvent>,
        around: &StreamContext<'_>,
        counts: &mut StreamCounts,
    ) -> Result<Vec<Vec<KvEvent>>, UnusableEventsError> {
        let mut cut = MessageParts::new(counts);
        for event in events {
            match event {
                EngineEvent::Stored(stored) => self.store(&stored, around, &mut cut)?,
                EngineEvent::Removed(removed) => self.remove(&removed, &mut cut),
                EngineEvent::Cleared => {
                    self.forget();
                    cut.clear();
                }
                EngineEvent::Unknown => {}
            }
        }
        Ok(cut.parts)
    }

    fn store(
        &mut self,
        stored: &BlockStored,
        around: &StreamContext<'_>,
        cut: &mut MessageParts<'_>,
    ) -> Result<(), UnusableEventsError> {
        self.learn_group(&stored.place);
        if stored.hashes.is_empty() || !self.is_indexed(&stored.place) {
            return Ok(());
        }
        if let CacheMedium::Lower(tier) = stored.place.medium {
            self.store_below(tier, stored, around, cut);
            return Ok(());
        }
        if !self.learn_parts(stored.block_size) {
            return Err(UnusableEventsError(KvRejection::BlockSize {
                engine: stored.block_size,
                router: self.identity.block_size,
            }));
        }
        let blocks = stored.hashes.len();
        let size = stored.block_size as usize;
        let plain = stored.keys.foreign_from.unwrap_or(blocks).min(blocks);
        let is_odd = stored.tokens.len() != blocks * size;
        let is_unnamed = stored.keys.has_adapter && stored.keys.adapter.is_none();
        if is_odd || is_unnamed || plain == 0 {
            cut.counts.foreign += blocks as u64;
            return Ok(());
        }
        cut.counts.foreign += (blocks - plain) as u64;
        let hashes = &self.names(&stored.hashes[..plain]);
        let tokens = &stored.tokens[..plain * size];
        let parent = match stored.parent {
            None => None,
            Some(parent) => match self.router_hash(parent, around) {
                Some(known) => Some((parent, known)),
                None => {
                    cut.counts.orphans += hashes.len() as u64;
                    self.set_aside(parent, hashes, tokens);
                    cut.leave_out(parent);
                    return Ok(());
                }
            },
        };
        self.chain(parent, &stored.keys, hashes, tokens, cut);
        self.adopt(hashes, around, cut);
        Ok(())
    }

    /// Adds blocks on a tier below the GPU: as the event describes them, or by their names.
    fn store_below(
        &mut self,
        tier: LowerTier,
        stored: &BlockStored,
        around: &StreamContext<'_>,
        cut: &mut MessageParts<'_>,
    ) {
        let names = self.names(&stored.hashes);
        cut.counts.stored += names.len() as u64;
        let parent = stored
            .parent
            .map(|parent| (parent, self.router_hash(parent, around)));
        let is_described = stored.tokens.len() == names.len() * self.identity.block_size as usize
            && !stored.keys.are_unknown
            && stored.keys.foreign_from.is_none()
            && stored.keys.has_adapter == stored.keys.adapter.is_some()
            && parent.is_none_or(|(_, router)| router.is_some());
        if !is_described {
            cut.add_in_parts(&names, |names| KvEvent::TierCopied {
                tier,
                blocks: names.to_vec(),
            });
            return;
        }
        let router = parent.and_then(|(_, router)| router);
        let blocks = self.hashed(router, &stored.keys, &names, &stored.tokens);
        let mut parent = parent.map(|(engine, _)| engine);
        cut.add_in_parts(&blocks, |blocks| {
            let first = parent;
            parent = blocks.last().map(|(engine, _)| *engine);
            KvEvent::TierStored {
                tier,
                parent: first,
                blocks: blocks.to_vec(),
            }
        });
    }

    /// Returns blocks with the router's hashes, which follow from their tokens and the block before
    /// them. Without one, they start a prompt with these keys.
    fn hashed(
        &mut self,
        parent: Option<BlockHash>,
        keys: &BlockKeys,
        hashes: &[EngineHash],
        tokens: &[u32],
    ) -> Vec<(EngineHash, BlockHash)> {
        let scope = TokenScope {
            model: &self.identity.model_of(keys.adapter.as_deref()),
            salt: keys.salt.as_deref().unwrap_or_default(),
            block_size: self.identity.block_size,
        };
        let chain = chain_of_tokens(&self.identity.hashing, &scope, parent, tokens, &[]);
        let blocks: Vec<_> = hashes.iter().copied().zip(chain).collect();
        for (engine, router) in &blocks {
            self.remember(*engine, *router);
        }
        blocks
    }

    /// Adds blocks that follow `parent`. If it is `None`, they start a prompt with these keys.
    fn chain(
        &mut self,
        parent: Option<(EngineHash, BlockHash)>,
        keys: &BlockKeys,
        hashes: &[EngineHash],
        tokens: &[u32],
        cut: &mut MessageParts<'_>,
    ) {
        let blocks = self.hashed(parent.map(|(_, hash)| hash), keys, hashes, tokens);
        cut.counts.stored += blocks.len() as u64;
        cut.store(parent.map(|(engine, _)| engine), &blocks);
    }

    /// Adds the blocks that waited for one of `parents`, and those that waited for the added
    /// blocks.
    fn adopt(
        &mut self,
        parents: &[EngineHash],
        around: &StreamContext<'_>,
        cut: &mut MessageParts<'_>,
    ) {
        let mut parents = parents.to_vec();
        while !self.orphans.is_empty()
            && let Some(parent) = parents.pop()
        {
            while let Some(at) = self.orphans.iter().position(|it| it.parent == parent) {
                let Some(orphans) = self.orphans.remove(at) else {
                    break;
                };
                self.orphans_len -= orphans.hashes.len();
                let Some(known) = self.router_hash(parent, around) else {
                    break;
                };
                let OrphanBlocks { hashes, tokens, .. } = orphans;
                let (parent_of_all, keys) = (Some((parent, known)), BlockKeys::default());
                self.chain(parent_of_all, &keys, &hashes, &tokens, cut);
                parents.extend(hashes);
            }
        }
    }

    fn set_aside(&mut self, parent: EngineHash, hashes: &[EngineHash], tokens: &[u32]) {
        if hashes.len() > ORPHANS_MAX {
            return;
        }
        self.orphans_len += hashes.len();
        self.orphans.push_back(OrphanBlocks {
            parent,
            hashes: hashes.to_vec(),
            tokens: tokens.to_vec(),
        });
        while self.orphans_len > ORPHANS_MAX
            && let Some(oldest) = self.orphans.pop_front()
        {
            self.orphans_len -= oldest.hashes.len();
        }
    }

    fn remove(&mut self, removed: &BlockRemoved, cut: &mut MessageParts<'_>) {
        if !self.is_indexed(&removed.place) {
            return;
        }
        let names = self.names(&removed.hashes);
        if let CacheMedium::Lower(tier) = removed.place.medium {
            cut.counts.removed += names.len() as u64;
            cut.add_in_parts(&names, |names| KvEvent::TierRemoved {
                tier,
                blocks: names.to_vec(),
            });
            return;
        }
        for hash in names {
            if !self.drop_orphan(hash) {
                cut.counts.removed += 1;
                cut.remove(hash);
            }
        }
    }

    /// Removes a block that was set aside, and those behind it. Returns whether the block was
    /// found.
    fn drop_orphan(&mut self, hash: EngineHash) -> bool {
        for orphans in &mut self.orphans {
            if let Some(at) = orphans.hashes.iter().position(|it| *it == hash) {
                self.orphans_len -= orphans.hashes.len() - at;
                orphans.hashes.truncate(at);
                orphans
                    .tokens
                    .truncate(at * self.identity.block_size as usize);
                return true;
            }
        }
        false
    }

    fn router_hash(&self, engine: EngineHash, around: &StreamContext<'_>) -> Option<BlockHash> {
        let before = || self.remembered_before.get(&engine);
        let remembered = self.remembered.get(&engine).or_else(before).copied();
        remembered.or_else(|| (around.known)(engine))
    }

    fn remember(&mut self, engine: EngineHash, router: BlockHash) {
        if self.remembered.len() >= REMEMBERED_MIN {
            self.remembered_before = std::mem::take(&mut self.remembered);
        }
        self.remembered.insert(engine, router);
    }

    /// Learns the number of router blocks per engine block from `engine`, its block size. Returns
    /// whether it is a whole number.
    fn learn_parts(&mut self, engine: u32) -> bool {
        let router = self.identity.block_size;
        let is_whole = engine > 0 && engine.is_multiple_of(router);
        if is_whole {
            self.parts = (engine / router) as usize;
        }
        is_whole
    }

    /// Returns names for the router blocks in engine blocks. The last one of each has the engine's
    /// own name, by which the next block refers to its parent. The others have names derived from
    /// it.
    fn names(&self, hashes: &[EngineHash]) -> Vec<EngineHash> {
        let parts = self.parts as u64;
        let of_one = |hash: &EngineHash| {
            let hash = *hash;
            let made = move |part: u64| {
                EngineHash(xxh3_64_with_seed(&hash.0.to_le_bytes(), PART_SEED + part))
            };
            (1..parts).map(made).chain([hash])
        };
        hashes.iter().flat_map(of_one).collect()
    }

    fn learn_group(&mut self, place: &CacheLocation) {
        if let (Some(group), Some(is_full)) = (place.group, place.is_full_attention)
            && (self.groups.len() < GROUPS_MAX || self.groups.contains_key(&group))
        {
            self.groups.insert(group, is_full);
        }
    }

    /// Whether the blocks at `place` are followed: on a known tier, in the first group with full
    /// attention.
    fn is_indexed(&self, place: &CacheLocation) -> bool {
        if place.medium == CacheMedium::Unknown || place.is_full_attention == Some(false) {
            return false;
        }
        let Some(group) = place.group else {
            return true;
        };
        let first_full = self.groups.iter().find(|(_, is_full)| **is_full);
        match first_full {
            Some((first, _)) => *first == group,
            None => self.groups.get(&group) != Some(&false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_adapters_belong_to_the_model_that_requests_name() {
        let model = |has_qualified_adapters: bool, adapter: Option<&str>| {
            let identity = HashIdentity {
                hashing: 7.into(),
                model: "base".to_owned(),
                has_qualified_adapters,
                block_size: 16,
                parts: 1,
            };
            identity.model_of(adapter).into_owned()
        };
        assert_eq!(model(false, None), "base");
        assert_eq!(model(true, None), "base");
        assert_eq!(model(false, Some("ada")), "ada");
        assert_eq!(model(true, Some("ada")), "base:ada");
    }
}
