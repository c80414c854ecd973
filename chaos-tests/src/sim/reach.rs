//! Tracks which replicas cannot reach a majority as links and memberships change.
//!
//! A response takes a chain of messages from the replica to a majority and back. The links need not
//! be open at the same time: a request may pass one way before that way is cut, and its response
//! may return later over a repaired link. A replica thus counts as cut off only while no majority
//! is reachable there and back over all links that were open at any moment of that time, for any
//! electorate known in it. When such a time ends, another may begin immediately.

use std::collections::{BTreeMap, BTreeSet};

/// A link, in one direction.
type DirectedLink = (u8, u8);

/// Links and electorates at one moment, or at any moment of a span of time.
#[derive(Debug, Clone, Default)]
pub(super) struct Reachability {
    /// Links that are not cut.
    pub(super) open: BTreeSet<DirectedLink>,
    /// Sets of voters, as known to running replicas.
    pub(super) electorates: BTreeSet<Vec<u8>>,
}

/// Tracker of the replicas that are cut off, each with the links and electorates since then.
#[derive(Debug, Default)]
pub(super) struct Reach {
    cut_off: BTreeMap<u8, Reachability>,
}

/// A change of whether a replica can reach a majority.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReachChange {
    /// The replica is cut off from now on.
    Lost(u8),
    /// The replica was cut off until now.
    Regained(u8),
}

impl Reach {
    /// Updates the tracker with the current links and electorates. Returns the changes for `ids`,
    /// in order. Must be called after any change.
    pub(super) fn look(&mut self, ids: &[u8], now: &Reachability) -> Vec<ReachChange> {
        let mut changes = Vec::new();
        for id in ids {
            if let Some(since) = self.cut_off.get_mut(id) {
                since.open.extend(&now.open);
                since.electorates.extend(now.electorates.iter().cloned());
                if !since.reach_majority(*id) {
                    continue;
                }
                self.cut_off.remove(id);
                changes.push(ReachChange::Regained(*id));
            }
            if !now.reach_majority(*id) {
                self.cut_off.insert(*id, now.clone());
                changes.push(ReachChange::Lost(*id));
            }
        }
        changes
    }
}

impl Reachability {
    /// Returns whether a majority of some electorate can exchange messages with `id` in both
    /// directions. Also true while no running replica knows the voters.
    fn reach_majority(&self, id: u8) -> bool {
        let hear: BTreeSet<u8> = closure(id, &self.open, |(from, to)| (from, to));
        let heard: BTreeSet<u8> = closure(id, &self.open, |(from, to)| (to, from));
        let is_reached = |voter: &&u8| hear.contains(voter) && heard.contains(voter);
        self.electorates.is_empty()
            || self
                .electorates
                .iter()
                .any(|voters| voters.iter().filter(is_reached).count() * 2 > voters.len())
    }
}

/// Returns all replicas that can be reached from `id`. `along` returns the direction in which a
/// link is followed.
fn closure(
    id: u8,
    open: &BTreeSet<DirectedLink>,
    along: impl Fn(DirectedLink) -> DirectedLink,
) -> BTreeSet<u8> {
    let (mut found, mut new) = (BTreeSet::from([id]), vec![id]);
    while let Some(here) = new.pop() {
        for (from, to) in open.iter().map(|way| along(*way)) {
            if from == here && found.insert(to) {
                new.push(to);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDS: [u8; 3] = [1, 2, 3];

    /// Returns all links between three replicas except those in `cut`.
    fn without(cut: &[DirectedLink], electorates: &[&[u8]]) -> Reachability {
        let ways = IDS
            .into_iter()
            .flat_map(|from| IDS.map(|to| (from, to)))
            .filter(|way| way.0 != way.1 && !cut.contains(way));
        Reachability {
            open: ways.collect(),
            electorates: electorates.iter().map(|voters| voters.to_vec()).collect(),
        }
    }

    #[test]
    fn paths_each_way_at_different_times_connect() {
        let mut reach = Reach::default();
        let (inbound, outbound) = ([(1, 3), (2, 3)], [(3, 1), (3, 2)]);
        let all: &[&[u8]] = &[&IDS];
        let both = [inbound, outbound].concat();
        let mut look = |cut: &[DirectedLink]| reach.look(&IDS, &without(cut, all));
        assert_eq!(look(&[]), []);
        assert_eq!(look(&inbound), [ReachChange::Lost(3)]);
        assert_eq!(look(&both), []);
        // An earlier request may be answered here; a request from now on is not.
        assert_eq!(
            look(&outbound),
            [ReachChange::Regained(3), ReachChange::Lost(3)]
        );
        assert_eq!(look(&both), []);
        assert_eq!(look(&outbound), []);
        assert_eq!(look(&[]), [ReachChange::Regained(3)]);
    }

    #[test]
    fn an_indirect_path_connects() {
        let mut reach = Reach::default();
        let all: &[&[u8]] = &[&IDS];
        assert_eq!(reach.look(&IDS, &without(&[(1, 3), (3, 2)], all)), []);
    }

    #[test]
    fn a_majority_of_any_recent_electorate_suffices() {
        let mut reach = Reach::default();
        let cut = [(1, 3), (3, 1), (2, 3), (3, 2)];
        let mut look = |electorates: &[&[u8]]| reach.look(&IDS, &without(&cut, electorates));
        // No replica knows the voters.
        assert_eq!(look(&[]), []);
        let (lost, regained) = (IDS.map(ReachChange::Lost), IDS.map(ReachChange::Regained));
        assert_eq!(look(&[&IDS]), lost[2..]);
        assert_eq!(look(&[&IDS, &[1, 2, 3, 4]]), []);
        // A replica that counted on three voters before may have received its response here.
        assert_eq!(look(&[&[1, 2, 3, 4]]), lost[..2]);
        assert_eq!(look(&[&[1, 2]]), regained[..2]);
        assert_eq!(look(&[]), []);
    }
}
