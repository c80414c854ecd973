//! Prefix identity: from prompt bytes or token ids to chained block hashes.
//!
//! `h(0) = xxh3_64(block 0, seed = root(scope))`, `h(i) = xxh3_64(h(i-1) as little-endian ++ block i)`.
//! A last partial block is no block. Token ids are hashed as little-endian `u32`s.
//!
//! The link and the block are hashed as one short input from a stack buffer: the streaming hasher
//! costs more to set up than a usual block costs to hash. Only blocks above `INLINE_BYTES` stream.

use xxhash_rust::xxh3::{Xxh3, xxh3_64, xxh3_64_with_seed};

use crate::ids::{BlockHash, ModelKey, UserKey};

/// Largest block, in bytes, that is hashed from the stack.
const INLINE_BYTES: usize = 512;
/// Bytes of the link to the block before.
const LINK_BYTES: usize = 8;

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
    let mut hasher = Xxh3::with_seed(hash_seed);
    for field in [scope.model, scope.adapter, scope.salt, scope.tokenizer] {
        hasher.update(&(field.len() as u64).to_le_bytes());
        hasher.update(field.as_bytes());
    }
    hasher.update(&scope.block_size.to_le_bytes());
    hasher.digest()
}

/// A user's key: `xxh3_64` of the name, seeded with the cluster's `hash_seed`.
#[must_use]
pub fn user_key(hash_seed: u64, name: &str) -> UserKey {
    UserKey(xxh3_64_with_seed(name.as_bytes(), hash_seed))
}

/// A model's key: as [`user_key`], of its name.
#[must_use]
pub fn model_key(hash_seed: u64, name: &str) -> ModelKey {
    ModelKey(xxh3_64_with_seed(name.as_bytes(), hash_seed))
}

/// Appends the hashes of the full blocks of `bytes` to `out`.
///
/// # Panics
/// When `block_size` is 0.
pub fn chain_bytes(root: u64, bytes: &[u8], block_size: usize, out: &mut Vec<BlockHash>) {
    continue_bytes(root, None, bytes, block_size, out);
}

/// As [`chain_bytes`], for `bytes` that follow the block `last`; `None`: they are the first.
///
/// # Panics
/// When `block_size` is 0.
pub fn continue_bytes(
    root: u64,
    last: Option<BlockHash>,
    bytes: &[u8],
    block_size: usize,
    out: &mut Vec<BlockHash>,
) {
    assert!(block_size > 0, "block size is 0");
    out.reserve(bytes.len() / block_size);
    let mut link = last.map(|last| last.0);
    let mut buffer = [0_u8; LINK_BYTES + INLINE_BYTES];
    for block in bytes.chunks_exact(block_size) {
        let hash = match link {
            None => xxh3_64_with_seed(block, root),
            Some(link) if block_size <= INLINE_BYTES => {
                buffer[..LINK_BYTES].copy_from_slice(&u64::to_le_bytes(link));
                buffer[LINK_BYTES..LINK_BYTES + block_size].copy_from_slice(block);
                xxh3_64(&buffer[..LINK_BYTES + block_size])
            }
            Some(link) => {
                let mut hasher = Xxh3::new();
                hasher.update(&u64::to_le_bytes(link));
                hasher.update(block);
                hasher.digest()
            }
        };
        link = Some(hash);
        out.push(BlockHash(hash));
    }
}

/// Appends the hashes of the full blocks of `tokens` to `out`.
///
/// # Panics
/// When `block_size` is 0.
pub fn chain_tokens(root: u64, tokens: &[u32], block_size: usize, out: &mut Vec<BlockHash>) {
    continue_tokens(root, None, tokens, block_size, out);
}

/// As [`chain_tokens`], for `tokens` that follow the block `last`; `None`: they are the first.
///
/// # Panics
/// When `block_size` is 0.
pub fn continue_tokens(
    root: u64,
    last: Option<BlockHash>,
    tokens: &[u32],
    block_size: usize,
    out: &mut Vec<BlockHash>,
) {
    assert!(block_size > 0, "block size is 0");
    out.reserve(tokens.len() / block_size);
    let mut link = last.map(|last| last.0);
    let mut buffer = [0_u8; LINK_BYTES + INLINE_BYTES];
    for block in tokens.chunks_exact(block_size) {
        let hash = if block_size * 4 <= INLINE_BYTES {
            let end = LINK_BYTES + block_size * 4;
            for (to, token) in buffer[LINK_BYTES..end].chunks_exact_mut(4).zip(block) {
                to.copy_from_slice(&token.to_le_bytes());
            }
            match link {
                None => xxh3_64_with_seed(&buffer[LINK_BYTES..end], root),
                Some(link) => {
                    buffer[..LINK_BYTES].copy_from_slice(&u64::to_le_bytes(link));
                    xxh3_64(&buffer[..end])
                }
            }
        } else {
            stream_tokens(root, link, block)
        };
        link = Some(hash);
        out.push(BlockHash(hash));
    }
}

/// Hashes a block of tokens too long for the stack buffer.
fn stream_tokens(root: u64, link: Option<u64>, block: &[u32]) -> u64 {
    let mut hasher = match link {
        None => Xxh3::with_seed(root),
        Some(link) => {
            let mut hasher = Xxh3::new();
            hasher.update(&link.to_le_bytes());
            hasher
        }
    };
    for token in block {
        hasher.update(&token.to_le_bytes());
    }
    hasher.digest()
}

/// How many blocks a prompt of `tokens` tokens can at most find in an engine's cache: the engine
/// always computes the last token anew.
///
/// # Panics
/// When `block_size` is 0.
#[must_use]
pub fn matchable_blocks(tokens: u64, block_size: u32) -> u64 {
    tokens.saturating_sub(1) / u64::from(block_size)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SCOPE: Scope<'_> = Scope {
        model: "m",
        adapter: "",
        salt: "",
        tokenizer: "character",
        block_size: 4,
    };

    fn chain(root: u64, bytes: &[u8], block_size: usize) -> Vec<BlockHash> {
        let mut out = Vec::new();
        chain_bytes(root, bytes, block_size, &mut out);
        out
    }

    /// The definition, word for word.
    fn chain_by_definition(root: u64, bytes: &[u8], block_size: usize) -> Vec<BlockHash> {
        let mut out: Vec<BlockHash> = Vec::new();
        for block in bytes.chunks_exact(block_size) {
            let hash = match out.last() {
                None => xxh3_64_with_seed(block, root),
                Some(last) => xxh3_64(&[&last.0.to_le_bytes()[..], block].concat()),
            };
            out.push(BlockHash(hash));
        }
        out
    }

    proptest! {
        #[test]
        fn bytes_follow_the_definition(
            root: u64,
            bytes in prop::collection::vec(any::<u8>(), 0..3000),
            block_size in prop_oneof![1_usize..40, 500_usize..530, Just(2000)],
        ) {
            prop_assert_eq!(
                chain(root, &bytes, block_size),
                chain_by_definition(root, &bytes, block_size)
            );
        }

        #[test]
        fn tokens_hash_as_their_little_endian_bytes(
            root: u64,
            tokens in prop::collection::vec(any::<u32>(), 0..700),
            block_size in prop_oneof![1_usize..20, 120_usize..140, Just(300)],
        ) {
            let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
            let mut hashes = Vec::new();
            chain_tokens(root, &tokens, block_size, &mut hashes);
            prop_assert_eq!(&hashes, &chain_by_definition(root, &bytes, block_size * 4));
            let half = hashes.len() / 2;
            let mut in_parts = hashes[..half].to_vec();
            let last = in_parts.last().copied();
            continue_tokens(root, last, &tokens[half * block_size..], block_size, &mut in_parts);
            prop_assert_eq!(in_parts, hashes);
        }

        #[test]
        fn equal_prefixes_share_hashes_and_nothing_after_a_difference(
            prefix in prop::collection::vec(any::<u8>(), 0..64),
            left in prop::collection::vec(any::<u8>(), 8..64),
            right in prop::collection::vec(any::<u8>(), 8..64),
        ) {
            let text = [prefix.clone(), left].concat();
            let other = [prefix, right].concat();
            let (a, b) = (chain(7, &text, 8), chain(7, &other, 8));
            let same_bytes = text.iter().zip(&other).take_while(|(a, b)| a == b).count();
            let same_blocks = a.iter().zip(&b).take_while(|(a, b)| a == b).count();
            prop_assert_eq!(same_blocks, (same_bytes / 8).min(a.len()).min(b.len()));
        }
    }

    #[test]
    fn every_field_of_the_scope_changes_the_root() {
        let base = root(1, &SCOPE);
        let others = [
            root(2, &SCOPE),
            root(
                1,
                &Scope {
                    model: "n",
                    ..SCOPE
                },
            ),
            root(
                1,
                &Scope {
                    adapter: "a",
                    ..SCOPE
                },
            ),
            root(1, &Scope { salt: "a", ..SCOPE }),
            root(
                1,
                &Scope {
                    tokenizer: "engine",
                    ..SCOPE
                },
            ),
            root(
                1,
                &Scope {
                    block_size: 5,
                    ..SCOPE
                },
            ),
        ];
        assert!(others.iter().all(|other| *other != base));
        let moved = root(
            1,
            &Scope {
                model: "",
                adapter: "m",
                ..SCOPE
            },
        );
        assert_ne!(
            moved, base,
            "the same text in another field is another scope"
        );
    }

    #[test]
    fn hashes_never_change() {
        expect_test::expect![[r#"
            root cfcfe20d42c9defd
            user 7fb9c39591c12626
            [
                0414b7f10a548979,
                b53d32bf3ba80a24,
                0e7420b3a32df4d5,
                ec672c752c4d790f,
            ]
        "#]]
        .assert_eq(&format!(
            "root {:016x}\nuser {:016x}\n{:#?}\n",
            root(42, &SCOPE),
            user_key(42, "alice").0,
            chain(root(42, &SCOPE), b"the quick brown fox", 4)
        ));
    }

    #[test]
    fn the_last_token_is_never_matched() {
        let counts: Vec<u64> = [0, 1, 16, 17, 32, 33]
            .map(|tokens| matchable_blocks(tokens, 16))
            .to_vec();
        assert_eq!(counts, [0, 0, 0, 1, 1, 2]);
    }
}
