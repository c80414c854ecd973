//! Asks the other members why this replica hears no quorum.
//!
//! A leader stops contacting a member as soon as its removal is committed, often before that member
//! has learned of it. A replica that hears no quorum therefore asks the members it knows for the
//! current membership. If a member does not respond, its error shows why there is no quorum.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, MissedTickBehavior};

use super::ReplicaInner;
use super::peer_discovery::{LastSeen, PeerDiscovery, SearchLog, report_member};
use crate::locks::lock;
use crate::status::PeerFinding;
use crate::types::{Node, public_index};
use crate::wire;

/// Interval between two checks for a quorum.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Checks periodically whether this replica lost its quorum, and if so, asks the members why. A
/// removed replica reports that in its status and requests no votes, since it would get none. Both
/// end when it hears a leader again, because it may have been added again.
pub(super) async fn notice(inner: Arc<ReplicaInner>) {
    let mut looks = tokio::time::interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut lost = None;
    loop {
        looks.tick().await;
        let has_quorum = inner.status.borrow().has_quorum;
        let (is_removed, found) = match has_quorum || !inner.is_member() {
            true => (false, Vec::new()),
            false => inner.ask_members().await,
        };
        let search = if found.is_empty() {
            lost = None;
            PeerDiscovery::default()
        } else {
            // A quorum that is back before the next check was hardly lost.
            lost.get_or_insert_with(LostQuorum::new).told(found)
        };
        let is_news = inner.is_member() && inner.show_members(search);
        if inner.is_removed.swap(is_removed, Ordering::AcqRel) != is_removed {
            inner.may_elect();
            inner.refresh();
        } else if is_news {
            inner.refresh();
        }
    }
}

/// State of a period without a quorum.
struct LostQuorum {
    log: SearchLog,
    seen: LastSeen,
}

impl LostQuorum {
    fn new() -> Self {
        Self {
            log: SearchLog::new(Instant::now()),
            seen: LastSeen::default(),
        }
    }

    /// Returns the findings to show in the status, and logs them if a line is due.
    fn told(&mut self, mut peers: Vec<PeerFinding>) -> PeerDiscovery {
        let now = Instant::now();
        self.seen.replace_timeouts(now, &mut peers);
        let search = PeerDiscovery {
            problem: None,
            peers,
        };
        self.log.say_lost(now, &search);
        search
    }
}

impl ReplicaInner {
    /// Returns the newest membership known to be committed: its log index and its members. Leaves
    /// out the asking replica `asker.0` if the member under that id has another store than
    /// `asker.1`. A membership that is not committed yet may never be.
    pub(crate) fn membership(&self, asker: (u64, u64)) -> (u64, Vec<u64>) {
        self.with_metrics(|metrics| {
            let stored = &metrics.committed_membership_config;
            let is_replaced =
                |id: u64, node: &Node| id == asker.0 && ![0, node.store].contains(&asker.1);
            let members = stored.nodes().filter(|(id, node)| !is_replaced(**id, node));
            let members = members.map(|(id, _)| *id);
            (public_index(stored.log_id().as_ref()), members.collect())
        })
    }

    /// Returns the newest membership here, committed or not: its log index, and the ids and
    /// addresses of the other members.
    pub(super) fn others(&self) -> (u64, Vec<(u64, String)>) {
        self.with_metrics(|metrics| {
            let stored = &metrics.membership_config;
            let others = stored
                .nodes()
                .filter(|(id, _)| **id != self.links.identity.id)
                .map(|(id, node)| (*id, node.address.clone()));
            (public_index(stored.log_id().as_ref()), others.collect())
        })
    }

    /// Stores the findings about the other members. Returns whether they changed.
    fn show_members(&self, found: PeerDiscovery) -> bool {
        let mut shown = lock(&self.search);
        let is_news = *shown != found;
        *shown = found;
        is_news
    }

    /// Asks the other members for the membership. Returns whether this replica was removed, and the
    /// findings at their addresses.
    async fn ask_members(&self) -> (bool, Vec<PeerFinding>) {
        let (id, cluster) = (self.links.identity.id, self.links.identity.cluster());
        // After a restart of all replicas none knows for a while what is committed, so a response
        // must not be older than the newest membership here.
        let (index, others) = self.others();
        let answers = join_all(others.iter().map(|(_, address)| self.ask(address))).await;
        let found = others.iter().zip(&answers);
        let found =
            found.map(|((id, address), answer)| report_member((*id, address), answer, cluster));
        let found = found.collect();
        let answers = answers
            .into_iter()
            .flatten()
            .filter(|info| wire::join_optional(info.cluster_high, info.cluster_low) == cluster)
            .map(|info| (info.membership_index, info.members));
        (lacks(id, index, answers), found)
    }
}

/// Whether the newest membership among `answers` lacks `id` and is not older than the one at log
/// index `known`. Index 0 means that nothing is committed yet, so no member was removed: otherwise
/// a cluster that is being formed could never elect its first leader.
fn lacks(id: u64, known: u64, answers: impl Iterator<Item = (u64, Vec<u64>)>) -> bool {
    let newest = answers.max_by_key(|(index, _)| *index);
    newest.is_some_and(|(index, members)| index >= known.max(1) && !members.contains(&id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_agreed_newer_membership_removes_a_replica() {
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
