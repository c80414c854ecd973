//! Digest of the replicated state. It leaves out empty parts that came after format version 1, so a
//! state that uses none of them keeps its version 1 digest.

use bincode::Encode;
use xxhash_rust::xxh3::xxh3_128;

use super::RouterState;
use crate::encoding;

/// Appends the canonical encoding of `part` unless it is the default.
fn append_unless_default<T: Encode + Default + PartialEq>(part: &T, bytes: &mut Vec<u8>) {
    if *part != T::default() {
        encoding::append_bytes(part, bytes);
    }
}

impl RouterState {
    /// Returns the digest of the whole replicated state, excluding the applied index itself. Large
    /// tables keep their digests up to date, so this takes microseconds.
    #[must_use]
    pub fn digest(&self) -> u128 {
        let [users, users_rest] = self.users.digest();
        let sessions = xxh3_128(&encoding::to_bytes(&self.sessions));
        let parts = [
            u128::from(self.time.now_ms),
            self.cold_digest,
            self.ownership.digest(),
            self.leases.digest(),
            users,
            users_rest,
            sessions,
        ];
        let mut bytes = Vec::with_capacity(16 * 16);
        for part in parts {
            bytes.extend(part.to_le_bytes());
        }
        self.append_hot_digest(&mut bytes);
        xxh3_128(&bytes)
    }

    /// Appends to the digest input the parts that change too often for the cold digest.
    fn append_hot_digest(&self, bytes: &mut Vec<u8>) {
        append_unless_default(&self.service, bytes);
        self.outputs.append_digest(bytes);
        if let Some(last_left) = self.users.last_left() {
            encoding::append_bytes(&last_left, bytes);
        }
        self.exact.append_digest(bytes);
        if let Some(staged) = &self.staged {
            staged.append_digest(bytes);
        }
        if let Some(paced) = &self.time.paced {
            encoding::append_bytes(paced, bytes);
        }
        append_unless_default(&self.ratios, bytes);
        append_unless_default(&self.assumed, bytes);
        append_unless_default(&self.beliefs, bytes);
        self.keys.append_digest(bytes);
        self.caches.append_digest(bytes);
        self.users.append_defaults_digest(bytes);
    }

    /// Returns the digest of the parts that change rarely.
    pub(super) fn hash_cold(&self) -> u128 {
        let mut bytes = encoding::to_bytes(&(&self.config, &self.backends, &self.audit));
        append_unless_default(&self.settings, &mut bytes);
        append_unless_default(&self.readers, &mut bytes);
        append_unless_default(&self.block_sizes, &mut bytes);
        append_unless_default(&self.discovered, &mut bytes);
        if let Some(secret) = &self.hash_secret {
            encoding::append_bytes(secret, &mut bytes);
        }
        xxh3_128(&bytes)
    }
}
