//! Maps of API keys that are cloned by reference.

use std::sync::Arc;

use super::{ApiKey, SecretHash};
use crate::cow::{CowMap, PathKey};
use crate::ids::ApiKeyId;

/// Map from ids to keys.
pub(super) type KeysById = CowMap<ApiKeyId, Arc<ApiKey>>;
/// Map from the current and former secrets to the ids of their keys.
pub(super) type KeysBySecret = CowMap<SecretHash, ApiKeyId>;

impl PathKey for ApiKeyId {
    // Ids are random.
    fn path(&self) -> u64 {
        self.0
    }
}

impl PathKey for SecretHash {
    fn path(&self) -> u64 {
        let (first, _) = self.0.split_first_chunk().expect("a hash has 32 bytes");
        u64::from_be_bytes(*first)
    }
}
