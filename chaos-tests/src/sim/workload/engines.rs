//! Engines as requests see them, with cache contents, latencies and failures.

use std::collections::BTreeMap;

use bytes::Bytes;
use state::ids::BlockHash;

use super::publisher::{PublishedMessage, PublisherRun};
use lab::rng::Rng;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::oracle::observation::EPOCH_MS;

/// Label of the engines' draws, which separates them from others under the same seed.
const RNG_LABEL: u64 = 0x656e_6769;
/// Cache capacity of an engine without KV events, in blocks.
const CAPACITY_BLOCKS: usize = 128;

/// All engines of a world, by URL.
pub struct SimEngines {
    rng: Rng,
    by_url: BTreeMap<String, SimEngine>,
    /// Messages published since the last [`SimEngines::take_published`].
    published: Vec<PublishedMessage>,
}

/// A prompt as an engine sees it.
#[derive(Debug, Clone, Copy)]
pub(super) struct EnginePrompt<'a> {
    /// The router's hashes of the prompt's blocks.
    pub(super) chain: &'a [BlockHash],
    /// The router's hashes of the prompt's token blocks, and the tokens; `None` if the engine does
    /// not publish KV events.
    pub(super) told: Option<(&'a [BlockHash], &'a [u32])>,
}

/// State of one engine.
#[derive(Debug)]
struct SimEngine {
    is_up: bool,
    /// Start of the engine's process, in Unix seconds.
    started_at_s: u64,
    /// Blocks in the engine's cache, each with the number of the request that last used it.
    cached: BTreeMap<BlockHash, u64>,
    uses: u64,
    /// Current run of the engine's publisher of KV events.
    publisher: PublisherRun,
}

/// Timing, output and cache hits with which an engine serves a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct EngineTiming {
    /// Number of leading blocks found in the cache.
    pub(super) cached_blocks: u64,
    /// Time to first token, in milliseconds.
    pub(super) first_ms: u64,
    /// Number of output tokens.
    pub(super) output: u64,
    /// Time between two tokens, in milliseconds.
    pub(super) gap_ms: u64,
    /// Number of tokens after which the connection to the engine breaks; `None` if it does not.
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

    /// Adds a prompt to the cache. Returns the number of leading blocks found there.
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
    /// Creates an empty set. Each engine is added on first use.
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

    /// Returns the start time of an engine in Unix seconds, or `None` if it is down.
    pub(super) fn look(&mut self, url: &str) -> Option<u64> {
        let engine = self.at(url);
        engine.is_up.then_some(engine.started_at_s)
    }

    /// Serves a request. Returns `None` if the engine is down or refuses it.
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

    /// Returns the publisher run of an engine, and the number of its next message; `None` if the
    /// engine is down.
    pub(super) fn publisher(&mut self, url: &str) -> Option<(u64, u64)> {
        let engine = self.at(url);
        let run = (engine.started_at_s, engine.publisher.next_seq());
        engine.is_up.then_some(run)
    }

    /// Returns the remembered messages of a run from number `seq` on; `None` if the engine is down
    /// or another run replaced it.
    pub(super) fn messages(&mut self, url: &str, run: u64, seq: u64) -> Option<Vec<(u64, Bytes)>> {
        let engine = self.at(url);
        if !engine.is_up || engine.started_at_s != run {
            return None;
        }
        let messages = engine.publisher.since(seq);
        Some(messages.map(|it| (it.seq, it.payload.clone())).collect())
    }

    /// Returns the messages published since the last call.
    pub(super) fn take_published(&mut self) -> Vec<PublishedMessage> {
        std::mem::take(&mut self.published)
    }

    /// Takes a random engine down, or brings it back with an empty cache. Returns its URL.
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

    /// Brings all engines up.
    pub(super) fn all_up(&mut self) {
        for engine in self.by_url.values_mut() {
            engine.is_up = true;
        }
    }
}
