//! The queue of one model at this replica.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use schemars::JsonSchema;
use state::admission::{Overload, Queue, QueueSettings};
use state::ids::Ticket;

use super::waiter::Waiter;
use crate::figures::LongestWait;

/// Requests of one model that wait at this replica.
pub(super) struct ModelQueue {
    model: Arc<str>,
    /// Those whose turn is to come.
    pub(super) queue: Queue,
    /// Those who have had it and were not run, in order of arrival.
    pub(super) again: VecDeque<Ticket>,
    /// All of both, by arrival: who is answered first at the end follows from it.
    pub(super) entries: BTreeMap<Ticket, Waiter>,
    /// When the time of an answer was measured last, on the queues' clock.
    pub(super) measured_ms: Option<u64>,
}

/// A line as the admin API shows it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, JsonSchema)]
pub struct ModelQueueView {
    /// The model.
    pub model: String,
    /// Requests that wait.
    pub waiting: usize,
    /// Users who wait.
    pub users: usize,
    /// Requests that wait, by bin of their predicted output.
    pub bins: BTreeMap<u16, usize>,
}

/// What waits at this replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WaitingSummary {
    /// Requests that wait.
    pub requests: usize,
    /// Users who wait, summed over models.
    pub users: usize,
    /// Who has waited longest.
    pub longest: Option<LongestWait>,
}

/// A user with requests that wait at this replica.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct WaitingUser {
    /// Its name.
    pub user: String,
    /// Models that its requests are for.
    pub models: BTreeSet<String>,
    /// Requests that wait.
    pub requests: usize,
    /// How long the first of them has waited.
    pub waited: Duration,
}

impl WaitingUser {
    /// Counts one more request.
    pub(super) fn add(&mut self, model: &str, waited: Duration) {
        if !self.models.contains(model) {
            self.models.insert(model.to_owned());
        }
        self.requests += 1;
        self.waited = self.waited.max(waited);
    }
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

    /// Takes a request out whose client has left.
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
            users: self.queue.users_len(),
            bins: self.queue.bins(),
        }
    }
}
