//! Engines as requests see them: what their caches hold, how long they take, and when they fail.

use std::collections::BTreeMap;

use bytes::Bytes;
use state::ids::BlockHash;

use super::publisher::{PublishedMessage, PublisherRun};
use lab::rng::Rng;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::sim::node::EPOCH_MS;

/// What separates engines' draws from others under the same seed.
const RNG_LABEL: u64 = 0x656e_6769;
/// Blocks that a cache holds when nobody says.
const CAPACITY_BLOCKS: usize = 128;

/// All engines, by address.
pub struct SimEngines {
    rng: Rng,
    by_url: BTreeMap<String, SimEngine>,
    /// What they published since the last [`SimEngines::take_published`].
    published: Vec<PublishedMessage>,
}

/// A prompt as an engine sees it.
#[derive(Debug, Clone, Copy)]
pub(super) struct EnginePrompt<'a> {
    /// What the router calls its blocks.
    pub(super) chain: &'a [BlockHash],
    /// Of an engine that publishes: what the router calls the blocks of its tokens, and these.
    pub(super) told: Option<(&'a [BlockHash], &'a [u32])>,
}

/// One engine.
#[derive(Debug)]
struct SimEngine {
    is_up: bool,
    /// Start of its process, Unix seconds.
    started_at_s: u64,
    /// Blocks in its cache, with when each was used last.
    cached: BTreeMap<BlockHash, u64>,
    uses: u64,
    /// What it publishes, if it does.
    publisher: PublisherRun,
}

/// How an engine serves a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct EngineTiming {
    /// Leading blocks found in the cache.
    pub(super) cached_blocks: u64,
    /// Time to the first token, milliseconds.
    pub(super) first_ms: u64,
    /// Tokens it makes.
    pub(super) output: u64,
    /// Time between two of them, milliseconds.
    pub(super) gap_ms: u64,
    /// After how many tokens it breaks; `None`: it does not.
    pub(super) breaks_after: Option<u64>,
}

impl SimEngine {
    fn new(url: &str, started_at_s: u64) -> Self {
        let salt = xxh3_64_with_seed(url.as_bytes(), started_at_s);
        Self {
            is_up: true,
            started_at_s,
            cached: BTreeMap::new(),
            uses: 0,
            publisher: PublisherRun::new(salt),
        }
    }

    /// Takes a prompt in: answers how many leading blocks were there.
    fn take(&mut self, chain: &[BlockHash]) -> u64 {
        let found = chain
            .iter()
            .take_while(|block| self.cached.contains_key(block));
        let found = found.count();
        self.uses += 1;
        for block in chain {
            self.cached.insert(*block, self.uses);
        }
        while self.cached.len() > CAPACITY_BLOCKS {
            let oldest = self
                .cached
                .iter()
                .min_by_key(|(block, used)| (**used, **block));
            let Some(oldest) = oldest.map(|(block, _)| *block) else {
                break;
            };
            self.cached.remove(&oldest);
        }
        found as u64
    }
}

impl SimEngines {
    /// None yet: each is there once it is asked for.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self {
            rng: Rng::new(seed, RNG_LABEL),
            by_url: BTreeMap::new(),
            published: Vec::new(),
        }
    }

    fn at(&mut self, url: &str) -> &mut SimEngine {
        let started_at_s = EPOCH_MS / 1000;
        self.by_url
            .entry(url.to_owned())
            .or_insert_with(|| SimEngine::new(url, started_at_s))
    }

    /// Whether it answers, and since when it runs.
    pub(super) fn look(&mut self, url: &str) -> Option<u64> {
        let engine = self.at(url);
        engine.is_up.then_some(engine.started_at_s)
    }

    /// A request reaches it; `None`: it does not answer.
    pub(super) fn serve(&mut self, url: &str, prompt: EnginePrompt<'_>) -> Option<EngineTiming> {
        let refuses = self.rng.below(40) == 0;
        let output = 1 + self.rng.below(80);
        let breaks_after = (self.rng.below(20) == 0).then(|| self.rng.below(output));
        let (first_ms, gap_ms) = (5 + self.rng.below(60), 1 + self.rng.below(8));
        let is_cleared = prompt.told.is_some() && self.rng.below(150) == 0;
        let engine = self.at(url);
        if refuses || !engine.is_up {
            return None;
        }
        let mut published = Vec::new();
        if is_cleared {
            published.push(engine.publisher.clear());
        }
        let cached_blocks = match prompt.told {
            None => engine.take(prompt.chain),
            Some((chain, ids)) => {
                let (found, message) = engine.publisher.take(chain, ids);
                published.extend(message);
                found
            }
        };
        self.published.extend(published);
        Some(EngineTiming {
            cached_blocks,
            first_ms,
            output,
            gap_ms,
            breaks_after,
        })
    }

    /// The run of an engine that answers, and the number of its next message.
    pub(super) fn publisher(&mut self, url: &str) -> Option<(u64, u64)> {
        let engine = self.at(url);
        let run = (engine.started_at_s, engine.publisher.next_seq());
        engine.is_up.then_some(run)
    }

    /// The messages of a run from `seq` on, as far as they are remembered; `None`: the engine is
    /// gone, or another run of it is there.
    pub(super) fn messages(&mut self, url: &str, run: u64, seq: u64) -> Option<Vec<(u64, Bytes)>> {
        let engine = self.at(url);
        if !engine.is_up || engine.started_at_s != run {
            return None;
        }
        let messages = engine.publisher.since(seq);
        Some(messages.map(|it| (it.seq, it.payload.clone())).collect())
    }

    /// What was published since this was last asked.
    pub(super) fn take_published(&mut self) -> Vec<PublishedMessage> {
        std::mem::take(&mut self.published)
    }

    /// An engine goes down, or comes back with an empty cache; answers which.
    pub(super) fn turn(&mut self, now_ms: u64) -> Option<String> {
        let urls: Vec<String> = self.by_url.keys().cloned().collect();
        if urls.is_empty() {
            return None;
        }
        let url = urls[self.rng.below(urls.len() as u64) as usize].clone();
        let engine = self.at(&url);
        if engine.is_up {
            engine.is_up = false;
        } else {
            let started_at_s = (EPOCH_MS + now_ms) / 1000;
            *engine = SimEngine::new(&url, started_at_s.max(engine.started_at_s + 1));
        }
        Some(url)
    }

    /// All of them answer.
    pub(super) fn all_up(&mut self) {
        for engine in self.by_url.values_mut() {
            engine.is_up = true;
        }
    }
}
