//! Tracks what this replica hears from the leader it follows.

use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use crate::locks::lock;
use crate::types::{LogId, Vote};

/// When the leader was last heard, and what it said.
#[derive(Debug, Default)]
pub(crate) struct LeaderContact(Mutex<ContactState>);

#[derive(Debug, Default)]
struct ContactState {
    last: Option<(Instant, bool)>,
    catch_up: Option<LogId>,
}

impl LeaderContact {
    /// Records an append or heartbeat that was accepted.
    pub(crate) fn append(&self, leader: Vote, committed: Option<LogId>, has_quorum: bool) {
        let mut state = lock(&self.0);
        state.last = Some((Instant::now(), has_quorum));
        // An entry committed in the leader's own term covers everything committed before.
        if state.catch_up.is_none()
            && committed.is_some_and(|committed| committed.leader_id == leader.leader_id)
        {
            state.catch_up = committed;
        }
    }

    /// Whether the leader was heard within `limit` and said that it has a quorum.
    pub(crate) fn has_quorum(&self, limit: Duration) -> bool {
        lock(&self.0)
            .last
            .is_some_and(|(at, has_quorum)| has_quorum && at.elapsed() <= limit)
    }

    /// What the leader had committed when this replica first heard it.
    pub(crate) fn catch_up(&self) -> Option<LogId> {
        lock(&self.0).catch_up
    }
}
