//! Notifies tasks that wait until a charge is in the log.
//!
//! Waiters are for the charges of a stream, or for all other charges of a user. They move with the last
//! of them that leaves the queue, and are notified when its envelope is committed. If the envelope is rejected or the replica stops, the
//! waiters are dropped and their receivers return an error.

use std::collections::BTreeMap;

use state::ids::{LogIndex, UserKey};
use state::streams::CarriedStream;
use tokio::sync::oneshot;

/// Whose charges a task waits for: those of a user's stream, or of all requests of the user that carry
/// none.
pub(super) type ChargedTo = (UserKey, Option<CarriedStream>);

/// Receiver of the log index at which the charge is committed. Fails if this is never known.
pub type ChargeCommit = oneshot::Receiver<LogIndex>;

/// Senders that notify tasks waiting for queued or outstanding charges.
#[derive(Debug, Default)]
pub(super) struct CommitWaiters {
    queued: BTreeMap<ChargedTo, Vec<oneshot::Sender<LogIndex>>>,
    outstanding: Vec<oneshot::Sender<LogIndex>>,
}

impl CommitWaiters {
    /// Returns a receiver for the commit of the queued charges.
    pub(super) fn wait_queued(&mut self, charged: ChargedTo) -> ChargeCommit {
        let (committed, commit) = oneshot::channel();
        self.queued.entry(charged).or_default().push(committed);
        commit
    }

    /// Returns a receiver for the commit of the outstanding envelope.
    pub(super) fn wait_outstanding(&mut self) -> ChargeCommit {
        let (committed, commit) = oneshot::channel();
        self.outstanding.push(committed);
        commit
    }

    /// Moves the waiters for charges of which none `is_queued` any more to the outstanding envelope.
    pub(super) fn leave(&mut self, is_queued: impl Fn(ChargedTo) -> bool) {
        let gone = self
            .queued
            .extract_if(.., |charged, _| !is_queued(*charged));
        self.outstanding
            .extend(gone.flat_map(|(_, waiters)| waiters));
    }

    /// Notifies the waiters of the outstanding envelope that it is committed at `index`.
    pub(super) fn committed(&mut self, index: LogIndex) {
        for waiter in self.outstanding.drain(..) {
            // The receiver may have been dropped.
            let _gone = waiter.send(index);
        }
    }

    /// Drops the waiters of the outstanding envelope, because it was rejected.
    pub(super) fn refused(&mut self) {
        self.outstanding.clear();
    }
}
