//! Turns of the trees of one user's sessions, so that an agent with many sub-agents does not stop the
//! user's other agents.
//!
//! This is start-time fair queueing (Goyal, Vin, Cheng: "Start-time Fair Queuing", 1996) with the
//! priced tokens of a request as its length. Each tree has a start tag; the tree with the least one
//! goes first, and what it sends moves its tag on. A tree that comes back, or comes for the first
//! time, starts at the virtual time, so it gains nothing by its absence. Virtual time is at least the
//! tag that was last served. It also advances by what is served, divided by the trees that wait, as
//! in weighted fair queueing; else trees of a single request each, coming without end, would all
//! start before one that was served once. But it does not pass the next tag of a tree that waits: it
//! would drift away from the tags, because trees that come and go make it faster than these, and a tree
//! that comes back would wait for many turns of the others. Two trees that always wait differ by at most
//! two requests. Requests without a session form one tree. Within a tree, the order is that of arrival.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::{AgentSessionKey, Ticket};

/// Root of a request's tree; `None` for requests without a session.
type Tree = Option<AgentSessionKey>;

/// The waiting requests of one user in one class, by tree.
#[derive(Debug, Clone, Default)]
pub(super) struct TreeTurns {
    lines: BTreeMap<Tree, TreeLine>,
    /// Lines with requests, by start tag, then by their head's arrival.
    order: BTreeSet<(u64, (u64, Ticket), Tree)>,
    /// Virtual time, in priced tokens.
    now: u64,
}

#[derive(Debug, Clone, Default)]
struct TreeLine {
    /// Start tag, in priced tokens.
    start: u64,
    arrivals: BTreeSet<(u64, Ticket)>,
}

impl TreeLine {
    /// Whether nothing waits, and the tree has made up at `now` for what it sent.
    fn is_spent(&self, now: u64) -> bool {
        self.arrivals.is_empty() && self.start <= now
    }
}

impl TreeTurns {
    pub(super) fn insert(&mut self, tree: Tree, arrival: (u64, Ticket)) {
        let now = self.now;
        self.change(tree, |line| {
            if line.arrivals.is_empty() {
                line.start = line.start.max(now);
            }
            line.arrivals.insert(arrival);
        });
    }

    pub(super) fn remove(&mut self, tree: Tree, arrival: (u64, Ticket)) {
        self.change(tree, |line| {
            line.arrivals.remove(&arrival);
        });
        if self
            .lines
            .get(&tree)
            .is_some_and(|line| line.is_spent(self.now))
        {
            self.lines.remove(&tree);
        }
    }

    /// Records that a request of `tree` goes to a backend, at a price in priced tokens. Call it
    /// before [`TreeTurns::remove`].
    pub(super) fn served(&mut self, tree: Tree, price: u64) {
        let start = self.lines.get(&tree).map_or(0, |line| line.start);
        let waiting = (self.order.len() as u64).max(1);
        let advanced = self.now.saturating_add(price.div_ceil(waiting).max(1));
        // Trees without room are passed over. One that is served meanwhile must not take the time
        // with it, or those that come later wait for what it had.
        let is_in_turn = self.order.first().is_none_or(|(first, ..)| start <= *first);
        let start = if is_in_turn { start } else { 0 };
        self.now = advanced.min(self.next_tag(price)).max(start).max(self.now);
        self.change(tree, |line| {
            line.start = line.start.saturating_add(price.max(1));
        });
        if self.lines.len() > self.order.len() {
            let now = self.now;
            self.lines.retain(|_, line| !line.is_spent(now));
        }
    }

    /// Returns the least start tag after the virtual time of the trees that wait, or else the last
    /// one and a request of this `price` behind it.
    fn next_tag(&self, price: u64) -> u64 {
        let after = (self.now.saturating_add(1), (0, Ticket(0)), None);
        let next = self.order.range(after..).next();
        let last = || {
            self.order
                .last()
                .map(|(start, ..)| start.saturating_add(price))
        };
        let next = next.map(|(start, ..)| *start);
        next.or_else(last).unwrap_or(u64::MAX)
    }

    /// Iterates over the first request of each tree, in the order of turns.
    pub(super) fn heads(&self) -> impl Iterator<Item = (u64, Ticket)> {
        self.order.iter().map(|(_, head, _)| *head)
    }

    /// Returns about how many requests go before a further one of `tree`, as if all had one price:
    /// those of the tree itself, and from each other tree one for each turn of this one.
    pub(super) fn before(&self, tree: Tree) -> u64 {
        let waiting = |line: &TreeLine| line.arrivals.len() as u64;
        let own = self.lines.get(&tree).map_or(0, waiting);
        let others = self.lines.iter().filter(|(it, _)| **it != tree);
        own + others
            .map(|(_, line)| waiting(line).min(own + 1))
            .sum::<u64>()
    }

    /// Returns the number of trees that are kept, waiting or not.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.lines.len()
    }

    fn change(&mut self, tree: Tree, change: impl FnOnce(&mut TreeLine)) {
        let line = self.lines.entry(tree).or_default();
        if let Some(head) = line.arrivals.first() {
            self.order.remove(&(line.start, *head, tree));
        }
        change(line);
        if let Some(head) = line.arrivals.first() {
            self.order.insert((line.start, *head, tree));
        }
    }
}
