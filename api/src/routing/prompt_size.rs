//! Size of a prompt and the part of it that is believed to be cached.

use state::Registry;
use state::ratios::TokenRatio;

use crate::prompt::PromptIdentity;

/// Size of a prompt as known before an engine counts it.
pub(super) struct PromptSize {
    /// 0 if bytes do not indicate the tokens: token ids, batches.
    pub(super) bytes: u64,
    pub(super) tokens: u64,
    /// Part of `tokens` that is believed to be cached.
    pub(super) predicted: u64,
    /// Whether `predicted` is charged as cached if the engine reports nothing; not if clients can
    /// construct blocks whose hashes collide.
    pub(super) trusts_prediction: bool,
    /// Whether the engine looks into its cache, so that its cached tokens are informative.
    pub(super) uses_cache: bool,
    /// Tokens of one block.
    pub(super) block_tokens: u32,
    pub(super) ratio: TokenRatio,
}

impl PromptSize {
    pub(super) fn of(identity: &PromptIdentity, matched: u32, registry: &Registry) -> Self {
        let (tail, matched) = (&identity.tail, matched as usize);
        let tokens = u64::from(identity.tokens);
        let predicted = match tail.block_bytes {
            0 => matched as u64 * u64::from(tail.tokens_per_block),
            block_bytes => u64::from(tail.ratio.tokens(matched * block_bytes)),
        };
        Self {
            bytes: match tail.is_partial {
                true => 0,
                false => (identity.chain.len() * tail.block_bytes + tail.bytes.len()) as u64,
            },
            tokens,
            predicted: predicted.min(tokens),
            uses_cache: !tail.skips_cache,
            trusts_prediction: registry.hash_secret.is_some(),
            block_tokens: tail.tokens_per_block,
            ratio: tail.ratio,
        }
    }

    /// Returns the predicted part of `prompt_tokens`, once they are counted. Scales an estimated
    /// text so that an error of the estimate does not count against the prediction.
    pub(super) fn predicted_of(&self, prompt_tokens: u64) -> u64 {
        let predicted = match self.bytes {
            0 => self.predicted,
            _ => {
                let share = u128::from(self.predicted) * u128::from(prompt_tokens);
                let share = share / u128::from(self.tokens.max(1));
                u64::try_from(share).unwrap_or(u64::MAX)
            }
        };
        predicted.min(prompt_tokens)
    }
}
