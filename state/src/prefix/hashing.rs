//! The cluster's hash seed and hash secret. Anyone who knows the secret can construct colliding
//! blocks.
//!
//! The seed goes into user and model keys and into the first link of every chain. The secret goes
//! into every block. With a seed alone, all blocks but the first would be hashed in a publicly known
//! way, and colliding blocks could be constructed for any seed (ADR 0016).

use std::fmt;
use std::sync::Arc;

use bincode::{Decode, Encode};
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_secret, xxh3_64_with_seed};

use super::{LINK_BYTES, Scope};

/// Length of the secret, in bytes: the longest that XXH3 accepts unmodified.
pub const SECRET_BYTES: usize = 192;

/// Secret that goes into every block hash. It is as random as the founding replica could make it,
/// and is never shown.
#[derive(Clone, PartialEq, Eq, Encode, Decode)]
pub struct HashSecret(Arc<[u8; SECRET_BYTES]>);

impl HashSecret {
    /// Creates a secret from `bytes`.
    #[must_use]
    pub fn new(bytes: [u8; SECRET_BYTES]) -> Self {
        Self(Arc::new(bytes))
    }

    /// Creates a secret for tests and simulations from `number`. Anyone who knows the number knows
    /// the secret.
    #[must_use]
    pub fn of_number(number: u64) -> Self {
        let mut bytes = [0; SECRET_BYTES];
        for (word, at) in bytes.chunks_exact_mut(8).zip(0_u64..) {
            word.copy_from_slice(&xxh3_64_with_seed(&at.to_le_bytes(), number).to_le_bytes());
        }
        Self::new(bytes)
    }

    /// Returns the secret as a key for cryptographic hashes. Never show it.
    #[must_use]
    pub fn key_bytes(&self) -> &[u8; SECRET_BYTES] {
        &self.0
    }

    /// Hashes `text` under the secret. Used for names that must not be guessable.
    #[must_use]
    pub fn hash(&self, text: &[u8]) -> u64 {
        xxh3_64_with_secret(text, &*self.0)
    }
}

impl Default for HashSecret {
    /// Returns the known secret of a replica whose cluster is not founded yet.
    fn default() -> Self {
        Self::new([0; SECRET_BYTES])
    }
}

impl fmt::Debug for HashSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HashSecret(..)")
    }
}

/// A cluster's hash seed and hash secret.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BlockHasher {
    /// Seed of user keys, model keys and the first links of chains.
    pub seed: u64,
    /// Secret that goes into every block hash.
    pub secret: HashSecret,
}

impl From<u64> for BlockHasher {
    /// Creates a hasher for tests and simulations: see [`HashSecret::of_number`].
    fn from(seed: u64) -> Self {
        let secret = HashSecret::of_number(seed);
        Self { seed, secret }
    }
}

impl BlockHasher {
    /// Returns the root of the chains of `scope`. Hashes the scope's fields under the seed, each
    /// prefixed with its length, so that no two scopes produce the same input.
    #[must_use]
    pub fn root(&self, scope: &Scope<'_>) -> ChainRoot {
        let mut hasher = Xxh3::with_seed(self.seed);
        for field in [scope.model, scope.adapter, scope.salt, scope.tokenizer] {
            hasher.update(&(field.len() as u64).to_le_bytes());
            hasher.update(field.as_bytes());
        }
        hasher.update(&scope.block_size.to_le_bytes());
        ChainRoot {
            scope: hasher.digest(),
            secret: self.secret.clone(),
        }
    }
}

/// Start of the hash chains of one scope: the hash of the scope, and the cluster's secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChainRoot {
    scope: u64,
    secret: HashSecret,
}

impl ChainRoot {
    #[cfg(test)]
    pub(crate) fn new(scope: u64, secret: HashSecret) -> Self {
        Self { scope, secret }
    }

    /// Hashes `bytes` that do not fill a block.
    #[must_use]
    pub fn partial(&self, bytes: &[u8]) -> u64 {
        xxh3_64_with_seed(bytes, self.scope)
    }

    /// Hashes the block in `buffer`, which has room for `link` in front of it. `link` is the hash
    /// of the previous block, or `None` for a first block.
    #[inline]
    pub(super) fn inline(&self, link: Option<u64>, buffer: &mut [u8]) -> u64 {
        let link = link.unwrap_or(self.scope);
        buffer[..LINK_BYTES].copy_from_slice(&link.to_le_bytes());
        xxh3_64_with_secret(buffer, &*self.secret.0)
    }

    /// Returns a hasher that has already consumed `link` (`None` for a first block), for a block
    /// too long for the stack.
    pub(super) fn streaming(&self, link: Option<u64>) -> Xxh3 {
        let mut hasher = Xxh3::with_secret(*self.secret.0);
        hasher.update(&link.unwrap_or(self.scope).to_le_bytes());
        hasher
    }
}
