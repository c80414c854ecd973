//! Texts to send: the same for the same seed and id, and unlike for others.

use crate::engine::text::{token_count, words};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A prompt as a row of blocks of text; made into text only when it is sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptSpec {
    /// Names the text of each block.
    pub ids: Vec<u64>,
    /// Bytes of a block.
    pub block_bytes: usize,
    /// Bytes in all: the last block may be partial.
    pub bytes: usize,
    /// Seed of the texts.
    pub seed: u64,
}

impl PromptSpec {
    /// The prompt.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::with_capacity(self.bytes);
        for id in &self.ids {
            let left = self.bytes.saturating_sub(text.len());
            text.push_str(&passage(self.seed, *id, left.min(self.block_bytes)));
        }
        text
    }
}

/// `bytes` bytes of words named by `id`. A shorter passage is the beginning of a longer one.
#[must_use]
pub fn passage(seed: u64, id: u64, bytes: usize) -> String {
    let voice = xxh3_64_with_seed(&id.to_le_bytes(), seed);
    let mut text = words(voice, 0, token_count(bytes));
    text.truncate(bytes);
    text
}
