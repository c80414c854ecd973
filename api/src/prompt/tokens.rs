//! Hashes token ids of prompts and of engines' KV events in the same way.
//!
//! The scope of token blocks contains the model, the salt, the block size and, in place of the
//! tokenizer, the word `tokens`. Ids identify themselves, so a prompt given as ids, a prompt
//! tokenized here and a block reported by an engine get the same hashes, whichever tokenizer
//! produced the ids. Blocks of text have the word `character` instead and never match them.
//!
//! The model name identifies a LoRA adapter: engines serve it as a model. The scope's own adapter
//! is the one that SGLang's `lora_path` names in addition to the model.

use state::ids::BlockHash;
use state::prefix::{self, BlockHasher, ChainRoot, Scope};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Word in place of the tokenizer in the scope of token blocks.
const TOKENS: &str = "tokens";

/// Scope of a chain of token blocks, within which equal tokens have equal hashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenScope<'a> {
    /// Model name from the request, which is the adapter's name for a LoRA adapter.
    pub model: &'a str,
    /// Cache salt of the request; empty for none.
    pub salt: &'a str,
    /// Number of tokens per block.
    pub block_size: u32,
}

impl TokenScope<'_> {
    /// Returns the root of the scope's chains.
    #[must_use]
    pub fn root(&self, hashing: &BlockHasher) -> ChainRoot {
        self.root_with(hashing, "")
    }

    /// Returns the root of chains with an `adapter` in addition to the model, as in SGLang.
    #[must_use]
    pub fn root_with(&self, hashing: &BlockHasher, adapter: &str) -> ChainRoot {
        let scope = Scope {
            model: self.model,
            adapter,
            salt: self.salt,
            tokenizer: TOKENS,
            block_size: self.block_size,
        };
        hashing.root(&scope)
    }
}

/// Returns the hashes of the full blocks of `tokens`, which follow the block `parent` (`None` at
/// the start of the prompt), exactly as routing hashes a prompt of these tokens.
///
/// `media` has one entry per block; missing entries are `None`. An entry is a key of the images or
/// sounds whose placeholders the block contains. Equal placeholders of different media get
/// different hashes; only the engine that chose the keys knows the media.
///
/// # Panics
/// Panics if the block size is 0.
#[must_use]
pub fn chain_of_tokens(
    hashing: &BlockHasher,
    scope: &TokenScope<'_>,
    parent: Option<BlockHash>,
    tokens: &[u32],
    media: &[Option<u64>],
) -> Vec<BlockHash> {
    let root = scope.root(hashing);
    let block_size = scope.block_size as usize;
    let mut chain = Vec::new();
    if media.iter().all(Option::is_none) {
        prefix::continue_tokens(&root, parent, tokens, block_size, &mut chain);
        return chain;
    }
    let mut last = parent;
    for (at, block) in tokens.chunks_exact(block_size).enumerate() {
        prefix::continue_tokens(&root, last, block, block_size, &mut chain);
        let hash = chain.last_mut().expect("the block is a full one");
        if let Some(key) = media.get(at).copied().flatten() {
            hash.0 = xxh3_64_with_seed(&hash.0.to_le_bytes(), key);
        }
        last = Some(*hash);
    }
    chain
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCOPE: TokenScope<'_> = TokenScope {
        model: "m",
        salt: "",
        block_size: 2,
    };

    #[test]
    fn a_token_chain_continues_from_its_parent() {
        let whole = chain_of_tokens(&7.into(), &SCOPE, None, &[1, 2, 3, 4, 5], &[]);
        assert_eq!(whole.len(), 2);
        let rest = chain_of_tokens(&7.into(), &SCOPE, Some(whole[0]), &[3, 4], &[]);
        assert_eq!(rest, whole[1..]);
    }

    #[test]
    fn media_change_their_block_and_all_later_ones() {
        let plain = chain_of_tokens(&7.into(), &SCOPE, None, &[1, 2, 3, 4, 5, 6], &[]);
        let one = chain_of_tokens(
            &7.into(),
            &SCOPE,
            None,
            &[1, 2, 3, 4, 5, 6],
            &[None, Some(1)],
        );
        let other = chain_of_tokens(
            &7.into(),
            &SCOPE,
            None,
            &[1, 2, 3, 4, 5, 6],
            &[None, Some(2)],
        );
        assert_eq!(plain[0], one[0]);
        assert_eq!(one[0], other[0]);
        assert!((1..3).all(|at| plain[at] != one[at] && one[at] != other[at]));
    }
}
