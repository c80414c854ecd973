//! Drives Raft's timers with few wakes.
//!
//! openraft's tick starts elections and sends heartbeats. It wakes a replica about five times per
//! heartbeat interval, a hundred times per second by default. A leader needs one wake per heartbeat.
//! A follower that accepted its leader's entries or heartbeats within the shortest election timeout
//! starts no election.

use std::sync::Arc;

use openraft::ServerState;
use openraft::async_runtime::watch::WatchReceiver as _;
use tokio::time::{Instant, sleep_until};

use super::ReplicaInner;

/// Sends this leader's heartbeats, and stops openraft's tick while this replica leads or hears its
/// leader. A follower's tick resumes once it heard no leader for the shortest election timeout.
pub(super) async fn drive(inner: Arc<ReplicaInner>) {
    let raft = &inner.raft;
    let (heartbeat, silence) = (
        inner.options.heartbeat,
        inner.options.election_timeout.start,
    );
    let mut server = raft.server_metrics();
    loop {
        let now = Instant::now();
        let state = server.borrow_watched().state;
        let rests_until = match state {
            ServerState::Leader => Some(now + heartbeat),
            ServerState::Follower | ServerState::Learner => {
                let election = inner.heard.last().map(|heard| heard + silence);
                election.filter(|election| *election > now)
            }
            _ => None,
        };
        raft.runtime_config().tick(rests_until.is_none());
        if state == ServerState::Leader && raft.trigger().heartbeat().await.is_err() {
            return;
        }
        let is_running = tokio::select! {
            biased;
            changed = server.changed() => changed.is_ok(),
            () = sleep_until(rests_until.unwrap_or(now + heartbeat)) => true,
        };
        if !is_running {
            return;
        }
    }
}
