//! Drives Raft's timers with few wakes.
//!
//! openraft's tick starts elections and sends heartbeats. It wakes a replica about five times per
//! heartbeat interval, a hundred times per second by default. A leader needs one wake per heartbeat.
//! A follower that accepted its leader's entries or heartbeats within the shortest election timeout
//! starts no election.

use std::sync::Arc;

use openraft::ServerState;
use openraft::async_runtime::watch::WatchReceiver as _;
use tokio::time::{Interval, MissedTickBehavior, interval};

use super::ReplicaInner;

impl ReplicaInner {
    /// Returns an interval of one heartbeat. Those of a replica begin together and stay in step, so
    /// that they share their wakes.
    pub(super) fn beats(&self) -> Interval {
        let mut beats = interval(self.options.heartbeat);
        beats.set_missed_tick_behavior(MissedTickBehavior::Skip);
        beats
    }

    /// Whether this replica starts no election before the next beat, and sends no heartbeat but at a
    /// beat.
    fn needs_no_tick(&self, state: ServerState) -> bool {
        let (heartbeat, silence) = (self.options.heartbeat, self.options.election_timeout.start);
        match state {
            ServerState::Leader => true,
            ServerState::Follower | ServerState::Learner => {
                let heard = self.heard.last();
                heard.is_some_and(|at| at.elapsed() + heartbeat < silence)
            }
            _ => false,
        }
    }
}

/// Sends this leader's heartbeats. Stops openraft's tick while this replica leads or hears its leader.
pub(super) async fn drive(inner: Arc<ReplicaInner>) {
    let raft = &inner.raft;
    let mut server = raft.server_metrics();
    let mut beats = inner.beats();
    loop {
        let has_changed = tokio::select! {
            biased;
            changed = server.changed() => {
                if changed.is_err() {
                    return;
                }
                true
            }
            _ = beats.tick() => false,
        };
        let state = server.borrow_watched().state;
        raft.runtime_config().tick(!inner.needs_no_tick(state));
        let is_due = state == ServerState::Leader && !has_changed;
        if is_due && raft.trigger().heartbeat().await.is_err() {
            return;
        }
    }
}
