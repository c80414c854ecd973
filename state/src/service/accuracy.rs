//! Accuracy of cache predictions, and the resulting correction of a backend's capacity.
//!
//! The router predicts which blocks a backend holds. With each response, the engine reports how
//! many prompt tokens were really cached. Overprediction means that the router counts blocks that
//! are gone: the cache is smaller than assumed, or shared with others. Underprediction means that
//! it dropped blocks that are still there. If the engine's reported capacity bounds the prediction,
//! that capacity is corrected, slowly and by a factor of at most two. Otherwise the backend is only
//! marked.

use bincode::{Decode, Encode};
use schemars::JsonSchema;
use serde::Serialize;

use super::ServiceSample;

/// Minimum number of prompt tokens observed before a backend is marked.
const TOKENS_MIN: u64 = 32_768;
/// Number of prompt tokens that are remembered; older ones fade.
const TOKENS_KEPT: u64 = 131_072;
/// Number of prompt tokens between two corrections. Predictions from before a correction do not
/// reflect it.
const TOKENS_PER_STEP: u64 = 65_536;
/// Minimum of the correction, in thousandths of the engine's value.
const CORRECTION_MIN_PERMILLE: u32 = 500;
const CORRECTION_MAX_PERMILLE: u32 = 2000;
/// Size of one correction step, in thousandths of the current correction.
const STEP_PERMILLE: u32 = 60;

/// Predicted and actual cache hits of one incarnation of a backend.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub(crate) struct Accuracy {
    prompt_tokens: u64,
    predicted_tokens: u64,
    cached_tokens: u64,
    /// Number of prompt tokens since the last correction.
    step_tokens: u64,
    is_off: bool,
    /// Correction of the reported capacity as an offset from 1000 thousandths; 0 for none.
    correction_permille: i32,
}

/// Accuracy of the predictions for one backend, over roughly the last hundred thousand prompt
/// tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub struct AccuracyView {
    /// Prompt tokens whose caching the engine reported, faded.
    pub prompt_tokens: u64,
    /// Part of `prompt_tokens` predicted to be cached.
    pub predicted_tokens: u64,
    /// Part of `prompt_tokens` that was cached.
    pub cached_tokens: u64,
    /// Predicted minus actually cached tokens, in thousandths of the prompt tokens; per cent in
    /// JSON.
    #[serde(rename = "error_percent", serialize_with = "crate::readable::percent")]
    #[schemars(with = "f64")]
    pub error_permille: i32,
    /// Whether the backend is marked: the error has exceeded the bound and not fallen to half of it
    /// since.
    pub is_off: bool,
    /// Corrected capacity, in thousandths of what the engine reports; per cent in JSON.
    #[serde(
        rename = "correction_percent",
        serialize_with = "crate::readable::percent"
    )]
    #[schemars(with = "f64")]
    pub correction_permille: u32,
}

/// Data about a backend's capacity on which a correction depends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CapacityObservation {
    /// Number of blocks that the backend owns.
    pub(crate) owned: u64,
    /// Capacity with all corrections, in blocks; `None` if there is none to correct.
    pub(crate) capacity: Option<u32>,
}

impl Accuracy {
    /// Adds a plausible sample. `off_permille` is the error above which the backend is marked.
    pub(crate) fn observe(
        &mut self,
        sample: &ServiceSample,
        off_permille: u32,
        holding: CapacityObservation,
    ) {
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
        // Hysteresis: marked beyond the bound, until the error is within half of it.
        let off = self.error_permille().unsigned_abs();
        self.is_off = off > off_permille || self.is_off && off > off_permille / 2;
        self.correct(holding);
    }

    /// Returns the accuracy for publication. `belief_permille` is the correction by
    /// [`super::CapacityCorrections`].
    pub(crate) fn view(&self, belief_permille: u32) -> AccuracyView {
        AccuracyView {
            prompt_tokens: self.prompt_tokens,
            predicted_tokens: self.predicted_tokens,
            cached_tokens: self.cached_tokens,
            error_permille: self.error_permille(),
            is_off: self.is_off,
            correction_permille: self.combined_permille(belief_permille),
        }
    }

    /// Returns the capacity `told`, which the engine reported, with both corrections: this one and
    /// `belief_permille` (see [`Accuracy::view`]).
    pub(crate) fn corrected(&self, told: u32, belief_permille: u32) -> u32 {
        let permille = self.combined_permille(belief_permille);
        let corrected = u64::from(told) * u64::from(permille) / 1000;
        u32::try_from(corrected).unwrap_or(u32::MAX).max(1)
    }

    fn combined_permille(&self, belief_permille: u32) -> u32 {
        // At most 2000 times 1400.
        let permille = self.correction_permille() * belief_permille / 1000;
        permille.clamp(CORRECTION_MIN_PERMILLE, CORRECTION_MAX_PERMILLE)
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

    /// Corrects the capacity by one step if the backend is marked, the capacity bounds the
    /// prediction, and enough tokens were seen since the last step.
    fn correct(&mut self, holding: CapacityObservation) {
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
