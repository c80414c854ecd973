//! A model of vLLM's block pool and scheduler, limited to prefix caching: reference counts, the
//! free queue, copies of one block, chunked prefill, preemption, reset. Written from the engine's
//! documented behaviour, without any code of the router.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Tokens per block.
pub(crate) const BLOCK_TOKENS: usize = 2;

/// An event that the engine publishes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    Stored {
        parent: Option<u64>,
        hashes: Vec<u64>,
        /// All tokens of the sequence up to the last of these blocks.
        prefix: Vec<u8>,
        salt: u8,
    },
    Removed(u64),
    Cleared,
}

#[derive(Debug, Clone, Default)]
struct Physical {
    hash: Option<u64>,
    references: u32,
}

/// A request in the engine.
#[derive(Debug, Clone)]
struct Running {
    id: usize,
    tokens: Vec<u8>,
    salt: u8,
    /// Number of output tokens that remain.
    output: u8,
    computed: usize,
    blocks: Vec<usize>,
    /// Number of its blocks that are registered.
    registered: usize,
}

/// One process of an engine (one rank).
#[derive(Debug, Clone)]
pub(crate) struct Engine {
    seed: u64,
    physical: Vec<Physical>,
    /// Free blocks; the front one is taken first.
    free: VecDeque<usize>,
    /// Physical blocks by hash.
    cached: BTreeMap<u64, BTreeSet<usize>>,
    waiting: VecDeque<Running>,
    running: Vec<Running>,
    events: Vec<Event>,
    /// Messages by sequence number.
    pub(crate) published: Vec<Vec<Event>>,
    /// Cached blocks after each message.
    pub(crate) history: Vec<BTreeSet<u64>>,
    /// First message that can be replayed.
    pub(crate) oldest: usize,
    pub(crate) finished: Vec<usize>,
    /// Blocks that each request found when it was first admitted.
    pub(crate) hits: BTreeMap<usize, usize>,
    /// Whether blocks without findable contents are taken first (vLLM 0.24 and later).
    pub(crate) takes_empty_first: bool,
    budget: usize,
}

impl Engine {
    pub(crate) fn new(seed: u64, blocks: usize, budget: usize) -> Self {
        Self {
            seed,
            physical: vec![Physical::default(); blocks],
            free: (0..blocks).collect(),
            cached: BTreeMap::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            events: Vec::new(),
            published: Vec::new(),
            history: Vec::new(),
            oldest: 0,
            finished: Vec::new(),
            hits: BTreeMap::new(),
            takes_empty_first: false,
            budget,
        }
    }

    pub(crate) fn submit(&mut self, id: usize, tokens: &[u8], salt: u8, output: u8) {
        self.waiting.push_back(Running {
            id,
            tokens: tokens.to_vec(),
            salt,
            output,
            computed: 0,
            blocks: Vec::new(),
            registered: 0,
        });
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Returns the engine's hashes of the full blocks of `tokens`.
    pub(crate) fn hashes(&self, tokens: &[u8], salt: u8) -> Vec<u64> {
        let mut link = xxh3_64_with_seed(&[salt], self.seed);
        let blocks = tokens.chunks_exact(BLOCK_TOKENS);
        let step = |block: &[u8]| {
            link = xxh3_64_with_seed(block, link);
            link
        };
        blocks.map(step).collect()
    }

    /// Returns the number of blocks that a lookup finds, without the last-token rule.
    pub(crate) fn lookup(&self, tokens: &[u8], salt: u8) -> usize {
        let hashes = self.hashes(tokens, salt);
        let hits = hashes.iter().take_while(|it| self.cached.contains_key(it));
        hits.count()
    }

    /// Runs one step of the scheduler: runs requests, admits what fits, publishes what happened.
    pub(crate) fn step(&mut self) {
        let mut budget = self.budget;
        let mut at = 0;
        while at < self.running.len() && budget > 0 {
            let (it, done) = (self.running[at].clone(), budget);
            let wanted = (it.tokens.len() - it.computed).min(budget);
            if self.advance(at, wanted) {
                budget = done - wanted;
                at += 1;
            } else {
                // Preempts the youngest request, possibly this one.
                let youngest = self.running.len() - 1;
                self.preempt(youngest);
                if youngest == at {
                    break;
                }
            }
        }
        while budget > 0 && self.admit(&mut budget) {}
        self.generate();
        self.publish();
    }

    /// Empties the cache and publishes `AllBlocksCleared` with the next step's events. Returns
    /// `false`, without a change, while any block is in use.
    pub(crate) fn reset(&mut self) -> bool {
        if self.physical.iter().any(|it| it.references > 0) {
            return false;
        }
        self.cached.clear();
        self.physical.iter_mut().for_each(|it| it.hash = None);
        self.events.push(Event::Cleared);
        true
    }

    fn admit(&mut self, budget: &mut usize) -> bool {
        let Some(mut request) = self.waiting.pop_front() else {
            return false;
        };
        let hashes = self.hashes(&request.tokens, request.salt);
        let most = (request.tokens.len() - 1) / BLOCK_TOKENS;
        let hits = hashes.iter().take(most);
        let hits = hits.map_while(|hash| self.cached.get(hash)?.first().copied());
        let hits: Vec<usize> = hits.collect();
        let held = hits
            .iter()
            .filter(|it| self.physical[**it].references == 0)
            .count();
        request.computed = hits.len() * BLOCK_TOKENS;
        let wanted = (request.tokens.len() - request.computed).min(*budget);
        let needed = (request.computed + wanted).div_ceil(BLOCK_TOKENS) - hits.len();
        if needed + held > self.free.len() {
            request.computed = 0;
            self.waiting.push_front(request);
            return false;
        }
        for &block in &hits {
            if self.physical[block].references == 0 {
                self.free.retain(|it| *it != block);
            }
            self.physical[block].references += 1;
        }
        self.hits.entry(request.id).or_insert(hits.len());
        request.registered = hits.len();
        request.blocks = hits;
        self.running.push(request);
        let is_run = self.advance(self.running.len() - 1, wanted);
        assert!(is_run, "there is room for it");
        *budget -= wanted;
        true
    }

    /// Computes this many more tokens of a running request; returns `false` if no block is free.
    fn advance(&mut self, at: usize, tokens: usize) -> bool {
        let computed = self.running[at].computed + tokens;
        let needed = computed.div_ceil(BLOCK_TOKENS) - self.running[at].blocks.len();
        if needed > self.free.len() {
            return false;
        }
        for _ in 0..needed {
            let block = self.free.pop_front().expect("it was counted");
            if let Some(hash) = self.physical[block].hash.take() {
                let copies = self.cached.get_mut(&hash).expect("a hash has its block");
                copies.remove(&block);
                if copies.is_empty() {
                    self.cached.remove(&hash);
                }
                self.events.push(Event::Removed(hash));
            }
            self.physical[block].references = 1;
            self.running[at].blocks.push(block);
        }
        self.running[at].computed = computed;
        self.register(at);
        true
    }

    /// Adds the full blocks of a request to the cache when they are scheduled, not when they are
    /// computed, and even if another copy exists.
    fn register(&mut self, at: usize) {
        let it = self.running[at].clone();
        let full = it.computed / BLOCK_TOKENS;
        if full <= it.registered {
            return;
        }
        let hashes = self.hashes(&it.tokens, it.salt);
        let fresh = it.blocks.iter().zip(&hashes).take(full);
        for (&block, &hash) in fresh.skip(it.registered) {
            self.physical[block].hash = Some(hash);
            self.cached.entry(hash).or_default().insert(block);
        }
        self.events.push(Event::Stored {
            parent: it.registered.checked_sub(1).map(|index| hashes[index]),
            hashes: hashes[it.registered..full].to_vec(),
            prefix: it.tokens[..full * BLOCK_TOKENS].to_vec(),
            salt: it.salt,
        });
        self.running[at].registered = full;
    }

    /// Generates a token for each computed request, or ends it.
    fn generate(&mut self) {
        let mut at = 0;
        while at < self.running.len() {
            let request = &mut self.running[at];
            if request.computed < request.tokens.len() {
                at += 1;
            } else if request.output > 0 {
                request.output -= 1;
                let token = request.tokens.last().map_or(0, |it| it.wrapping_add(1) % 3);
                request.tokens.push(token);
                at += 1;
            } else {
                let request = self.running.remove(at);
                self.finished.push(request.id);
                self.give_back(&request);
            }
        }
    }

    fn preempt(&mut self, at: usize) {
        let mut request = self.running.remove(at);
        self.give_back(&request);
        request.blocks.clear();
        (request.computed, request.registered) = (0, 0);
        self.waiting.push_front(request);
    }

    /// Frees the blocks of a request, the last one first, so that it is evicted first.
    fn give_back(&mut self, request: &Running) {
        for &block in request.blocks.iter().rev() {
            self.physical[block].references -= 1;
            let it = &self.physical[block];
            if it.references == 0 && it.hash.is_none() && self.takes_empty_first {
                self.free.push_front(block);
            } else if it.references == 0 {
                self.free.push_back(block);
            }
        }
    }

    fn publish(&mut self) {
        if !self.events.is_empty() {
            self.published.push(std::mem::take(&mut self.events));
            self.history.push(self.cached.keys().copied().collect());
        }
    }
}
