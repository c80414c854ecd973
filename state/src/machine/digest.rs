//! Digest of the replicated state.

use xxhash_rust::xxh3::xxh3_128;

use super::RouterState;
use crate::encoding;

impl RouterState {
    /// Returns the digest of the whole replicated state, excluding the applied index itself. Large
    /// tables keep their digests up to date, so this takes microseconds.
    #[must_use]
    pub fn digest(&self) -> u128 {
        let [users, users_rest] = self.users.digest();
        let sessions = xxh3_128(&encoding::to_bytes(&self.sessions));
        let [usage, usage_sources, usage_totals] = self.usage.digest();
        let parts = [
            self.cold_digest,
            self.ownership.digest(),
            self.leases.digest(),
            users,
            users_rest,
            sessions,
            self.trees.digest(),
            self.streams.digest(),
            usage,
            usage_sources,
            usage_totals,
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
        let learned = (&self.service, &self.assumed, &self.beliefs, &self.ratios);
        encoding::append_bytes(&learned, bytes);
        encoding::append_bytes(&self.capacity, bytes);
        encoding::append_bytes(&self.time, bytes);
        self.outputs.append_digest(bytes);
        self.exact.append_digest(bytes);
        self.keys.append_digest(bytes);
        if let Some(staged) = &self.staged {
            staged.append_digest(bytes);
        }
    }

    /// Returns the digest of the parts that change rarely.
    pub(super) fn hash_cold(&self) -> u128 {
        let config = (&self.config, &self.settings);
        let backends = (&self.backends, &self.discovered, &self.block_sizes);
        let parts = (config, backends, &self.readers, &self.audit);
        xxh3_128(&encoding::to_bytes(&parts))
    }
}
