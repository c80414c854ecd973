//! Ideal bounds with which runs are compared.
//!
//! *Pooled LRU* is one cache with the blocks of all engines, on all tiers. It serves requests in the
//! order of arrival, each finished before the next. No router can hit much more often, because no
//! engine has all blocks. *Lower bound of TTFT* is the time to compute what even that cache missed,
//! on an otherwise idle engine.

use std::sync::Arc;

use super::plan::{EngineModel, SimPlan};
use super::workload::{SimPrompt, WarmPrefix};
use crate::engine::cache::{BlockPool, HeldBlocks};

/// Ideal hit rate and time to first token of a workload.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct IdealBounds {
    /// Share of the prompt tokens that the pooled cache had, from 0 to 1.
    pub hit_rate: f64,
    /// Mean lower bound of the time to first token, in milliseconds.
    pub ttft_ms: f64,
}

impl IdealBounds {
    /// Computes the bounds for `asked`, prompts and output tokens in arrival order, with what is
    /// cached at the start; `None` for engines without a prefix cache.
    #[must_use]
    pub fn of(
        plan: &SimPlan,
        warm: &[WarmPrefix],
        asked: &[(Arc<SimPrompt>, u32)],
    ) -> Option<Self> {
        let EngineModel::Continuous(shape) = plan.engine else {
            return None;
        };
        let offload = [plan.offload.cpu_blocks, plan.offload.disk_blocks];
        let blocks = offload
            .into_iter()
            .fold(shape.num_gpu_blocks, u32::saturating_add);
        let blocks = blocks.saturating_mul(u32::from(plan.backends));
        let mut pool = BlockPool::new(blocks, shape.block_size);
        let mut serve = |prompt: &SimPrompt, output_tokens: u32| {
            let mut sequence = prompt.sequence.clone();
            let hit = pool.find(sequence.hashes(), prompt.tokens);
            let hit_tokens = u64::from(hit.tokens(&pool));
            for _ in 0..output_tokens {
                sequence.push_token();
            }
            let mut held = HeldBlocks::default();
            if pool.allocate(&mut held, &hit, sequence.tokens()) {
                pool.register(&mut held, sequence.hashes(), sequence.tokens());
                pool.release(&mut held);
            }
            drop(pool.take_events());
            hit_tokens
        };
        for prefix in warm {
            serve(&prefix.prompt, 0);
        }
        let (mut prompt_tokens, mut hit_tokens) = (0_u64, 0_u64);
        for (prompt, output_tokens) in asked {
            prompt_tokens += u64::from(prompt.tokens);
            hit_tokens += serve(prompt, *output_tokens);
        }
        let uncached = prompt_tokens - hit_tokens;
        let seconds = uncached as f64 / f64::from(shape.prefill_tokens_per_s);
        Some(Self {
            hit_rate: hit_tokens as f64 / prompt_tokens.max(1) as f64,
            ttft_ms: 1e3 * seconds / asked.len().max(1) as f64,
        })
    }
}
