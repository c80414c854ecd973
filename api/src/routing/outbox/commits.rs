//! Who waits until a charge is in the log.
//!
//! A user's charge leaves the queue as a whole, with some envelope. Whoever waits for it moves on
//! with it, and hears when the envelope is committed. One that is refused for good, or a replica
//! that stops, drops the waiter: it hears that it will not hear.

use std::collections::BTreeMap;

use state::ids::UserKey;
use tokio::sync::oneshot;

/// Resolves once what a user was charged is committed. An error: that will not be known.
pub type ChargeCommit = oneshot::Receiver<()>;

/// Waiters for charges that are queued or outstanding.
#[derive(Debug, Default)]
pub(super) struct CommitWaiters {
    queued: BTreeMap<UserKey, Vec<oneshot::Sender<()>>>,
    outstanding: Vec<oneshot::Sender<()>>,
}

impl CommitWaiters {
    /// Waits for the charge of `user` that is queued.
    pub(super) fn wait_queued(&mut self, user: UserKey) -> ChargeCommit {
        let (committed, commit) = oneshot::channel();
        self.queued.entry(user).or_default().push(committed);
        commit
    }

    /// Waits for the envelope that is outstanding.
    pub(super) fn wait_outstanding(&mut self) -> ChargeCommit {
        let (committed, commit) = oneshot::channel();
        self.outstanding.push(committed);
        commit
    }

    /// The charges of `users` have left the queue with the envelope that is now outstanding.
    pub(super) fn leave(&mut self, users: impl Iterator<Item = UserKey>) {
        if self.queued.is_empty() {
            return;
        }
        let waiters = users.filter_map(|user| self.queued.remove(&user));
        self.outstanding.extend(waiters.flatten());
    }

    /// The outstanding envelope is committed.
    pub(super) fn committed(&mut self) {
        for waiter in self.outstanding.drain(..) {
            // Who has given up needs no answer.
            let _gone = waiter.send(());
        }
    }

    /// The outstanding envelope was refused for good.
    pub(super) fn refused(&mut self) {
        self.outstanding.clear();
    }
}
