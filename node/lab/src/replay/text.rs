//! Texts of prompts, determined by a seed and ids.

use crate::engine::output::words;
use crate::engine::text::token_count;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A prompt as a list of text blocks, whose text is generated only when it is sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptSpec {
    /// Ids from which the texts of the blocks are derived, in order.
    pub ids: Vec<u64>,
    /// Length of a block, in bytes. The last one has what is left.
    pub block_bytes: usize,
    /// Total length in bytes.
    pub bytes: usize,
    /// Seed from which the texts are derived.
    pub seed: u64,
}

impl PromptSpec {
    /// Generates the text of the prompt.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::with_capacity(self.bytes);
        for (number, id) in self.ids.iter().enumerate() {
            let left = self.bytes.saturating_sub(text.len());
            let bytes = match number + 1 == self.ids.len() {
                true => left,
                false => left.min(self.block_bytes),
            };
            text.push_str(&passage(self.seed, *id, bytes));
        }
        text
    }
}

/// Returns `bytes` bytes of words derived from `seed` and `id`. Shorter passages are prefixes of
/// longer ones.
#[must_use]
pub fn passage(seed: u64, id: u64, bytes: usize) -> String {
    let output_seed = xxh3_64_with_seed(&id.to_le_bytes(), seed);
    let mut text = words(output_seed, 0, token_count(bytes));
    text.truncate(bytes);
    text
}
