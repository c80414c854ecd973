//! Assignment of replicas to backends as readers of their KV events.
//!
//! The leader decides on the assignment, and the other replicas follow it. Correctness does not
//! require a single reader at a time: a message that two readers report is applied once.

use std::collections::BTreeMap;

use bincode::{Decode, Encode};
use serde::Serialize;

use crate::bounds::BACKENDS_MAX;
use crate::ids::{BackendRef, ReplicaId, Slot};
use crate::reject::Rejection;
use crate::validate::ensure;

/// Assignment of one backend to its reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize)]
pub struct Assignment {
    /// Backend, with its incarnation, whose KV events are read.
    pub backend: BackendRef,
    /// Replica that reads the events.
    pub replica: ReplicaId,
}

/// Readers of all backends, by slot. A backend that starts a new incarnation keeps its reader until
/// the leader reassigns it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub(crate) struct Readers(BTreeMap<Slot, ReplicaId>);

impl Readers {
    /// Returns the reader of the backend in `slot`, if any.
    pub(crate) fn of(&self, slot: Slot) -> Option<ReplicaId> {
        self.0.get(&slot).copied()
    }

    /// Replaces all readers and returns the slots whose reader changed, in ascending order. Ignores
    /// assignments of past incarnations.
    pub(crate) fn replace(
        &mut self,
        readers: &[Assignment],
        is_live: impl Fn(BackendRef) -> bool,
    ) -> Result<Vec<Slot>, Rejection> {
        ensure(
            readers.len() <= BACKENDS_MAX,
            "readers",
            "at most one per backend",
        )?;
        let live = readers.iter().filter(|it| is_live(it.backend));
        let new: BTreeMap<Slot, ReplicaId> = live.map(|it| (it.backend.slot, it.replica)).collect();
        let old = std::mem::replace(&mut self.0, new);
        let slots = old.keys().chain(self.0.keys());
        let mut changed: Vec<Slot> = slots
            .copied()
            .filter(|slot| old.get(slot) != self.0.get(slot))
            .collect();
        changed.sort_unstable();
        changed.dedup();
        Ok(changed)
    }

    /// Removes the reader of the backend in `slot`.
    pub(crate) fn forget(&mut self, slot: Slot) {
        self.0.remove(&slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Incarnation;

    fn reads(slot: u16, replica: u8) -> Assignment {
        Assignment {
            backend: BackendRef {
                slot: Slot(slot),
                incarnation: Incarnation(1),
            },
            replica: ReplicaId(replica),
        }
    }

    #[test]
    fn reader_changes_are_listed_by_slot() {
        let mut readers = Readers::default();
        let all = |_: BackendRef| true;
        let first = readers.replace(&[reads(0, 1), reads(1, 2)], all);
        assert_eq!(first, Ok(vec![Slot(0), Slot(1)]));
        let second = readers.replace(&[reads(1, 2), reads(2, 1)], all);
        assert_eq!(second, Ok(vec![Slot(0), Slot(2)]));
        assert_eq!(readers.of(Slot(1)), Some(ReplicaId(2)));
        readers.forget(Slot(1));
        assert_eq!(readers.of(Slot(1)), None);
        let none_live = readers.replace(&[reads(2, 1)], |_| false);
        assert_eq!(none_live, Ok(vec![Slot(2)]));
    }

    #[test]
    fn too_many_readers_are_refused() {
        let mut readers = Readers::default();
        let many = vec![reads(0, 1); BACKENDS_MAX + 1];
        assert!(readers.replace(&many, |_| true).is_err());
    }
}
