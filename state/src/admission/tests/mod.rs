//! Tests of the queue (orders by table and against a naive model), the gate and the ledger.

mod gate;
mod ledger;
mod model;
mod orders;
mod overload;
mod queue;
mod trees;

use std::collections::BTreeMap;

use super::*;
use crate::ids::{Ticket, UserKey};

/// Source of users' figures that a test sets.
#[derive(Debug, Clone, Default)]
struct Users(BTreeMap<UserKey, UserFigures>);

impl Users {
    /// Creates users 1, 2, ... with these counters in whole tokens, known to wait.
    fn with(counters: &[u64]) -> Self {
        let mut users = Self::default();
        for (user, tokens) in (1..).zip(counters) {
            users.set(user, *tokens);
        }
        users
    }

    fn set(&mut self, user: u64, tokens: u64) {
        let figures = self.figures_mut(user);
        figures.counter_milli = tokens * 1000;
        figures.is_lifted = true;
    }

    fn figures_mut(&mut self, user: u64) -> &mut UserFigures {
        self.0.entry(UserKey(user)).or_default()
    }
}

impl Counters for Users {
    fn figures(&self, user: UserKey) -> UserFigures {
        self.0.get(&user).copied().unwrap_or_default()
    }
}

fn rules(order: Order) -> QueueSettings {
    let settings = AdmissionSettings {
        order,
        ..AdmissionSettings::default()
    };
    QueueSettings::of(&settings, Pricing::default())
}

/// Returns a request of `user` that arrived at the time `ticket`.
fn waiting(user: u64, ticket: u64) -> QueuedRequest {
    QueuedRequest {
        ticket: Ticket(ticket),
        user: UserKey(user),
        tree: None,
        priority: 0,
        arrived_ms: ticket,
        input_tokens: 10,
        predicted_output: 0,
        bin: 0,
        matched_blocks: 0,
        due_ms: None,
        hold_ms: None,
        is_selective: false,
    }
}

fn queue(order: Order, users: &Users, requests: &[QueuedRequest]) -> Queue {
    let mut queue = Queue::new(rules(order));
    for request in requests {
        queue
            .push(*request, 0, users, &Gate::default())
            .expect("it has room");
    }
    queue
}

fn all(_: &QueuedRequest) -> DispatchVerdict {
    DispatchVerdict::Go
}

/// Removes and returns the next request of a queue without peers.
fn next(queue: &mut Queue, users: &Users) -> Option<u64> {
    match queue.next(0, users, &mut Gate::default(), all) {
        Next::Go(waiting) => Some(waiting.ticket.0),
        Next::Held { .. } | Next::NoRoom | Next::Empty => None,
    }
}

/// Returns the tickets in the order in which they go while no counter moves.
fn drain(queue: &mut Queue, users: &Users) -> Vec<u64> {
    std::iter::from_fn(|| next(queue, users)).collect()
}
