//! Classes of requests, and the orders of the user queues in them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::tree_turns::TreeTurns;
use crate::ids::{AgentSessionKey, Ticket, UserKey};

/// Maximum number of requests examined behind the head of one user queue.
const BEHIND_MAX: usize = 16;

/// Key of a class: priority (highest first) and bin.
pub(super) type ClassKey = (Reverse<i16>, u16);
/// Sort position of a user queue: key, arrival and ticket of its head, then user.
pub(super) type UserQueueKey = (u64, u64, Ticket, UserKey);

/// All waiting requests of one priority and bin.
#[derive(Debug, Clone, Default)]
pub(super) struct Class {
    /// User queues by key, then by their head's arrival.
    pub(super) heads: BTreeSet<UserQueueKey>,
    /// Users with deficit left, by the longest match of their queue. Used for `dlpm` only.
    pub(super) solvent: BTreeSet<(MatchKey, UserKey)>,
    pub(super) queues: BTreeMap<UserKey, UserQueue>,
    pub(super) waiting: usize,
}

/// Sort position of a request by its match: longest match first, then arrival.
pub(super) type MatchKey = (Reverse<u32>, u64, Ticket);

/// Order of one user's requests in one class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UserOrder {
    /// The user's trees take turns.
    Turns,
    /// First come, first served.
    OldestFirst,
    /// In overload, the newest goes first: its client is the least likely to have left.
    NewestFirst,
}

/// One user's requests in one class; never empty.
#[derive(Debug, Clone, Default)]
pub(super) struct UserQueue {
    /// Key under which the queue is listed in `Class::heads`.
    pub(super) key: u64,
    pub(super) arrivals: BTreeSet<(u64, Ticket)>,
    pub(super) turns: TreeTurns,
    pub(super) matches: BTreeSet<MatchKey>,
    pub(super) is_solvent: bool,
    /// Arrival and ticket under which the queue is listed in `Class::heads`.
    order_head: (u64, Ticket),
}

impl UserQueue {
    pub(super) fn len(&self) -> u64 {
        self.arrivals.len() as u64
    }

    /// Returns how many requests of the user go before a further one of `tree`.
    pub(super) fn before(&self, tree: Option<AgentSessionKey>, order: UserOrder) -> u64 {
        match order {
            UserOrder::Turns => self.turns.before(tree),
            UserOrder::OldestFirst | UserOrder::NewestFirst => self.len(),
        }
    }

    /// Returns arrival and ticket of the request that goes first.
    pub(super) fn head(&self, order: UserOrder) -> (u64, Ticket) {
        let head = match order {
            UserOrder::Turns => self.turns.heads().next(),
            UserOrder::OldestFirst => self.arrivals.first().copied(),
            UserOrder::NewestFirst => self.arrivals.last().copied(),
        };
        head.expect("a queue is never empty")
    }

    /// Returns up to [`BEHIND_MAX`] requests behind the head, in order: with turns, first those of
    /// other trees.
    pub(super) fn behind(&self, order: UserOrder) -> Vec<Ticket> {
        let ticket = |(_, ticket): (u64, Ticket)| ticket;
        let arrivals = || self.arrivals.iter().copied().map(ticket);
        match order {
            UserOrder::Turns => {
                let heads: Vec<Ticket> = self.turns.heads().map(ticket).take(BEHIND_MAX).collect();
                let others = arrivals().filter(|it| !heads.contains(it));
                let others: Vec<Ticket> = others.take(BEHIND_MAX).collect();
                let all = heads.into_iter().skip(1).chain(others);
                all.take(BEHIND_MAX).collect()
            }
            UserOrder::OldestFirst => arrivals().skip(1).take(BEHIND_MAX).collect(),
            UserOrder::NewestFirst => arrivals().rev().skip(1).take(BEHIND_MAX).collect(),
        }
    }

    pub(super) fn best(&self) -> MatchKey {
        *self.matches.first().expect("a queue is never empty")
    }
}

impl Class {
    /// Removes a user queue from `heads` and `solvent`, before it changes.
    pub(super) fn remove_from_order(&mut self, user: UserKey) {
        if let Some(queue) = self
            .queues
            .get(&user)
            .filter(|queue| !queue.arrivals.is_empty())
        {
            let (arrived_ms, ticket) = queue.order_head;
            self.heads.remove(&(queue.key, arrived_ms, ticket, user));
            self.solvent.remove(&(queue.best(), user));
        }
    }

    /// Inserts a user queue into `heads` and, if it is solvent, into `solvent`.
    pub(super) fn insert_into_order(&mut self, user: UserKey, order: UserOrder) {
        if let Some(queue) = self.queues.get_mut(&user) {
            queue.order_head = queue.head(order);
            let (arrived_ms, ticket) = queue.order_head;
            self.heads.insert((queue.key, arrived_ms, ticket, user));
            if queue.is_solvent {
                self.solvent.insert((queue.best(), user));
            }
        }
    }
}
