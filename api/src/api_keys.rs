//! API keys of the cluster outside the state: how secrets are drawn and hashed, and how old this
//! replica's list of keys may be.
//!
//! A secret is `qk-` and 43 characters of base64url, 256 random bits. The form decides what
//! validates a key: only the cluster can accept one of this form, so a revoked key is refused even
//! where other keys are not checked, and a list in a file cannot bring it back.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use state::ids::ApiKeyId;
use state::keys::SecretHash;
use tokio::time::Instant;

/// What every secret begins with.
pub const SECRET_PREFIX: &str = "qk-";
/// Characters that follow.
const SECRET_CHARACTERS: usize = 43;
/// What is hashed before a secret, so that the hashes are of no other use.
const HASH_LABEL: &[u8] = b"quorate api key 1";

/// A secret that was just drawn, in the clear: it is told once and kept nowhere.
pub struct NewSecret(String);

impl NewSecret {
    /// Draws a secret from the system's random numbers.
    #[must_use]
    pub fn draw() -> Self {
        let random = BASE64_URL_SAFE_NO_PAD.encode(rand::random::<[u8; 32]>());
        Self(format!("{SECRET_PREFIX}{random}"))
    }

    /// The secret itself.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.0
    }

    /// What the cluster keeps of it.
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

/// Hashes a secret under the cluster's seed. Fast on purpose: what is hashed cannot be guessed
/// (ADR 0067).
#[must_use]
pub fn secret_hash(hash_seed: u64, secret: &[u8]) -> SecretHash {
    let hash = Sha256::new()
        .chain_update(HASH_LABEL)
        .chain_update(hash_seed.to_le_bytes())
        .chain_update(secret);
    SecretHash(hash.finalize().into())
}

/// Whether a key has the form of the cluster's keys, known or not.
#[must_use]
pub fn is_of_cluster(key: &[u8]) -> bool {
    let random = key.strip_prefix(SECRET_PREFIX.as_bytes());
    let is_of_base64 = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    random.is_some_and(|it| it.len() == SECRET_CHARACTERS && it.iter().all(is_of_base64))
}

/// What becomes of requests with a key while the list of keys is stale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum WhenStale {
    /// They are served by the list as it is.
    #[default]
    Serve,
    /// They are refused, so that no revoked key is served for longer than the list may be old.
    Refuse,
}

/// How old this replica's list of keys may be: as old as the last word of a leader with a quorum
/// whose commits, as of then, are all applied here.
pub struct ListAge {
    /// When that was; `None`: not since this replica started.
    confirmed: Box<dyn Fn() -> Option<Instant> + Send + Sync>,
    /// Up to which age the list is current: leaders are heard at intervals.
    current_within: Duration,
}

/// How old a list of keys may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyListAge {
    /// It is current.
    Current,
    /// It was current so long ago.
    Known(Duration),
    /// It is the one this replica was stopped with.
    Unknown,
}

impl Default for ListAge {
    /// A list that is current.
    fn default() -> Self {
        Self::of(Duration::ZERO, || Some(Instant::now()))
    }
}

impl ListAge {
    /// The age of a list that is current while `confirmed` was at most `current_within` ago.
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

    /// Returns how old the list may be.
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
    /// Whether it is older than `after`, as far as is known.
    #[must_use]
    pub fn is_stale(&self, after: Duration) -> bool {
        match self {
            Self::Current => false,
            Self::Known(age) => *age > after,
            Self::Unknown => true,
        }
    }
}

/// How keys of the cluster are judged here.
#[derive(Debug, Clone)]
pub struct KeyRules {
    /// Whether requests need a key that is checked, of the cluster or of this replica's file.
    pub is_required: bool,
    /// What becomes of requests with a key of the cluster while the list is stale.
    pub when_stale: WhenStale,
    /// Age from which the list is stale.
    pub stale_after: Duration,
    /// How old the list may be.
    pub list: Arc<ListAge>,
}

impl Default for KeyRules {
    fn default() -> Self {
        Self {
            is_required: false,
            when_stale: WhenStale::default(),
            stale_after: STALE_AFTER,
            list: Arc::default(),
        }
    }
}

impl KeyRules {
    /// Whether requests with keys of the cluster are refused at present.
    #[must_use]
    pub fn refuses(&self) -> bool {
        self.when_stale == WhenStale::Refuse && self.list.age().is_stale(self.stale_after)
    }
}

/// Age from which the list is stale, unless the config says otherwise.
pub const STALE_AFTER: Duration = Duration::from_secs(10);
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_has_its_form_and_its_hash_is_the_clusters() {
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
    fn hashes_stay_as_they_are() {
        // Keys that were given out are known by them.
        let SecretHash(hash) = secret_hash(42, format!("qk-{}", "5a_-".repeat(11)).as_bytes());
        let digits: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        expect_test::expect!["b533f0ac387b7f505d974d078e5b9d85d7cac5c0b2880592a550f11253db9080"]
            .assert_eq(&digits);
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_is_as_old_as_the_last_word_of_the_leader() {
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
