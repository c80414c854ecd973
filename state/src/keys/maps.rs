//! Maps of API keys that are cloned by reference.

use std::sync::Arc;

use super::{ApiKey, SecretHash};
use crate::cow::{CowMap, ShardKey};
use crate::ids::ApiKeyId;

/// Map from ids to keys.
pub(super) type KeysById = CowMap<ApiKeyId, Arc<ApiKey>>;
/// Map from the current and former secrets to the ids of their keys.
pub(super) type KeysBySecret = CowMap<SecretHash, ApiKeyId>;

impl ShardKey for ApiKeyId {
    const BRANCHES: usize = 16;

    // The highest bits select the shard, so that shard order is key order. Ids are random.
    fn shard(&self) -> usize {
        (self.0 >> 54) as usize
    }
}

impl ShardKey for SecretHash {
    const BRANCHES: usize = 16;

    fn shard(&self) -> usize {
        usize::from(u16::from_be_bytes([self.0[0], self.0[1]]) >> 6)
    }
}
