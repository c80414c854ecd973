//! Estimates the size of a prompt and the part of it that is cached.

use state::kv_events::{LOWER_TIERS, LowerTierBlocks};
use state::ratios::TokenRatio;

use crate::prompt::PromptIdentity;

/// Size of a prompt as known before the engine reports its token count.
pub(super) struct PromptSize {
    /// Length of the prompt's text, in bytes; 0 if it does not indicate the number of tokens, as
    /// with token ids and batches.
    pub(in crate::routing) bytes: u64,
    pub(in crate::routing) tokens: u64,
    /// Whether the prompt is identified by token ids, so that predictions are accurate to a block.
    pub(super) is_exact: bool,
    /// Number of the `tokens` that are believed to be cached.
    pub(in crate::routing) predicted: u64,
    /// Number of the `predicted` tokens that the engine loads from each tier below the GPU, fastest
    /// first.
    pub(super) loaded: [u64; LOWER_TIERS],
    /// Whether the engine uses its cache for the prompt, so that cached tokens are informative.
    pub(super) uses_cache: bool,
    /// Whether the engine's count of cached tokens is wrong, so that the prediction counts.
    pub(super) is_miscounted: bool,
    /// Number of tokens per block.
    pub(super) block_tokens: u32,
    pub(super) ratio: TokenRatio,
}

/// Work that a prompt causes at a backend, in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::routing) struct PromptWork {
    /// Tokens that are not cached.
    pub(in crate::routing) computed: u64,
    /// Tokens to load from each tier below the GPU, fastest first.
    pub(in crate::routing) loaded: [u64; LOWER_TIERS],
}

impl PromptSize {
    /// Returns what the engine has to do for the prompt, by what is believed to be cached.
    pub(super) fn work(&self) -> PromptWork {
        PromptWork {
            computed: self.tokens - self.predicted,
            loaded: self.loaded,
        }
    }

    /// Returns the size of a prompt of which a backend holds `matched` leading blocks, `loaded` of
    /// them on tiers below the GPU.
    pub(in crate::routing) fn of(
        identity: &PromptIdentity,
        matched: u32,
        loaded: LowerTierBlocks,
    ) -> Self {
        let tail = &identity.tail;
        let tokens = u64::from(identity.tokens);
        let tokens_of = |blocks: u32| match tail.block_bytes {
            0 => u64::from(blocks) * u64::from(tail.tokens_per_block),
            block_bytes => u64::from(tail.ratio.tokens(blocks as usize * block_bytes)),
        };
        let predicted = tokens_of(matched);
        Self {
            bytes: match tail.is_partial {
                true => 0,
                false => (identity.chain.len() * tail.block_bytes + tail.bytes.len()) as u64,
            },
            tokens,
            is_exact: tail.block_bytes == 0,
            predicted: predicted.min(tokens),
            loaded: loaded.all().map(tokens_of),
            uses_cache: !tail.skips_cache,
            is_miscounted: false,
            block_tokens: tail.tokens_per_block,
            ratio: tail.ratio,
        }
    }

    /// Returns how many of the `prompt_tokens` that the engine counted were predicted to be cached.
    /// For text, the prediction is scaled to that count, so that an error in the estimated token
    /// count does not look like a wrong prediction.
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
