//! What waits here, for operators and figures.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use state::ids::UserKey;
use tokio::time::Instant;

use super::Admission;
use super::model_queue::{ModelQueue, ModelQueueView, WaitingSummary, WaitingUser, users_of};
use crate::cluster::figures::LongestWait;

impl Admission {
    /// Returns summaries of the queues at this replica, by model.
    #[must_use]
    pub fn queues(&self) -> Vec<ModelQueueView> {
        let queues = self.lock();
        queues.by_model.values().map(ModelQueue::view).collect()
    }

    /// Returns at most `limit` users with requests that wait here, the longest wait first.
    #[must_use]
    pub fn waiting_users(&self, limit: usize) -> Vec<WaitingUser> {
        let now = Instant::now();
        let queues = self.lock();
        let mut users: BTreeMap<&str, WaitingUser> = BTreeMap::new();
        for line in queues.by_model.values() {
            for entry in line.entries.values() {
                let name = entry.ask().user.as_str();
                let user = users.entry(name).or_insert_with(|| WaitingUser {
                    user: name.to_owned(),
                    ..WaitingUser::default()
                });
                user.add(line.model(), now.duration_since(entry.since));
            }
        }
        let mut users: Vec<WaitingUser> = users.into_values().collect();
        users.sort_by_key(|user| std::cmp::Reverse(user.waited));
        users.truncate(limit);
        users
    }

    /// Returns a summary of all requests that wait here, over all models.
    #[must_use]
    pub fn all_waiting(&self) -> WaitingSummary {
        if !self.is_contended.load(Ordering::Acquire) {
            return WaitingSummary::default();
        }
        let hash_seed = self.view.registry().hash_seed;
        let queues = self.lock();
        let entries = || {
            queues
                .by_model
                .values()
                .flat_map(|line| line.entries.values())
        };
        let oldest = entries().min_by_key(|entry| entry.since);
        WaitingSummary {
            requests: entries().count(),
            users: users_of(entries()),
            longest: oldest.map(|entry| LongestWait {
                user: entry.ask().user.key(hash_seed),
                waited_ms: u64::try_from(entry.since.elapsed().as_millis()).unwrap_or(u64::MAX),
            }),
        }
    }

    /// Returns the number of requests of `user` that wait here for their turn, over all models.
    #[must_use]
    pub fn waiting_of(&self, user: UserKey) -> usize {
        let queues = self.lock();
        let waiting = queues.by_model.values().map(|line| line.queue.len_of(user));
        waiting.sum()
    }
}
