//! Records which member was last removed under each id, and when, according to the log. The record
//! is the same on every replica that has applied the same entries.
//!
//! A join request that a member sent before its removal may arrive after it. The log distinguishes
//! it from the request of a replica that was never admitted, but only as far as the log reaches
//! back. So this record is part of snapshots.

use std::collections::BTreeMap;

use crate::types::{LogId, Membership};
use crate::wire::proto;

/// Maximum id of a replica, and so the maximum number of recorded removals.
const ID_MAX: u64 = 255;

/// Latest removal under each replica id.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RemovedMembers(BTreeMap<u64, Removal>);

/// Removal of a member: its store, and the entry that removed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Removal {
    store: u64,
    by: LogId,
}

impl RemovedMembers {
    /// Records the members that the entry `by` removed.
    pub(crate) fn note(&mut self, before: &Membership, after: &Membership, by: LogId) {
        for (id, node) in before.nodes() {
            let stays = after.get_node(id).is_some_and(|it| it.store == node.store);
            if !stays && *id <= ID_MAX {
                let store = node.store;
                self.0.insert(*id, Removal { store, by });
            }
        }
    }

    /// Whether `store` of replica `id` was removed after the entry `asked`.
    pub(crate) fn is_removed_since(&self, id: u64, store: u64, requested_at: LogId) -> bool {
        let removal = self.0.get(&id).filter(|removal| removal.store == store);
        removal.is_some_and(|removal| removal.by > requested_at)
    }

    pub(crate) fn to_wire(&self) -> Vec<proto::Removal> {
        let removals = self.0.iter().map(|(id, removal)| proto::Removal {
            id: *id,
            store: removal.store,
            by: Some(removal.by.into()),
        });
        removals.collect()
    }

    pub(crate) fn from_wire(removals: Vec<proto::Removal>) -> Self {
        let known = removals.into_iter().filter_map(|removal| {
            let by = LogId::from(removal.by?);
            let store = removal.store;
            (removal.id <= ID_MAX).then_some((removal.id, Removal { store, by }))
        });
        Self(known.collect())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::types::{Node, log_id};

    fn members(stores: &[(u64, u64)]) -> Membership {
        let node = |store| Node {
            store,
            ..Node::default()
        };
        let nodes: BTreeMap<u64, Node> = (stores.iter())
            .map(|(id, store)| (*id, node(*store)))
            .collect();
        Membership::new(vec![BTreeSet::from([1])], nodes).unwrap()
    }

    #[test]
    fn a_removal_applies_to_its_store_and_earlier_requests() {
        let mut removed = RemovedMembers::default();
        let at = |index| log_id(2, 1, index);
        removed.note(&members(&[(1, 7)]), &members(&[(1, 7), (2, 8)]), at(4));
        removed.note(&members(&[(1, 7), (2, 8)]), &members(&[(1, 7)]), at(6));
        let removed = RemovedMembers::from_wire(removed.to_wire());
        assert!(removed.is_removed_since(2, 8, at(4)));
        assert!(!removed.is_removed_since(2, 8, at(7)), "let in again since");
        assert!(!removed.is_removed_since(2, 9, at(4)), "another store");
        assert!(!removed.is_removed_since(1, 7, at(4)), "a member");
        // The removal was in the log of a leader of a later term whose entry was lost.
        assert!(!removed.is_removed_since(2, 8, log_id(3, 1, 5)));
    }

    #[test]
    fn a_replacing_store_removes_the_replaced_one() {
        let mut removed = RemovedMembers::default();
        let by = log_id(2, 1, 6);
        removed.note(&members(&[(1, 7), (2, 8)]), &members(&[(1, 7), (2, 9)]), by);
        assert!(removed.is_removed_since(2, 8, log_id(2, 1, 4)));
        assert!(!removed.is_removed_since(2, 9, log_id(2, 1, 4)));
    }
}
