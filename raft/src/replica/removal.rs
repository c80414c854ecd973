//! Notices that this replica is a member no more.
//!
//! A leader falls silent toward a member as soon as its removal is committed, often before that
//! member has learnt of it. A replica that hears no quorum therefore asks the members it knows of
//! who they think the members are.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join_all;
use openraft::async_runtime::WatchReceiver;
use tokio::time::MissedTickBehavior;

use super::ReplicaInner;
use crate::wire;

/// Between two looks.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Looks until the replica stops. What it finds shows in the status; a removed replica asks for no
/// votes, which nobody would give it. Both are taken back when a leader is heard again: a removed
/// replica may be added anew.
pub(super) async fn notice(inner: Arc<ReplicaInner>) {
    let mut looks = tokio::time::interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = inner.cancel.cancelled() => return,
            _ = looks.tick() => {}
        }
        let is_removed = tokio::select! {
            biased;
            () = inner.cancel.cancelled() => return,
            is_removed = inner.is_told_removed() => is_removed,
        };
        if inner.is_removed.swap(is_removed, Ordering::AcqRel) != is_removed {
            inner.may_elect();
            inner.refresh();
        }
    }
}

impl ReplicaInner {
    /// The members that are agreed on, as far as is known here, and the log index that says so. What
    /// is not committed yet may never be.
    pub(crate) fn membership(&self) -> (u64, Vec<u64>) {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        let stored = &metrics.committed_membership_config;
        let index = stored.log_id().map_or(0, |log_id| log_id.index + 1);
        (index, stored.nodes().map(|(id, _)| *id).collect())
    }

    /// The log index of the newest membership here, agreed on or not, and where the others are.
    fn others(&self) -> (u64, Vec<String>) {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        let stored = &metrics.membership_config;
        let index = stored.log_id().map_or(0, |log_id| log_id.index + 1);
        let others = stored
            .nodes()
            .filter(|(id, _)| **id != self.links.identity.id)
            .map(|(_, node)| node.address.clone());
        (index, others.collect())
    }

    async fn is_told_removed(&self) -> bool {
        if self.status.borrow().has_quorum {
            return false;
        }
        let (id, cluster) = (self.links.identity.id, self.links.identity.cluster());
        // After a restart of all, what is agreed on is known to nobody for a while: a membership
        // that came later counts against it.
        let (index, others) = self.others();
        let answers = join_all(others.iter().map(|address| self.ask(address))).await;
        let answers = answers
            .into_iter()
            .flatten()
            .filter(|info| wire::join_optional(info.cluster_high, info.cluster_low) == cluster)
            .map(|info| (info.membership_index, info.members));
        lacks(id, index, answers)
    }
}

/// Whether the newest membership among `answers` lacks `id`, and is not older than that of log index
/// `known`. Where nothing is agreed on yet (index 0) nobody was removed: a cluster that is being
/// founded could never elect its first leader.
fn lacks(id: u64, known: u64, answers: impl Iterator<Item = (u64, Vec<u64>)>) -> bool {
    let newest = answers.max_by_key(|(index, _)| *index);
    newest.is_some_and(|(index, members)| index >= known.max(1) && !members.contains(&id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_agreed_and_newer_membership_removes() {
        let lacks = |known, answers: &[(u64, Vec<u64>)]| lacks(3, known, answers.iter().cloned());
        assert!(lacks(5, &[(9, vec![1, 2])]));
        assert!(lacks(9, &[(9, vec![1, 2])]), "it knows so itself");
        assert!(!lacks(5, &[]), "nobody answers");
        assert!(!lacks(0, &[(0, vec![]), (0, vec![])]), "not founded yet");
        assert!(!lacks(5, &[(4, vec![1, 2])]), "older than its own");
        assert!(
            !lacks(5, &[(7, vec![1, 2]), (8, vec![1, 2, 3])]),
            "added again"
        );
    }
}
