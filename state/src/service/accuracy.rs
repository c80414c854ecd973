//! Accuracy of cache predictions, and the correction of a backend's capacity that follows.
//!
//! The router believes that a backend holds blocks; with each answer the engine says how many
//! prompt tokens it really had. Who over-predicts believes in blocks that are gone: the cache is
//! smaller than thought, or shared with others. Who under-predicts forgot blocks that are still
//! there. Where the belief is bounded by the capacity the engine told, the capacity is corrected,
//! slowly and by a factor of two at most; elsewhere the backend is only marked.

use bincode::{Decode, Encode};
use serde::Serialize;

use super::ServiceSample;

/// Prompt tokens after which a verdict is possible.
const TOKENS_MIN: u64 = 32_768;
/// Prompt tokens that are remembered; older ones fade.
const TOKENS_KEPT: u64 = 131_072;
/// Prompt tokens between two corrections: what was predicted before one says nothing about it.
const TOKENS_PER_STEP: u64 = 65_536;
/// Thousandths of the engine's word.
const CORRECTION_MIN_PERMILLE: u32 = 500;
const CORRECTION_MAX_PERMILLE: u32 = 2000;
/// One correction, thousandths of the last one.
const STEP_PERMILLE: u32 = 60;

/// Predictions against reality, of one life of a backend.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub(crate) struct Accuracy {
    prompt_tokens: u64,
    predicted_tokens: u64,
    cached_tokens: u64,
    /// Prompt tokens since the last correction.
    step_tokens: u64,
    is_off: bool,
    /// By how much the told capacity is corrected, thousandths added; 0: it is not.
    correction_permille: i32,
}

/// How well predictions hold for one backend, over the last hundred thousand prompt tokens or so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct AccuracyView {
    /// Prompt tokens whose caching the engine told, faded.
    pub prompt_tokens: u64,
    /// Of these, predicted to be cached.
    pub predicted_tokens: u64,
    /// Of these, cached.
    pub cached_tokens: u64,
    /// Predicted less cached, thousandths of the prompt tokens.
    pub error_permille: i32,
    /// Whether that is off beyond the bound.
    pub is_off: bool,
    /// What the engine's capacity is taken times, thousandths.
    pub correction_permille: u32,
}

/// What the correction of a capacity depends on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Holding {
    /// Blocks owned.
    pub(crate) owned: u64,
    /// The capacity as corrected; `None`: there is none that could be corrected.
    pub(crate) capacity: Option<u32>,
}

impl Accuracy {
    /// Takes in a plausible sample. `off_permille` is what a prediction may be off.
    pub(crate) fn observe(&mut self, sample: &ServiceSample, off_permille: u32, holding: Holding) {
        let fresh = sample.predicted_prompt_tokens;
        if fresh == 0 {
            return;
        }
        self.prompt_tokens = self.prompt_tokens.saturating_add(fresh);
        self.predicted_tokens = self
            .predicted_tokens
            .saturating_add(sample.predicted_cached_tokens);
        self.cached_tokens = self.cached_tokens.saturating_add(sample.cached_tokens);
        self.step_tokens = self.step_tokens.saturating_add(fresh);
        self.fade();
        if self.prompt_tokens < TOKENS_MIN {
            return;
        }
        // Off beyond the bound until it is within half of it: no mark that comes and goes.
        let off = self.error_permille().unsigned_abs();
        self.is_off = off > off_permille || self.is_off && off > off_permille / 2;
        self.correct(holding);
    }

    pub(crate) fn view(&self) -> AccuracyView {
        AccuracyView {
            prompt_tokens: self.prompt_tokens,
            predicted_tokens: self.predicted_tokens,
            cached_tokens: self.cached_tokens,
            error_permille: self.error_permille(),
            is_off: self.is_off,
            correction_permille: self.correction_permille(),
        }
    }

    /// The capacity an engine told, corrected.
    pub(crate) fn corrected(&self, told: u32) -> u32 {
        let corrected = u64::from(told) * u64::from(self.correction_permille()) / 1000;
        u32::try_from(corrected).unwrap_or(u32::MAX).max(1)
    }

    fn correction_permille(&self) -> u32 {
        let permille = 1000_i32.saturating_add(self.correction_permille);
        u32::try_from(permille)
            .unwrap_or(0)
            .clamp(CORRECTION_MIN_PERMILLE, CORRECTION_MAX_PERMILLE)
    }

    fn error_permille(&self) -> i32 {
        let parts = |tokens: u64| i128::from(tokens) * 1000;
        let error = parts(self.predicted_tokens) - parts(self.cached_tokens);
        let error = error / i128::from(self.prompt_tokens.max(1));
        error.clamp(-1000, 1000) as i32
    }

    fn fade(&mut self) {
        let Some(over) = self
            .prompt_tokens
            .checked_sub(TOKENS_KEPT)
            .filter(|it| *it > 0)
        else {
            return;
        };
        let (kept, whole) = (self.prompt_tokens - over, self.prompt_tokens);
        let faded = |tokens: u64| {
            let faded = u128::from(tokens) * u128::from(kept) / u128::from(whole);
            u64::try_from(faded).unwrap_or(u64::MAX)
        };
        self.predicted_tokens = faded(self.predicted_tokens);
        self.cached_tokens = faded(self.cached_tokens);
        self.prompt_tokens = kept;
    }

    /// A step, where the mark stands, the belief is bounded by the capacity, and enough was seen
    /// since the last step.
    fn correct(&mut self, holding: Holding) {
        let is_bounded = holding
            .capacity
            .is_some_and(|capacity| holding.owned * 10 >= u64::from(capacity) * 9);
        if !self.is_off || !is_bounded || self.step_tokens < TOKENS_PER_STEP {
            return;
        }
        self.step_tokens = 0;
        let now = self.correction_permille();
        let step = now * STEP_PERMILLE / 1000;
        let next = if self.error_permille() > 0 {
            now - step
        } else {
            now + step
        };
        let next = next.clamp(CORRECTION_MIN_PERMILLE, CORRECTION_MAX_PERMILLE);
        // Between 500 and 2000.
        self.correction_permille = next as i32 - 1000;
    }
}
