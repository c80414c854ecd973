//! Whose calls reach whom.
//!
//! A leader learns of its followers by their answers, which come over connections that the leader has
//! made. Whether their own calls get through it does not learn that way: a firewall or a stale name may
//! keep them out while everything the leader does goes well. So each replica notes whose calls reach it,
//! and tells the leader with every answer to an append. A leader that hears fewer voters than one of
//! them would hands over ([`better_leader`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Who called this long ago at most is heard: peers send a message ten times a second.
const LATELY: Duration = Duration::from_secs(1);

/// Whom this replica hears, and what peers said of themselves.
#[derive(Debug, Default)]
pub(crate) struct Hearing(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    heard: BTreeMap<u64, Instant>,
    told: BTreeMap<u64, (Instant, Told)>,
}

/// What a peer says with an answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Told {
    /// Whom it hears, itself included.
    pub(crate) hears: BTreeSet<u64>,
    /// Whether it would not lead.
    pub(crate) stands_back: bool,
}

impl Hearing {
    /// A call or message of `peer` has come.
    pub(crate) fn heard(&self, peer: u64) {
        self.lock().heard.insert(peer, Instant::now());
    }

    /// Who was heard lately.
    pub(crate) fn hears(&self) -> BTreeSet<u64> {
        let state = self.lock();
        let lately = state.heard.iter().filter(|(_, at)| at.elapsed() <= LATELY);
        lately.map(|(peer, _)| *peer).collect()
    }

    /// An answer of `peer` has come. One of an earlier build tells nothing.
    pub(crate) fn answered(&self, peer: u64, told: Told) {
        if told.hears.contains(&peer) {
            self.lock().told.insert(peer, (Instant::now(), told));
        }
    }

    /// What peers told lately.
    pub(crate) fn told(&self) -> BTreeMap<u64, Told> {
        let state = self.lock();
        let lately = state
            .told
            .iter()
            .filter(|(_, (at, _))| at.elapsed() <= LATELY);
        lately
            .map(|(peer, (_, told))| (*peer, told.clone()))
            .collect()
    }

    /// Whether `peer` said last that it would not lead.
    pub(crate) fn stands_back(&self, peer: u64) -> bool {
        let state = self.lock();
        let told = state.told.get(&peer);
        told.is_some_and(|(_, told)| told.stands_back)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Which of `voters` should lead in place of `me`: one that hears more of the others, would lead, and
/// has a quorum that it hears and that hears it. The one that hears most, of equals the lowest.
pub(crate) fn better_leader(
    me: u64,
    voters: &BTreeSet<u64>,
    hears: &BTreeSet<u64>,
    told: &BTreeMap<u64, Told>,
) -> Option<u64> {
    let is_heard_by = |speaker: u64, listener: u64| {
        listener == speaker
            || match listener == me {
                true => hears.contains(&speaker),
                false => told
                    .get(&listener)
                    .is_some_and(|it| it.hears.contains(&speaker)),
            }
    };
    let gains = told.iter().filter_map(|(candidate, it)| {
        if !voters.contains(candidate) || *candidate == me || it.stands_back {
            return None;
        }
        // The two hear each other or not, whichever of them leads.
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

    fn telling<const N: usize>(hears: [u64; N]) -> Told {
        Told {
            hears: set(hears),
            stands_back: false,
        }
    }

    #[test]
    fn a_leader_that_hears_all_is_as_good_as_any() {
        let told = BTreeMap::from([(2, telling([1, 2, 3])), (3, telling([1, 2, 3]))]);
        let voters = set([1, 2, 3]);
        assert_eq!(better_leader(1, &voters, &set([2, 3]), &told), None);
        // Nobody hears one that is dead.
        let told = BTreeMap::from([(2, telling([1, 2]))]);
        assert_eq!(better_leader(1, &voters, &set([2]), &told), None);
    }

    #[test]
    fn a_leader_whom_no_call_reaches_is_replaced() {
        let voters = set([1, 2, 3]);
        let mut told = BTreeMap::from([(2, telling([1, 2, 3])), (3, telling([1, 2, 3]))]);
        assert_eq!(better_leader(1, &voters, &set([]), &told), Some(2));
        told.insert(
            2,
            Told {
                stands_back: true,
                ..telling([1, 2, 3])
            },
        );
        assert_eq!(better_leader(1, &voters, &set([]), &told), Some(3));
        // It hears the other, which does not hear it: nobody would follow.
        told.insert(2, telling([1, 2]));
        assert_eq!(better_leader(1, &voters, &set([]), &told), None);
    }

    #[test]
    fn who_is_in_the_middle_leads() {
        let voters = set([1, 2, 3]);
        let told = BTreeMap::from([(2, telling([1, 2, 3]))]);
        assert_eq!(better_leader(1, &voters, &set([2]), &told), Some(2));
    }

    #[test]
    fn of_two_voters_neither_is_better_nor_is_a_learner() {
        let told = BTreeMap::from([(2, telling([1, 2])), (9, telling([1, 2, 9]))]);
        assert_eq!(better_leader(1, &set([1, 2]), &set([]), &told), None);
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_long_ago_does_not_count() {
        let hearing = Hearing::default();
        hearing.heard(2);
        hearing.answered(2, telling([1, 2]));
        hearing.answered(3, telling([]));
        assert_eq!((hearing.hears(), hearing.told().len()), (set([2]), 1));
        tokio::time::advance(LATELY + Duration::from_millis(1)).await;
        assert_eq!((hearing.hears(), hearing.told().len()), (set([]), 0));
    }
}
