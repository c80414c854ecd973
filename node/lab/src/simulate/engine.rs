//! A modelled engine: vLLM's scheduler and block pool with modelled time, or a server with static
//! batching.
//!
//! The first is the engine of `quorate engine` ([`crate::engine::model`]), driven by events instead
//! of a clock: chunked prefill, the sequence limit, the free queue of blocks and preemption are the
//! same code. The second is the service-time model of multi-bin batching: requests that start
//! together end together.

use std::collections::VecDeque;

use super::events::Micros;
use super::plan::{BatchTimes, EngineModel, micros};
use super::workload::SimPrompt;
use crate::engine::cache::BlockEvent;
use crate::engine::model::{ComputeJob, Finish, RequestId, Scheduler};
use crate::engine::offload::{OffloadEvent, OffloadOptions, TierTokens};

/// Progress of a request at the end of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServedStep {
    /// Number of the request, as submitted.
    pub request: usize,
    /// Number of output tokens so far.
    pub output_tokens: u32,
    /// Number of prompt tokens found in the cache.
    pub cached_tokens: u32,
    /// These tokens by tier.
    pub found: TierTokens,
    /// Whether the request has ended with this step.
    pub is_done: bool,
}

/// Progress of a request, as reported by an engine.
#[derive(Debug, Clone, Copy)]
pub struct EngineUsage {
    /// Simulated time of the report.
    pub at: Micros,
    /// Number of output tokens so far.
    pub output: u32,
    /// Number of prompt tokens found in the cache.
    pub cached: u32,
}

/// Figures of an engine that probes read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProbedFigures {
    /// Number of requests in the batch.
    pub running: u32,
    /// Number of requests in the engine's own queue.
    pub waiting: u32,
    /// Share of the KV cache in use, in thousandths.
    pub kv_usage_permille: u32,
    /// Total number of preemptions.
    pub preemptions: u64,
}

/// A modelled engine of the simulation.
#[derive(Debug)]
pub struct SimEngine {
    model: EngineTiming,
    is_busy: bool,
}

#[derive(Debug)]
enum EngineTiming {
    Continuous {
        scheduler: Box<Scheduler>,
        /// Numbers of the requests, indexed by the engine's own id, which counts from 0.
        names: Vec<usize>,
        /// Numbers and engine ids of the requests in flight, ascending by number.
        ids: Vec<(usize, RequestId)>,
    },
    Static {
        times: BatchTimes,
        waiting: VecDeque<(usize, u32)>,
        batch: Vec<(usize, u32)>,
    },
}

impl SimEngine {
    /// Creates an idle engine with an empty cache. With static batching, it has no cache at all.
    #[must_use]
    pub fn new(model: &EngineModel, offload: &OffloadOptions) -> Self {
        let model = match model {
            EngineModel::Continuous(shape) => EngineTiming::Continuous {
                scheduler: Box::new(Scheduler::new(*shape).with_offload(offload)),
                names: Vec::new(),
                ids: Vec::new(),
            },
            EngineModel::Static(times) => EngineTiming::Static {
                times: *times,
                waiting: VecDeque::new(),
                batch: Vec::new(),
            },
        };
        Self {
            model,
            is_busy: false,
        }
    }

    /// Submits a request with the number `request`. The caller must reject one that can never fit
    /// ([`SimEngine::fits`]).
    pub fn submit(&mut self, request: usize, prompt: &SimPrompt, output_tokens: u32) {
        self.begin(request, prompt, output_tokens, false);
    }

    /// Submits request number `request`, whose prompt's blocks were fetched from another engine.
    pub fn submit_fetched(&mut self, request: usize, prompt: &SimPrompt, output_tokens: u32) {
        self.begin(request, prompt, output_tokens, true);
    }

    fn begin(&mut self, request: usize, prompt: &SimPrompt, output_tokens: u32, is_fetched: bool) {
        match &mut self.model {
            EngineTiming::Continuous {
                scheduler,
                names,
                ids,
            } => {
                let id = scheduler.submit(ComputeJob {
                    sequence: prompt.sequence.clone(),
                    max_tokens: output_tokens,
                    ending: Finish::Length,
                    adapter: None,
                    is_fetched,
                });
                names.push(request);
                let place = ids.partition_point(|(known, _)| *known < request);
                ids.insert(place, (request, id));
            }
            EngineTiming::Static { waiting, .. } => waiting.push_back((request, output_tokens)),
        }
    }

    /// Returns whether the engine can serve a request of `tokens` prompt and output tokens.
    #[must_use]
    pub fn fits(&self, tokens: u32) -> bool {
        match &self.model {
            EngineTiming::Continuous { scheduler, .. } => tokens <= scheduler.tokens_max(),
            EngineTiming::Static { .. } => true,
        }
    }

    /// Returns the number of tokens of the prompt that this engine has cached, on any tier.
    #[must_use]
    pub fn cached_tokens(&self, prompt: &SimPrompt) -> u32 {
        self.found_tokens(prompt).cached()
    }

    /// Returns the numbers of tokens of the prompt that this engine has cached, by tier.
    #[must_use]
    pub fn found_tokens(&self, prompt: &SimPrompt) -> TierTokens {
        match &self.model {
            EngineTiming::Continuous { scheduler, .. } => scheduler.found_tokens(&prompt.sequence),
            EngineTiming::Static { .. } => TierTokens::default(),
        }
    }

    /// Iterates over the numbers of the requests in flight.
    pub fn in_flight(&self) -> impl Iterator<Item = usize> {
        let ids = match &self.model {
            EngineTiming::Continuous { ids, .. } => ids.as_slice(),
            EngineTiming::Static { .. } => &[],
        };
        ids.iter().map(|(number, _)| *number)
    }

    /// Returns the number of tokens that this engine has still to compute of all prompts.
    #[must_use]
    pub fn prefill_left(&self) -> u64 {
        match &self.model {
            EngineTiming::Continuous { scheduler, .. } => scheduler.prefill_left(),
            EngineTiming::Static { .. } => 0,
        }
    }

    /// Returns the number of blocks that this engine can compute before it evicts any.
    #[must_use]
    pub fn uncached_blocks(&self) -> u32 {
        match &self.model {
            EngineTiming::Continuous { scheduler, .. } => {
                let usable = scheduler.stats().usable_blocks;
                usable.saturating_sub(count(scheduler.cached_hashes()))
            }
            EngineTiming::Static { .. } => u32::MAX,
        }
    }

    /// Returns the number of prompt tokens that this engine would compute before this prompt's first
    /// output token.
    #[must_use]
    pub fn tokens_to_first(&self, prompt: &SimPrompt) -> u64 {
        match &self.model {
            EngineTiming::Continuous { scheduler, .. } => {
                let own = prompt.sequence.prompt_tokens() - self.cached_tokens(prompt);
                scheduler.prefill_left() + u64::from(own)
            }
            EngineTiming::Static { .. } => 0,
        }
    }

    /// Puts the prompt's blocks into the cache of this engine, which must be idle.
    pub fn hold(&mut self, prompt: &SimPrompt) {
        self.submit_fetched(usize::MAX, prompt, 1);
        while self.begin_step().is_some() {
            self.finish_step();
        }
    }

    /// Drops a request, if it is in flight.
    pub fn abort(&mut self, request: usize) {
        match &mut self.model {
            EngineTiming::Continuous { scheduler, ids, .. } => {
                if let Ok(place) = ids.binary_search_by_key(&request, |(known, _)| *known) {
                    scheduler.abort(ids.remove(place).1);
                }
            }
            EngineTiming::Static { waiting, batch, .. } => {
                waiting.retain(|(known, _)| *known != request);
                batch.retain(|(known, _)| *known != request);
            }
        }
    }

    /// Begins the next step. Returns its duration; `None` if a step runs or there is no work.
    pub fn begin_step(&mut self) -> Option<Micros> {
        if self.is_busy {
            return None;
        }
        let took = match &mut self.model {
            EngineTiming::Continuous { scheduler, .. } => scheduler.begin_step().map(micros),
            EngineTiming::Static {
                times,
                waiting,
                batch,
            } => {
                let size = waiting.len().min(times.batch_max as usize);
                batch.extend(waiting.drain(..size));
                let longest = batch.iter().map(|(_, tokens)| *tokens).max();
                longest.map(|tokens| times.service_us(count(batch.len()), tokens))
            }
        };
        self.is_busy = took.is_some();
        // Every step takes time, so that an engine's events never coincide.
        took.map(|took| took.max(1))
    }

    /// Ends the step. Returns the progress of its requests.
    pub fn finish_step(&mut self) -> Vec<ServedStep> {
        self.is_busy = false;
        match &mut self.model {
            EngineTiming::Continuous {
                scheduler,
                names,
                ids,
            } => {
                let progress = scheduler.finish_step();
                let found = scheduler.found().iter();
                let served = progress.into_iter().zip(found).map(|(progress, found)| {
                    let number = usize::try_from(progress.id.0).expect("ids count from 0");
                    let request = names[number];
                    let is_done = progress.finish.is_some();
                    if is_done
                        && let Ok(place) = ids.binary_search_by_key(&request, |(known, _)| *known)
                    {
                        ids.remove(place);
                    }
                    ServedStep {
                        request,
                        output_tokens: progress.output_tokens,
                        cached_tokens: progress.cached_tokens,
                        found: *found,
                        is_done,
                    }
                });
                served.collect()
            }
            EngineTiming::Static { batch, .. } => {
                let served = batch.drain(..).map(|(request, output_tokens)| ServedStep {
                    request,
                    output_tokens,
                    cached_tokens: 0,
                    found: TierTokens::default(),
                    is_done: true,
                });
                served.collect()
            }
        }
    }

    /// Returns the changes of the cache since the last call: those on the GPU, and those on the tiers
    /// below it.
    pub fn take_events(&mut self) -> (Vec<BlockEvent>, Vec<OffloadEvent>) {
        match &mut self.model {
            EngineTiming::Continuous { scheduler, .. } => {
                (scheduler.take_events(), scheduler.take_offload_events())
            }
            EngineTiming::Static { .. } => (Vec::new(), Vec::new()),
        }
    }

    /// Returns whether no request runs or waits.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let figures = self.figures();
        !self.is_busy && figures.running + figures.waiting == 0
    }

    /// Returns the figures that a probe reads.
    #[must_use]
    pub fn figures(&self) -> ProbedFigures {
        match &self.model {
            EngineTiming::Continuous { scheduler, .. } => {
                let stats = scheduler.stats();
                ProbedFigures {
                    running: stats.running,
                    waiting: stats.waiting,
                    kv_usage_permille: 1000 * stats.used_blocks / stats.usable_blocks.max(1),
                    preemptions: stats.preemptions,
                }
            }
            EngineTiming::Static { waiting, batch, .. } => ProbedFigures {
                running: count(batch.len()),
                waiting: count(waiting.len()),
                ..ProbedFigures::default()
            },
        }
    }
}

fn count(requests: usize) -> u32 {
    u32::try_from(requests).unwrap_or(u32::MAX)
}
