//! Prefix identity: from prompt bytes or token ids to chained block hashes.
//!
//! Under the cluster's secret, `h(i) = xxh3_64(link ++ block i)`. The link is `h(i-1)` as
//! little-endian, and the hash of the scope for the first block. A trailing partial block is
//! dropped. Token ids are hashed as little-endian `u32`s.
//!
//! The link and the block are hashed as one short input from a stack buffer, because the streaming
//! hasher costs more to set up than a typical block costs to hash. Only blocks above `INLINE_BYTES`
//! stream.

mod hashing;

use xxhash_rust::xxh3::xxh3_64_with_seed;

pub use self::hashing::{BlockHasher, ChainRoot, HashSecret, SECRET_BYTES};
use crate::ids::{BlockHash, ModelKey, UserKey};

/// Size of the largest block that is hashed from the stack, in bytes.
const INLINE_BYTES: usize = 512;
/// Length of the link to the previous block, in bytes.
const LINK_BYTES: usize = 8;

/// Scope of a hash chain. Equal text in different scopes never shares a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scope<'a> {
    /// Model id as in the request.
    pub model: &'a str,
    /// Name of the LoRA adapter; empty if none.
    pub adapter: &'a str,
    /// The request's `cache_salt`; empty if none.
    pub salt: &'a str,
    /// Name of the tokenizer in the config file.
    pub tokenizer: &'a str,
    /// Block size in tokens; in bytes for the tokenizer `character`.
    pub block_size: u32,
}

/// Returns a user's key: `xxh3_64` of the name, seeded with the cluster's `hash_seed`.
#[must_use]
pub fn user_key(hash_seed: u64, name: &str) -> UserKey {
    UserKey(xxh3_64_with_seed(name.as_bytes(), hash_seed))
}

/// Returns a model's key: `xxh3_64` of the name, seeded with the cluster's `hash_seed`.
#[must_use]
pub fn model_key(hash_seed: u64, name: &str) -> ModelKey {
    ModelKey(xxh3_64_with_seed(name.as_bytes(), hash_seed))
}

/// Appends the hashes of the full blocks of `bytes` to `out`.
///
/// # Panics
/// Panics if `block_size` is 0.
pub fn chain_bytes(root: &ChainRoot, bytes: &[u8], block_size: usize, out: &mut Vec<BlockHash>) {
    continue_bytes(root, None, bytes, block_size, out);
}

/// Appends the hashes of the full blocks of `bytes` to `out`. The bytes follow the block `last`, or
/// start a chain if it is `None`.
///
/// # Panics
/// Panics if `block_size` is 0.
pub fn continue_bytes(
    root: &ChainRoot,
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
        let hash = if block_size <= INLINE_BYTES {
            let inline = &mut buffer[..LINK_BYTES + block_size];
            inline[LINK_BYTES..].copy_from_slice(block);
            root.inline(link, inline)
        } else {
            let mut hasher = root.streaming(link);
            hasher.update(block);
            hasher.digest()
        };
        link = Some(hash);
        out.push(BlockHash(hash));
    }
}

/// Appends the hashes of the full blocks of `tokens` to `out`.
///
/// # Panics
/// Panics if `block_size` is 0.
pub fn chain_tokens(root: &ChainRoot, tokens: &[u32], block_size: usize, out: &mut Vec<BlockHash>) {
    continue_tokens(root, None, tokens, block_size, out);
}

/// Appends the hashes of the full blocks of `tokens` to `out`. The tokens follow the block `last`,
/// or start a chain if it is `None`.
///
/// # Panics
/// Panics if `block_size` is 0.
pub fn continue_tokens(
    root: &ChainRoot,
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
            let inline = &mut buffer[..LINK_BYTES + block_size * 4];
            for (to, token) in inline[LINK_BYTES..].chunks_exact_mut(4).zip(block) {
                to.copy_from_slice(&token.to_le_bytes());
            }
            root.inline(link, inline)
        } else {
            let mut hasher = root.streaming(link);
            for token in block {
                hasher.update(&token.to_le_bytes());
            }
            hasher.digest()
        };
        link = Some(hash);
        out.push(BlockHash(hash));
    }
}

/// Returns the maximum number of prompt blocks that an engine can find in its cache, for a prompt
/// of `tokens` tokens. The engine always recomputes the last token.
///
/// # Panics
/// Panics if `block_size` is 0.
#[must_use]
pub fn matchable_blocks(tokens: u64, block_size: u32) -> u64 {
    tokens.saturating_sub(1) / u64::from(block_size)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_secret};

    use super::*;

    const SCOPE: Scope<'_> = Scope {
        model: "m",
        adapter: "",
        salt: "",
        tokenizer: "character",
        block_size: 4,
    };

    fn chain(root: &ChainRoot, bytes: &[u8], block_size: usize) -> Vec<BlockHash> {
        let mut out = Vec::new();
        chain_bytes(root, bytes, block_size, &mut out);
        out
    }

    fn root(seed: u64, scope: &Scope<'_>) -> ChainRoot {
        BlockHasher::from(seed).root(scope)
    }

    /// Computes a chain by the definition in the module documentation, written out literally.
    fn chain_by_definition(
        scope: u64,
        secret: &HashSecret,
        bytes: &[u8],
        block_size: usize,
    ) -> Vec<BlockHash> {
        let mut out: Vec<BlockHash> = Vec::new();
        for block in bytes.chunks_exact(block_size) {
            let link = out.last().map_or(scope, |last| last.0);
            let linked = [&link.to_le_bytes()[..], block].concat();
            out.push(BlockHash(xxh3_64_with_secret(&linked, secret.key_bytes())));
        }
        out
    }

    proptest! {
        #[test]
        fn block_hashes_follow_the_definition(
            scope: u64,
            bytes in prop::collection::vec(any::<u8>(), 0..3000),
            block_size in prop_oneof![1_usize..40, 500_usize..530, Just(2000)],
        ) {
            let secret = HashSecret::of_number(scope);
            prop_assert_eq!(
                chain(&ChainRoot::new(scope, secret.clone()), &bytes, block_size),
                chain_by_definition(scope, &secret, &bytes, block_size)
            );
        }

        #[test]
        fn tokens_hash_as_little_endian_bytes(
            scope: u64,
            tokens in prop::collection::vec(any::<u32>(), 0..700),
            block_size in prop_oneof![1_usize..20, 120_usize..140, Just(300)],
        ) {
            let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
            let secret = HashSecret::of_number(scope);
            let root = ChainRoot::new(scope, secret.clone());
            let mut hashes = Vec::new();
            chain_tokens(&root, &tokens, block_size, &mut hashes);
            let expected = chain_by_definition(scope, &secret, &bytes, block_size * 4);
            prop_assert_eq!(&hashes, &expected);
            let half = hashes.len() / 2;
            let mut in_parts = hashes[..half].to_vec();
            let last = in_parts.last().copied();
            let rest = &tokens[half * block_size..];
            continue_tokens(&root, last, rest, block_size, &mut in_parts);
            prop_assert_eq!(in_parts, hashes);
        }

        #[test]
        fn chains_share_hashes_up_to_the_first_difference(
            prefix in prop::collection::vec(any::<u8>(), 0..64),
            left in prop::collection::vec(any::<u8>(), 8..64),
            right in prop::collection::vec(any::<u8>(), 8..64),
        ) {
            let text = [prefix.clone(), left].concat();
            let other = [prefix, right].concat();
            let root = root(7, &SCOPE);
            let (a, b) = (chain(&root, &text, 8), chain(&root, &other, 8));
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
    fn hashes_have_golden_values() {
        expect_test::expect![[r#"
            user 7fb9c39591c12626
            [
                f5ca78ad0d29dfca,
                f0d73541d4c05fd4,
                bd71516c3e879a98,
                f3b9d806e05f6344,
            ]
        "#]]
        .assert_eq(&format!(
            "user {:016x}\n{:#?}\n",
            user_key(42, "alice").0,
            chain(&root(42, &SCOPE), b"the quick brown fox", 4)
        ));
    }

    /// Under XXH3's public secret, anyone can construct a block that collides with another one behind any
    /// link. For this length, XXH3 hashes each 16 bytes as a product of two words, each XORed with
    /// a word of the secret; with the public secret the factors can be swapped.
    #[test]
    fn blocks_that_collide_under_the_public_secret_differ_under_a_clusters() {
        // The beginning of XXH3's default secret.
        let public: [u8; 48] = [
            0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21,
            0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4,
            0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a,
            0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
        ];
        let word = |at: usize| u64::from_le_bytes(public[at..at + 8].try_into().unwrap());
        // The second lane of link ++ block: bytes 16..32, under bytes 16..32 of the secret.
        let swap = word(16) ^ word(24);
        let block = [b'a'; 128];
        let mut other = block;
        let lane = 16 - LINK_BYTES;
        let (low, high) = (&block[lane..lane + 8], &block[lane + 8..lane + 16]);
        let low = u64::from_le_bytes(low.try_into().unwrap());
        let high = u64::from_le_bytes(high.try_into().unwrap());
        other[lane..lane + 8].copy_from_slice(&(high ^ swap).to_le_bytes());
        other[lane + 8..lane + 16].copy_from_slice(&(low ^ swap).to_le_bytes());
        assert_ne!(block, other);
        for link in [0, 1, u64::MAX, 0x0414_b7f1_0a54_8979] {
            let public = |block: &[u8]| xxh3_64(&[&link.to_le_bytes()[..], block].concat());
            assert_eq!(public(&block), public(&other), "behind any link");
        }
        let prompt = |block: &[u8]| [&[b'x'; 128], block].concat();
        for seed in 0..100 {
            let second = |block| chain(&root(seed, &SCOPE), &prompt(block), 128)[1];
            assert_ne!(second(&block), second(&other));
        }
    }

    #[test]
    fn the_last_token_is_never_matched() {
        let counts: Vec<u64> = [0, 1, 16, 17, 32, 33]
            .map(|tokens| matchable_blocks(tokens, 16))
            .to_vec();
        assert_eq!(counts, [0, 0, 0, 1, 1, 2]);
    }
}
