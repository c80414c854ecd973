//! Determines which replicas should not lead, and which should lead instead.
//!
//! A replica refuses to lead while its log cannot be written or its machine's state may be wrong:
//! it requests no votes, accepts no leadership, and transfers leadership if it leads. A leader also
//! transfers leadership to a voter that more of the other voters can reach, since updates from
//! those others could not get to the leader.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use openraft::ServerState;
use tokio::time::{Instant, MissedTickBehavior};

use super::ReplicaInner;
use crate::net::better_leader;

/// Time for which another voter must have been the better leader. Reachability fluctuates, and a
/// transfer costs an election.
const BETTER_FOR: Duration = Duration::from_secs(2);

/// Transfers leadership whenever this replica refuses to lead.
pub(super) async fn yield_leadership(inner: Arc<ReplicaInner>) {
    let mut waiting = inner.log.waiting();
    let mut is_state_suspect = inner.is_state_suspect.subscribe();
    // An election in progress may still be won.
    let mut leads = inner.has_quorum.subscribe();
    loop {
        waiting.mark_unchanged();
        is_state_suspect.mark_unchanged();
        leads.mark_unchanged();
        inner.may_elect();
        let refuses = inner.refuses_leadership().is_some();
        if refuses {
            inner.hand_over().await;
        }
        let changed = tokio::select! {
            biased;
            changed = waiting.changed() => changed,
            changed = is_state_suspect.changed() => changed,
            changed = leads.changed() => changed,
            // Retry: perhaps no voter could take it.
            () = tokio::time::sleep(inner.options.election_timeout.end), if refuses => Ok(()),
        };
        if changed.is_err() {
            return;
        }
    }
}

/// Transfers leadership to a voter that has heard from more of the other voters for a while.
pub(super) async fn transfer_to_better_connected(inner: Arc<ReplicaInner>) {
    let mut ticks = tokio::time::interval(inner.options.election_timeout.end);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut since = None;
    loop {
        ticks.tick().await;
        let Some(better) = inner.better_leader() else {
            since = None;
            continue;
        };
        let began = *since.get_or_insert_with(Instant::now);
        if began.elapsed() < BETTER_FOR {
            continue;
        }
        since = None;
        tracing::warn!(
            to = better,
            "calls of other voters do not arrive at this leader; transferring leadership"
        );
        inner
            .transfer_within(better, inner.options.election_timeout.end * 2)
            .await;
    }
}

impl ReplicaInner {
    /// Returns why this replica currently refuses to lead; `None` if it does not.
    pub(crate) fn refuses_leadership(&self) -> Option<&'static str> {
        if self.log.waiting().borrow().is_some() {
            return Some("its log accepts nothing at present");
        }
        self.is_state_suspect
            .borrow()
            .then_some("its state may be wrong")
    }

    /// Sets whether Raft may request votes: not while this replica is removed or refuses to lead.
    pub(super) fn may_elect(&self) {
        let is_removed = self.is_removed.load(Ordering::Acquire);
        let may_elect = !is_removed && self.refuses_leadership().is_none();
        self.raft.runtime_config().elect(may_elect);
    }

    /// Returns the voter that should lead instead of this leader, if there is one. `None` while
    /// voters change.
    fn better_leader(&self) -> Option<u64> {
        let voters = self.with_metrics(|metrics| {
            let membership = metrics.membership_config.membership();
            let is_settled = membership.get_joint_config().len() == 1;
            let leads = metrics.state == ServerState::Leader;
            (leads && is_settled).then(|| membership.voter_ids().collect())
        })?;
        let (me, reachability) = (self.links.identity.id, &self.links.reachability);
        better_leader(me, &voters, &reachability.hears(), &reachability.reports())
    }
}
