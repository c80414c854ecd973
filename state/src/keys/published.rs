//! API keys for readers on other threads: one immutable image, replaced when a key changes.

use std::sync::Arc;

use super::maps::{KeysById, KeysBySecret};
use super::{ApiKey, SecretHash};
use crate::cow::CowMap;
use crate::ids::ApiKeyId;

/// All API keys, as of the last command that changed one.
#[derive(Debug, Clone)]
pub struct KeysView {
    by_id: KeysById,
    by_secret: KeysBySecret,
}

/// Result of looking up a secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FoundKey {
    /// The secret is valid for this key.
    Live(Arc<ApiKey>),
    /// The key has expired, or the secret is a former one whose grace period is over.
    Expired,
    /// No key has this secret, for example because its key was revoked.
    Unknown,
}

impl Default for KeysView {
    fn default() -> Self {
        Self::of(CowMap::new(), CowMap::new())
    }
}

impl KeysView {
    pub(super) fn of(by_id: KeysById, by_secret: KeysBySecret) -> Self {
        Self { by_id, by_secret }
    }

    /// Returns the number of keys.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Whether the view has no keys.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Finds the key of `secret` at the time `calendar_ms` of the cluster's clock.
    #[must_use]
    pub fn find(&self, secret: &SecretHash, calendar_ms: u64) -> FoundKey {
        let id = self.by_secret.get(secret);
        match id.and_then(|id| self.by_id.get(id)) {
            Some(key) if key.accepts(secret, calendar_ms) => FoundKey::Live(Arc::clone(key)),
            Some(_) => FoundKey::Expired,
            None => FoundKey::Unknown,
        }
    }

    /// Returns the key with this id, if any.
    #[must_use]
    pub fn get(&self, id: ApiKeyId) -> Option<&Arc<ApiKey>> {
        self.by_id.get(&id)
    }

    /// Iterates over the keys with ids above `after`, in ascending order of ids. `None` starts at
    /// the first key.
    pub fn after(&self, after: Option<ApiKeyId>) -> impl Iterator<Item = &Arc<ApiKey>> {
        let keys = self.by_id.iter_from(after.unwrap_or_default());
        keys.filter(move |(id, _)| after.is_none_or(|after| **id > after))
            .map(|(_, key)| key)
    }

    pub(super) fn are(&self, by_id: &KeysById, by_secret: &KeysBySecret) -> bool {
        self.by_id.iter().eq(by_id.iter()) && self.by_secret.iter().eq(by_secret.iter())
    }
}
