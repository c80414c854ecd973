//! Turns of the trees of one user's sessions, so that an agent with many sub-agents does not stop the
//! user's other agents.
//!
//! This is start-time fair queueing (Goyal, Vin, Cheng: "Start-time Fair Queuing", 1996) with the
//! priced tokens of a request as its length. Each tree has a start tag; the tree with the least one
//! goes first, and what it sends moves its tag on. A tree that comes back starts at the tag that was
//! last served, so it gains nothing by its absence. Two trees that always wait differ by at most two
//! requests. Requests without a session form one tree. Within a tree, the order is that of arrival.

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
    /// Start tag that was last served, in priced tokens.
    passed: u64,
}

#[derive(Debug, Clone, Default)]
struct TreeLine {
    /// Start tag, in priced tokens.
    start: u64,
    arrivals: BTreeSet<(u64, Ticket)>,
}

impl TreeTurns {
    pub(super) fn insert(&mut self, tree: Tree, arrival: (u64, Ticket)) {
        let passed = self.passed;
        self.change(tree, |line| {
            if line.arrivals.is_empty() {
                line.start = line.start.max(passed);
            }
            line.arrivals.insert(arrival);
        });
    }

    pub(super) fn remove(&mut self, tree: Tree, arrival: (u64, Ticket)) {
        self.change(tree, |line| {
            line.arrivals.remove(&arrival);
        });
    }

    /// Records that a request of `tree` goes to a backend, at a price in priced tokens. Call it
    /// before [`TreeTurns::remove`].
    pub(super) fn served(&mut self, tree: Tree, price: u64) {
        let start = self.lines.get(&tree).map_or(0, |line| line.start);
        self.passed = self.passed.max(start);
        self.change(tree, |line| {
            line.start = line.start.saturating_add(price.max(1));
        });
        let passed = self.passed;
        let is_kept = |line: &TreeLine| !line.arrivals.is_empty() || line.start > passed;
        self.lines.retain(|_, line| is_kept(line));
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
