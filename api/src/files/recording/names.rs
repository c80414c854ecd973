//! The ids that replace names in recordings.

use sha2::{Digest, Sha256};
use state::ids::{AgentSessionKey, BlockHash};
use state::prefix::BlockHasher;

use super::BlockId;

/// Prefix of the hashed bytes, for domain separation.
const LABEL: &[u8] = b"quorate recording 1";

/// Key under which names are hashed to ids: a hash of the cluster's secret and the recording's
/// salt, the same on all replicas.
pub struct RecordingNames([u8; 32]);

impl RecordingNames {
    /// Derives the key for a recording with this salt.
    #[must_use]
    pub fn new(hashing: &BlockHasher, salt: &str) -> Self {
        let key = Sha256::new()
            .chain_update(LABEL)
            .chain_update(hashing.seed.to_le_bytes())
            .chain_update(hashing.secret.key_bytes());
        Self(key.chain_update(salt).finalize().into())
    }

    /// Returns the id of a user.
    #[must_use]
    pub fn user(&self, name: &str) -> String {
        format!("{:016x}", self.hash(b'u', name.as_bytes()))
    }

    /// Returns the id of a cache scope.
    #[must_use]
    pub fn tenant(&self, name: &str) -> String {
        format!("{:016x}", self.hash(b't', name.as_bytes()))
    }

    /// Returns the id of an agent's session.
    #[must_use]
    pub fn session(&self, session: AgentSessionKey) -> String {
        format!("{:016x}", self.hash(b's', &session.0.to_le_bytes()))
    }

    /// Returns the id of a model that the cluster does not serve.
    #[must_use]
    pub fn model(&self, name: &str) -> String {
        format!("unknown-{:016x}", self.hash(b'm', name.as_bytes()))
    }

    /// Returns the id of a block together with all before it.
    #[must_use]
    pub fn block(&self, block: BlockHash) -> BlockId {
        BlockId(self.hash(b'b', &block.0.to_le_bytes()))
    }

    fn hash(&self, kind: u8, bytes: &[u8]) -> u64 {
        let hash = Sha256::new()
            .chain_update(self.0)
            .chain_update([kind])
            .chain_update(bytes);
        let hash: [u8; 32] = hash.finalize().into();
        let (first, _) = hash.split_first_chunk().expect("32 bytes are more than 8");
        u64::from_le_bytes(*first)
    }
}
