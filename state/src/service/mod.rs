//! Service: what replicas measured of the backends, and what follows from it.
//!
//! Replicas report sums per backend; everything derived from them (learnt prices of `cost`, how well
//! prefix predictions hold, concurrency limits) is computed in `apply`, so that every replica has
//! the same and a restart loses none of it.

mod accuracy;
mod fit;
mod learnt;
pub mod limits;
mod published;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use bincode::{Decode, Encode};

use crate::ids::{BackendRef, Slot};

pub use accuracy::AccuracyView;
pub(crate) use accuracy::{Accuracy, Holding};
pub(crate) use learnt::PriceLearner;
pub use learnt::{LEARNT_FIRST_TOKENS_MIN, LearntPrices};
pub(crate) use limits::AdaptiveLimit;
pub use limits::LimitFigures;
pub use published::{BackendServiceView, ServiceView};

/// Longest time to a first token that a sample may tell, microseconds each.
pub const FIRST_TOKEN_US_MAX: u64 = 3_600_000_000;
/// Longest time between two tokens that a sample may tell, microseconds each.
pub const GAP_US_MAX: u64 = 600_000_000;
/// Most requests running at a backend that a sample may tell.
pub const RUNNING_MAX: u64 = 1 << 20;

/// Sums over what one replica saw of one backend since its last report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub struct ServiceSample {
    /// The backend.
    pub backend: BackendRef,
    /// Requests that ended and whose usage the engine told.
    pub ended: u32,
    /// Their prompt tokens.
    pub prompt_tokens: u64,
    /// Their output tokens.
    pub output_tokens: u64,
    /// What they added to the cache: prompt tokens that were not cached, and output tokens. Where the
    /// engine does not tell what was cached, the prediction stands in.
    pub added_tokens: u64,
    /// Sum of the squares of what each added.
    pub added_squared: u64,
    /// Tokens that one of the router's blocks holds, rounded down, at least 1: what turns the
    /// backend's capacity into tokens. 0: unknown.
    pub block_tokens: u32,
    /// First tokens that came.
    pub first_tokens: u32,
    /// Time to them from dispatch, microseconds.
    pub first_token_us: u64,
    /// Uncached prompt tokens that stood before them: their own and what was pending at the backend
    /// when they were dispatched, from all replicas.
    pub prefill_tokens: u64,
    /// Sum over the first tokens of requests that ran at the backend at dispatch, all replicas.
    pub first_running: u64,
    /// Output tokens after the first.
    pub gaps: u64,
    /// Time between first and last token, microseconds.
    pub gap_us: u64,
    /// Sum over the gaps of requests that ran at the backend, all replicas.
    pub gap_running: u64,
    /// Gaps during which the backend was at its limit.
    pub gaps_at_limit: u64,
    /// Requests whose cached tokens the engine told.
    pub predicted: u32,
    /// Prompt tokens of these.
    pub predicted_prompt_tokens: u64,
    /// Of these, tokens that were predicted to be cached.
    pub predicted_cached_tokens: u64,
    /// Of these, tokens that were cached.
    pub cached_tokens: u64,
}

impl ServiceSample {
    /// Nothing of `backend` yet.
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

    /// Whether every sum is one that a replica can have measured. Absurd figures would outlive the
    /// replica that made them.
    pub(crate) fn is_plausible(&self) -> bool {
        const COUNT_MAX: u32 = 1 << 24;
        const TOKENS_MAX: u64 = 1 << 40;
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
            && self.gap_us <= per(self.gaps, GAP_US_MAX)
            && self.gap_running <= per(self.gaps, RUNNING_MAX)
            && self.gaps_at_limit <= self.gaps
            && self.predicted_cached_tokens <= self.predicted_prompt_tokens
            && self.cached_tokens <= self.predicted_prompt_tokens
    }
}

/// What is known of one backend.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub(crate) struct BackendStats {
    /// What its first tokens and gaps cost.
    pub(crate) learning: PriceLearner,
    /// How well predictions of cached prefixes hold.
    pub(crate) accuracy: Accuracy,
    /// How many requests it is given at once.
    pub(crate) limit: AdaptiveLimit,
}

/// All backends, by slot. A new life of a backend starts anew.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub(crate) struct ServiceStats(BTreeMap<Slot, BackendStats>);

impl ServiceStats {
    /// The figures of the backend in `slot`; those of a slot without any begin empty.
    pub(crate) fn figures_mut(&mut self, slot: Slot) -> &mut BackendStats {
        self.0.entry(slot).or_default()
    }

    pub(crate) fn figures(&self, slot: Slot) -> Option<&BackendStats> {
        self.0.get(&slot)
    }

    /// The backend in `slot` is gone, or begins a new life.
    pub(crate) fn forget(&mut self, slot: Slot) {
        self.0.remove(&slot);
    }

    /// Slots that figures are kept of, ascending.
    pub(crate) fn slots(&self) -> impl Iterator<Item = Slot> {
        self.0.keys().copied()
    }
}
