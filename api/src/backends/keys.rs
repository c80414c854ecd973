//! Keys that engines require from this replica.
//!
//! A key belongs to an id *and* a URL, both as configured at this replica. Anyone who can reach an
//! admin listener can change what the replicated registry says about a backend. If a key were sent
//! wherever the registry points, it could be stolen by pointing it elsewhere (I62). Keys are never
//! replicated.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use arc_swap::ArcSwap;
use http::HeaderValue;

/// The `authorization` header for each engine that requires one. Clones are the same set, which can
/// be replaced while it is used.
#[derive(Clone, Default)]
pub struct EngineKeys(Arc<ArcSwap<BTreeMap<String, EngineKey>>>);

#[derive(Clone, PartialEq, Eq)]
struct EngineKey {
    /// Without a trailing slash.
    url: String,
    authorization: HeaderValue,
    /// Whether client requests carry it in addition to probes.
    is_for_requests: bool,
}

impl EngineKeys {
    /// Adds a key for everything sent to the engine `id` at `url`, replacing the client's own.
    pub fn add(&mut self, id: &str, url: &str, authorization: HeaderValue) {
        self.insert(id, url, authorization, true);
    }

    /// Adds a key only for what the replica itself asks the engine.
    pub fn add_for_probes(&mut self, id: &str, url: &str, authorization: HeaderValue) {
        self.insert(id, url, authorization, false);
    }

    fn insert(&mut self, id: &str, url: &str, mut authorization: HeaderValue, requests: bool) {
        authorization.set_sensitive(true);
        let key = EngineKey {
            url: bare(url).to_owned(),
            authorization,
            is_for_requests: requests,
        };
        let mut keys = BTreeMap::clone(&self.0.load());
        keys.insert(id.to_owned(), key);
        self.0.store(Arc::new(keys));
    }

    /// Uses the keys that `other` has now, and no others.
    pub fn replace(&self, other: &Self) {
        self.0.store(other.0.load_full());
    }

    /// Returns the key for the replica's own requests to the backend `id` at `url`.
    pub(crate) fn of_probes(&self, id: &str, url: &str) -> Option<HeaderValue> {
        self.of(id, url).map(|key| key.authorization)
    }

    /// Returns the key that client requests to the backend `id` at `url` carry instead of their
    /// own.
    pub(crate) fn of_requests(&self, id: &str, url: &str) -> Option<HeaderValue> {
        let key = self.of(id, url).filter(|key| key.is_for_requests);
        key.map(|key| key.authorization)
    }

    fn of(&self, id: &str, url: &str) -> Option<EngineKey> {
        let keys = self.0.load();
        keys.get(id).filter(|key| key.url == bare(url)).cloned()
    }
}

/// Whether both hold the same keys.
impl PartialEq for EngineKeys {
    fn eq(&self, other: &Self) -> bool {
        self.0.load().as_ref() == other.0.load().as_ref()
    }
}

impl Eq for EngineKeys {}

fn bare(url: &str) -> &str {
    url.trim_end_matches('/')
}

impl fmt::Debug for EngineKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EngineKeys({} keys)", self.0.load().len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_for_one_id_at_one_url() {
        let mut keys = EngineKeys::default();
        keys.add(
            "gpu-1",
            "http://10.0.0.1:8000/",
            HeaderValue::from_static("Bearer one"),
        );
        keys.add_for_probes(
            "gpu-2",
            "http://10.0.0.2",
            HeaderValue::from_static("Bearer two"),
        );
        let (one, two) = ("http://10.0.0.1:8000", "http://10.0.0.2");
        assert_eq!(keys.of_requests("gpu-1", one).unwrap(), "Bearer one");
        assert_eq!(keys.of_probes("gpu-1", one).unwrap(), "Bearer one");
        assert_eq!(keys.of_probes("gpu-2", two).unwrap(), "Bearer two");
        assert_eq!(keys.of_requests("gpu-2", two), None);
        for (id, url) in [
            ("gpu-1", two),
            ("gpu-2", one),
            ("gpu-1", "http://10.0.0.1:80"),
            ("gpu-1", "http://evil.example"),
            ("evil", one),
        ] {
            assert_eq!(keys.of_probes(id, url), None, "{id} {url}");
        }
        assert_eq!(format!("{keys:?}"), "EngineKeys(2 keys)");
        let user = keys.clone();
        let mut later = EngineKeys::default();
        later.add("gpu-2", two, HeaderValue::from_static("Bearer three"));
        assert_ne!(user, later);
        keys.replace(&later);
        assert_eq!(user.of_requests("gpu-2", two).unwrap(), "Bearer three");
        assert_eq!(user.of_probes("gpu-1", one), None);
        assert_eq!(user, later);
    }
}
