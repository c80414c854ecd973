//! Cluster API keys outside the replicated state: drawing and hashing secrets, and the age of this
//! replica's key list.
//!
//! A secret is `qk-` and 43 characters of base64url, 256 random bits. The form decides which list
//! validates a key. Only the cluster accepts keys of this form, so a revoked key stays refused even
//! where other keys are not checked. A list in a file cannot restore it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use sha2::{Digest, Sha256};
use state::ids::ApiKeyId;
use state::keys::SecretHash;
use tokio::time::Instant;

/// Prefix of every secret.
pub const SECRET_PREFIX: &str = "qk-";
/// Number of characters after the prefix.
const SECRET_CHARACTERS: usize = 43;
/// Prefix of the hashed bytes, for domain separation from other hashes.
const HASH_LABEL: &[u8] = b"quorate api key 1";

/// A new secret in clear text. It is returned once and never stored.
pub struct NewSecret(String);

impl NewSecret {
    /// Draws a secret from a cryptographically secure random number generator.
    #[must_use]
    pub fn draw() -> Self {
        let random = BASE64_URL_SAFE_NO_PAD.encode(rand::random::<[u8; 32]>());
        Self(format!("{SECRET_PREFIX}{random}"))
    }

    /// Returns the secret in clear text.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.0
    }

    /// Returns the hash that the cluster stores.
    #[must_use]
    pub fn hash(&self, hash_seed: u64) -> SecretHash {
        secret_hash(hash_seed, self.0.as_bytes())
    }
}

/// Draws the id of a new key.
#[must_use]
pub fn draw_id() -> ApiKeyId {
    ApiKeyId(rand::random())
}

/// Hashes a secret under the cluster's seed. Fast on purpose: nobody can guess a secret of 256
/// random bits (ADR 0014).
#[must_use]
pub fn secret_hash(hash_seed: u64, secret: &[u8]) -> SecretHash {
    let hash = Sha256::new()
        .chain_update(HASH_LABEL)
        .chain_update(hash_seed.to_le_bytes())
        .chain_update(secret);
    SecretHash(hash.finalize().into())
}

/// Whether a key has the form of the cluster's keys. The key need not exist.
#[must_use]
pub fn is_of_cluster(key: &[u8]) -> bool {
    let random = key.strip_prefix(SECRET_PREFIX.as_bytes());
    let is_of_base64 = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    random.is_some_and(|it| it.len() == SECRET_CHARACTERS && it.iter().all(is_of_base64))
}

/// Age of this replica's key list: time since the last message of a leader with a quorum whose
/// commits up to that message are all applied here.
pub struct ListAge {
    /// Returns the time of the leader's message; `None` if none arrived since this replica started.
    confirmed: Box<dyn Fn() -> Option<Instant> + Send + Sync>,
    /// Age up to which the list counts as current. Leaders send messages only at intervals.
    current_within: Duration,
}

/// Age of a key list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyListAge {
    /// The list was last confirmed at most `current_within` ago (see [`ListAge::of`]).
    Current,
    /// The list was last confirmed this long ago.
    Known(Duration),
    /// The age is unknown: the list is from before the start of this replica and has not been
    /// confirmed since.
    Unknown,
}

impl Default for ListAge {
    /// Creates the age of a list that is always current.
    fn default() -> Self {
        Self::of(Duration::ZERO, || Some(Instant::now()))
    }
}

impl ListAge {
    /// Creates the age of a list that is current while `confirmed` is at most `current_within` ago.
    #[must_use]
    pub fn of(
        current_within: Duration,
        confirmed: impl Fn() -> Option<Instant> + Send + Sync + 'static,
    ) -> Self {
        Self {
            confirmed: Box::new(confirmed),
            current_within,
        }
    }

    /// Returns the present age of the list.
    #[must_use]
    pub fn age(&self) -> KeyListAge {
        match (self.confirmed)().map(|at| at.elapsed()) {
            None => KeyListAge::Unknown,
            Some(age) if age <= self.current_within => KeyListAge::Current,
            Some(age) => KeyListAge::Known(age),
        }
    }
}

impl fmt::Debug for ListAge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ListAge").field(&self.age()).finish()
    }
}

impl KeyListAge {
    /// Whether the list is older than `after`. An unknown age counts as older.
    #[must_use]
    pub fn is_stale(&self, after: Duration) -> bool {
        match self {
            Self::Current => false,
            Self::Known(age) => *age > after,
            Self::Unknown => true,
        }
    }
}

/// Rules by which this replica validates the cluster's keys.
#[derive(Debug, Clone, Default)]
pub struct KeyRules {
    /// Whether requests need a valid key, from the cluster or from this replica's file.
    pub is_required: bool,
    /// Age of the list from which requests with a cluster key are refused. `None`: never.
    pub refuse_stale_after: Option<Duration>,
    /// Age of this replica's key list.
    pub list: Arc<ListAge>,
}

impl KeyRules {
    /// Whether requests with keys of the cluster are refused at present.
    #[must_use]
    pub fn refuses(&self) -> bool {
        let after = self.refuse_stale_after;
        after.is_some_and(|after| self.list.age().is_stale(after))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_have_a_fixed_format_and_a_cluster_specific_hash() {
        let secret = NewSecret::draw();
        assert!(is_of_cluster(secret.text().as_bytes()), "{}", secret.text());
        assert_ne!(secret.text(), NewSecret::draw().text());
        assert_eq!(secret.hash(1), secret_hash(1, secret.text().as_bytes()));
        assert_ne!(secret.hash(1), secret.hash(2));
        let random = "0".repeat(43);
        let long = format!("qk-{random}0");
        let odd = format!("qk-{}=", "0".repeat(42));
        for other in ["sk-1", "qk-", "qk-1", &random, &long, &odd] {
            assert!(!is_of_cluster(other.as_bytes()), "{other}");
        }
    }

    #[test]
    fn api_key_hashes_have_golden_values() {
        // Keys that were handed out are recognised by these hashes.
        let SecretHash(hash) = secret_hash(42, format!("qk-{}", "5a_-".repeat(11)).as_bytes());
        let digits: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        expect_test::expect!["b533f0ac387b7f505d974d078e5b9d85d7cac5c0b2880592a550f11253db9080"]
            .assert_eq(&digits);
    }

    #[tokio::test(start_paused = true)]
    async fn key_list_age_counts_from_the_last_leader_contact() {
        let list = ListAge::of(Duration::from_millis(300), || None);
        assert_eq!(list.age(), KeyListAge::Unknown);
        assert!(list.age().is_stale(Duration::MAX));
        let heard = Instant::now();
        let list = ListAge::of(Duration::from_millis(300), move || Some(heard));
        tokio::time::advance(Duration::from_millis(300)).await;
        assert_eq!(list.age(), KeyListAge::Current);
        assert!(!list.age().is_stale(Duration::ZERO));
        tokio::time::advance(Duration::from_millis(2700)).await;
        assert_eq!(list.age(), KeyListAge::Known(Duration::from_secs(3)));
        assert!(!list.age().is_stale(Duration::from_secs(3)));
        assert!(list.age().is_stale(Duration::from_secs(2)));
    }
}
