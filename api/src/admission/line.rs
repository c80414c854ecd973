//! The queue of one model at this replica.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use state::admission::{Overload, Queue, QueueSettings};
use state::ids::Ticket;

use super::entry::Waiter;

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
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
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
