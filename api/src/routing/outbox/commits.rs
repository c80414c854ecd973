//! Tasks that wait until a charge is in the log.
//!
//! A user's charge leaves the queue as a whole, in one envelope. Its waiters move with it and are
//! notified when the envelope is committed. If the envelope is rejected or the replica stops, they
//! are dropped and their receivers return an error.

use std::collections::BTreeMap;

use state::ids::UserKey;
use tokio::sync::oneshot;

/// Resolves once the user's charge is committed; an error means that this will not be known.
pub type ChargeCommit = oneshot::Receiver<()>;

/// Waiters for queued or outstanding charges.
#[derive(Debug, Default)]
pub(super) struct CommitWaiters {
    queued: BTreeMap<UserKey, Vec<oneshot::Sender<()>>>,
    outstanding: Vec<oneshot::Sender<()>>,
}

impl CommitWaiters {
    /// Waits for the queued charge of `user`.
    pub(super) fn wait_queued(&mut self, user: UserKey) -> ChargeCommit {
        let (committed, commit) = oneshot::channel();
        self.queued.entry(user).or_default().push(committed);
        commit
    }

    /// Waits for the outstanding envelope.
    pub(super) fn wait_outstanding(&mut self) -> ChargeCommit {
        let (committed, commit) = oneshot::channel();
        self.outstanding.push(committed);
        commit
    }

    /// Moves the waiters of `users` from the queue to the outstanding envelope.
    pub(super) fn leave(&mut self, users: impl Iterator<Item = UserKey>) {
        if self.queued.is_empty() {
            return;
        }
        let waiters = users.filter_map(|user| self.queued.remove(&user));
        self.outstanding.extend(waiters.flatten());
    }

    /// Notifies the waiters that the outstanding envelope is committed.
    pub(super) fn committed(&mut self) {
        for waiter in self.outstanding.drain(..) {
            // The waiter may be gone.
            let _gone = waiter.send(());
        }
    }

    /// Drops the waiters, because the outstanding envelope was rejected.
    pub(super) fn refused(&mut self) {
        self.outstanding.clear();
    }
}
