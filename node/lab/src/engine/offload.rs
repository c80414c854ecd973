//! Cache tiers below the GPU: CPU memory and disk, as behind vLLM's `OffloadingConnector`.
//!
//! Source: vLLM `distributed/kv_transfer/kv_connector/v1/offloading/` and `v1/kv_offload/`. Once
//! blocks are computed, they are also stored in CPU memory, with those before them that are not
//! there. A full tier evicts what was touched least recently: CPU memory to disk, the disk for
//! good. A prompt touches its blocks deepest first, so that tiers lose the ends of prompts first. A
//! block that is loaded from disk is stored in CPU memory again.
//!
//! Nothing here reads a clock or knows of requests: the scheduler says which blocks of a sequence
//! were computed or loaded, and spends the time that a load takes ([`OffloadTiers::load`]). The
//! changes are recorded as [`OffloadEvent`]s, in vLLM's order: what a tier evicts comes before what
//! it stores. As what CPU memory evicts must be on disk before its place is taken, the disk's changes
//! come first.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::cache::{BlockPool, PrefixHit};
use super::text::{BlockContent, EngineHash, Sequence};

/// Time to load a token from CPU memory by default, as a part of the time to compute it.
const CPU_LOAD_PART: u64 = 20;
/// Time to load a token from disk by default, as a part of the time to compute it.
const DISK_LOAD_PART: u64 = 5;
/// Number of stale touches that a tier keeps before it looks for them.
const STALE_TOUCHES_MIN: usize = 1024;

/// A cache tier below the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OffloadTier {
    /// CPU memory.
    Cpu,
    /// Disk, which takes what CPU memory evicts.
    Disk,
}

/// Sizes and speeds of the tiers below the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OffloadOptions {
    /// Number of blocks in CPU memory. If 0, there is no tier at all.
    pub cpu_blocks: u32,
    /// Number of blocks on disk.
    pub disk_blocks: u32,
    /// Time to load a token from CPU memory, in nanoseconds; `None` for 1/20 of the time to compute
    /// it.
    pub cpu_load_ns: Option<u32>,
    /// Time to load a token from disk, in nanoseconds; `None` for 1/5 of the time to compute it.
    pub disk_load_ns: Option<u32>,
    /// Whether events describe their blocks, as with vLLM's `self_describing_kv_events`.
    pub is_described: bool,
}

impl OffloadOptions {
    /// Returns the times to load a token from CPU memory and from disk, in nanoseconds, for an engine
    /// that computes `prefill_tokens_per_s` prompt tokens per second.
    #[must_use]
    pub fn load_ns(&self, prefill_tokens_per_s: u32) -> [u64; 2] {
        let compute_ns = 1_000_000_000 / u64::from(prefill_tokens_per_s.max(1));
        let load_ns = |set: Option<u32>, part| set.map_or(compute_ns / part, u64::from);
        [
            load_ns(self.cpu_load_ns, CPU_LOAD_PART),
            load_ns(self.disk_load_ns, DISK_LOAD_PART),
        ]
    }
}

/// Flags for the tiers below the GPU.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct OffloadArgs {
    /// Blocks of a tier in CPU memory, which also gets the computed blocks; 0: none
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=1 << 24))]
    cpu_blocks: u32,
    /// Blocks of a tier on disk, which gets what CPU memory evicts; 0: none
    #[arg(long, value_name = "N", default_value_t = 0, requires = "cpu_blocks", value_parser = clap::value_parser!(u32).range(..=1 << 24))]
    disk_blocks: u32,
    /// Nanoseconds to load a token from CPU memory [default: 1/20 of computing it]
    #[arg(long, value_name = "NS", requires = "cpu_blocks")]
    cpu_load_ns_per_token: Option<u32>,
    /// Nanoseconds to load a token from disk [default: 1/5 of computing it]
    #[arg(long, value_name = "NS", requires = "disk_blocks")]
    disk_load_ns_per_token: Option<u32>,
}

impl From<OffloadArgs> for OffloadOptions {
    fn from(args: OffloadArgs) -> Self {
        Self {
            cpu_blocks: args.cpu_blocks,
            disk_blocks: args.disk_blocks,
            cpu_load_ns: args.cpu_load_ns_per_token,
            disk_load_ns: args.disk_load_ns_per_token,
            is_described: false,
        }
    }
}

/// Numbers of a prompt's tokens that need not be computed, by where they were found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TierTokens {
    /// Tokens on the GPU.
    pub gpu: u32,
    /// Tokens that are loaded from CPU memory.
    pub cpu: u32,
    /// Tokens that are loaded from disk.
    pub disk: u32,
    /// Tokens that were fetched from another engine.
    pub peer: u32,
}

impl TierTokens {
    /// Returns the number of tokens of all tiers: what an engine reports as cached.
    #[must_use]
    pub fn cached(self) -> u32 {
        self.gpu + self.cpu + self.disk + self.peer
    }
}

/// A block in a tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OffloadedBlock {
    /// Chained hash of the block.
    pub hash: EngineHash,
    /// Hash of the block before it; `None` at the start of a prompt.
    pub parent: Option<EngineHash>,
    /// Content of the block; `None` if events do not describe it.
    pub content: Option<Arc<BlockContent>>,
}

/// A change of a tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OffloadEvent {
    /// Blocks were stored in the tier.
    Stored(OffloadTier, Vec<OffloadedBlock>),
    /// Blocks were evicted from the tier.
    Removed(OffloadTier, Vec<EngineHash>),
}

/// The tiers of an engine.
#[derive(Debug, Clone)]
pub struct OffloadTiers {
    cpu: LruBlocks,
    disk: LruBlocks,
    /// Time to load a token from CPU memory and from disk, in nanoseconds.
    load_ns: [u64; 2],
    is_described: bool,
    events: Vec<OffloadEvent>,
}

impl OffloadTiers {
    /// Creates the empty tiers of an engine that computes `prefill_tokens_per_s` prompt tokens per
    /// second.
    #[must_use]
    pub fn new(options: &OffloadOptions, prefill_tokens_per_s: u32) -> Self {
        Self {
            cpu: LruBlocks::new(options.cpu_blocks),
            disk: LruBlocks::new(options.disk_blocks),
            load_ns: options.load_ns(prefill_tokens_per_s),
            is_described: options.is_described,
            events: Vec::new(),
        }
    }

    /// Returns whether there is a tier.
    #[must_use]
    pub fn is_used(&self) -> bool {
        self.cpu.blocks_max > 0
    }

    /// Finds the cached prefix of the first `tokens` tokens of a sequence: the hit on the GPU, and
    /// the tokens by tier, each counted at its fastest one. The last token is always computed.
    #[must_use]
    pub fn find(
        &self,
        pool: &BlockPool,
        sequence: &Sequence,
        tokens: u32,
    ) -> (PrefixHit, TierTokens) {
        let hit = pool.find(sequence.hashes(), tokens);
        let block_tokens = pool.block_tokens();
        let mut found = TierTokens {
            gpu: hit.tokens(pool),
            ..TierTokens::default()
        };
        let most = (tokens.saturating_sub(1) / block_tokens) as usize;
        let begun = (found.gpu / block_tokens) as usize;
        for hash in sequence.hashes().iter().take(most).skip(begun) {
            if self.cpu.contains(*hash) {
                found.cpu += block_tokens;
            } else if self.disk.contains(*hash) {
                found.disk += block_tokens;
            } else {
                break;
            }
        }
        (hit, found)
    }

    /// Loads what was `found` of a sequence whose first `blocks` blocks are then on the GPU. Touches
    /// all blocks of the sequence, and returns the time that the load takes.
    pub fn load(&mut self, sequence: &Sequence, found: TierTokens, blocks: usize) -> Duration {
        self.cpu.touch_all(sequence.hashes());
        self.disk.touch_all(sequence.hashes());
        if found.disk > 0 {
            self.store(sequence, blocks);
        }
        let [cpu_ns, disk_ns] = self.load_ns;
        let cpu_ns = cpu_ns.saturating_mul(found.cpu.into());
        Duration::from_nanos(cpu_ns.saturating_add(disk_ns.saturating_mul(found.disk.into())))
    }

    /// Stores a sequence's first blocks up to the end of `computed`, if blocks were computed.
    /// Returns the number of blocks that were stored by now.
    pub fn offload(&mut self, sequence: &Sequence, computed: Range<usize>) -> usize {
        // A block may have all its tokens before it has all its bytes.
        let blocks = computed.end.min(sequence.hashes().len());
        if blocks > computed.start {
            self.store(sequence, blocks);
        }
        blocks.max(computed.start)
    }

    /// Stores the first `blocks` blocks of a sequence in CPU memory, where some may be already. If
    /// they are more than fit, stores the beginning.
    fn store(&mut self, sequence: &Sequence, blocks: usize) {
        let kept = blocks.min(self.cpu.blocks_max);
        let deepest_first: Vec<EngineHash> =
            sequence.hashes()[..kept].iter().rev().copied().collect();
        let is_described = self.is_described;
        let block = |index: usize| block_of(sequence, kept - 1 - index, is_described);
        let mut admitted = self.cpu.admit(&deepest_first, block);
        admitted.stored.reverse();
        self.spill(&admitted.evicted);
        self.note(OffloadTier::Cpu, &admitted);
    }

    /// Returns the changes since the last call, in order.
    pub fn take_events(&mut self) -> Vec<OffloadEvent> {
        std::mem::take(&mut self.events)
    }

    /// Returns the hashes of the blocks in a tier, in no particular order.
    pub fn hashes(&self, tier: OffloadTier) -> impl Iterator<Item = EngineHash> {
        let blocks = match tier {
            OffloadTier::Cpu => &self.cpu,
            OffloadTier::Disk => &self.disk,
        };
        blocks.entries.keys().copied()
    }

    /// Empties the tiers without an event, like a new process.
    pub fn clear(&mut self) {
        for tier in [&mut self.cpu, &mut self.disk] {
            tier.entries.clear();
            tier.touches.clear();
        }
        self.events.clear();
    }

    /// Stores on disk what CPU memory evicted.
    fn spill(&mut self, evicted: &[OffloadedBlock]) {
        let hashes: Vec<EngineHash> = evicted.iter().map(|block| block.hash).collect();
        let skipped = evicted.len().saturating_sub(self.disk.blocks_max);
        let admitted = self
            .disk
            .admit(&hashes[skipped..], |index| evicted[skipped + index].clone());
        self.note(OffloadTier::Disk, &admitted);
    }

    fn note(&mut self, tier: OffloadTier, admitted: &AdmittedBlocks) {
        if !admitted.evicted.is_empty() {
            let hashes = admitted.evicted.iter().map(|block| block.hash);
            let removed = OffloadEvent::Removed(tier, hashes.collect());
            self.events.push(removed);
        }
        if !admitted.stored.is_empty() {
            let stored = OffloadEvent::Stored(tier, admitted.stored.clone());
            self.events.push(stored);
        }
    }
}

fn block_of(sequence: &Sequence, index: usize, is_described: bool) -> OffloadedBlock {
    let content = is_described.then(|| sequence.content(index..index + 1));
    OffloadedBlock {
        hash: sequence.hashes()[index],
        parent: index.checked_sub(1).map(|parent| sequence.hashes()[parent]),
        content: content.flatten().map(Arc::new),
    }
}

/// A bounded set of blocks that evicts what was touched least recently.
#[derive(Debug, Clone)]
struct LruBlocks {
    blocks_max: usize,
    entries: HashMap<EngineHash, LruEntry>,
    /// Touches in order. All but the last one of a block are stale.
    touches: VecDeque<(u64, EngineHash)>,
    touched: u64,
}

#[derive(Debug, Clone)]
struct LruEntry {
    /// Number of the block's last touch.
    touched: u64,
    block: OffloadedBlock,
}

/// What [`LruBlocks::admit`] changed.
struct AdmittedBlocks {
    /// Blocks that were not there before.
    stored: Vec<OffloadedBlock>,
    /// Blocks that made room, least recently touched first.
    evicted: Vec<OffloadedBlock>,
}

impl LruBlocks {
    fn new(blocks_max: u32) -> Self {
        Self {
            blocks_max: blocks_max as usize,
            entries: HashMap::new(),
            touches: VecDeque::new(),
            touched: 0,
        }
    }

    fn contains(&self, hash: EngineHash) -> bool {
        self.entries.contains_key(&hash)
    }

    /// Touches those of a sequence's blocks that are here, deepest first.
    fn touch_all(&mut self, hashes: &[EngineHash]) {
        if !self.entries.is_empty() {
            for hash in hashes.iter().rev() {
                self.touch(*hash);
            }
        }
    }

    /// Touches a block. Returns whether it is here.
    fn touch(&mut self, hash: EngineHash) -> bool {
        let Some(entry) = self.entries.get_mut(&hash) else {
            return false;
        };
        self.touched += 1;
        entry.touched = self.touched;
        self.touches.push_back((self.touched, hash));
        if self.touches.len() > 2 * self.entries.len() + STALE_TOUCHES_MIN {
            let entries = &self.entries;
            self.touches
                .retain(|(touched, hash)| is_latest(entries, *hash, *touched));
        }
        true
    }

    /// Touches blocks in this order, and stores those that are not here. Of more than fit, omits the
    /// first. No block occurs twice in `hashes`.
    fn admit(
        &mut self,
        hashes: &[EngineHash],
        block: impl Fn(usize) -> OffloadedBlock,
    ) -> AdmittedBlocks {
        let from = hashes.len().saturating_sub(self.blocks_max);
        // Blocks that stay must be touched before others are evicted.
        let is_new = |hash: &&EngineHash| !self.touch(**hash);
        let new = hashes[from..].iter().filter(is_new).count();
        let mut admitted = AdmittedBlocks {
            stored: Vec::with_capacity(new),
            evicted: Vec::new(),
        };
        if new == 0 {
            return admitted;
        }
        while self.entries.len() + new > self.blocks_max {
            admitted.evicted.push(self.evict());
        }
        for (index, hash) in hashes.iter().enumerate().skip(from) {
            if !self.contains(*hash) {
                let (touched, block) = (0, block(index));
                admitted.stored.push(block.clone());
                self.entries.insert(*hash, LruEntry { touched, block });
            }
            self.touch(*hash);
        }
        admitted
    }

    /// Removes the block that was touched least recently.
    fn evict(&mut self) -> OffloadedBlock {
        loop {
            let oldest = self.touches.pop_front();
            let (touched, hash) = oldest.expect("every block was touched");
            if is_latest(&self.entries, hash, touched) {
                let entry = self.entries.remove(&hash);
                return entry.expect("the block is here").block;
            }
        }
    }
}

fn is_latest(entries: &HashMap<EngineHash, LruEntry>, hash: EngineHash, touched: u64) -> bool {
    let entry = entries.get(&hash);
    entry.is_some_and(|entry| entry.touched == touched)
}

#[cfg(test)]
#[path = "offload_tests.rs"]
mod tests;
