//! Grants through the log: one dispatch order under backlog for all replicas.
//!
//! With `grants = "log"`, a request that has to wait is entered here ([`Item::Wait`]). A replica
//! with free capacity proposes [`Item::Grant`]. Applying it takes the next request by priority,
//! then by its user's counter, then by log order. The same step charges the user the price of the
//! request, so the next grant already takes it into account. The result is a single queue for the
//! whole cluster, with the VTC bound of one queue. The replica that owns the request finds the
//! grant in [`GrantsView`] and dispatches. With [`Item::Leave`] it reports that it took or declined
//! the grant.
//!
//! [`Item::Wait`]: crate::command::Item::Wait
//! [`Item::Grant`]: crate::command::Item::Grant
//! [`Item::Leave`]: crate::command::Item::Leave
//!
//! # The protocol for replicas
//! - When a request ends here while requests wait, propose `Grant {model, 1}`.
//! - When requests of this replica have waited a while although there is capacity (no request
//!   ended, but a backend was added), propose `Grant` for as many as there is capacity. Grants
//!   beyond the number of waiting requests have no effect, so proposing too many costs at most one
//!   request too many at an engine.
//! - A granted request goes ahead of everything waiting here, as soon as there is capacity; propose
//!   `Leave` for it. If its client is gone, propose `Leave` and `Grant {model, 1}`, so that the
//!   next one goes. The price already charged becomes the user's credit (`CreditLedger::credit`).
//! - When a replica is lost, its requests are removed and its open grants are passed on.

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use bincode::{Decode, Encode};
use xxhash_rust::xxh3::xxh3_128;

use crate::encoding;
use crate::ids::{ModelKey, ReplicaId, Ticket, UserKey};

/// Maximum number of requests of one replica that may be waiting or granted.
pub const WAITING_PER_REPLICA_MAX: usize = 16_384;
/// Maximum number of requests waiting or granted at all replicas.
pub const WAITING_MAX: usize = 65_536;

/// A request that waits for a grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub struct Wait {
    /// Identifier of the request, unique within the replica that proposed it.
    pub ticket: Ticket,
    /// Model that the request is for.
    pub model: ModelKey,
    /// User to whom the request is charged.
    pub user: UserKey,
    /// Priority; a higher one goes first.
    pub priority: i16,
    /// Number of priced tokens to charge when the request is granted.
    pub tokens: u32,
}

/// Requests that are waiting or granted, as of one applied index.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GrantsView {
    granted: BTreeMap<(ReplicaId, Ticket), Wait>,
    waiting: BTreeSet<(ReplicaId, Ticket)>,
}

impl GrantsView {
    /// Iterates by ticket over the granted requests of `replica`.
    pub fn granted(&self, replica: ReplicaId) -> impl Iterator<Item = &Wait> {
        let all = (replica, Ticket(0))..=(replica, Ticket(u64::MAX));
        self.granted.range(all).map(|(_, wait)| wait)
    }

    /// Whether a request is waiting or granted. Any other was never applied or has ended.
    #[must_use]
    pub fn knows(&self, replica: ReplicaId, ticket: Ticket) -> bool {
        let key = (replica, ticket);
        self.waiting.contains(&key) || self.granted.contains_key(&key)
    }

    /// Returns the number of waiting requests of all replicas and models.
    #[must_use]
    pub fn waiting_len(&self) -> usize {
        self.waiting.len()
    }
}

/// A request in the list, as snapshots store it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub(crate) struct WaitEntry {
    replica: ReplicaId,
    wait: Wait,
    /// Position in log order.
    seq: u64,
    is_granted: bool,
}

/// All waiting and granted requests, and the order of the waiting ones.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct WaitingList {
    entries: BTreeMap<(ReplicaId, Ticket), WaitEntry>,
    queues: BTreeMap<WaitQueueKey, WaitQueue>,
    per_replica: BTreeMap<ReplicaId, usize>,
    /// Position of the latest request in log order; 0 whenever the list is empty.
    last_seq: u64,
    /// Wrapping sum of the entries' hashes.
    digest: u128,
}

/// Key of a queue: model, and priority (highest first).
type WaitQueueKey = (ModelKey, Reverse<i16>);

/// All waiting requests of one model and priority.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct WaitQueue {
    /// `(counter, log order of the user's first request, user)`. Counters are as last seen. Since
    /// they only rise, a first entry whose counter is unchanged has the least counter.
    order: BTreeSet<(u64, u64, UserKey)>,
    users: BTreeMap<UserKey, UserTickets>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct UserTickets {
    counter: u64,
    /// Requests by position in log order; never empty.
    tickets: BTreeMap<u64, (ReplicaId, Ticket)>,
}

impl UserTickets {
    fn first(&self) -> u64 {
        let (seq, _) = self
            .tickets
            .first_key_value()
            .expect("a line is never empty");
        *seq
    }
}

impl WaitQueue {
    fn insert(&mut self, entry: &WaitEntry) {
        let user = entry.wait.user;
        let line = self.users.entry(user).or_default();
        line.tickets
            .insert(entry.seq, (entry.replica, entry.wait.ticket));
        // Positions in log order only rise, so a user with tickets keeps its first one.
        self.order.insert((line.counter, line.first(), user));
    }

    fn remove(&mut self, entry: &WaitEntry) {
        let user = entry.wait.user;
        let Some(line) = self.users.get_mut(&user) else {
            return;
        };
        self.order.remove(&(line.counter, line.first(), user));
        line.tickets.remove(&entry.seq);
        if line.tickets.is_empty() {
            self.users.remove(&user);
        } else {
            self.order.insert((line.counter, line.first(), user));
        }
    }

    /// Returns the request that goes next by the current counters, without removing it.
    fn next(&mut self, counter: impl Fn(UserKey) -> u64) -> Option<(ReplicaId, Ticket)> {
        loop {
            let &(seen, first, user) = self.order.first()?;
            let line = self.users.get_mut(&user)?;
            let present = counter(user);
            if present == seen {
                return line.tickets.get(&first).copied();
            }
            line.counter = present;
            self.order.remove(&(seen, first, user));
            self.order.insert((present, first, user));
        }
    }
}

impl WaitingList {
    /// Adds a waiting request. Returns `false` if it is a repeat or exceeds a bound.
    pub(crate) fn wait(&mut self, replica: ReplicaId, wait: Wait) -> bool {
        let entry = WaitEntry {
            replica,
            wait,
            seq: self.last_seq + 1,
            is_granted: false,
        };
        let is_taken = self.insert(entry);
        if is_taken {
            self.last_seq += 1;
        }
        is_taken
    }

    fn insert(&mut self, entry: WaitEntry) -> bool {
        let key = (entry.replica, entry.wait.ticket);
        let of_replica = self.per_replica.get(&entry.replica).copied();
        let is_welcome = of_replica.unwrap_or_default() < WAITING_PER_REPLICA_MAX
            && self.entries.len() < WAITING_MAX
            && !self.entries.contains_key(&key);
        if !is_welcome {
            return false;
        }
        // The request is counted only now, because a replica without requests must have no count.
        *self.per_replica.entry(entry.replica).or_default() += 1;
        self.digest = self.digest.wrapping_add(hash(&entry));
        if !entry.is_granted {
            self.queues.entry(place(&entry)).or_default().insert(&entry);
        }
        self.entries.insert(key, entry);
        true
    }

    /// Removes a request whose replica took or declined the grant, or saw the request leave.
    /// Returns whether the request was in the list.
    pub(crate) fn leave(&mut self, replica: ReplicaId, ticket: Ticket) -> bool {
        let Some(entry) = self.entries.remove(&(replica, ticket)) else {
            return false;
        };
        self.digest = self.digest.wrapping_sub(hash(&entry));
        self.unlist(&entry);
        if let Some(count) = self.per_replica.get_mut(&replica) {
            *count -= 1;
            if *count == 0 {
                self.per_replica.remove(&replica);
            }
        }
        if self.entries.is_empty() {
            self.last_seq = 0;
        }
        true
    }

    fn unlist(&mut self, entry: &WaitEntry) {
        if entry.is_granted {
            return;
        }
        let place = place(entry);
        if let Some(lane) = self.queues.get_mut(&place) {
            lane.remove(entry);
            if lane.users.is_empty() {
                self.queues.remove(&place);
            }
        }
    }

    /// Grants the next request of `model` and returns it with its replica, to charge its user;
    /// `None` if no request waits for a grant.
    pub(crate) fn grant(
        &mut self,
        model: ModelKey,
        counter: impl Fn(UserKey) -> u64,
    ) -> Option<(ReplicaId, Wait)> {
        let all = (model, Reverse(i16::MAX))..=(model, Reverse(i16::MIN));
        let (_, lane) = self.queues.range_mut(all).next()?;
        let key = lane.next(counter)?;
        let mut entry = *self.entries.get(&key)?;
        self.unlist(&entry);
        self.digest = self.digest.wrapping_sub(hash(&entry));
        entry.is_granted = true;
        self.digest = self.digest.wrapping_add(hash(&entry));
        self.entries.insert(key, entry);
        Some((key.0, entry.wait))
    }

    /// Removes all requests of `replica` and returns the models of those that were granted.
    pub(crate) fn close_replica(&mut self, replica: ReplicaId) -> Vec<ModelKey> {
        let all = (replica, Ticket(0))..=(replica, Ticket(u64::MAX));
        let entries: Vec<WaitEntry> = self.entries.range(all).map(|(_, entry)| *entry).collect();
        for entry in &entries {
            self.leave(replica, entry.wait.ticket);
        }
        let granted = entries.into_iter().filter(|entry| entry.is_granted);
        granted.map(|entry| entry.wait.model).collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the last position in log order and the digest of the entries.
    pub(crate) fn digest(&self) -> (u64, u128) {
        (self.last_seq, self.digest)
    }

    /// Returns a view of the list for replicas.
    pub(crate) fn view(&self) -> GrantsView {
        let mut view = GrantsView::default();
        for (key, entry) in &self.entries {
            if entry.is_granted {
                view.granted.insert(*key, entry.wait);
            } else {
                view.waiting.insert(*key);
            }
        }
        view
    }

    /// Returns the whole list in the form that snapshots store.
    pub(crate) fn image(&self) -> (u64, Vec<WaitEntry>) {
        (self.last_seq, self.entries.values().copied().collect())
    }

    /// Rebuilds the list from [`WaitingList::image`]. An error describes the first fault.
    pub(crate) fn restored((last_seq, entries): (u64, Vec<WaitEntry>)) -> Result<Self, String> {
        let mut list = Self::default();
        let mut by_log: Vec<WaitEntry> = entries;
        by_log.sort_by_key(|entry| entry.seq);
        for entry in by_log {
            let is_later = entry.seq > list.last_seq;
            if !is_later || !list.insert(entry) {
                return Err(format!("{entry:?} is out of bounds"));
            }
            list.last_seq = entry.seq;
        }
        if list.last_seq > last_seq || (list.entries.is_empty() && last_seq > 0) {
            return Err(format!("log order {last_seq} is out of bounds"));
        }
        list.last_seq = last_seq;
        Ok(list)
    }

    /// Iterates over the replicas with requests in the list, in ascending order.
    pub(crate) fn replicas(&self) -> impl Iterator<Item = ReplicaId> {
        self.per_replica.keys().copied()
    }

    /// Whether orders, counts and digest follow from the entries.
    pub(crate) fn is_consistent(&self) -> bool {
        let Ok(rebuilt) = Self::restored(self.image()) else {
            return false;
        };
        let lines = |list: &Self| -> Vec<(WaitQueueKey, UserKey, Vec<u64>)> {
            let of_lane = |(place, lane): (&WaitQueueKey, &WaitQueue)| {
                let place = *place;
                let line = |(user, line): (&UserKey, &UserTickets)| {
                    (place, *user, line.tickets.keys().copied().collect())
                };
                lane.users.iter().map(line).collect::<Vec<_>>()
            };
            list.queues.iter().flat_map(of_lane).collect()
        };
        let is_ordered = self.queues.values().all(|lane| {
            let first =
                |(user, line): (&UserKey, &UserTickets)| (line.counter, line.first(), *user);
            let order: BTreeSet<_> = lane.users.iter().map(first).collect();
            order == lane.order
        });
        is_ordered
            && lines(&rebuilt) == lines(self)
            && rebuilt.per_replica == self.per_replica
            && rebuilt.digest == self.digest
    }
}

fn place(entry: &WaitEntry) -> WaitQueueKey {
    (entry.wait.model, Reverse(entry.wait.priority))
}

fn hash(entry: &WaitEntry) -> u128 {
    xxh3_128(&encoding::to_bytes(entry))
}
