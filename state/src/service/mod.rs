//! Service: the replicas' measurements of the backends, and what is derived from them.
//!
//! Replicas report sums per backend. `apply` computes everything derived from them (learned prices
//! of `cost`, accuracy of prefix predictions, concurrency limits), so that every replica has the
//! same values and a restart loses none of them.

mod accuracy;
mod assumed_capacity;
mod capacity_correction;
mod fit;
mod learnt;
pub mod limits;
#[cfg(test)]
mod price_tests;
mod published;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use bincode::{Decode, Encode};

use crate::ids::{BackendRef, Slot};
use crate::kv_events::LOWER_TIERS;

pub use accuracy::AccuracyView;
pub(crate) use accuracy::{Accuracy, CapacityObservation};
pub(crate) use assumed_capacity::{AssumedCapacities, share};
pub use capacity_correction::BeliefSample;
pub(crate) use capacity_correction::CapacityCorrections;
pub(crate) use learnt::PriceLearner;
pub use learnt::{LEARNT_FIRST_TOKENS_MIN, LearntPrices};
pub use limits::LimitFigures;
pub(crate) use limits::{AdaptiveLimit, LimitSettings};
pub use published::{BackendServiceView, CapacitySource, ServiceView};

/// Maximum time to a first token, in microseconds. Bounds the sums of a sample.
pub const FIRST_TOKEN_US_MAX: u64 = 3_600_000_000;
/// Maximum time between two tokens, in microseconds. Bounds the sums of a sample.
pub const GAP_US_MAX: u64 = 600_000_000;
/// Maximum number of requests running at a backend that a sample may contain.
pub const RUNNING_MAX: u64 = 1 << 20;

/// Sums over requests that loaded tokens from tiers below the GPU, while nothing was pending at the
/// backend: whatever else waits or loads would look like a part of their own load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode)]
pub struct LoadingSample {
    /// Number of the requests.
    pub requests: u32,
    /// Sum of the times from dispatch to first token, in microseconds.
    pub first_token_us: u64,
    /// Number of uncached prompt tokens.
    pub prefill_tokens: u64,
    /// Sum of the requests running at the backend at dispatch.
    pub running: u64,
    /// Number of prompt tokens loaded from each tier, fastest first.
    pub loaded_tokens: [u64; LOWER_TIERS],
}

impl LoadingSample {
    fn is_plausible(&self) -> bool {
        let requests = u64::from(self.requests);
        let tokens = self.loaded_tokens.iter().chain([&self.prefill_tokens]);
        (requests > 0 || *self == Self::default())
            && self.first_token_us <= requests.saturating_mul(FIRST_TOKEN_US_MAX)
            && self.running <= requests.saturating_mul(RUNNING_MAX)
            && tokens.copied().all(|it| it <= TOKENS_MAX)
    }
}

/// Maximum number of tokens in a sum of a sample.
const TOKENS_MAX: u64 = 1 << 40;

/// Sums that one replica measured at one backend since its last report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub struct ServiceSample {
    /// Backend that was measured.
    pub backend: BackendRef,
    /// Number of requests that ended and whose usage the engine reported.
    pub ended: u32,
    /// Number of prompt tokens of the ended requests.
    pub prompt_tokens: u64,
    /// Number of output tokens of the ended requests.
    pub output_tokens: u64,
    /// Number of tokens that the ended requests added to the cache: uncached prompt tokens and
    /// output tokens. If the engine does not report cached tokens, the prediction is used.
    pub added_tokens: u64,
    /// Sum of the squares of the tokens that each ended request added.
    pub added_squared: u64,
    /// Number of tokens per router block, rounded down, at least 1. Converts the backend's capacity
    /// into tokens. 0 if unknown.
    pub block_tokens: u32,
    /// Number of first tokens received.
    pub first_tokens: u32,
    /// Sum of the times from dispatch to first token, in microseconds.
    pub first_token_us: u64,
    /// Number of uncached prompt tokens ahead of the first tokens: those of the requests
    /// themselves, and those pending at the backend at dispatch, from all replicas.
    pub prefill_tokens: u64,
    /// Number of prompt tokens of these requests that their engine loads from each tier below the
    /// GPU, fastest first.
    pub loaded_tokens: [u64; LOWER_TIERS],
    /// Sums over those of these requests that loaded, and before which nothing was pending.
    pub loading: LoadingSample,
    /// Sum over the first tokens of the requests running at the backend at dispatch, from all
    /// replicas.
    pub first_running: u64,
    /// Number of output tokens after the first of each request.
    pub gaps: u64,
    /// Sum of the times between first and last token, in microseconds.
    pub gap_us: u64,
    /// Sum over the gaps of the requests running at the backend, from all replicas.
    pub gap_running: u64,
    /// Number of gaps during which the backend was at its limit.
    pub gaps_at_limit: u64,
    /// Number of requests whose cached tokens the engine reported.
    pub predicted: u32,
    /// Number of prompt tokens of the requests in `predicted`.
    pub predicted_prompt_tokens: u64,
    /// Part of `predicted_prompt_tokens` that was predicted to be cached.
    pub predicted_cached_tokens: u64,
    /// Part of `predicted_prompt_tokens` that was cached.
    pub cached_tokens: u64,
}

impl ServiceSample {
    /// Returns an empty sample of `backend`.
    #[must_use]
    pub fn empty(backend: BackendRef) -> Self {
        Self {
            backend,
            ended: 0,
            prompt_tokens: 0,
            output_tokens: 0,
            added_tokens: 0,
            added_squared: 0,
            block_tokens: 0,
            first_tokens: 0,
            first_token_us: 0,
            prefill_tokens: 0,
            loaded_tokens: [0; LOWER_TIERS],
            loading: LoadingSample::default(),
            first_running: 0,
            gaps: 0,
            gap_us: 0,
            gap_running: 0,
            gaps_at_limit: 0,
            predicted: 0,
            predicted_prompt_tokens: 0,
            predicted_cached_tokens: 0,
            cached_tokens: 0,
        }
    }

    /// Whether a replica can have measured the sums in this sample. Absurd values would outlive the
    /// replica that sent them.
    pub(crate) fn is_plausible(&self) -> bool {
        const COUNT_MAX: u32 = 1 << 24;
        let counts = [self.ended, self.first_tokens, self.predicted];
        let tokens = [
            self.prompt_tokens,
            self.output_tokens,
            self.prefill_tokens,
            self.gaps,
            self.predicted_prompt_tokens,
        ];
        let per = |count: u64, each_max: u64| count.saturating_mul(each_max);
        counts.iter().all(|count| *count <= COUNT_MAX)
            && tokens.iter().all(|tokens| *tokens <= TOKENS_MAX)
            && self.first_token_us <= per(self.first_tokens.into(), FIRST_TOKEN_US_MAX)
            && self.first_running <= per(self.first_tokens.into(), RUNNING_MAX)
            && (self.first_tokens > 0 || self.prefill_tokens == 0)
            && (self.first_tokens > 0 || self.loaded_tokens == [0; LOWER_TIERS])
            && (self.loaded_tokens.iter()).all(|tokens| *tokens <= TOKENS_MAX)
            && self.loading.requests <= self.first_tokens
            && self.loading.is_plausible()
            && self.gap_us <= per(self.gaps, GAP_US_MAX)
            && self.gap_running <= per(self.gaps, RUNNING_MAX)
            && self.gaps_at_limit <= self.gaps
            && self.predicted_cached_tokens <= self.predicted_prompt_tokens
            && self.cached_tokens <= self.predicted_prompt_tokens
    }
}

/// Statistics of one incarnation of a backend.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub(crate) struct BackendStats {
    /// Estimators of the prices of its first tokens and gaps.
    pub(crate) learning: PriceLearner,
    /// Accuracy of the predictions of its cached prefixes.
    pub(crate) accuracy: Accuracy,
    /// State of the limit on its concurrent requests.
    pub(crate) limit: AdaptiveLimit,
}

/// Statistics of all backends, by slot. A new incarnation starts from scratch.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub(crate) struct ServiceStats(BTreeMap<Slot, BackendStats>);

impl ServiceStats {
    /// Returns the statistics of the backend in `slot`. Adds empty ones if there are none.
    pub(crate) fn figures_mut(&mut self, slot: Slot) -> &mut BackendStats {
        self.0.entry(slot).or_default()
    }

    pub(crate) fn figures(&self, slot: Slot) -> Option<&BackendStats> {
        self.0.get(&slot)
    }

    /// Forgets the statistics of a backend that was removed or starts a new incarnation.
    pub(crate) fn forget(&mut self, slot: Slot) {
        self.0.remove(&slot);
    }

    /// Iterates over the slots with statistics, ascending.
    pub(crate) fn slots(&self) -> impl Iterator<Item = Slot> {
        self.0.keys().copied()
    }
}
