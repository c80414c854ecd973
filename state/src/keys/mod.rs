//! API keys of the data plane: which users, models and paths a client may use.
//!
//! The replica that creates a key draws its secret and returns it once. Commands only carry a keyed
//! hash of it ([`SecretHash`]), so no log, snapshot or backup holds a secret (ADR 0014). A rotation
//! gives a key a new secret and keeps the former one valid for a grace period.
//!
//! Keys expire by the cluster's clock, the median of its members' clocks
//! (`node/src/app/clocks.rs`). It stamps commands and advances while none are written. An expired
//! key stays in the table: it is rejected, and makes room when the table is full.

mod maps;
mod published;
mod revoked;
mod table;
#[cfg(test)]
mod tests;

use std::fmt;

use bincode::{Decode, Encode};

use crate::ids::ApiKeyId;
use crate::reject::Rejection;
use crate::validate::{PATTERNS_BYTES_MAX, ensure, is_name, stands_for};

pub use crate::bounds::API_KEYS_MAX;
pub use published::{FoundKey, KeysView};
pub(crate) use revoked::RevokedKeys;
pub(crate) use table::{Keys, KeysImage};

/// Maximum total length of the models and scopes of one key, in bytes.
pub const API_KEY_LISTS_BYTES_MAX: usize = PATTERNS_BYTES_MAX;
/// Maximum grace period for the former secret after a rotation, in milliseconds: 30 days.
pub const GRACE_MS_MAX: u64 = 30 * 24 * 60 * 60 * 1000;

/// Latest allowed expiry of a key, as Unix time in milliseconds: the end of the year 9999.
pub const EXPIRY_MS_MAX: u64 = 253_402_300_799_000;

/// Keyed hash of an API key's secret. The state can compare it but not compute it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Encode, Decode)]
pub struct SecretHash(pub [u8; 32]);

impl fmt::Debug for SecretHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretHash(..)")
    }
}

/// Description of an API key, as requested by an operator.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub struct ApiKeySpec {
    /// Id of the key, drawn at random by the replica that received the request.
    pub id: ApiKeyId,
    /// Hash of the current secret.
    pub secret: SecretHash,
    /// Name of the key, for display.
    pub name: String,
    /// User to whom requests with this key belong.
    pub user: String,
    /// Time at which the key expires, as Unix time in milliseconds. `None` if it never does.
    pub expires_at_ms: Option<u64>,
    /// Models that the key may use; a trailing `*` matches any suffix. Empty if it may use all.
    pub models: Vec<String>,
    /// Paths that the key may use; a trailing `*` matches any suffix. Empty if it may use all.
    pub scopes: Vec<String>,
}

impl ApiKeySpec {
    /// Checks the bounds of every field.
    ///
    /// # Errors
    /// [`Rejection::Invalid`] with the first field that is out of bounds.
    pub fn validate(&self) -> Result<(), Rejection> {
        ensure(is_name(&self.name), "name", "1 to 256 bytes")?;
        ensure(is_name(&self.user), "user", "1 to 256 bytes")?;
        ensure(
            self.expires_at_ms.is_none_or(|at| at <= EXPIRY_MS_MAX),
            "expires_at",
            "at most the year 9999",
        )?;
        let is_model = |model: &String| is_name(model);
        ensure(
            self.models.iter().all(is_model),
            "models",
            "1 to 256 bytes each",
        )?;
        let is_scope = |scope: &String| is_name(scope) && scope.starts_with('/');
        ensure(
            self.scopes.iter().all(is_scope),
            "scopes",
            "paths such as \"/v1/chat/completions\" or \"/v1/*\", 256 bytes at most",
        )?;
        let bytes = self.models.iter().chain(&self.scopes).map(String::len);
        ensure(
            bytes.sum::<usize>() <= API_KEY_LISTS_BYTES_MAX,
            "models and scopes",
            "1024 bytes together at most",
        )
    }
}

/// An API key in the table.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct ApiKey {
    /// Description of the key, with its current secret.
    pub spec: ApiKeySpec,
    /// Time at which the key was created, as Unix time in milliseconds.
    pub created_at_ms: u64,
    /// Time of the key's last rotation, as Unix time in milliseconds, if any.
    pub rotated_at_ms: Option<u64>,
    /// Secret before the last rotation, if that rotation granted a grace period.
    pub former: Option<FormerSecret>,
}

/// A secret that a rotation replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub struct FormerSecret {
    /// Hash of the secret.
    pub secret: SecretHash,
    /// Time from which the secret is rejected, as Unix time in milliseconds.
    pub until_ms: u64,
}

impl ApiKey {
    /// Returns a description for people: id, name and user.
    #[must_use]
    pub fn subject(&self) -> String {
        let ApiKeySpec { id, name, user, .. } = &self.spec;
        format!("{id}: {name:?} of {user:?}")
    }

    /// Whether the key has expired at the time `calendar_ms` of the cluster's clock.
    #[must_use]
    pub fn is_expired(&self, calendar_ms: u64) -> bool {
        self.spec.expires_at_ms.is_some_and(|at| at <= calendar_ms)
    }

    /// Whether the key accepts `secret` at the time `calendar_ms` of the cluster's clock.
    #[must_use]
    pub fn accepts(&self, secret: &SecretHash, calendar_ms: u64) -> bool {
        let is_present = self.spec.secret == *secret;
        let is_former =
            |former: &FormerSecret| former.secret == *secret && calendar_ms < former.until_ms;
        !self.is_expired(calendar_ms) && (is_present || self.former.as_ref().is_some_and(is_former))
    }

    /// Whether the key may use `model`.
    #[must_use]
    pub fn allows_model(&self, model: &str) -> bool {
        self.spec.models.is_empty() || self.spec.models.iter().any(|it| stands_for(it, model))
    }

    /// Whether the key may use `path`.
    #[must_use]
    pub fn allows_path(&self, path: &str) -> bool {
        self.spec.scopes.is_empty() || self.spec.scopes.iter().any(|it| stands_for(it, path))
    }

    /// Returns the hashes of the current and the former secret.
    fn secrets(&self) -> impl Iterator<Item = SecretHash> + use<> {
        let former = self.former.map(|former| former.secret);
        [Some(self.spec.secret), former].into_iter().flatten()
    }
}
