//! Client API keys in this replica's key file.
//!
//! Keys are stored as SHA-256 under a salt of this run, so that memory, core dumps and faulty log
//! lines contain no key. Lookups use this hash, so their timing reveals at most a salted hash. All
//! keys can be replaced at once while requests are served.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use arc_swap::ArcSwap;
use sha2::{Digest, Sha256};
use state::keys::ApiKey;
use state::prefix::BlockHasher;

type KeyHash = [u8; 32];

/// User of a key. `None` for a key without a name, see [`key_user_name`].
type KeyUser = Option<Arc<str>>;

/// Holder of a request's key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holder {
    /// The key, if any, is not checked.
    Unchecked,
    /// The key is valid and has no name, see [`key_user_name`].
    Unnamed,
    /// The key is valid and charged to this user.
    Named(Arc<str>),
    /// The key is a valid key of the cluster.
    Cluster(Arc<ApiKey>),
}

/// The valid keys, each with its user. Clones share one set.
#[derive(Clone)]
pub struct ApiKeys(Arc<KeySet>);

struct KeySet {
    salt: [u8; 32],
    users: ArcSwap<BTreeMap<KeyHash, KeyUser>>,
}

/// A key in clear text and the user to charge; `None` to derive it with [`key_user_name`].
pub type KeyEntry = (String, Option<String>);

impl Default for ApiKeys {
    fn default() -> Self {
        let known = KeySet {
            salt: rand::random(),
            users: ArcSwap::default(),
        };
        Self(Arc::new(known))
    }
}

impl ApiKeys {
    /// Adds a key that is charged to `user`; `None` to derive the user with [`key_user_name`].
    pub fn add(&mut self, key: &str, user: Option<String>) {
        let mut users = BTreeMap::clone(&self.0.users.load());
        let (hash, user) = self.entry(key, user);
        users.insert(hash, user);
        self.0.users.store(Arc::new(users));
    }

    /// Replaces all keys for later requests.
    pub fn replace(&self, keys: Vec<KeyEntry>) {
        let users = keys.into_iter().map(|(key, user)| self.entry(&key, user));
        self.0.users.store(Arc::new(users.collect()));
    }

    fn entry(&self, key: &str, user: Option<String>) -> (KeyHash, KeyUser) {
        (self.hash(key.as_bytes()), user.map(Arc::from))
    }

    /// Returns the holder of a key; `None` if the key is unknown.
    #[must_use]
    pub fn holder(&self, key: &[u8]) -> Option<Holder> {
        let users = self.0.users.load();
        let user = users.get(&self.hash(key))?;
        Some(user.clone().map_or(Holder::Unnamed, Holder::Named))
    }

    fn hash(&self, key: &[u8]) -> KeyHash {
        Sha256::new()
            .chain_update(self.0.salt)
            .chain_update(key)
            .finalize()
            .into()
    }
}

/// Two values are equal if they share one set.
impl PartialEq for ApiKeys {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for ApiKeys {}

impl fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ApiKeys({} keys)", self.0.users.load().len())
    }
}

/// Returns the name of a user known only by a key. It contains a hash of the key under the
/// cluster's secret, so that a weak key cannot be guessed from the name.
#[must_use]
pub fn key_user_name(hashing: &BlockHasher, key: &[u8]) -> String {
    format!("key-{:016x}", hashing.secret.hash(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn api_keys_are_matched_and_never_printed() {
        let mut keys = ApiKeys::default();
        keys.add("sk-one", None);
        keys.add("sk-two", Some("ada".to_owned()));
        assert_eq!(
            keys.holder(b"sk-two"),
            Some(Holder::Named(Arc::from("ada")))
        );
        assert_eq!(keys.holder(b"sk-one"), Some(Holder::Unnamed));
        assert_eq!(keys.holder(b"sk-on"), None);
        assert_eq!(format!("{keys:?}"), "ApiKeys(2 keys)");
        let names = [1, 2].map(|seed| key_user_name(&BlockHasher::from(seed), b"sk-one"));
        assert_eq!(names[0].len(), 20);
        assert_ne!(names[0], names[1]);
        // Another run stores other hashes.
        assert_ne!(keys.hash(b"sk-one"), ApiKeys::default().hash(b"sk-one"));
    }

    #[test]
    fn replacing_keys_affects_all_clones() {
        let mut keys = ApiKeys::default();
        keys.add("sk-old", None);
        let checker = keys.clone();
        keys.replace(vec![("sk-new".to_owned(), Some("bo".to_owned()))]);
        assert_eq!(checker.holder(b"sk-old"), None);
        let bo = Holder::Named(Arc::from("bo"));
        assert_eq!(checker.holder(b"sk-new"), Some(bo));
    }
}
