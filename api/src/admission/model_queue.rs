//! The queue of one model at this replica.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use schemars::JsonSchema;
use state::admission::{Overload, Queue, QueueSettings};
use state::ids::Ticket;
use tokio::time::Instant;

use super::waiter::{Seeking, Waiter};
use crate::cluster::figures::LongestWait;
use crate::routing::{LoadTable, PeerPlace};

/// Requests of one model that wait at this replica.
pub(super) struct ModelQueue {
    model: Arc<str>,
    /// Requests that have not had their turn.
    pub(super) queue: Queue,
    /// Requests that have had their turn and were not run, or whose places are a peer's, in the order
    /// of their return.
    pub(super) again: VecDeque<Ticket>,
    /// All requests of `queue` and `again`, by ticket. A leaving replica rejects them in order.
    pub(super) entries: BTreeMap<Ticket, Waiter>,
    /// Time of the last measurement of the service time, on the queues' clock; `None` if never.
    pub(super) measured_ms: Option<u64>,
}

/// Summary of a model's queue at this replica.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, JsonSchema)]
pub struct ModelQueueView {
    /// Id of the model.
    pub model: String,
    /// Number of waiting requests, including those that a backend did not run.
    pub waiting: usize,
    /// Number of users with waiting requests.
    pub users: usize,
    /// Number of requests that have not had a backend yet, by bin of predicted output length.
    pub bins: BTreeMap<u16, usize>,
}

/// Summary of the requests that wait at this replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WaitingSummary {
    /// Number of waiting requests.
    pub requests: usize,
    /// Number of users with waiting requests.
    pub users: usize,
    /// The user with the longest wait; `None` if nothing waits.
    pub longest: Option<LongestWait>,
}

/// A user with requests that wait at this replica.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct WaitingUser {
    /// Name of the user.
    pub user: String,
    /// Models for which the user's requests wait.
    pub models: BTreeSet<String>,
    /// Number of waiting requests.
    pub requests: usize,
    /// Time that the longest-waiting request has waited.
    pub waited: Duration,
}

impl WaitingUser {
    /// Counts another request of the user, which waits for `model` and has waited for `waited`.
    pub(super) fn add(&mut self, model: &str, waited: Duration) {
        if !self.models.contains(model) {
            self.models.insert(model.to_owned());
        }
        self.requests += 1;
        self.waited = self.waited.max(waited);
    }
}

/// Returns the number of users with these requests.
pub(super) fn users_of<'a>(waiters: impl Iterator<Item = &'a Waiter>) -> usize {
    let users: HashSet<&str> = waiters.map(|waiter| waiter.ask().user.as_str()).collect();
    users.len()
}

impl ModelQueue {
    pub(super) fn new(model: Arc<str>, rules: QueueSettings, learnt: Overload) -> Self {
        Self {
            model,
            queue: Queue::new(rules).with_overload(learnt),
            again: VecDeque::new(),
            entries: BTreeMap::new(),
            measured_ms: None,
        }
    }

    pub(super) fn model(&self) -> &str {
        &self.model
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Lets a request that has had its turn wait for the `place` of a peer from `now` on.
    pub(super) fn seek(
        &mut self,
        (ticket, mut entry): (Ticket, Waiter),
        place: PeerPlace,
        load: &LoadTable,
        now: Instant,
    ) {
        entry.seek(place, load, now);
        self.again.push_back(ticket);
        self.entries.insert(ticket, entry);
    }

    /// Returns the waits for peers' places. Only requests that have had their turn have one.
    pub(super) fn seeking(&self) -> impl Iterator<Item = &Seeking> {
        let entries = self.again.iter().filter_map(|it| self.entries.get(it));
        entries.filter_map(|entry| entry.seeking.as_ref())
    }

    /// Removes a request whose client has left; returns `None` if it does not wait.
    pub(super) fn left(&mut self, ticket: Ticket, now_ms: u64) -> Option<Waiter> {
        let entry = self.entries.remove(&ticket)?;
        if self.queue.left(ticket, now_ms).is_none() {
            self.again.retain(|waiting| *waiting != ticket);
        }
        Some(entry)
    }

    pub(super) fn view(&self) -> ModelQueueView {
        ModelQueueView {
            model: self.model.to_string(),
            waiting: self.entries.len(),
            users: users_of(self.entries.values()),
            bins: self.queue.bins(),
        }
    }
}
