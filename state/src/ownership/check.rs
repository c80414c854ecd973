//! Checks the invariants of an [`Ownership`] from scratch, which is slow for a large one.

use std::collections::BTreeMap;

use crate::error::InvariantError;
use crate::ids::{BlockHash, Slot};
use crate::ownership::Ownership;
use crate::ownership::arena::{BlockRecord, NO_RECORD};
use crate::ownership::backend::{BackendBlocks, key};

impl Ownership {
    /// Checks the invariants, given the tips of all open leases:
    ///
    /// - `I1` Ownership is prefix-closed: every block's parent is owned, and no block is its own
    ///   ancestor.
    /// - `I2` The published view shows exactly the owned blocks, each at one place.
    /// - `I3` Without its reported blocks, a backend exceeds its capacity only while nothing can be
    ///   evicted. The counts agree.
    /// - `I6` Pins are right: a record counts its children and the leases that end at it. The
    ///   evictable records are exactly those that nothing holds, and some release kept each of
    ///   them.
    /// - `I8` The digest equals one computed from scratch.
    ///
    /// # Errors
    /// Describes the first invariant that does not hold.
    pub fn check(
        &self,
        leases: impl IntoIterator<Item = (Slot, BlockHash)>,
    ) -> Result<(), InvariantError> {
        let mut open = BTreeMap::<(Slot, BlockHash), u16>::new();
        for lease in leases {
            *open.entry(lease).or_default() += 1;
        }
        let mut owned = 0_u64;
        for backend in self.backends.iter().flatten() {
            let mut sum = 0_u128;
            for (index, record) in backend.arena.live() {
                sum = sum.wrapping_add(backend.digest_of(&record));
                self.check_record(backend, index, &record, &mut open)?;
            }
            owned += u64::from(backend.owned);
            check_backend(backend)?;
            if sum != backend.sum {
                let (slot, kept) = (backend.slot, backend.sum);
                return broken("I8", format!("{slot}: kept {kept:032x}, is {sum:032x}"));
            }
        }
        if let Some(((slot, tip), leases)) = open.first_key_value() {
            return broken(
                "I6",
                format!("{leases} leases on {tip} of {slot}, which is not owned"),
            );
        }
        if (owned, self.common.view.pairs()) != (self.common.owned, owned) {
            let view = self.common.view.pairs();
            return broken("I2", format!("{owned} owned, {view} shown, {:?}", self));
        }
        Ok(())
    }

    /// Checks `I23`, given the reports of each slot's engine: one entry per rank and block.
    pub(crate) fn check_reports(
        &self,
        reports: &dyn Fn(Slot) -> Vec<BlockHash>,
    ) -> Result<(), String> {
        for backend in self.backends.iter().flatten() {
            let slot = backend.slot;
            let mut expected = BTreeMap::<BlockHash, u8>::new();
            for block in reports(slot) {
                *expected.entry(block).or_default() += 1;
            }
            for (_, record) in backend.arena.live() {
                let reports = expected.remove(&record.hash).unwrap_or(0);
                if reports != record.reports {
                    return Err(format!("{slot}: {reports} ranks report {record:?}"));
                }
            }
            if let Some((block, _)) = expected.first_key_value() {
                return Err(format!("{slot}: {block} is reported and not owned"));
            }
        }
        Ok(())
    }

    fn check_record(
        &self,
        backend: &BackendBlocks,
        index: u32,
        record: &BlockRecord,
        open: &mut BTreeMap<(Slot, BlockHash), u16>,
    ) -> Result<(), InvariantError> {
        let slot = backend.slot;
        if record.parent != NO_RECORD && backend.arena.try_get(record.parent).is_none() {
            return broken(
                "I1",
                format!("{slot}: the parent of {record:?} is not owned"),
            );
        }
        if backend.find(record.hash) != Some(index) {
            return broken("I1", format!("{slot}: {record:?} is not found by its hash"));
        }
        let place = backend.place(index);
        if !self.common.view.shows(slot, place, record.hash) {
            return broken("I2", format!("{slot}: {record:?} is not in the view"));
        }
        let leases = open.remove(&(slot, record.hash)).unwrap_or(0);
        if leases != record.leases {
            return broken("I6", format!("{slot}: {leases} leases end at {record:?}"));
        }
        let is_evictable = backend.evictable.contains(&key(index, record));
        if is_evictable != record.is_free_leaf() || is_evictable && record.epoch == 0 {
            return broken(
                "I6",
                format!("{slot}: {record:?} evictable: {is_evictable}"),
            );
        }
        Ok(())
    }
}

fn check_backend(backend: &BackendBlocks) -> Result<(), InvariantError> {
    let slot = backend.slot;
    let mut children = vec![0_u32; backend.arena.len() as usize];
    let (mut owned, mut reported, mut free_leaves, mut leaves) = (0, 0, 0, Vec::new());
    for (index, record) in backend.arena.live() {
        owned += 1;
        reported += u32::from(record.reports > 0);
        free_leaves += usize::from(record.is_free_leaf());
        if record.parent != NO_RECORD {
            children[record.parent as usize] += 1;
        }
        if record.children == 0 {
            leaves.push(index);
        }
    }
    let wrong = backend
        .arena
        .live()
        .find(|(at, r)| children[*at as usize] != r.children);
    if let Some((at, record)) = wrong {
        let children = children[at as usize];
        return broken("I6", format!("{slot}: {record:?} has {children} children"));
    }
    if reached_from(backend, &leaves) != owned {
        return broken("I1", format!("{slot}: a block is its own ancestor"));
    }
    if (owned, u64::from(owned)) != (backend.owned, backend.index.len()) {
        return broken(
            "I3",
            format!("{slot}: {owned} records, counted {}", backend.owned),
        );
    }
    if reported != backend.reported {
        let counted = backend.reported;
        return broken(
            "I3",
            format!("{slot}: {reported} reported, counted {counted}"),
        );
    }
    if backend.evictable.len() != free_leaves {
        return broken(
            "I6",
            format!("{slot}: {} evictable", backend.evictable.len()),
        );
    }
    if let Err(detail) = backend.check_engine_order() {
        return broken("I118", format!("{slot}: {detail}"));
    }
    if backend.capacity.is_some_and(|most| owned - reported > most) && free_leaves > 0 {
        let capacity = backend.capacity;
        return broken(
            "I3",
            format!("{slot}: {owned} of {capacity:?}, {free_leaves} evictable"),
        );
    }
    Ok(())
}

/// Returns the number of records on paths from `leaves` to a first block. If the child counts are
/// right, this leaves out only records on a cycle.
fn reached_from(backend: &BackendBlocks, leaves: &[u32]) -> u32 {
    let mut is_reached = vec![false; backend.arena.len() as usize];
    let mut reached = 0;
    for &leaf in leaves {
        let mut at = leaf;
        while at != NO_RECORD && !is_reached[at as usize] {
            is_reached[at as usize] = true;
            reached += 1;
            at = backend.arena.get(at).parent;
        }
    }
    reached
}

fn broken(number: &'static str, detail: String) -> Result<(), InvariantError> {
    Err(InvariantError { number, detail })
}
