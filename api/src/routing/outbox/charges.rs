//! Queued charges: one of each user and source, and one of each resumable stream of the user.
//!
//! Counts of waiting belong to no source. They join the next or present charge of the user, because a
//! request that stops waiting and starts must do so in one step. One queued charge has all of them,
//! because charges are written in any order, and a wait must not end before it has begun.

use std::collections::BTreeMap;

use state::command::{Charge, Item};
use state::ids::{SourceKey, UserKey};
use state::streams::{CarriedStream, StreamCharge};
use state::trees::SessionTurn;

use super::commits::ChargedTo;
use super::{CHARGED_USERS_MAX, Outbox};

/// What a queued charge is for. All charges of a user follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) struct ChargeKey {
    pub(super) user: UserKey,
    /// The stream; `None` for all requests that are not resumable.
    carried: Option<CarriedStream>,
    /// API key and model; always [`SourceKey::OTHER`] for a stream, whose charge has the source.
    source: SourceKey,
}

impl ChargeKey {
    pub(super) fn of_user(user: UserKey) -> Self {
        Self {
            user,
            carried: None,
            source: SourceKey::OTHER,
        }
    }

    fn of((user, carried): ChargedTo) -> Self {
        Self {
            carried,
            ..Self::of_user(user)
        }
    }

    /// Whether charges to this user, for this stream or for requests that carry none, are queued.
    pub(super) fn are_queued(queue: &ChargeQueue, charged: ChargedTo) -> bool {
        let first = queue.range(Self::of(charged)..).next();
        first.is_some_and(|(key, _)| (key.user, key.carried) == charged)
    }
}

/// Queued charges, those of a user next to each other.
pub(super) type ChargeQueue = BTreeMap<ChargeKey, QueuedCharge>;

/// A charge that waits for the next envelope.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct QueuedCharge {
    pub(super) charge: Charge,
    takes_over: Option<u32>,
    is_closed: bool,
    turn: Option<SessionTurn>,
}

impl QueuedCharge {
    /// Whether it would change nothing.
    fn is_empty(&self) -> bool {
        let empty = Charge {
            user: self.charge.user,
            source: self.charge.source,
            ..Charge::default()
        };
        self.charge == empty && self.takes_over.is_none() && !self.is_closed && self.turn.is_none()
    }

    pub(super) fn into_item(mut self, key: ChargeKey) -> Item {
        if !counts_usage(&self.charge) {
            self.charge.source = SourceKey::OTHER;
        }
        let Some(carried) = key.carried else {
            return Item::Charge(self.charge);
        };
        Item::ChargeStream(Box::new(StreamCharge {
            carried,
            takes_over: self.takes_over,
            is_closed: self.is_closed,
            charge: self.charge,
            turn: self.turn,
        }))
    }
}

/// Whether a charge has counts of waiting.
fn has_waits(charge: &Charge) -> bool {
    charge.queued > 0 || charge.dequeued > 0
}

/// Whether a charge counts in a row of the usage.
fn counts_usage(charge: &Charge) -> bool {
    charge.started > 0 || charge.input_uncached | charge.input_cached | charge.output > 0
}

impl Outbox {
    /// Adds a charge to the queued charge of its user.
    pub fn charge(&mut self, charge: Charge) {
        self.charge_for(None, charge);
    }

    /// Adds a charge to the queued charge of a stream, or of its user.
    pub fn charge_for(&mut self, carried: Option<CarriedStream>, charge: Charge) {
        match carried {
            Some(carried) => self.charge_stream(carried, charge),
            None if has_waits(&charge) && !counts_usage(&charge) => self.charge_waits(&charge),
            None => self.charge_source(&charge),
        }
    }

    fn charge_stream(&mut self, carried: CarriedStream, mut charge: Charge) {
        let key = ChargeKey::of((charge.user, Some(carried)));
        if charge.started > 0 || charge.ended > 0 {
            self.join_waits(key, &mut charge);
        }
        let queued = &mut self.queued_charge(key).charge;
        let source = match charge.source {
            SourceKey::OTHER => queued.source,
            source => source,
        };
        queued.add(&charge);
        queued.source = source;
    }

    /// Adds counts of waiting to those of the user that are queued, or else to any charge.
    fn charge_waits(&mut self, charge: &Charge) {
        let holds_waits = |key: &ChargeKey| has_waits(&self.charges[key].charge);
        let holder = self.keys_of(charge.user).find(holds_waits);
        let holder = holder.or_else(|| self.keys_of(charge.user).next());
        let key = holder.unwrap_or(ChargeKey::of_user(charge.user));
        let found = &mut self.queued_charge(key).charge;
        let source = found.source;
        found.add(charge);
        found.source = source;
    }

    fn charge_source(&mut self, charge: &Charge) {
        let key = self.key_of(charge);
        let mut all = *charge;
        if key.source == SourceKey::OTHER && counts_usage(charge) {
            let is_folded = |it: &ChargeKey| *it != key && it.carried.is_none();
            let folded: Vec<ChargeKey> = self.keys_of(charge.user).filter(is_folded).collect();
            let folded = folded.iter().filter_map(|it| self.charges.remove(it));
            folded.for_each(|it| all.add(&it.charge));
        }
        if counts_usage(charge) {
            self.join_waits(key, &mut all);
        }
        let found = &mut self.queued_charge(key).charge;
        found.add(&all);
        found.source = key.source;
    }

    /// Returns the key of a charge that is not a stream's. Without room for another source all of the user's charges
    /// become one, until it is written: a request's end must not be written before its start.
    fn key_of(&self, charge: &Charge) -> ChargeKey {
        let other = ChargeKey::of_user(charge.user);
        let own = ChargeKey {
            source: charge.source,
            ..other
        };
        if charge.source != SourceKey::OTHER {
            let is_folded = self
                .charges
                .get(&other)
                .is_some_and(|it| counts_usage(&it.charge));
            let has_room =
                self.charges.len() < CHARGED_USERS_MAX || self.charges.contains_key(&own);
            return match has_room && !is_folded {
                true => own,
                false => other,
            };
        }
        other
    }

    /// Returns the keys of the user's queued charges.
    fn keys_of(&self, user: UserKey) -> impl Iterator<Item = ChargeKey> {
        let keys = self.charges.range(ChargeKey::of_user(user)..);
        let keys = keys.map(|(key, _)| *key);
        keys.take_while(move |key| key.user == user)
    }

    /// Moves the user's queued counts of waiting from other charges than that at `key` to `charge`. So
    /// one charge has all of them, and no batch can end a wait before its beginning.
    fn join_waits(&mut self, key: ChargeKey, charge: &mut Charge) {
        let is_holder = |it: &ChargeKey| *it != key && has_waits(&self.charges[it].charge);
        let Some(holder) = self.keys_of(key.user).find(is_holder) else {
            return;
        };
        let queued = self.queued_charge(holder);
        let held = &mut queued.charge;
        charge.queued = charge.queued.saturating_add(held.queued);
        charge.dequeued = charge.dequeued.saturating_add(held.dequeued);
        (held.queued, held.dequeued) = (0, 0);
        if queued.is_empty() {
            self.charges.remove(&holder);
        }
    }

    /// Returns the stream if its charges have room in the queue.
    pub fn admits(&self, user: UserKey, carried: CarriedStream) -> Option<CarriedStream> {
        let key = ChargeKey::of((user, Some(carried)));
        let has_room = self.charges.len() < CHARGED_USERS_MAX || self.charges.contains_key(&key);
        has_room.then_some(carried)
    }

    /// Queues that the carrier takes the stream over in this epoch.
    pub fn take_over(&mut self, user: UserKey, carried: CarriedStream, epoch: u32) {
        self.queued_stream(user, carried).takes_over = Some(epoch);
    }

    /// Queues that the unused advance of the stream has become credit.
    pub fn close_stream(&mut self, user: UserKey, carried: CarriedStream) {
        self.queued_stream(user, carried).is_closed = true;
    }

    /// Queues the end of the session's turn that the stream is.
    pub fn end_stream_turn(&mut self, user: UserKey, carried: CarriedStream, turn: SessionTurn) {
        self.queued_stream(user, carried).turn = Some(turn);
    }

    fn queued_stream(&mut self, user: UserKey, carried: CarriedStream) -> &mut QueuedCharge {
        self.queued_charge(ChargeKey::of((user, Some(carried))))
    }

    fn queued_charge(&mut self, key: ChargeKey) -> &mut QueuedCharge {
        let queued = self.charges.entry(key).or_default();
        queued.charge.user = key.user;
        queued
    }

    /// Returns the queued charges of a user.
    pub(super) fn queued_for(&self, user: UserKey) -> impl Iterator<Item = &QueuedCharge> {
        let from = self.charges.range(ChargeKey::of_user(user)..);
        let theirs = from.take_while(move |(key, _)| key.user == user);
        theirs.map(|(_, queued)| queued)
    }
}
