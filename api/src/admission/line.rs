//! What waits for one model here.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use state::admission::{Queue, Rules};
use state::ids::Ticket;

use super::entry::Entry;

/// Requests of one model that wait at this replica.
pub(super) struct Line {
    model: Arc<str>,
    /// Those whose turn is to come.
    pub(super) queue: Queue,
    /// Those who have had it and were not run, in order of arrival.
    pub(super) again: VecDeque<Ticket>,
    /// All of both, by arrival: who is answered first at the end follows from it.
    pub(super) entries: BTreeMap<Ticket, Entry>,
}

/// A line as the admin API shows it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct LineView {
    /// The model.
    pub model: String,
    /// Requests that wait.
    pub waiting: usize,
    /// Users who wait.
    pub users: usize,
    /// Requests that wait, by bin of their predicted output.
    pub bins: BTreeMap<u16, usize>,
}

impl Line {
    pub(super) fn new(model: Arc<str>, rules: Rules) -> Self {
        Self {
            model,
            queue: Queue::new(rules),
            again: VecDeque::new(),
            entries: BTreeMap::new(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Takes a request out.
    pub(super) fn remove(&mut self, ticket: Ticket) -> Option<Entry> {
        let entry = self.entries.remove(&ticket)?;
        if self.queue.remove(ticket).is_none() {
            self.again.retain(|waiting| *waiting != ticket);
        }
        Some(entry)
    }

    pub(super) fn view(&self) -> LineView {
        LineView {
            model: self.model.to_string(),
            waiting: self.entries.len(),
            users: self.queue.users_len(),
            bins: self.queue.bins(),
        }
    }
}
