//! Bytes per token, learned from the engines' own counts.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock};

use state::command::NAME_BYTES_MAX;

/// Bytes per token until an engine's usage tells better; also what a block is worth in tokens where
/// all replicas must agree.
pub const BYTES_PER_TOKEN: f32 = 4.0;
/// Weight of a new sample in the moving average.
const SAMPLE_WEIGHT: f32 = 1.0 / 16.0;
/// Fewest and most bytes per token believed. What is beyond is not text counted right: a batch of
/// which only the first prompt is measured, or an image.
const RANGE: (f32, f32) = (0.5, 16.0);
/// Shortest prompt that tells anything: what a chat template adds, some 30 tokens, counts for more
/// than the text of a shorter one, and long prompts are what an estimate matters for.
const SAMPLE_BYTES_MIN: u64 = 512;
/// Models whose ratio is learnt; further ones, and those no backend serves, share one.
const MODELS_MAX: usize = 1024;

/// Bytes per token of one model's prompts: a moving average over what engines reported. Shared by
/// all who estimate; local to this replica.
#[derive(Debug, Clone)]
pub struct TokenRatio(Arc<AtomicU32>);

impl Default for TokenRatio {
    fn default() -> Self {
        Self(Arc::new(AtomicU32::new(BYTES_PER_TOKEN.to_bits())))
    }
}

impl TokenRatio {
    /// Bytes per token.
    #[must_use]
    pub fn get(&self) -> f32 {
        f32::from_bits(self.0.load(Relaxed))
    }

    /// Tokens of `bytes` bytes, rounded up.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "it saturates"
    )]
    pub fn tokens(&self, bytes: usize) -> u32 {
        (bytes as f32 / self.get()).ceil() as u32
    }

    /// Tokens of one block of `bytes` bytes: the nearest whole number, 1 at least. Rounded up, many
    /// blocks would add up to more than their prompt.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "it saturates"
    )]
    pub fn block_tokens(&self, bytes: usize) -> u32 {
        ((bytes as f32 / self.get()).round() as u32).max(1)
    }

    /// Takes in that an engine counted `tokens` in `bytes` bytes. Racing samples may be lost.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    pub fn learn(&self, bytes: u64, tokens: u64) {
        if bytes < SAMPLE_BYTES_MIN || tokens == 0 {
            return;
        }
        let sample = bytes as f32 / tokens as f32;
        if !(RANGE.0..=RANGE.1).contains(&sample) {
            return;
        }
        let mean = self.get() + (sample - self.get()) * SAMPLE_WEIGHT;
        self.0.store(mean.to_bits(), Relaxed);
    }
}

/// Ratios by model.
#[derive(Default)]
pub(super) struct TokenRatios {
    by_model: RwLock<HashMap<String, TokenRatio>>,
    others: TokenRatio,
}

impl TokenRatios {
    /// Models with a ratio of their own.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        let by_model = self.by_model.read();
        by_model.unwrap_or_else(PoisonError::into_inner).len()
    }

    /// The ratio of `model`. `is_served` says whether the name is worth remembering: clients may
    /// ask for any.
    pub(super) fn of(&self, model: &str, is_served: impl FnOnce() -> bool) -> TokenRatio {
        let known = self.by_model.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(ratio) = known.get(model) {
            return ratio.clone();
        }
        if known.len() >= MODELS_MAX {
            return self.others.clone();
        }
        drop(known);
        if model.len() > NAME_BYTES_MAX || !is_served() {
            return self.others.clone();
        }
        let mut known = self
            .by_model
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        known.entry(model.to_owned()).or_default().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_moves_to_what_engines_count_and_stays_sane() {
        let ratio = TokenRatio::default();
        assert_eq!(
            (ratio.tokens(0), ratio.tokens(1), ratio.tokens(8)),
            (0, 1, 2)
        );
        ratio.learn(0, 5);
        ratio.learn(5, 0);
        assert_eq!(ratio.tokens(400), 100);
        (0..200).for_each(|_| ratio.learn(2000, 1000));
        assert_eq!(ratio.tokens(200), 100);
        for (bytes, tokens) in [(u64::MAX, 1), (1, u64::MAX), (1000, 10_000)] {
            (0..500).for_each(|_| ratio.learn(bytes, tokens));
            assert_eq!(ratio.tokens(200), 100, "{bytes} bytes in {tokens} tokens");
        }
    }

    #[test]
    fn short_prompts_do_not_teach_what_a_template_costs() {
        let ratio = TokenRatio::default();
        // "hello, how are you" in vLLM with Qwen's template.
        (0..500).for_each(|_| ratio.learn(27, 34));
        assert_eq!(ratio.tokens(4000), 1000);
    }
}
