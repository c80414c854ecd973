//! API keys of the data plane: who may send requests, in whose name, for which models and paths.
//!
//! A key's secret is drawn by the replica that is asked for it and told to the caller once. Commands
//! carry a keyed hash of it only ([`SecretHash`]), so neither log nor snapshot nor backup holds a
//! secret (ADR 0067). A rotation gives a key another secret; the former one is taken for a grace.
//!
//! Whether a key has expired is judged by the cluster's clock, the median of its members' clocks
//! (`node/src/app/clocks.rs`): it stamps commands, and goes on while none are written. Nothing happens to a key when it
//! expires: it is refused from then on, and makes room when the table is full.

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

/// Maximum total length of a key's models and scopes, in bytes.
pub const API_KEY_LISTS_BYTES_MAX: usize = PATTERNS_BYTES_MAX;
/// Longest time for which a rotation leaves the former secret valid, in milliseconds: 30 days.
pub const GRACE_MS_MAX: u64 = 30 * 24 * 60 * 60 * 1000;

/// Last time at which a key can expire, in milliseconds: the end of the year 9999.
pub const EXPIRY_MS_MAX: u64 = 253_402_300_799_000;

/// Keyed hash of a key's secret. The state compares it and cannot compute it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Encode, Decode)]
pub struct SecretHash(pub [u8; 32]);

impl fmt::Debug for SecretHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretHash(..)")
    }
}

/// A key as an operator asks for it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub struct ApiKeySpec {
    /// Id, drawn at random by the replica that was asked.
    pub id: ApiKeyId,
    /// Hash of its secret.
    pub secret: SecretHash,
    /// What people call it.
    pub name: String,
    /// User whose requests come with it.
    pub user: String,
    /// Unix time from which it is refused, in milliseconds. `None`: never.
    pub expires_at_ms: Option<u64>,
    /// Models that it may use; one that ends in `*` stands for all that begin so. Empty: all.
    pub models: Vec<String>,
    /// Paths that it may use, in the same form. Empty: all.
    pub scopes: Vec<String>,
}

impl ApiKeySpec {
    /// Checks every field.
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

/// A key as stored.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct ApiKey {
    /// As it was asked for, with its present secret.
    pub spec: ApiKeySpec,
    /// Unix time of its creation, in milliseconds.
    pub created_at_ms: u64,
    /// Unix time of its last rotation, in milliseconds.
    pub rotated_at_ms: Option<u64>,
    /// Secret before the last rotation, if that left a grace.
    pub former: Option<FormerSecret>,
}

/// A secret that a rotation replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub struct FormerSecret {
    /// Hash of it.
    pub secret: SecretHash,
    /// Unix time from which it is refused, in milliseconds.
    pub until_ms: u64,
}

impl ApiKey {
    /// The key as people read of it: id, name and user.
    #[must_use]
    pub fn subject(&self) -> String {
        let ApiKeySpec { id, name, user, .. } = &self.spec;
        format!("{id}: {name:?} of {user:?}")
    }

    /// Whether the key has expired, whatever its secret.
    #[must_use]
    pub fn is_expired(&self, calendar_ms: u64) -> bool {
        self.spec.expires_at_ms.is_some_and(|at| at <= calendar_ms)
    }

    /// Whether a request with this secret is served at this time.
    #[must_use]
    pub fn accepts(&self, secret: &SecretHash, calendar_ms: u64) -> bool {
        let is_present = self.spec.secret == *secret;
        let is_former =
            |former: &FormerSecret| former.secret == *secret && calendar_ms < former.until_ms;
        !self.is_expired(calendar_ms) && (is_present || self.former.as_ref().is_some_and(is_former))
    }

    /// Whether it may use a model.
    #[must_use]
    pub fn allows_model(&self, model: &str) -> bool {
        self.spec.models.is_empty() || self.spec.models.iter().any(|it| stands_for(it, model))
    }

    /// Whether it may use a path.
    #[must_use]
    pub fn allows_path(&self, path: &str) -> bool {
        self.spec.scopes.is_empty() || self.spec.scopes.iter().any(|it| stands_for(it, path))
    }

    /// Hashes of the secrets that lead to it.
    fn secrets(&self) -> impl Iterator<Item = SecretHash> + use<> {
        let former = self.former.map(|former| former.secret);
        [Some(self.spec.secret), former].into_iter().flatten()
    }
}
