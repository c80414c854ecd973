//! Sums the token counts that engines report for text prompts, per model. The sums go to the log
//! once a second, and the state derives bytes per token from them (`state/src/ratios.rs`).

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use state::ids::ModelKey;
use state::ratios::{RATIOS_MAX, TextSample};

/// Minimum prompt length that counts, in bytes: in a shorter prompt the chat template's tokens,
/// some 30, outweigh the text. Estimates matter for long prompts.
const PROMPT_BYTES_MIN: u64 = 512;
/// Maximum weight of a prompt, in bytes, so that a single long prompt does not outweigh all others.
const PROMPT_BYTES_MAX: u64 = 16 << 10;

/// Prompt bytes and tokens, summed by model.
#[derive(Debug, Default)]
pub(in crate::routing) struct TextSums(Mutex<BTreeMap<ModelKey, (u64, u64)>>);

impl TextSums {
    /// Adds a prompt of `bytes` bytes for which an engine reported `tokens` tokens. Ignores short
    /// prompts and implausible counts.
    pub(in crate::routing) fn add(&self, model: ModelKey, bytes: u64, tokens: u64) {
        let prompt = TextSample {
            model,
            bytes,
            tokens,
        };
        if bytes < PROMPT_BYTES_MIN || !prompt.is_plausible() {
            return;
        }
        let kept = bytes.min(PROMPT_BYTES_MAX);
        let tokens = u128::from(tokens) * u128::from(kept) / u128::from(bytes);
        let mut sums = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if sums.len() < RATIOS_MAX || sums.contains_key(&model) {
            let (sum_bytes, sum_tokens) = sums.entry(model).or_default();
            *sum_bytes += kept;
            // A plausible prompt has at most two tokens per byte.
            *sum_tokens += u64::try_from(tokens).unwrap_or(0);
        }
    }

    /// Removes and returns the sums of all models.
    pub(in crate::routing) fn take(&self) -> impl Iterator<Item = TextSample> + use<> {
        let mut sums = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = std::mem::take(&mut *sums).into_iter();
        taken.map(|(model, (bytes, tokens))| TextSample {
            model,
            bytes,
            tokens,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(sums: &TextSums) -> Vec<(u64, u64, u64)> {
        let each = sums.take();
        each.map(|it| (it.model.0, it.bytes, it.tokens)).collect()
    }

    #[test]
    fn text_samples_are_summed_by_model() {
        let sums = TextSums::default();
        for (model, bytes, tokens) in [(1, 1000, 250), (2, 600, 300), (1, 2000, 400)] {
            sums.add(ModelKey(model), bytes, tokens);
        }
        assert_eq!(taken(&sums), [(1, 3000, 650), (2, 600, 300)]);
        assert_eq!(taken(&sums), []);
    }

    #[test]
    fn implausible_text_samples_are_dropped_and_long_ones_capped() {
        let sums = TextSums::default();
        // Valid prompts from vLLM with Qwen's template; then an image, nothing, and nonsense.
        for (bytes, tokens) in [(27, 34), (1000, 10_000), (1000, 0), (u64::MAX, u64::MAX)] {
            sums.add(ModelKey(1), bytes, tokens);
        }
        assert_eq!(taken(&sums), []);
        sums.add(ModelKey(1), 1 << 20, 1 << 18);
        assert_eq!(taken(&sums), [(1, 16 << 10, 4 << 10)]);
    }
}
