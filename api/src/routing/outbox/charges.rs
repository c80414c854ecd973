//! Queued charges: one of each user, and one of each resumable stream of the user.

use state::command::{Charge, Item};
use state::ids::UserKey;
use state::streams::{CarriedStream, StreamCharge};
use state::trees::SessionTurn;

use super::{CHARGED_USERS_MAX, Outbox};

/// What a queued charge is for. All charges of a user follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) struct ChargeKey {
    pub(super) user: UserKey,
    /// The stream; `None` for all requests that are not resumable.
    carried: Option<CarriedStream>,
}

impl ChargeKey {
    pub(super) fn of_user(user: UserKey) -> Self {
        Self {
            user,
            carried: None,
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
    pub(super) fn into_item(self, key: ChargeKey) -> Item {
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

impl Outbox {
    /// Adds a charge to the queued charge of its user.
    pub fn charge(&mut self, charge: Charge) {
        self.charge_for(None, charge);
    }

    /// Adds a charge to the queued charge of a stream, or of its user.
    pub fn charge_for(&mut self, carried: Option<CarriedStream>, charge: Charge) {
        self.queued_charge(charge.user, carried).charge.add(&charge);
    }

    /// Returns the stream if its charges have room in the queue.
    pub fn admits(&self, user: UserKey, carried: CarriedStream) -> Option<CarriedStream> {
        let key = ChargeKey {
            user,
            carried: Some(carried),
        };
        let has_room = self.charges.len() < CHARGED_USERS_MAX || self.charges.contains_key(&key);
        has_room.then_some(carried)
    }

    /// Queues that the carrier takes the stream over in this epoch.
    pub fn take_over(&mut self, user: UserKey, carried: CarriedStream, epoch: u32) {
        self.queued_charge(user, Some(carried)).takes_over = Some(epoch);
    }

    /// Queues that the unused advance of the stream has become credit.
    pub fn close_stream(&mut self, user: UserKey, carried: CarriedStream) {
        self.queued_charge(user, Some(carried)).is_closed = true;
    }

    /// Queues the end of the session's turn that the stream is.
    pub fn end_stream_turn(&mut self, user: UserKey, carried: CarriedStream, turn: SessionTurn) {
        self.queued_charge(user, Some(carried)).turn = Some(turn);
    }

    fn queued_charge(
        &mut self,
        user: UserKey,
        carried: Option<CarriedStream>,
    ) -> &mut QueuedCharge {
        let queued = self.charges.entry(ChargeKey { user, carried });
        let queued = queued.or_default();
        queued.charge.user = user;
        queued
    }

    /// Returns the queued charges of a user.
    pub(super) fn queued_for(&self, user: UserKey) -> impl Iterator<Item = &QueuedCharge> {
        let from = self.charges.range(ChargeKey::of_user(user)..);
        let theirs = from.take_while(move |(key, _)| key.user == user);
        theirs.map(|(_, queued)| queued)
    }
}
