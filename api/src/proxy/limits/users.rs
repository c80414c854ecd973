//! Counts requests per user, in shards by a keyed hash of the user's name. The table is only as large
//! as what is open.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Number of shards of the counts.
const SHARDS: usize = 64;

/// Number of requests in flight per user.
pub(in crate::proxy) struct UserRequests {
    shards: Box<[Mutex<HashMap<u64, usize>>]>,
    hasher: RandomState,
    requests_max: AtomicUsize,
}

/// Guard of a user's request. The request counts until the guard is dropped.
pub(in crate::proxy) struct UserRequestGuard {
    users: Arc<UserRequests>,
    user: u64,
}

impl UserRequests {
    pub(in crate::proxy) fn new(requests_max: usize) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            hasher: RandomState::new(),
            requests_max: requests_max.into(),
        }
    }

    /// Replaces the limit for later requests.
    pub(in crate::proxy) fn limit(&self, requests_max: usize) {
        self.requests_max.store(requests_max, Relaxed);
    }

    /// Counts a request of `user`; `None` if the user has reached the limit.
    pub(in crate::proxy) fn count(self: &Arc<Self>, user: &str) -> Option<UserRequestGuard> {
        let user = self.hasher.hash_one(user);
        let mut shard = self.shard(user);
        let requests = shard.entry(user).or_insert(0);
        if *requests >= self.requests_max.load(Relaxed) {
            return None;
        }
        *requests += 1;
        let users = Arc::clone(self);
        Some(UserRequestGuard { users, user })
    }

    fn shard(&self, user: u64) -> MutexGuard<'_, HashMap<u64, usize>> {
        let shards = self.shards.len() as u64;
        let at = usize::try_from(user % shards).expect("less than the number of shards");
        // Every change leaves the counts consistent.
        self.shards[at]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for UserRequestGuard {
    fn drop(&mut self) {
        let mut shard = self.users.shard(self.user);
        if let Some(requests) = shard.get_mut(&self.user) {
            *requests -= 1;
            if *requests == 0 {
                shard.remove(&self.user);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_per_user_are_bounded_and_released() {
        let users = Arc::new(UserRequests::new(2));
        let both = [users.count("ada").unwrap(), users.count("ada").unwrap()];
        assert!(users.count("ada").is_none());
        assert!(users.count("bob").is_some());
        drop(both);
        assert!(users.count("ada").is_some());
        assert!(users.shards.iter().all(|it| it.lock().unwrap().is_empty()));
    }
}
