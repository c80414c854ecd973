//! How large a prompt is, and how much of it is believed to be cached.

use state::Registry;
use state::ratios::TokenRatio;

use crate::prompt::PromptIdentity;

/// A prompt's size as far as known before an engine counts it.
pub(super) struct PromptSize {
    /// 0 where they tell nothing of the tokens: token ids, batches.
    pub(super) bytes: u64,
    pub(super) tokens: u64,
    /// Of these, believed cached.
    pub(super) predicted: u64,
    /// Whether these are charged as cached where the engine does not tell: not where blocks that
    /// hash alike can be written down.
    pub(super) is_believed: bool,
    /// Whether what the engine finds cached tells of its cache: it looks there.
    pub(super) is_telling: bool,
    /// Of one block.
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
            is_telling: !tail.skips_cache,
            is_believed: registry.hash_secret.is_some(),
            block_tokens: tail.tokens_per_block,
            ratio: tail.ratio,
        }
    }

    /// The believed share of so many tokens, once they are counted: where a text's tokens were
    /// estimated, the estimate's fault is not the prediction's.
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
