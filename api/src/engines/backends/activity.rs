//! Whether an engine computes, judging by the figures on its metrics page.

use std::fmt;

use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Counts of generated tokens, which engines raise with every step. SGLang's counts tokens only at
/// the end of a request, but its other figures change meanwhile.
const TOKENS_MADE: [&str; 3] = [
    "vllm:generation_tokens_total",
    "sglang:generation_tokens_total",
    "llamacpp:n_decode_total",
];

/// Other figures that change while an engine computes.
const ACTIVITY: [&str; 12] = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prompt_tokens_total",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:prompt_tokens_total",
    "sglang:token_usage",
    "sglang:gen_throughput",
    "sglang:realtime_tokens_total",
];

/// Digest of the figures that change while an engine computes. vLLM counts tokens with every step,
/// and its cache fills while it computes a long prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EngineActivity(u64);

/// Samples of one page, from which the digest is made.
#[derive(Default)]
pub(super) struct ActivitySeries {
    digest: u64,
    has_tokens: bool,
}

impl ActivitySeries {
    /// Adds a sample, if it tells of activity. Samples of a page come in a fixed order.
    pub(super) fn add(&mut self, name: &str, value: f64) {
        let is_count = TOKENS_MADE.contains(&name);
        if is_count || ACTIVITY.contains(&name) {
            self.digest = xxh3_64_with_seed(&value.to_le_bytes(), self.digest);
            self.has_tokens |= is_count;
        }
    }

    /// Returns the digest; `None` without a count of tokens.
    pub(super) fn activity(&self) -> Option<EngineActivity> {
        self.has_tokens.then_some(EngineActivity(self.digest))
    }
}

/// Why an engine that answers probes does no work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Standstill {
    /// It sleeps until an operator wakes it up.
    Asleep,
    /// Requests run, and its counts of tokens stand still.
    Hung,
}

impl fmt::Display for Standstill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Asleep => "the engine sleeps (`/is_sleeping`); wake it up",
            Self::Hung => "the engine reports running requests, but computes nothing: it may hang",
        })
    }
}
