//! The scheduler of an emulated vLLM v1 engine and the time its steps take.
//!
//! Source: vLLM `v1/core/sched/scheduler.py`. Each step first serves the running requests (one
//! token for each that decodes, a further piece of each prompt that is not through), then lets in
//! waiting ones while the token budget, the sequence limit and the free blocks last. A running
//! request that finds no block preempts the one that came last: its blocks go, its prompt is
//! computed anew. Blocks are registered in the cache when they are *scheduled* full.
//!
//! A step takes `prefill tokens / rate` plus, when anything decodes, `decode * (1 + batch / 64)`:
//! prefill is bound by arithmetic and shared by the batch; decoding is bound by reading the
//! weights, with a part that grows with the batch. No clock is read here: the driver waits the time
//! out.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::cache::{BlockEvent, BlockPool, HeldBlocks};
use super::lora::{LoraOptions, LoraSlots};
use super::text::{BlockContent, Sequence};

/// Requests that double the time of a decode step.
const DECODE_BATCH_DOUBLING: u64 = 64;

/// Names a request within its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Sizes and speeds of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineShape {
    /// KV blocks, the null block included.
    pub num_gpu_blocks: u32,
    /// Tokens per block.
    pub block_size: u32,
    /// Most requests running at once.
    pub max_num_seqs: u32,
    /// Most tokens computed in one step.
    pub max_num_batched_tokens: u32,
    /// Prompt tokens computed per second, all requests together.
    pub prefill_tokens_per_s: u32,
    /// Time of a decode step for one request.
    pub decode: Duration,
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// The model had no more to say.
    Stop,
    /// The client's limit.
    Length,
}

/// What a request has got so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestProgress {
    /// The request.
    pub id: RequestId,
    /// Tokens made.
    pub output_tokens: u32,
    /// Prompt tokens found in the cache.
    pub cached_tokens: u32,
    /// Set once, with the last token.
    pub finish: Option<Finish>,
}

/// Counters and gauges, as `/metrics` shows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EngineStats {
    /// Requests in the batch.
    pub running: u32,
    /// Requests in the queue.
    pub waiting: u32,
    /// Blocks that requests hold.
    pub used_blocks: u32,
    /// Blocks that requests can hold.
    pub usable_blocks: u32,
    /// Tokens looked up in the cache.
    pub cache_queries: u64,
    /// Of these, found.
    pub cache_hits: u64,
    /// Requests whose blocks were taken from them.
    pub preemptions: u64,
    /// Prompt tokens of admitted requests.
    pub prompt_tokens: u64,
    /// Tokens made.
    pub generation_tokens: u64,
    /// Ended with [`Finish::Stop`].
    pub finished_stop: u64,
    /// Ended with [`Finish::Length`].
    pub finished_length: u64,
    /// Left by their clients.
    pub aborted: u64,
    /// Blocks registered, copies included.
    pub blocks_stored: u64,
    /// Blocks evicted, copies included.
    pub blocks_removed: u64,
    /// LoRA adapters loaded.
    pub adapter_loads: u64,
}

/// A request to be computed.
#[derive(Debug, Clone)]
pub struct ComputeJob {
    /// Its prompt; output is appended to it.
    pub sequence: Sequence,
    /// Tokens to make; none: only the prompt is computed, as for an embedding.
    pub max_tokens: u32,
    /// How it ends when they are made.
    pub ending: Finish,
    /// LoRA adapter; `None`: the base model.
    pub adapter: Option<Arc<str>>,
    /// Whether the blocks of its prompt were fetched from another engine.
    pub is_fetched: bool,
}

#[derive(Debug)]
struct ScheduledRequest {
    job: ComputeJob,
    held: HeldBlocks,
    computed: u32,
    /// `None` until first let in.
    cached: Option<u32>,
}

/// A piece of work in the present step.
#[derive(Debug, Clone, Copy)]
struct ScheduledWork {
    id: RequestId,
    tokens: u32,
}

/// The engine's queue, batch and cache.
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
    /// Time that the present step loads adapters for.
    loading: Duration,
}

impl Scheduler {
    /// An idle engine.
    ///
    /// # Panics
    /// When a size in `shape` is zero, or there are fewer than two blocks.
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
            loading: Duration::ZERO,
        }
    }

    /// The same with room for adapters.
    #[must_use]
    pub fn with_lora(mut self, options: &LoraOptions) -> Self {
        self.lora = LoraSlots::new(options.max_loras, options.load);
        self
    }

    /// Most tokens a request can have, prompt and output together.
    #[must_use]
    pub fn tokens_max(&self) -> u32 {
        self.pool
            .usable_blocks()
            .saturating_mul(self.pool.block_tokens())
    }

    /// Queues a request.
    ///
    /// # Panics
    /// When it could never fit: the edge refuses those.
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
            cached: None,
        };
        self.requests.insert(id, request);
        self.waiting.push_back(id);
        id
    }

    /// Drops a request at once and frees its blocks. Unknown ids are requests that have ended.
    pub fn abort(&mut self, id: RequestId) {
        if let Some(mut request) = self.requests.remove(&id) {
            self.pool.release(&mut request.held);
            self.running.retain(|running| *running != id);
            self.waiting.retain(|waiting| *waiting != id);
            self.stats.aborted += 1;
        }
    }

    /// Plans a step and answers how long it takes; `None` when there is nothing to do.
    ///
    /// # Panics
    /// When the step before was not finished.
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

    /// Ends the step: what each request in it has got.
    pub fn finish_step(&mut self) -> Vec<RequestProgress> {
        let step = std::mem::take(&mut self.step);
        let mut progress = Vec::with_capacity(step.len());
        for ScheduledWork { id, tokens } in step {
            let Some(request) = self.requests.get_mut(&id) else {
                continue; // Aborted while the step ran.
            };
            request.computed += tokens;
            if request.computed < request.job.sequence.tokens() {
                continue; // A prompt that is not through yet.
            }
            if request.job.max_tokens > 0 {
                request.job.sequence.push_token();
                self.stats.generation_tokens += 1;
            }
            let output_tokens = request.job.sequence.output_tokens();
            let is_done = output_tokens >= request.job.max_tokens;
            progress.push(RequestProgress {
                id,
                output_tokens,
                cached_tokens: request.cached.unwrap_or(0),
                finish: is_done.then_some(request.job.ending),
            });
            if is_done {
                self.retire(id);
            }
        }
        progress
    }

    /// Counters and gauges as they stand.
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

    /// What entered and left the cache since the last call, in order.
    pub fn take_events(&mut self) -> Vec<BlockEvent> {
        std::mem::take(&mut self.events)
    }

    /// What stands in the blocks of the [`BlockEvent::Stored`]s taken at the same time, in their
    /// order. Nothing of sequences that do not remember it.
    pub fn take_contents(&mut self) -> Vec<BlockContent> {
        std::mem::take(&mut self.contents)
    }

    /// Forgets the cache, unless a request holds a block of it. The event comes with the next step.
    pub fn reset_cache(&mut self) -> bool {
        self.pool.reset()
    }

    /// Forgets what has not been told of the cache.
    pub fn forget_events(&mut self) {
        drop(self.pool.take_events());
        self.events.clear();
        self.contents.clear();
    }

    /// Whether no request is under way.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    /// Distinct hashes in the cache.
    #[must_use]
    pub fn cached_hashes(&self) -> usize {
        self.pool.cached_hashes()
    }

    /// Adapters of the requests that run, and of those that wait, once per request.
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

    /// Leading blocks of a sequence that stand in the cache.
    #[must_use]
    pub fn cached_prefix(&self, sequence: &Sequence) -> u32 {
        let hit = self.pool.find(sequence.hashes(), u32::MAX);
        hit.tokens(&self.pool) / self.pool.block_tokens()
    }

    /// Schedules the requests that run; answers whether one of them was preempted.
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
        // Those before it wait for a place for their adapters, and let others pass.
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
            let hit = self.pool.find(request.job.sequence.hashes(), tokens);
            let hit_tokens = hit.tokens(&self.pool);
            // The last token is computed in any case.
            let ready = match request.job.is_fetched {
                true => tokens.saturating_sub(1).max(hit_tokens),
                false => hit_tokens,
            };
            let new = (tokens - ready).min(*budget);
            if !self.pool.allocate(&mut request.held, &hit, ready + new) {
                return;
            }
            request.computed = ready;
            register(&mut self.pool, request, ready + new, &mut self.contents);
            if request.cached.is_none() {
                request.cached = Some(ready);
                self.stats.cache_queries += u64::from(tokens);
                self.stats.cache_hits += u64::from(hit_tokens);
                self.stats.prompt_tokens += u64::from(tokens);
            }
            *budget -= new;
            self.waiting.remove(at);
            self.running.push(id);
            self.step.push(ScheduledWork { id, tokens: new });
        }
    }

    /// Brings the request's adapter into memory; answers how long that takes, `None` when there is
    /// no place for it.
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

    /// Schedules `tokens` more of a running request, if the blocks for it can be had.
    fn extend(&mut self, id: RequestId, tokens: u32) -> bool {
        let request = self
            .requests
            .get_mut(&id)
            .expect("running requests are known");
        let target = request.computed + tokens;
        if !self.pool.allocate(
            &mut request.held,
            &super::cache::PrefixHit::default(),
            target,
        ) {
            return false;
        }
        register(&mut self.pool, request, target, &mut self.contents);
        self.step.push(ScheduledWork { id, tokens });
        true
    }

    /// Sends the request that came last back to the head of the queue.
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

/// Registers what `tokens` scheduled tokens fill, and notes what stands in it.
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
