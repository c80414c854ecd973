//! Request ids that clients chose, of the requests in flight.
//!
//! Some engines fail if two requests with one id run at once. A client may repeat an id, for example
//! when it retries after a timeout. Then the engine gets the id with a suffix; the client, the log
//! and the decisions keep the id as it is.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::HeaderValue;
use xxhash_rust::xxh3::xxh3_64;

/// Hashes of the ids in flight.
#[derive(Default)]
pub(in crate::proxy) struct RequestIds(Mutex<BTreeSet<u64>>);

/// An id in flight. Dropping it frees the id.
pub(in crate::proxy) struct RequestIdGuard {
    ids: Arc<RequestIds>,
    hash: u64,
}

impl RequestIds {
    /// Claims a client's id for a request. Returns the id that its engine gets, and the claim unless
    /// the id is in flight already.
    pub(in crate::proxy) fn claim(
        self: &Arc<Self>,
        id: &HeaderValue,
    ) -> (HeaderValue, Option<RequestIdGuard>) {
        let hash = xxh3_64(id.as_bytes());
        if self.lock().insert(hash) {
            let ids = Arc::clone(self);
            return (id.clone(), Some(RequestIdGuard { ids, hash }));
        }
        let text = id.to_str().unwrap_or_default();
        let other = format!("{text}-{:08x}", rand::random::<u32>());
        let other = HeaderValue::try_from(other);
        (other.expect("the client's id is visible ascii"), None)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for RequestIdGuard {
    fn drop(&mut self) {
        self.ids.lock().remove(&self.hash);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_in_flight_gets_a_suffix() {
        let ids = Arc::new(RequestIds::default());
        let id = HeaderValue::from_static("r1");
        let (first, claim) = ids.claim(&id);
        assert_eq!(first, id);
        let (second, none) = ids.claim(&id);
        assert!(none.is_none() && second.to_str().unwrap().starts_with("r1-"));
        assert_ne!(second, ids.claim(&id).0);
        drop(claim);
        assert_eq!(ids.claim(&id).0, id);
    }
}
