//! The event queue, whose order depends only on times and on the order in which events were
//! planned.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Simulated time, in microseconds since the start.
pub type Micros = u64;

/// Queue of events, ordered by time. Events at one time keep the order of their planning.
#[derive(Debug)]
pub struct EventQueue<E> {
    heap: BinaryHeap<Reverse<PlannedEvent<E>>>,
    planned: u64,
}

#[derive(Debug)]
struct PlannedEvent<E> {
    at: Micros,
    sequence: u64,
    event: E,
}

impl<E> PartialEq for PlannedEvent<E> {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl<E> Eq for PlannedEvent<E> {}

impl<E> PartialOrd for PlannedEvent<E> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for PlannedEvent<E> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

impl<E> PlannedEvent<E> {
    fn key(&self) -> (Micros, u64) {
        (self.at, self.sequence)
    }
}

impl<E> Default for EventQueue<E> {
    fn default() -> Self {
        Self {
            heap: BinaryHeap::new(),
            planned: 0,
        }
    }
}

impl<E> EventQueue<E> {
    /// Plans `event` at the time `at`.
    pub fn plan(&mut self, at: Micros, event: E) {
        self.planned += 1;
        self.heap.push(Reverse(PlannedEvent {
            at,
            sequence: self.planned,
            event,
        }));
    }

    /// Removes the next event and returns it with its time; `None` if the queue is empty.
    pub fn take_next(&mut self) -> Option<(Micros, E)> {
        let Reverse(next) = self.heap.pop()?;
        Some((next.at, next.event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simultaneous_events_keep_their_order() {
        let mut events = EventQueue::default();
        for (at, name) in [(5, "c"), (1, "a"), (5, "d"), (1, "b")] {
            events.plan(at, name);
        }
        let order: Vec<_> = std::iter::from_fn(|| events.take_next()).collect();
        assert_eq!(order, [(1, "a"), (1, "b"), (5, "c"), (5, "d")]);
    }
}
