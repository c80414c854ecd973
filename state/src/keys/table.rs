//! The table of API keys, indexed by id and by secret. Both indexes are frozen and published by
//! cloning references.

use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_128;

use super::maps::{KeysById, KeysBySecret};
use super::{
    API_KEYS_MAX, ApiKey, ApiKeySpec, FormerSecret, GRACE_MS_MAX, KeysView, RevokedKeys, SecretHash,
};
use crate::cow::CowMap;
use crate::encoding;
use crate::ids::ApiKeyId;
use crate::reject::Rejection;
use crate::validate::ensure;

/// Maximum number of keys in one section of a snapshot.
const KEYS_PER_PIECE: usize = 4096;

/// All API keys, and the revoked ones that are remembered.
pub(crate) struct Keys {
    by_id: KeysById,
    by_secret: KeysBySecret,
    /// Revoked keys that a restore must not bring back.
    revoked: RevokedKeys,
    /// Wrapping sum of the keys' hashes.
    digest: u128,
    keys_max: usize,
    /// Whether a key changed since the last [`Keys::publish`].
    is_changed: bool,
}

/// Frozen copy of the keys, for a snapshot.
pub(crate) struct KeysImage(KeysById);

impl Default for Keys {
    fn default() -> Self {
        Self::with_max(API_KEYS_MAX)
    }
}

impl Keys {
    /// Creates an empty table for at most `keys_max` keys.
    pub(super) fn with_max(keys_max: usize) -> Self {
        Self {
            by_id: CowMap::new(),
            by_secret: CowMap::new(),
            revoked: RevokedKeys::with_max(keys_max),
            digest: 0,
            keys_max,
            is_changed: false,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Returns the wrapping sum of the keys' hashes.
    #[cfg(test)]
    pub(super) fn digest(&self) -> u128 {
        self.digest
    }

    /// Appends the digests of the keys and revoked keys to the digest input.
    pub(crate) fn append_digest(&self, bytes: &mut Vec<u8>) {
        encoding::append_bytes(&(self.digest, self.revoked.digest()), bytes);
    }

    /// Returns the revoked keys that are remembered.
    pub(crate) fn revoked(&self) -> &RevokedKeys {
        &self.revoked
    }

    pub(crate) fn get(&self, id: ApiKeyId) -> Option<&Arc<ApiKey>> {
        self.by_id.get(&id)
    }

    /// Adds a key. If the table is full, removes the expired key with the earliest expiry.
    ///
    /// # Errors
    /// If `spec` is invalid or has expired, its id or secret is taken, or the table is full.
    pub(crate) fn create(&mut self, spec: ApiKeySpec, calendar_ms: u64) -> Result<(), Rejection> {
        spec.validate()?;
        ensure(
            spec.expires_at_ms.is_none_or(|at| at > calendar_ms),
            "expires_at",
            "a time to come",
        )?;
        let is_taken = self.by_id.get(&spec.id).is_some() || self.revoked.contains(spec.id);
        if is_taken || self.by_secret.get(&spec.secret).is_some() {
            return Err(Rejection::KeyTaken { id: spec.id });
        }
        if self.by_id.len() >= self.keys_max {
            let expired = self.first_expired(calendar_ms);
            self.remove(expired.ok_or(Rejection::TooManyKeys)?);
        }
        self.put(ApiKey {
            spec,
            created_at_ms: calendar_ms,
            rotated_at_ms: None,
            former: None,
        });
        Ok(())
    }

    /// Removes a key, or returns [`Rejection::UnknownKey`]. No restore brings it back.
    pub(crate) fn revoke(&mut self, id: ApiKeyId, calendar_ms: u64) -> Result<(), Rejection> {
        if self.remove(id).is_none() {
            return Err(Rejection::UnknownKey { id });
        }
        self.revoked.insert(id, calendar_ms);
        Ok(())
    }

    /// Carries over what has ended in `current`, the table that these restored keys replace:
    /// removes the keys that were revoked there, and takes from there the keys that were rotated
    /// since.
    pub(crate) fn keep_revocations(&mut self, current: &Self) {
        for (id, at_ms) in current.revoked.iter() {
            self.remove(id);
            self.revoked.insert(id, at_ms);
        }
        for (id, key) in current.by_id.iter() {
            let is_later = |own: &Arc<ApiKey>| own.rotated_at_ms <= key.rotated_at_ms;
            if !self.by_id.get(id).is_some_and(is_later) {
                continue;
            }
            self.remove(*id);
            if self.is_free(key) {
                self.put(ApiKey::clone(key));
            }
        }
    }

    /// Gives a key a new secret. The current one stays valid for `grace_ms`; any earlier one ends.
    ///
    /// # Errors
    /// If `grace_ms` is out of bounds, the key is unknown or expired, or the secret is taken.
    pub(crate) fn rotate(
        &mut self,
        id: ApiKeyId,
        secret: SecretHash,
        grace_ms: u64,
        calendar_ms: u64,
    ) -> Result<(), Rejection> {
        ensure(grace_ms <= GRACE_MS_MAX, "grace", "30 days at most")?;
        let Some(key) = self.by_id.get(&id) else {
            return Err(Rejection::UnknownKey { id });
        };
        ensure(
            !key.is_expired(calendar_ms),
            "id",
            "a key that has not expired",
        )?;
        if self.by_secret.get(&secret).is_some() {
            return Err(Rejection::KeyTaken { id });
        }
        let mut key = ApiKey::clone(key);
        self.remove(id);
        key.former = (grace_ms > 0).then(|| FormerSecret {
            secret: key.spec.secret,
            until_ms: calendar_ms.saturating_add(grace_ms),
        });
        key.spec.secret = secret;
        key.rotated_at_ms = Some(calendar_ms);
        self.put(key);
        Ok(())
    }

    /// Returns a view of the keys for readers on other threads.
    pub(crate) fn view(&self) -> KeysView {
        KeysView::of(self.by_id.clone(), self.by_secret.clone())
    }

    /// Returns a view of the keys if they changed since the last call.
    pub(crate) fn publish(&mut self) -> Option<KeysView> {
        std::mem::take(&mut self.is_changed).then(|| self.view())
    }

    /// Marks the keys as changed, so that the next command publishes them.
    pub(crate) fn replaced(&mut self) {
        self.is_changed = true;
    }

    pub(crate) fn freeze(&self) -> KeysImage {
        KeysImage(self.by_id.clone())
    }

    /// Adds the keys of one section of a snapshot. An error describes the fault.
    pub(crate) fn restore_piece(&mut self, bytes: &[u8]) -> Result<(), String> {
        type Piece = Vec<ApiKey>;
        for key in encoding::from_bytes::<Piece, { encoding::SECTION_BYTES_MAX }>(bytes)? {
            let id = key.spec.id;
            key.spec
                .validate()
                .map_err(|reject| format!("key {id}: {reject}"))?;
            if !self.is_free(&key) || self.by_id.len() >= self.keys_max {
                return Err(format!("key {id} stands twice, or is one too many"));
            }
            self.put(key);
        }
        Ok(())
    }

    /// Adds the revoked keys of one section, after all keys. An error describes the fault.
    pub(crate) fn restore_revoked(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.revoked.restore_piece(bytes)?;
        match self.revoked.iter().find(|(id, _)| self.get(*id).is_some()) {
            Some((id, _)) => Err(format!("key {id} was revoked and is there")),
            None => Ok(()),
        }
    }

    /// Whether the id of `key` is neither taken nor revoked, and its secrets are not taken.
    fn is_free(&self, key: &ApiKey) -> bool {
        let id = key.spec.id;
        let mut secrets = key.secrets();
        self.by_id.get(&id).is_none()
            && !self.revoked.contains(id)
            && secrets.all(|secret| self.by_secret.get(&secret).is_none())
    }

    /// Whether `view` shows exactly these keys.
    pub(crate) fn are(&self, view: &KeysView) -> bool {
        view.are(&self.by_id, &self.by_secret)
    }

    /// Checks I100: both indexes, the digest and the revoked keys agree with the keys.
    ///
    /// # Errors
    /// Describes the first violation.
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut rebuilt = Self::with_max(self.keys_max);
        for (id, key) in self.by_id.iter() {
            if key.spec.id != *id {
                return Err(format!("key {} stands at {id}", key.spec.id));
            }
            if self.revoked.contains(*id) {
                return Err(format!("key {id} was revoked and is there"));
            }
            let mut secrets = key.secrets();
            if secrets.any(|secret| rebuilt.by_secret.get(&secret).is_some()) {
                return Err(format!("a secret of key {id} leads to another key, too"));
            }
            rebuilt.put(ApiKey::clone(key));
        }
        if rebuilt.by_id.len() != self.by_id.len() || self.by_id.len() > self.keys_max {
            return Err(format!("{} keys are counted", self.by_id.len()));
        }
        if !rebuilt.by_secret.iter().eq(self.by_secret.iter()) {
            return Err("the index of secrets differs from the keys".to_owned());
        }
        if !self.revoked.is_sound() {
            return Err("the revoked keys differ from their digest".to_owned());
        }
        if rebuilt.digest != self.digest {
            return Err("the digest of keys differs from the keys".to_owned());
        }
        Ok(())
    }

    /// Returns the id of the expired key with the earliest expiry, if any.
    fn first_expired(&self, calendar_ms: u64) -> Option<ApiKeyId> {
        let keys = self.by_id.iter();
        let expired = keys.filter(|(_, key)| key.is_expired(calendar_ms));
        let first = expired.min_by_key(|(id, key)| (key.spec.expires_at_ms, **id));
        first.map(|(id, _)| *id)
    }

    /// Adds a key whose id and secrets are not taken.
    fn put(&mut self, key: ApiKey) {
        self.is_changed = true;
        self.digest = self.digest.wrapping_add(hash(&key));
        let id = key.spec.id;
        for secret in key.secrets() {
            self.by_secret.insert_new(secret, id);
        }
        self.by_id.insert_new(id, Arc::new(key));
    }

    fn remove(&mut self, id: ApiKeyId) -> Option<Arc<ApiKey>> {
        let key = self.by_id.remove(&id)?;
        self.is_changed = true;
        self.digest = self.digest.wrapping_sub(hash(&key));
        for secret in key.secrets() {
            self.by_secret.remove(&secret);
        }
        Some(key)
    }
}

impl KeysImage {
    /// Encodes all keys in sections of bounded size. Yields none if there are no keys.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Vec<u8>> {
        encoding::pieces(self.0.iter().map(|(_, key)| &**key), KEYS_PER_PIECE)
    }
}

fn hash(key: &ApiKey) -> u128 {
    xxh3_128(&encoding::to_bytes(key))
}
