//! Open leases: the blocks that each dispatch of a replica holds at a backend.
//!
//! [`Ownership`](crate::ownership::Ownership) only counts pins. This table records their holders,
//! so that a session's leases can be closed when it ends, and repeated or unknown items are
//! detected.

use std::collections::{BTreeMap, BTreeSet};

use bincode::{Decode, Encode};
use xxhash_rust::xxh3::xxh3_128;

use crate::cow::{CowMap, PathKey};
use crate::encoding;
use crate::ids::{AttemptId, BackendRef, BlockHash, ReplicaId, Slot};
use crate::ownership::Lease;

/// Maximum number of open leases of one replica.
pub(super) const LEASES_PER_REPLICA_MAX: usize = 1_000_000;

/// Holder of a lease: one dispatch of one replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Encode, Decode)]
pub(super) struct Holder {
    pub(super) replica: ReplicaId,
    pub(super) attempt: AttemptId,
}

impl PathKey for Holder {
    // Attempt ids ascend, so attempts that are open together differ in their lowest bits.
    fn path(&self) -> u64 {
        self.attempt.0.reverse_bits()
    }
}

/// An open lease, as the table stores it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub(super) struct OpenLease {
    pub(super) backend: BackendRef,
    pub(super) tip: Option<BlockHash>,
    pub(super) inserted: u32,
}

impl OpenLease {
    pub(super) fn of(backend: BackendRef, lease: &Lease) -> Self {
        Self {
            backend,
            tip: lease.tip,
            inserted: lease.inserted,
        }
    }

    pub(super) fn lease(self) -> Lease {
        Lease {
            slot: self.backend.slot,
            tip: self.tip,
            inserted: self.inserted,
        }
    }
}

/// All open leases, by holder.
pub(super) struct Leases {
    map: CowMap<Holder, OpenLease>,
    per_replica: BTreeMap<ReplicaId, usize>,
    /// Wrapping sum of the leases' hashes.
    digest: u128,
}

/// Frozen copy of the leases, for a snapshot.
pub(super) struct LeasesImage(CowMap<Holder, OpenLease>);

impl Leases {
    pub(super) fn new() -> Self {
        Self {
            map: CowMap::new(),
            per_replica: BTreeMap::new(),
            digest: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.map.len()
    }

    pub(super) fn of_replica(&self, replica: ReplicaId) -> usize {
        self.per_replica.get(&replica).copied().unwrap_or(0)
    }

    pub(super) fn contains(&self, holder: Holder) -> bool {
        self.map.get(&holder).is_some()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Holder, &OpenLease)> {
        self.map.iter()
    }

    /// Opens a lease. Returns `false`, without a change, if `holder` has one already.
    pub(super) fn open(&mut self, holder: Holder, lease: OpenLease) -> bool {
        if !self.map.insert_new(holder, lease) {
            return false;
        }
        *self.per_replica.entry(holder.replica).or_default() += 1;
        self.digest = self.digest.wrapping_add(hash(holder, &lease));
        true
    }

    pub(super) fn close(&mut self, holder: Holder) -> Option<OpenLease> {
        let lease = self.map.remove(&holder)?;
        if let Some(count) = self.per_replica.get_mut(&holder.replica) {
            *count -= 1;
            if *count == 0 {
                self.per_replica.remove(&holder.replica);
            }
        }
        self.digest = self.digest.wrapping_sub(hash(holder, &lease));
        Some(lease)
    }

    /// Closes all leases of `replica` and returns them in order of attempts.
    pub(super) fn close_replica(&mut self, replica: ReplicaId) -> Vec<OpenLease> {
        if self.of_replica(replica) == 0 {
            return Vec::new();
        }
        self.close_where(|holder, _| holder.replica == replica)
    }

    /// Closes all leases on the backend in `slot`.
    pub(super) fn forget_slot(&mut self, slot: Slot) {
        self.close_where(|_, lease| lease.backend.slot == slot);
    }

    /// Closes the leases on the backend in `slot` that end at one of the removed blocks `tips`.
    pub(super) fn forget_tips(&mut self, slot: Slot, tips: &[BlockHash]) {
        if tips.is_empty() {
            return;
        }
        let tips: BTreeSet<BlockHash> = tips.iter().copied().collect();
        self.close_where(|_, lease| {
            let tip = lease.tip.filter(|_| lease.backend.slot == slot);
            tip.is_some_and(|tip| tips.contains(&tip))
        });
    }

    /// Closes and returns the leases for which `is_over` returns `true`. Scans all leases, so only
    /// rare events use it.
    fn close_where(
        &mut self,
        mut is_over: impl FnMut(&Holder, &OpenLease) -> bool,
    ) -> Vec<OpenLease> {
        let over = self
            .map
            .iter()
            .filter(|(holder, lease)| is_over(holder, lease));
        let mut over: Vec<Holder> = over.map(|(holder, _)| *holder).collect();
        over.sort_unstable();
        over.into_iter()
            .filter_map(|holder| self.close(holder))
            .collect()
    }

    pub(super) fn digest(&self) -> u128 {
        self.digest
    }

    /// Whether counts and digest agree with the leases.
    pub(super) fn is_consistent(&self) -> bool {
        let mut rebuilt = Self::new();
        for (holder, lease) in self.map.iter() {
            rebuilt.open(*holder, *lease);
        }
        rebuilt.len() == self.len()
            && rebuilt.per_replica == self.per_replica
            && rebuilt.digest == self.digest
    }

    pub(super) fn freeze(&self) -> LeasesImage {
        LeasesImage(self.map.clone())
    }

    /// Adds the leases of one section of a snapshot. An error describes the fault.
    pub(super) fn restore_piece(&mut self, bytes: &[u8]) -> Result<(), String> {
        for (holder, lease) in encoding::from_bytes::<
            Vec<(Holder, OpenLease)>,
            { encoding::SECTION_BYTES_MAX },
        >(bytes)?
        {
            if !self.open(holder, lease) {
                return Err(format!("{holder:?} stands twice"));
            }
        }
        Ok(())
    }
}

impl LeasesImage {
    /// Encodes all leases in sections of bounded size. Yields none if there are no leases.
    pub(super) fn pieces(&self) -> impl Iterator<Item = Vec<u8>> {
        const LEASES_PER_PIECE: usize = 16_384;
        let mut leases = self.0.iter().peekable();
        std::iter::from_fn(move || {
            leases.peek()?;
            let piece: Vec<(&Holder, &OpenLease)> =
                leases.by_ref().take(LEASES_PER_PIECE).collect();
            Some(encoding::to_bytes(&piece))
        })
    }
}

fn hash(holder: Holder, lease: &OpenLease) -> u128 {
    let mut bytes = [0_u8; 28];
    bytes[0] = holder.replica.0;
    bytes[1..9].copy_from_slice(&holder.attempt.0.to_le_bytes());
    bytes[9..11].copy_from_slice(&lease.backend.slot.0.to_le_bytes());
    bytes[11..15].copy_from_slice(&lease.backend.incarnation.0.to_le_bytes());
    bytes[15] = u8::from(lease.tip.is_some());
    bytes[16..24].copy_from_slice(&lease.tip.unwrap_or_default().0.to_le_bytes());
    bytes[24..28].copy_from_slice(&lease.inserted.to_le_bytes());
    xxh3_128(&bytes)
}
