//! Notices that this replica is a member no more.
//!
//! A leader falls silent toward a member as soon as its removal is committed, often before that
//! member has learnt of it. A replica that hears no quorum therefore asks the members it knows of
//! who they think the members are.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join_all;
use openraft::async_runtime::WatchReceiver;
use tokio::time::MissedTickBehavior;

use super::Inner;
use super::change::ask;
use crate::wire;

/// Between two looks.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Looks until the replica stops. What it finds shows in the status, and is taken back when a
/// leader is heard again: the removal may have been seen before it was committed, and lost.
pub(super) async fn notice(inner: Arc<Inner>) {
    let mut looks = tokio::time::interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = inner.cancel.cancelled() => return,
            _ = looks.tick() => {}
        }
        let is_removed = tokio::select! {
            () = inner.cancel.cancelled() => return,
            is_removed = inner.is_told_removed() => is_removed,
        };
        inner.is_removed.store(is_removed, Ordering::Release);
    }
}

impl Inner {
    /// The members as they are known here with their addresses, and the log index that says so.
    pub(crate) fn membership(&self) -> (u64, BTreeMap<u64, String>) {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        let stored = &metrics.membership_config;
        let index = stored.log_id().map_or(0, |log_id| log_id.index + 1);
        let nodes = stored.nodes();
        let members = nodes.map(|(id, node)| (*id, node.address.clone()));
        (index, members.collect())
    }

    async fn is_told_removed(&self) -> bool {
        let (index, members) = self.membership();
        if members.is_empty() || self.status.borrow().has_quorum {
            return false;
        }
        let (id, cluster) = (self.links.identity.id, self.links.identity.cluster());
        let others = members.iter().filter(|(other, _)| **other != id);
        let answers = join_all(others.map(|(_, address)| ask(address))).await;
        let newest = answers
            .into_iter()
            .flatten()
            .filter(|info| wire::join_optional(info.cluster_high, info.cluster_low) == cluster)
            .max_by_key(|info| info.membership_index);
        newest.is_some_and(|info| info.membership_index >= index && !info.members.contains(&id))
    }
}
