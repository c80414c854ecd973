//! Tracks which replicas reach which.
//!
//! A leader sees its followers' responses, which arrive on connections that the leader opened. It
//! does not see whether the followers' own calls get through: a firewall or a stale DNS name may
//! block them while everything the leader does works. So each replica records which peers' calls
//! reach it, and reports that to the leader with every append response. A leader that hears fewer
//! voters than another voter does transfers leadership to that voter ([`better_leader`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use crate::locks::lock;

/// Time for which a peer counts as heard after its last call. Peers send at least ten messages per
/// second.
const LATELY: Duration = Duration::from_secs(1);

/// Peers that this replica hears, and what they reported.
#[derive(Debug, Default)]
pub(crate) struct Reachability(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    heard: BTreeMap<u64, Instant>,
    reports: BTreeMap<u64, (Instant, PeerReport)>,
    applied: BTreeMap<u64, u64>,
}

/// Report that a peer sent in an append response.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PeerReport {
    /// Ids of the replicas that the peer hears, including its own.
    pub(crate) hears: BTreeSet<u64>,
    /// Whether the peer currently refuses to lead.
    pub(crate) refuses_leadership: bool,
}

impl Reachability {
    /// Records a call or message from `peer`.
    pub(crate) fn heard(&self, peer: u64) {
        lock(&self.0).heard.insert(peer, Instant::now());
    }

    /// Returns the ids of the peers that were heard recently.
    pub(crate) fn hears(&self) -> BTreeSet<u64> {
        let state = lock(&self.0);
        let lately = state.heard.iter().filter(|(_, at)| at.elapsed() <= LATELY);
        lately.map(|(peer, _)| *peer).collect()
    }

    /// Records that `peer` has applied its log up to `index`; 0 while it has
    /// applied nothing.
    pub(crate) fn applied(&self, peer: u64, index: u64) {
        if index > 0 {
            lock(&self.0).applied.insert(peer, index);
        }
    }

    /// Returns the last applied log index that each peer reported.
    pub(crate) fn all_applied(&self) -> BTreeMap<u64, u64> {
        lock(&self.0).applied.clone()
    }

    /// Records the `report` of `peer`, unless it is empty: a report names at least its sender.
    pub(crate) fn reported(&self, peer: u64, report: PeerReport) {
        if report.hears.contains(&peer) {
            lock(&self.0).reports.insert(peer, (Instant::now(), report));
        }
    }

    /// Returns the recent reports by peer.
    pub(crate) fn reports(&self) -> BTreeMap<u64, PeerReport> {
        let state = lock(&self.0);
        let lately = state
            .reports
            .iter()
            .filter(|(_, (at, _))| at.elapsed() <= LATELY);
        lately
            .map(|(peer, (_, report))| (*peer, report.clone()))
            .collect()
    }

    /// Whether `peer` refuses to lead, according to its last report.
    pub(crate) fn refuses_leadership(&self, peer: u64) -> bool {
        let state = lock(&self.0);
        let report = state.reports.get(&peer);
        report.is_some_and(|(_, report)| report.refuses_leadership)
    }
}

/// Returns the voter that should lead in place of `me`, if there is one: one that hears more of the
/// other voters, does not refuse, and can exchange calls with a quorum of voters in both
/// directions. Prefers the one that hears most; the lowest id breaks ties.
pub(crate) fn better_leader(
    me: u64,
    voters: &BTreeSet<u64>,
    hears: &BTreeSet<u64>,
    reports: &BTreeMap<u64, PeerReport>,
) -> Option<u64> {
    let is_heard_by = |speaker: u64, listener: u64| {
        listener == speaker
            || match listener == me {
                true => hears.contains(&speaker),
                false => reports
                    .get(&listener)
                    .is_some_and(|it| it.hears.contains(&speaker)),
            }
    };
    let gains = reports.iter().filter_map(|(candidate, it)| {
        if !voters.contains(candidate) || *candidate == me || it.refuses_leadership {
            return None;
        }
        // Whether these two hear each other does not depend on which of them leads.
        let others = voters.iter().filter(|id| **id != me && id != &candidate);
        let (there, here) = others.fold((0, 0), |(there, here), id| {
            (
                there + u64::from(it.hears.contains(id)),
                here + u64::from(hears.contains(id)),
            )
        });
        let both_ways = voters
            .iter()
            .filter(|id| is_heard_by(**id, *candidate) && is_heard_by(*candidate, **id));
        let has_quorum = both_ways.count() * 2 > voters.len();
        (there > here && has_quorum).then_some((there, std::cmp::Reverse(*candidate)))
    });
    gains.max().map(|(_, candidate)| candidate.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set<const N: usize>(ids: [u64; N]) -> BTreeSet<u64> {
        BTreeSet::from(ids)
    }

    fn report_of<const N: usize>(hears: [u64; N]) -> PeerReport {
        PeerReport {
            hears: set(hears),
            refuses_leadership: false,
        }
    }

    #[test]
    fn a_fully_connected_leader_is_not_replaced() {
        let reports = BTreeMap::from([(2, report_of([1, 2, 3])), (3, report_of([1, 2, 3]))]);
        let voters = set([1, 2, 3]);
        assert_eq!(better_leader(1, &voters, &set([2, 3]), &reports), None);
        // No one hears a dead voter.
        let reports = BTreeMap::from([(2, report_of([1, 2]))]);
        assert_eq!(better_leader(1, &voters, &set([2]), &reports), None);
    }

    #[test]
    fn an_unreachable_leader_is_replaced() {
        let voters = set([1, 2, 3]);
        let mut reports = BTreeMap::from([(2, report_of([1, 2, 3])), (3, report_of([1, 2, 3]))]);
        assert_eq!(better_leader(1, &voters, &set([]), &reports), Some(2));
        reports.insert(
            2,
            PeerReport {
                refuses_leadership: true,
                ..report_of([1, 2, 3])
            },
        );
        assert_eq!(better_leader(1, &voters, &set([]), &reports), Some(3));
        // It hears the other voter, which does not hear it: the other would not follow.
        reports.insert(2, report_of([1, 2]));
        assert_eq!(better_leader(1, &voters, &set([]), &reports), None);
    }

    #[test]
    fn the_voter_that_reaches_all_others_leads() {
        let voters = set([1, 2, 3]);
        let reports = BTreeMap::from([(2, report_of([1, 2, 3]))]);
        assert_eq!(better_leader(1, &voters, &set([2]), &reports), Some(2));
    }

    #[test]
    fn neither_of_two_voters_nor_a_learner_is_a_better_leader() {
        let reports = BTreeMap::from([(2, report_of([1, 2])), (9, report_of([1, 2, 9]))]);
        assert_eq!(better_leader(1, &set([1, 2]), &set([]), &reports), None);
    }

    #[tokio::test(start_paused = true)]
    async fn old_reachability_reports_expire() {
        let reachability = Reachability::default();
        reachability.heard(2);
        reachability.reported(2, report_of([1, 2]));
        reachability.reported(3, report_of([]));
        assert_eq!(
            (reachability.hears(), reachability.reports().len()),
            (set([2]), 1)
        );
        tokio::time::advance(LATELY + Duration::from_millis(1)).await;
        assert_eq!(
            (reachability.hears(), reachability.reports().len()),
            (set([]), 0)
        );
    }
}
