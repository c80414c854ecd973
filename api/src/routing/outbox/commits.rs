//! Notifies tasks that wait until a charge is in the log.
//!
//! The waiters for a user's charges move with the last of them that leaves the queue, and are notified
//! when its envelope is committed. If the envelope is rejected or the replica stops, the
//! waiters are dropped and their receivers return an error.

use std::collections::BTreeMap;

use state::ids::{LogIndex, UserKey};
use tokio::sync::oneshot;

/// Receiver of the log index at which the user's charge is committed. Fails if this is never known.
pub type ChargeCommit = oneshot::Receiver<LogIndex>;

/// Senders that notify tasks waiting for queued or outstanding charges.
#[derive(Debug, Default)]
pub(super) struct CommitWaiters {
    queued: BTreeMap<UserKey, Vec<oneshot::Sender<LogIndex>>>,
    outstanding: Vec<oneshot::Sender<LogIndex>>,
}

impl CommitWaiters {
    /// Returns a receiver for the commit of the queued charge of `user`.
    pub(super) fn wait_queued(&mut self, user: UserKey) -> ChargeCommit {
        let (committed, commit) = oneshot::channel();
        self.queued.entry(user).or_default().push(committed);
        commit
    }

    /// Returns a receiver for the commit of the outstanding envelope.
    pub(super) fn wait_outstanding(&mut self) -> ChargeCommit {
        let (committed, commit) = oneshot::channel();
        self.outstanding.push(committed);
        commit
    }

    /// Moves the waiters for the charges of `users`, all of which have left the queue, to the
    /// outstanding envelope.
    pub(super) fn leave(&mut self, users: impl Iterator<Item = UserKey>) {
        if self.queued.is_empty() {
            return;
        }
        let waiters = users.filter_map(|user| self.queued.remove(&user));
        self.outstanding.extend(waiters.flatten());
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
