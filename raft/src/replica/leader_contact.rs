//! Tracks contact with the leader that this replica follows.

use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use crate::locks::lock;
use crate::types::{LogId, Vote};

/// Times and contents of recent contacts with the leader.
#[derive(Debug, Default)]
pub(crate) struct LeaderContact(Mutex<ContactState>);

#[derive(Debug, Default)]
struct ContactState {
    last: Option<(Instant, bool)>,
    catch_up: Option<LogId>,
    /// Oldest and newest contact whose commits are not known to be applied here.
    unapplied: [Option<Contact>; 2],
    /// Time of the last contact whose commits are all applied here; `None` if there was none yet.
    confirmed: Option<Instant>,
}

/// Entries that a leader with a quorum had committed at a given time.
#[derive(Debug, Clone, Copy)]
struct Contact {
    at: Instant,
    committed: LogId,
}

impl LeaderContact {
    /// Records an append or heartbeat that arrived at the time `at` and that this replica accepted.
    /// `committed` is the last entry that the leader had committed, if any.
    pub(crate) fn append(
        &self,
        at: Instant,
        leader: Vote,
        committed: Option<LogId>,
        has_quorum: bool,
    ) {
        let mut state = lock(&self.0);
        state.last = Some((at, has_quorum));
        let Some(committed) = own(leader, committed) else {
            return;
        };
        state.catch_up.get_or_insert(committed);
        if has_quorum {
            state.note(Contact { at, committed });
        }
    }

    /// Records that a quorum acknowledged this replica as the leader at the time `at`. `committed`
    /// is the last committed entry, if any.
    pub(crate) fn led(&self, leader: Vote, committed: Option<LogId>, at: Instant) {
        if let Some(committed) = own(leader, committed) {
            lock(&self.0).note(Contact { at, committed });
        }
    }

    /// Records that the log is applied here up to `applied`.
    pub(crate) fn applied(&self, applied: LogId) {
        let mut state = lock(&self.0);
        let [oldest, newest] = state.unapplied;
        let is_applied = |contact: &Contact| contact.committed <= applied;
        if let Some(contact) = newest.filter(is_applied) {
            (state.confirmed, state.unapplied) = (Some(contact.at), [None, None]);
        } else if let Some(contact) = oldest.filter(is_applied) {
            (state.confirmed, state.unapplied) = (Some(contact.at), [newest, None]);
        }
    }

    /// Returns the time at which the last append or heartbeat arrived that this replica accepted;
    /// `None` if it accepted none yet.
    pub(crate) fn last(&self) -> Option<Instant> {
        lock(&self.0).last.map(|(at, _)| at)
    }

    /// Whether the leader was heard within `limit` and reported that it has a quorum.
    pub(crate) fn has_quorum(&self, limit: Duration) -> bool {
        lock(&self.0)
            .last
            .is_some_and(|(at, has_quorum)| has_quorum && at.elapsed() <= limit)
    }

    /// Returns the last entry that the leader had committed when this replica first heard from it.
    pub(crate) fn catch_up(&self) -> Option<LogId> {
        lock(&self.0).catch_up
    }

    /// Returns the time of the last contact with a leader whose commits at that time are all
    /// applied here; `None` if there was none yet.
    pub(crate) fn confirmed(&self) -> Option<Instant> {
        lock(&self.0).confirmed
    }
}

impl ContactState {
    fn note(&mut self, contact: Contact) {
        let [oldest, newest] = &mut self.unapplied;
        match oldest {
            None => *oldest = Some(contact),
            Some(_) => *newest = Some(contact),
        }
    }
}

/// Returns `committed` if it is of the leader's own term: it then covers all earlier commits.
fn own(leader: Vote, committed: Option<LogId>) -> Option<LogId> {
    committed.filter(|committed| committed.leader_id == leader.leader_id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::LeaderId;

    fn at(term: u64, index: u64) -> LogId {
        LogId::new(LeaderId { term, node_id: 1 }, index)
    }

    /// Returns the time since the confirmed contact, in milliseconds; `None` if there was none yet.
    fn age_ms(contact: &LeaderContact) -> Option<u128> {
        contact.confirmed().map(|at| at.elapsed().as_millis())
    }

    #[tokio::test(start_paused = true)]
    async fn leader_contact_counts_once_its_commits_are_applied() {
        let pass = |ms| tokio::time::advance(Duration::from_millis(ms));
        let (contact, leader) = (LeaderContact::default(), Vote::new(2, 1));
        // Nothing of the leader's own term is committed: it does not know earlier commits yet.
        contact.append(Instant::now(), leader, Some(at(1, 3)), true);
        contact.applied(at(1, 3));
        assert_eq!(age_ms(&contact), None);
        contact.append(Instant::now(), leader, Some(at(2, 4)), false);
        contact.applied(at(2, 4));
        assert_eq!(age_ms(&contact), None, "the leader heard no quorum");
        contact.append(Instant::now(), leader, Some(at(2, 4)), true);
        contact.applied(at(2, 4));
        assert_eq!(age_ms(&contact), Some(0));
        // Cut off. The first heartbeat afterwards announces entries that are missing here.
        pass(5000).await;
        contact.append(Instant::now(), leader, Some(at(2, 9)), true);
        contact.applied(at(2, 4));
        assert_eq!(age_ms(&contact), Some(5000));
        pass(50).await;
        contact.append(Instant::now(), leader, Some(at(2, 12)), true);
        pass(50).await;
        contact.applied(at(2, 9));
        assert_eq!(age_ms(&contact), Some(100), "as of the first one");
        contact.applied(at(2, 12));
        assert_eq!(age_ms(&contact), Some(50));
    }

    #[tokio::test(start_paused = true)]
    async fn leader_contact_is_confirmed_by_its_quorum() {
        let (contact, leader) = (LeaderContact::default(), Vote::new(2, 1));
        let acknowledged = Instant::now();
        tokio::time::advance(Duration::from_millis(80)).await;
        contact.led(leader, Some(at(2, 4)), acknowledged);
        contact.applied(at(2, 4));
        assert_eq!(age_ms(&contact), Some(80));
    }
}
