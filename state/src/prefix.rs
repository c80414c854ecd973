//! Prefix identity: from prompt bytes or token ids to chained block hashes.
//!
//! `h(0) = xxh3_64(block 0, seed = root(scope))`, `h(i) = xxh3_64(h(i-1) as little-endian ++ block i)`.
//! A last partial block is no block. Token ids are hashed as little-endian `u32`s.

use crate::ids::BlockHash;

/// What a hash chain is scoped to: equal text under different scopes never shares a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scope<'a> {
    /// Model id as the request names it.
    pub model: &'a str,
    /// LoRA adapter; empty for none.
    pub adapter: &'a str,
    /// The request's `cache_salt`; empty for none.
    pub salt: &'a str,
    /// Tokenizer name from the config.
    pub tokenizer: &'a str,
    /// Tokens (for `character`: bytes) per block.
    pub block_size: u32,
}

/// Seed of a chain's first block: the scope's fields under the cluster's `hash_seed`, each with its
/// length, so that no two scopes read alike.
#[must_use]
pub fn root(hash_seed: u64, scope: &Scope<'_>) -> u64 {
    let _ = (hash_seed, scope);
    unimplemented!("state helper")
}

/// Appends the hashes of the full blocks of `bytes` to `out`.
///
/// # Panics
/// When `block_size` is 0.
pub fn chain_bytes(root: u64, bytes: &[u8], block_size: usize, out: &mut Vec<BlockHash>) {
    let _ = (root, bytes, block_size, out);
    unimplemented!("state helper")
}

/// Appends the hashes of the full blocks of `tokens` to `out`.
///
/// # Panics
/// When `block_size` is 0.
pub fn chain_tokens(root: u64, tokens: &[u32], block_size: usize, out: &mut Vec<BlockHash>) {
    let _ = (root, tokens, block_size, out);
    unimplemented!("state helper")
}

/// How many blocks a prompt of `tokens` tokens can at most find in an engine's cache: the engine
/// always computes the last token anew.
#[must_use]
pub fn matchable_blocks(tokens: u64, block_size: u32) -> u64 {
    tokens.saturating_sub(1) / u64::from(block_size)
}
