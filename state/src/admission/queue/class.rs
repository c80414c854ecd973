//! Lines of requests and the orders they stand in.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::ids::{Ticket, UserKey};

/// Of those behind a line's head, so many are looked at.
const BEHIND_MAX: usize = 16;

/// Priority and bin.
pub(super) type Place = (Reverse<i16>, u16);
/// A line as sorted: key, first arrival, its ticket, user.
pub(super) type Head = (u64, u64, Ticket, UserKey);

/// Requests of one priority and bin.
#[derive(Debug, Clone, Default)]
pub(super) struct Class {
    /// By key, then by the line's first arrival.
    pub(super) heads: BTreeSet<Head>,
    /// By the line's longest match, of users who have deficit left; kept for `dlpm` only.
    pub(super) solvent: BTreeSet<(Match, UserKey)>,
    pub(super) lines: BTreeMap<UserKey, Line>,
    pub(super) waiting: usize,
}

/// Longest match first, then first come.
pub(super) type Match = (Reverse<u32>, u64, Ticket);

/// One user's requests in one class; never empty.
#[derive(Debug, Clone, Default)]
pub(super) struct Line {
    /// As in `heads`.
    pub(super) key: u64,
    pub(super) arrivals: BTreeSet<(u64, Ticket)>,
    pub(super) matches: BTreeSet<Match>,
    pub(super) is_solvent: bool,
    /// Its head as in `heads`.
    hooked: (u64, Ticket),
}

impl Line {
    pub(super) fn len(&self) -> u64 {
        self.arrivals.len() as u64
    }

    /// Who goes first of it.
    pub(super) fn head(&self, is_newest_first: bool) -> (u64, Ticket) {
        let head = if is_newest_first {
            self.arrivals.last()
        } else {
            self.arrivals.first()
        };
        *head.expect("a line is never empty")
    }

    /// Those behind its head, as they come.
    pub(super) fn behind(&self, is_newest_first: bool) -> Vec<Ticket> {
        let ticket = |(_, ticket): &(u64, Ticket)| *ticket;
        let behind = self.arrivals.iter();
        if is_newest_first {
            behind.rev().skip(1).map(ticket).take(BEHIND_MAX).collect()
        } else {
            behind.skip(1).map(ticket).take(BEHIND_MAX).collect()
        }
    }

    pub(super) fn best(&self) -> Match {
        *self.matches.first().expect("a line is never empty")
    }
}

impl Class {
    /// Takes a line out of the orders, before it changes.
    pub(super) fn unhook(&mut self, user: UserKey) {
        if let Some(line) = self
            .lines
            .get(&user)
            .filter(|line| !line.arrivals.is_empty())
        {
            let (arrived_ms, ticket) = line.hooked;
            self.heads.remove(&(line.key, arrived_ms, ticket, user));
            self.solvent.remove(&(line.best(), user));
        }
    }

    /// Puts a line into the orders.
    pub(super) fn hook(&mut self, user: UserKey, is_newest_first: bool) {
        if let Some(line) = self.lines.get_mut(&user) {
            line.hooked = line.head(is_newest_first);
            let (arrived_ms, ticket) = line.hooked;
            self.heads.insert((line.key, arrived_ms, ticket, user));
            if line.is_solvent {
                self.solvent.insert((line.best(), user));
            }
        }
    }
}
