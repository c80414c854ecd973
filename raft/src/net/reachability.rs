//! Whose calls reach whom.
//!
//! A leader sees its followers' answers, which arrive over connections that the leader opened. It
//! does not see whether calls that the followers make get through: a firewall or a stale DNS name
//! may block them while everything the leader does works. So each replica records whose calls reach
//! it, and reports that to the leader with every answer to an append. A leader that hears fewer
//! voters than another voter does transfers leadership to that one ([`better_leader`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use crate::locks::lock;

/// How long after its last call a peer counts as heard. Peers send ten messages a second.
const LATELY: Duration = Duration::from_secs(1);

/// Which peers this replica hears, and what they reported.
#[derive(Debug, Default)]
pub(crate) struct Reachability(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    heard: BTreeMap<u64, Instant>,
    reports: BTreeMap<u64, (Instant, PeerReport)>,
    applied: BTreeMap<u64, u64>,
}

/// What a peer reports with its answer to an append.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PeerReport {
    /// The replicas it hears, itself included.
    pub(crate) hears: BTreeSet<u64>,
    /// Whether it refuses to lead at present.
    pub(crate) stands_back: bool,
}

impl Reachability {
    /// A call or message of `peer` has arrived.
    pub(crate) fn heard(&self, peer: u64) {
        lock(&self.0).heard.insert(peer, Instant::now());
    }

    /// The peers heard lately.
    pub(crate) fn hears(&self) -> BTreeSet<u64> {
        let state = lock(&self.0);
        let lately = state.heard.iter().filter(|(_, at)| at.elapsed() <= LATELY);
        lately.map(|(peer, _)| *peer).collect()
    }

    /// `peer` has applied its log up to `index`; 0: an earlier build, which does not tell.
    pub(crate) fn applied(&self, peer: u64, index: u64) {
        if index > 0 {
            lock(&self.0).applied.insert(peer, index);
        }
    }

    /// The last log index that each peer told to have applied.
    pub(crate) fn all_applied(&self) -> BTreeMap<u64, u64> {
        lock(&self.0).applied.clone()
    }

    /// `peer` has reported. Earlier builds report nothing, not even themselves.
    pub(crate) fn reported(&self, peer: u64, report: PeerReport) {
        if report.hears.contains(&peer) {
            lock(&self.0).reports.insert(peer, (Instant::now(), report));
        }
    }

    /// The reports of late.
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

    /// Whether `peer` refuses to lead, by its last report.
    pub(crate) fn stands_back(&self, peer: u64) -> bool {
        let state = lock(&self.0);
        let report = state.reports.get(&peer);
        report.is_some_and(|(_, report)| report.stands_back)
    }
}

/// The voter that should lead in place of `me`: one that hears more of the other voters, does not
/// refuse, and has a quorum of voters that it hears and that hear it. Of several the one that hears
/// most; the lowest id breaks ties.
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
        if !voters.contains(candidate) || *candidate == me || it.stands_back {
            return None;
        }
        // Whether these two hear each other is the same whichever of them leads.
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
            stands_back: false,
        }
    }

    #[test]
    fn a_leader_that_hears_all_is_as_good_as_any() {
        let reports = BTreeMap::from([(2, report_of([1, 2, 3])), (3, report_of([1, 2, 3]))]);
        let voters = set([1, 2, 3]);
        assert_eq!(better_leader(1, &voters, &set([2, 3]), &reports), None);
        // Nobody hears one that is dead.
        let reports = BTreeMap::from([(2, report_of([1, 2]))]);
        assert_eq!(better_leader(1, &voters, &set([2]), &reports), None);
    }

    #[test]
    fn a_leader_whom_no_call_reaches_is_replaced() {
        let voters = set([1, 2, 3]);
        let mut reports = BTreeMap::from([(2, report_of([1, 2, 3])), (3, report_of([1, 2, 3]))]);
        assert_eq!(better_leader(1, &voters, &set([]), &reports), Some(2));
        reports.insert(
            2,
            PeerReport {
                stands_back: true,
                ..report_of([1, 2, 3])
            },
        );
        assert_eq!(better_leader(1, &voters, &set([]), &reports), Some(3));
        // It hears the other, which does not hear it: nobody would follow.
        reports.insert(2, report_of([1, 2]));
        assert_eq!(better_leader(1, &voters, &set([]), &reports), None);
    }

    #[test]
    fn who_is_in_the_middle_leads() {
        let voters = set([1, 2, 3]);
        let reports = BTreeMap::from([(2, report_of([1, 2, 3]))]);
        assert_eq!(better_leader(1, &voters, &set([2]), &reports), Some(2));
    }

    #[test]
    fn of_two_voters_neither_is_better_nor_is_a_learner() {
        let reports = BTreeMap::from([(2, report_of([1, 2])), (9, report_of([1, 2, 9]))]);
        assert_eq!(better_leader(1, &set([1, 2]), &set([]), &reports), None);
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_long_ago_does_not_count() {
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
