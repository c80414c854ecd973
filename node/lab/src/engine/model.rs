//! The scheduler of an emulated vLLM v1 engine, and the duration of its steps.
//!
//! Source: vLLM `v1/core/sched/scheduler.py`. Each step first schedules the running requests: one
//! token for each decode, a further chunk of each unfinished prompt. A running request that finds
//! no block preempts the latest one, which loses its blocks and is recomputed. A step without
//! preemption then admits waiting requests while the token budget, the sequence limit and the free
//! blocks last. Blocks are registered in the cache when they are *scheduled* full.
//!
//! A step takes `prefill tokens / rate` plus, if anything decodes, `decode * (1 + batch / 64)`:
//! prefill is compute-bound and shared by the batch; decoding is bound by reading the weights, with
//! a part that grows with the batch. Loading LoRA adapters takes extra time, and so does loading
//! blocks from tiers below the GPU ([`super::offload`]) for the prompts that a step admits. The
//! scheduler reads no clock: the driver waits for the duration.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::cache::{BlockEvent, BlockPool, HeldBlocks, PrefixHit};
use super::lora::{LoraOptions, LoraSlots};
use super::offload::{OffloadEvent, OffloadOptions, OffloadTiers, TierTokens};
use super::text::{BlockContent, Sequence};

/// Batch size that doubles the duration of a decode step.
pub(crate) const DECODE_BATCH_DOUBLING: u64 = 64;

/// Identifies a request within its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Sizes and speeds of an emulated engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineShape {
    /// Number of KV blocks, including the null block.
    pub num_gpu_blocks: u32,
    /// Number of tokens per block.
    pub block_size: u32,
    /// Maximum number of running requests.
    pub max_num_seqs: u32,
    /// Maximum number of tokens scheduled in one step.
    pub max_num_batched_tokens: u32,
    /// Number of prompt tokens computed per second, over all requests.
    pub prefill_tokens_per_s: u32,
    /// Fixed part of the duration of a decode step; each request that decodes adds 1/64 of it.
    pub decode: Duration,
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// The model ended its output by itself.
    Stop,
    /// The output reached the client's token limit.
    Length,
}

/// Progress of a request at the end of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestProgress {
    /// Id of the request.
    pub id: RequestId,
    /// Number of output tokens so far.
    pub output_tokens: u32,
    /// Number of prompt tokens found in the cache or fetched from another engine.
    pub cached_tokens: u32,
    /// How the request ended; set only in its last progress.
    pub finish: Option<Finish>,
}

/// Counters and gauges of an engine, as `/metrics` shows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EngineStats {
    /// Number of requests in the batch.
    pub running: u32,
    /// Number of requests in the queue.
    pub waiting: u32,
    /// Number of blocks that requests hold.
    pub used_blocks: u32,
    /// Number of blocks that requests can hold.
    pub usable_blocks: u32,
    /// Number of prompt tokens looked up in the cache.
    pub cache_queries: u64,
    /// Number of prompt tokens found in the cache.
    pub cache_hits: u64,
    /// Number of preemptions.
    pub preemptions: u64,
    /// Number of prompt tokens of admitted requests.
    pub prompt_tokens: u64,
    /// Number of output tokens.
    pub generation_tokens: u64,
    /// Number of requests that ended with [`Finish::Stop`].
    pub finished_stop: u64,
    /// Number of requests that ended with [`Finish::Length`].
    pub finished_length: u64,
    /// Number of requests that were aborted because their clients disconnected.
    pub aborted: u64,
    /// Number of blocks registered in the cache, including copies.
    pub blocks_stored: u64,
    /// Number of blocks evicted, including copies.
    pub blocks_removed: u64,
    /// Number of times that a LoRA adapter was loaded.
    pub adapter_loads: u64,
}

/// Work of a request that the scheduler computes.
#[derive(Debug, Clone)]
pub struct ComputeJob {
    /// Sequence of the prompt, to which the output is appended.
    pub sequence: Sequence,
    /// Number of output tokens. If zero, only the prompt is computed, as for an embedding.
    pub max_tokens: u32,
    /// How the request ends after `max_tokens` output tokens.
    pub ending: Finish,
    /// LoRA adapter; `None` for the base model.
    pub adapter: Option<Arc<str>>,
    /// Whether the blocks of the prompt were fetched from another engine.
    pub is_fetched: bool,
}

#[derive(Debug)]
struct ScheduledRequest {
    job: ComputeJob,
    held: HeldBlocks,
    computed: u32,
    /// Where prompt tokens were found; `None` until the request is first admitted.
    found: Option<TierTokens>,
    /// Number of leading blocks that the tiers below the GPU have seen.
    offloaded: usize,
}

/// Tokens of one request that the current step computes.
#[derive(Debug, Clone, Copy)]
struct ScheduledWork {
    id: RequestId,
    tokens: u32,
}

/// Scheduler of an engine: its queue, batch and cache.
#[derive(Debug)]
pub struct Scheduler {
    shape: EngineShape,
    pool: BlockPool,
    requests: HashMap<RequestId, ScheduledRequest>,
    running: Vec<RequestId>,
    waiting: VecDeque<RequestId>,
    step: Vec<ScheduledWork>,
    next_id: u64,
    stats: EngineStats,
    events: Vec<BlockEvent>,
    contents: Vec<BlockContent>,
    lora: LoraSlots,
    tiers: OffloadTiers,
    /// Where the prompts of the last step's progress were found.
    found: Vec<TierTokens>,
    /// Time that the current step spends loading adapters and blocks.
    loading: Duration,
}

impl Scheduler {
    /// Creates the scheduler of an idle engine with an empty cache.
    ///
    /// # Panics
    /// If a size in `shape` is zero, or it has fewer than two blocks.
    #[must_use]
    pub fn new(shape: EngineShape) -> Self {
        assert!(
            shape.max_num_seqs > 0
                && shape.max_num_batched_tokens > 0
                && shape.prefill_tokens_per_s > 0,
            "an engine that can do nothing: {shape:?}"
        );
        Self {
            shape,
            pool: BlockPool::new(shape.num_gpu_blocks, shape.block_size),
            requests: HashMap::new(),
            running: Vec::new(),
            waiting: VecDeque::new(),
            step: Vec::new(),
            next_id: 0,
            stats: EngineStats::default(),
            events: Vec::new(),
            contents: Vec::new(),
            lora: LoraSlots::new(0, Duration::ZERO),
            tiers: OffloadTiers::new(&OffloadOptions::default(), shape.prefill_tokens_per_s),
            found: Vec::new(),
            loading: Duration::ZERO,
        }
    }

    /// Sets the number of adapter slots and the time to load an adapter.
    #[must_use]
    pub fn with_lora(mut self, options: &LoraOptions) -> Self {
        self.lora = LoraSlots::new(options.max_loras, options.load);
        self
    }

    /// Sets the tiers below the GPU.
    #[must_use]
    pub fn with_offload(mut self, options: &OffloadOptions) -> Self {
        self.tiers = OffloadTiers::new(options, self.shape.prefill_tokens_per_s);
        self
    }

    /// Returns the maximum number of tokens of a request, prompt and output together.
    #[must_use]
    pub fn tokens_max(&self) -> u32 {
        self.pool
            .usable_blocks()
            .saturating_mul(self.pool.block_tokens())
    }

    /// Queues a request and returns its id.
    ///
    /// # Panics
    /// If the request exceeds [`tokens_max`](Self::tokens_max); the HTTP API rejects those.
    pub fn submit(&mut self, job: ComputeJob) -> RequestId {
        let tokens = job.sequence.tokens().saturating_add(job.max_tokens);
        assert!(
            tokens <= self.tokens_max(),
            "request of {tokens} tokens, {} to make, for {} at most",
            job.max_tokens,
            self.tokens_max()
        );
        let id = RequestId(self.next_id);
        self.next_id += 1;
        let request = ScheduledRequest {
            job,
            held: HeldBlocks::default(),
            computed: 0,
            found: None,
            offloaded: 0,
        };
        self.requests.insert(id, request);
        self.waiting.push_back(id);
        id
    }

    /// Drops a request at once and frees its blocks. Ignores the id of a request that has ended.
    pub fn abort(&mut self, id: RequestId) {
        if let Some(mut request) = self.requests.remove(&id) {
            self.pool.release(&mut request.held);
            self.running.retain(|running| *running != id);
            self.waiting.retain(|waiting| *waiting != id);
            self.stats.aborted += 1;
        }
    }

    /// Plans a step and returns its duration; `None` if there is nothing to compute.
    ///
    /// # Panics
    /// If the previous step was not finished.
    pub fn begin_step(&mut self) -> Option<Duration> {
        assert!(
            self.step.is_empty(),
            "step of {} begun twice",
            self.step.len()
        );
        let mut budget = self.shape.max_num_batched_tokens;
        self.loading = Duration::ZERO;
        let preempted = self.schedule_running(&mut budget);
        if !preempted {
            self.admit_waiting(&mut budget);
        }
        self.note_events();
        (!self.step.is_empty()).then(|| self.step_time())
    }

    /// Ends the step. Returns the progress of those of its requests whose prompts are computed.
    pub fn finish_step(&mut self) -> Vec<RequestProgress> {
        let step = std::mem::take(&mut self.step);
        let mut progress = Vec::with_capacity(step.len());
        self.found.clear();
        for ScheduledWork { id, tokens } in step {
            let Some(request) = self.requests.get_mut(&id) else {
                continue; // Aborted while the step ran.
            };
            request.computed += tokens;
            let blocks = (request.computed / self.shape.block_size) as usize;
            request.offloaded = self
                .tiers
                .offload(&request.job.sequence, request.offloaded..blocks);
            if request.computed < request.job.sequence.tokens() {
                continue; // A prompt that is not through yet.
            }
            if request.job.max_tokens > 0 {
                request.job.sequence.push_token();
                self.stats.generation_tokens += 1;
            }
            let output_tokens = request.job.sequence.output_tokens();
            let is_done = output_tokens >= request.job.max_tokens;
            let found = request.found.unwrap_or_default();
            self.found.push(found);
            progress.push(RequestProgress {
                id,
                output_tokens,
                cached_tokens: found.cached(),
                finish: is_done.then_some(request.job.ending),
            });
            if is_done {
                self.retire(id);
            }
        }
        progress
    }

    /// Returns where the prompts of the last step's progress were found, in its order.
    #[must_use]
    pub fn found(&self) -> &[TierTokens] {
        &self.found
    }

    /// Returns the current counters and gauges.
    #[must_use]
    pub fn stats(&self) -> EngineStats {
        let usable_blocks = self.pool.usable_blocks();
        EngineStats {
            running: u32::try_from(self.running.len()).unwrap_or(u32::MAX),
            waiting: u32::try_from(self.waiting.len()).unwrap_or(u32::MAX),
            used_blocks: usable_blocks - self.pool.free_blocks(),
            usable_blocks,
            ..self.stats
        }
    }

    /// Returns the changes of the cache since the last call, in order.
    pub fn take_events(&mut self) -> Vec<BlockEvent> {
        std::mem::take(&mut self.events)
    }

    /// Returns the contents of the [`BlockEvent::Stored`]s of [`take_events`](Self::take_events),
    /// in the same order. Omits sequences that do not remember their contents.
    pub fn take_contents(&mut self) -> Vec<BlockContent> {
        std::mem::take(&mut self.contents)
    }

    /// Returns the changes of the tiers below the GPU since the last call, in order.
    pub fn take_offload_events(&mut self) -> Vec<OffloadEvent> {
        self.tiers.take_events()
    }

    /// Returns the tiers below the GPU.
    #[must_use]
    pub fn tiers(&self) -> &OffloadTiers {
        &self.tiers
    }

    /// Resets the cache of the GPU; the next step records the event. Returns `false` and does nothing while a
    /// request holds a block.
    pub fn reset_cache(&mut self) -> bool {
        self.pool.reset()
    }

    /// Drops the recorded changes of the cache, and empties the tiers below the GPU.
    pub fn forget_events(&mut self) {
        self.tiers.clear();
        drop(self.pool.take_events());
        self.events.clear();
        self.contents.clear();
    }

    /// Returns whether no request is queued or running.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    /// Returns the number of tokens of this sequence's prompt that a request would find cached now.
    #[must_use]
    pub fn cached_tokens(&self, sequence: &Sequence) -> u32 {
        self.found_tokens(sequence).cached()
    }

    /// Returns where a request would find the tokens of this sequence's prompt now.
    #[must_use]
    pub fn found_tokens(&self, sequence: &Sequence) -> TierTokens {
        let tokens = sequence.prompt_tokens();
        self.tiers.find(&self.pool, sequence, tokens).1
    }

    /// Returns the number of tokens that are left to compute of all prompts, as the cache is now.
    #[must_use]
    pub fn prefill_left(&self) -> u64 {
        let left = |request: &ScheduledRequest| {
            let tokens = request.job.sequence.tokens();
            let ready = match request.found {
                None => self.cached_tokens(&request.job.sequence),
                Some(_) => request.computed,
            };
            u64::from(tokens.saturating_sub(ready))
        };
        self.requests.values().map(left).sum()
    }

    /// Returns the number of distinct hashes of cached blocks.
    #[must_use]
    pub fn cached_hashes(&self) -> usize {
        self.pool.cached_hashes()
    }

    /// Returns the adapters of running requests and of waiting requests, once per request.
    pub(super) fn adapters(
        &self,
    ) -> (
        impl Iterator<Item = &Arc<str>> + Clone,
        impl Iterator<Item = &Arc<str>>,
    ) {
        let adapter = |id: &RequestId| self.requests.get(id)?.job.adapter.as_ref();
        let running = self.running.iter().filter_map(adapter);
        (running, self.waiting.iter().filter_map(adapter))
    }

    /// Returns the number of leading blocks of a sequence that are cached.
    #[must_use]
    pub fn cached_prefix(&self, sequence: &Sequence) -> u32 {
        let hit = self.pool.find(sequence.hashes(), u32::MAX);
        hit.tokens(&self.pool) / self.pool.block_tokens()
    }

    /// Schedules the running requests. Returns whether one of them was preempted.
    fn schedule_running(&mut self, budget: &mut u32) -> bool {
        let mut preempted = false;
        let mut index = 0;
        while index < self.running.len() && *budget > 0 {
            let id = self.running[index];
            let tokens = {
                let request = &self.requests[&id];
                (request.job.sequence.tokens() - request.computed).min(*budget)
            };
            if self.extend(id, tokens) {
                *budget -= tokens;
                index += 1;
            } else {
                preempted = true;
                self.preempt_last();
            }
        }
        preempted
    }

    fn admit_waiting(&mut self, budget: &mut u32) {
        // Requests before `at` wait for a slot for their adapters, and let later ones pass.
        let mut at = 0;
        while *budget > 0 && self.running.len() < self.shape.max_num_seqs as usize {
            let Some(&id) = self.waiting.get(at) else {
                return;
            };
            let Some(loading) = self.load_adapter(id) else {
                at += 1;
                continue;
            };
            self.loading += loading;
            let request = self
                .requests
                .get_mut(&id)
                .expect("queued requests are known");
            let tokens = request.job.sequence.tokens();
            let sequence = &request.job.sequence;
            let (hit, mut found) = self.tiers.find(&self.pool, sequence, tokens);
            if request.job.is_fetched {
                // The last token is always computed.
                let fetched = tokens.saturating_sub(1).saturating_sub(found.gpu);
                (found.cpu, found.disk, found.peer) = (0, 0, fetched);
            }
            let ready = found.cached();
            let new = (tokens - ready).min(*budget);
            if !self.pool.allocate(&mut request.held, &hit, ready + new) {
                return;
            }
            request.computed = ready;
            request.offloaded = ((ready - found.peer) / self.shape.block_size) as usize;
            let (sequence, blocks) = (&request.job.sequence, request.offloaded);
            self.loading += self.tiers.load(sequence, found, blocks);
            register(&mut self.pool, request, ready + new, &mut self.contents);
            if request.found.is_none() {
                request.found = Some(found);
                self.stats.cache_queries += u64::from(tokens);
                self.stats.cache_hits += u64::from(found.gpu);
                self.stats.prompt_tokens += u64::from(tokens);
            }
            *budget -= new;
            self.waiting.remove(at);
            self.running.push(id);
            self.step.push(ScheduledWork { id, tokens: new });
        }
    }

    /// Loads the request's adapter if it is not in memory. Returns the time that takes, or `None`
    /// if no slot is free.
    fn load_adapter(&mut self, id: RequestId) -> Option<Duration> {
        let (requests, running) = (&self.requests, &self.running);
        let adapter = |id: &RequestId| requests.get(id)?.job.adapter.as_ref();
        let Some(wanted) = adapter(&id) else {
            return Some(Duration::ZERO);
        };
        let loading = self.lora.admit(wanted, &running.iter().filter_map(adapter));
        let is_load = loading.is_some_and(|loading| !loading.is_zero());
        self.stats.adapter_loads += u64::from(is_load);
        loading
    }

    /// Schedules `tokens` more tokens of a running request. Returns `false` and does nothing if too
    /// few blocks are free.
    fn extend(&mut self, id: RequestId, tokens: u32) -> bool {
        let request = self
            .requests
            .get_mut(&id)
            .expect("running requests are known");
        let target = request.computed + tokens;
        let hit = PrefixHit::default();
        if !self.pool.allocate(&mut request.held, &hit, target) {
            return false;
        }
        register(&mut self.pool, request, target, &mut self.contents);
        self.step.push(ScheduledWork { id, tokens });
        true
    }

    /// Preempts the latest running request: frees its blocks and puts it at the head of the queue.
    fn preempt_last(&mut self) {
        let id = self
            .running
            .pop()
            .expect("the one that found no block runs");
        let request = self
            .requests
            .get_mut(&id)
            .expect("running requests are known");
        self.pool.release(&mut request.held);
        request.computed = 0;
        request.job.is_fetched = false;
        self.waiting.push_front(id);
        self.stats.preemptions += 1;
    }

    fn retire(&mut self, id: RequestId) {
        let Some(mut request) = self.requests.remove(&id) else {
            return;
        };
        self.pool.release(&mut request.held);
        self.running.retain(|running| *running != id);
        match request.job.ending {
            Finish::Stop => self.stats.finished_stop += 1,
            Finish::Length => self.stats.finished_length += 1,
        }
    }

    fn note_events(&mut self) {
        for event in self.pool.take_events() {
            match &event {
                BlockEvent::Stored { hashes, .. } => {
                    self.stats.blocks_stored += hashes.len() as u64;
                }
                BlockEvent::Removed { .. } => self.stats.blocks_removed += 1,
                BlockEvent::Cleared => {}
            }
            self.events.push(event);
        }
    }

    fn step_time(&self) -> Duration {
        let (mut prefill, mut decodes) = (0_u64, 0_u64);
        for ScheduledWork { id, tokens } in &self.step {
            let sequence = &self.requests[id].job.sequence;
            if sequence.output_tokens() > 0 && *tokens == 1 {
                decodes += 1;
            } else {
                prefill += u64::from(*tokens);
            }
        }
        let rate = u64::from(self.shape.prefill_tokens_per_s);
        let prefill = Duration::from_nanos(prefill.saturating_mul(1_000_000_000) / rate);
        let prefill = prefill + self.loading;
        if decodes == 0 {
            return prefill;
        }
        let decode_ns = u64::try_from(self.shape.decode.as_nanos()).unwrap_or(u64::MAX);
        let shared = decode_ns.saturating_mul(decodes) / DECODE_BATCH_DOUBLING;
        prefill + Duration::from_nanos(decode_ns.saturating_add(shared))
    }
}

/// Registers the blocks of `request` that `tokens` scheduled tokens fill. Appends their contents to
/// `contents`, if the sequence remembers them.
fn register(
    pool: &mut BlockPool,
    request: &mut ScheduledRequest,
    tokens: u32,
    contents: &mut Vec<BlockContent>,
) {
    let sequence = &request.job.sequence;
    let new = pool.register(&mut request.held, sequence.hashes(), tokens);
    contents.extend(new.and_then(|blocks| sequence.content(blocks)));
}

#[cfg(test)]
#[path = "model_tests.rs"]
mod tests;
