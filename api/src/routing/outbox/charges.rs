//! Queued charges: one of each user and source, and one of each resumable stream of the user.
//!
//! Counts of waiting belong to no source. They join the next or present charge of the user, because a
//! request that stops waiting and starts must do so in one step. One queued charge has all of them,
//! because charges are written in any order, and a wait must not end before it has begun.

use state::command::{Charge, Item};
use state::ids::{SourceKey, UserKey};
use state::streams::{CarriedStream, StreamCharge};
use state::trees::SessionTurn;
use state::usage::UsageSource;

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
}

/// A charge that waits for the next envelope.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct QueuedCharge {
    pub(super) charge: Charge,
    takes_over: Option<u32>,
    is_closed: bool,
    turn: Option<SessionTurn>,
}

impl QueuedCharge {
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
        let Some(carried) = carried else {
            return self.charge_source(&charge);
        };
        let queued = &mut self.queued_stream(charge.user, carried).charge;
        let source = match charge.source {
            SourceKey::OTHER => queued.source,
            source => source,
        };
        queued.add(&charge);
        queued.source = source;
    }

    fn charge_source(&mut self, charge: &Charge) {
        let key = self.key_of(charge);
        let mut all = *charge;
        if key.source == SourceKey::OTHER && counts_usage(charge) {
            let folded: Vec<ChargeKey> =
                self.keys_of(charge.user).filter(|it| *it != key).collect();
            let folded = folded.iter().filter_map(|it| self.charges.remove(it));
            folded.for_each(|it| all.add(&it.charge));
        } else if counts_usage(charge) {
            let (queued, dequeued) = self.take_waits(key);
            all.queued = all.queued.saturating_add(queued);
            all.dequeued = all.dequeued.saturating_add(dequeued);
        }
        let found = &mut self.queued_charge(key).charge;
        found.add(&all);
        found.source = key.source;
    }

    /// Returns the key of a charge that is not a stream's. Counts of waiting join those of the user
    /// that are queued, or else any charge. Without room for another source all of the user's charges
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
        if counts_usage(charge) {
            return other;
        }
        let holds_waits = |key: &ChargeKey| has_waits(&self.charges[key].charge);
        let holder = self.keys_of(charge.user).find(holds_waits);
        holder
            .or_else(|| self.keys_of(charge.user).next())
            .unwrap_or(other)
    }

    /// Returns the keys of the user's queued charges that are not a stream's.
    fn keys_of(&self, user: UserKey) -> impl Iterator<Item = ChargeKey> {
        let keys = self.charges.range(ChargeKey::of_user(user)..);
        let keys = keys.map(|(key, _)| *key);
        keys.take_while(move |key| key.user == user && key.carried.is_none())
    }

    /// Takes the user's queued counts of waiting from other charges than that at `key`. So one charge
    /// has all of them, and no batch can end a wait before its beginning.
    fn take_waits(&mut self, key: ChargeKey) -> (u32, u32) {
        let is_holder = |it: &ChargeKey| *it != key && has_waits(&self.charges[it].charge);
        let Some(holder) = self.keys_of(key.user).find(is_holder) else {
            return (0, 0);
        };
        let charge = &mut self.queued_charge(holder).charge;
        let waits = (charge.queued, charge.dequeued);
        (charge.queued, charge.dequeued) = (0, 0);
        let empty = Charge {
            user: charge.user,
            source: charge.source,
            ..Charge::default()
        };
        if *charge == empty {
            self.charges.remove(&holder);
        }
        waits
    }

    /// Returns the stream if its charges have room in the queue.
    pub fn admits(&self, user: UserKey, carried: CarriedStream) -> Option<CarriedStream> {
        let key = ChargeKey {
            user,
            carried: Some(carried),
            source: SourceKey::OTHER,
        };
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
        self.queued_charge(ChargeKey {
            carried: Some(carried),
            ..ChargeKey::of_user(user)
        })
    }

    fn queued_charge(&mut self, key: ChargeKey) -> &mut QueuedCharge {
        let queued = self.charges.entry(key).or_default();
        queued.charge.user = key.user;
        queued
    }

    /// Queues the name of a source, unless it is queued already. Without room it is dropped, and the
    /// next request of the source queues it again.
    pub fn name_source(&mut self, source: UsageSource) {
        let item = Item::DefineSource(source);
        if !self.notes.iter().any(|(note, _)| *note == item) {
            self.note(item);
        }
    }

    /// Returns the queued charges of a user.
    pub(super) fn queued_for(&self, user: UserKey) -> impl Iterator<Item = &QueuedCharge> {
        let from = self.charges.range(ChargeKey::of_user(user)..);
        let theirs = from.take_while(move |(key, _)| key.user == user);
        theirs.map(|(_, queued)| queued)
    }
}
