//! Flags of `quorate simulate` for the engines.

use std::time::Duration;

use state::policy::VisibleTiers;

use super::parse::tiers;
use super::plan::{BLOCK_TOKENS, BatchTimes, EngineModel};
use super::recorded::RecordedDemand;
use crate::engine::model::EngineShape;
use crate::engine::offload::OffloadArgs;

/// Maximum number of tokens computed per step, unless set.
const BATCHED_TOKENS: u32 = 2048;
/// Prompt tokens computed per second, unless set or recorded.
const PREFILL_RATE: u32 = 10_000;
/// Fixed time of a decode step, unless set or recorded.
const DECODE: Duration = Duration::from_millis(20);

/// Properties of the engines.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Engines")]
pub(super) struct SimEngineArgs {
    /// KV blocks per engine, of 32 tokens each, or of the recorded size [default: 8192, or as
    /// recorded]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=10_000_000))]
    blocks: Option<u32>,
    /// Maximum number of running requests per engine
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    max_num_seqs: u32,
    /// Maximum number of tokens computed per step [default: 2048]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    max_num_batched_tokens: Option<u32>,
    /// Prompt tokens computed per second [default: 10000, or as fitted to the recording]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    prefill_rate: Option<u32>,
    /// Fixed time of a decode step, to which each request that decodes adds 1/64 [default: 20ms, or
    /// as fitted to the recording]
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    decode: Option<Duration>,
    /// Static batches of this many requests, which end together [default: continuous batching]
    #[arg(long, value_name = "B", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(super) static_batch: Option<u32>,
    #[command(flatten)]
    pub(super) offload: OffloadArgs,
    /// Follow the engines' KV events, through the log, instead of inferring caches from leases
    #[arg(long, conflicts_with_all = ["static_batch", "restart_at", "experiment"])]
    pub(super) exact: bool,
    /// Cache tiers that policies see, gpu or all, as `routing.tiers` [default: all for `cost`]
    #[arg(long, value_name = "TIERS", requires = "exact", value_parser = tiers)]
    pub(super) tiers: Option<VisibleTiers>,
    /// Let the policy decide by the engines' true caches, work and prices, as no router can
    #[arg(long, conflicts_with_all = ["static_batch", "prefill"])]
    pub(super) all_knowing: bool,
}

impl SimEngineArgs {
    /// Returns the model of the engines. Sizes that no flag sets are as recorded, or the defaults
    /// if nothing is recorded.
    pub(super) fn model(&self, recorded: Option<&RecordedDemand>) -> EngineModel {
        // One block is vLLM's null block.
        let capacity = recorded.and_then(|it| it.capacity_blocks);
        let capacity = capacity.map_or(8192, |blocks| blocks.saturating_add(1));
        let speed = recorded.map(|it| it.figures.speed).unwrap_or_default();
        match self.static_batch {
            Some(batch_max) => EngineModel::Static(BatchTimes {
                batch_max,
                ..BatchTimes::CALIBRATED
            }),
            None => EngineModel::Continuous(self.shape(&EngineShape {
                num_gpu_blocks: capacity,
                block_size: recorded.map_or(BLOCK_TOKENS, |it| it.block_tokens),
                max_num_batched_tokens: BATCHED_TOKENS,
                prefill_tokens_per_s: speed.prefill_rate.unwrap_or(PREFILL_RATE),
                decode: speed.decode().unwrap_or(DECODE),
                max_num_seqs: self.max_num_seqs,
            })),
        }
    }

    /// Returns an engine with continuous batching that is as the flags say, else as `other`.
    pub(super) fn shape(&self, other: &EngineShape) -> EngineShape {
        let prefill_tokens_per_s = self.prefill_rate.unwrap_or(other.prefill_tokens_per_s);
        let batched_tokens = self.max_num_batched_tokens;
        EngineShape {
            num_gpu_blocks: self.blocks.unwrap_or(other.num_gpu_blocks).max(2),
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: batched_tokens.unwrap_or(other.max_num_batched_tokens),
            prefill_tokens_per_s,
            decode: self.decode.unwrap_or(other.decode),
            ..*other
        }
    }
}
