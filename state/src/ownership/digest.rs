//! A record's contribution to the digest. Contributions do not depend on order, so the digest can
//! be maintained incrementally.
//!
//! The digest is the wrapping sum of one 128-bit hash (xxh3) per record over its canonical bytes.
//! Changing a record subtracts its old hash and adds the new one. Children are not hashed, because
//! each record names its parent.

use xxhash_rust::xxh3::xxh3_128;

use crate::ids::{BlockHash, Slot};
use crate::ownership::arena::BlockRecord;

/// Returns the hash of `record` in `slot`, given its parent's block (`None` for a first block).
pub(super) fn of_record(slot: Slot, record: &BlockRecord, parent: Option<BlockHash>) -> u128 {
    let mut bytes = [0_u8; 29];
    bytes[..8].copy_from_slice(&record.hash.0.to_le_bytes());
    bytes[8..16].copy_from_slice(&parent.map_or(0, |hash| hash.0).to_le_bytes());
    bytes[16..24].copy_from_slice(&record.epoch.to_le_bytes());
    bytes[24..26].copy_from_slice(&slot.0.to_le_bytes());
    bytes[26..28].copy_from_slice(&record.leases.to_le_bytes());
    bytes[28] = u8::from(parent.is_some());
    xxh3_128(&bytes)
}

/// Returns the hash of a backend's slot, capacity (`None` if unknown) and release count.
pub(super) fn of_backend(slot: Slot, capacity: Option<u32>, epoch: u64) -> u128 {
    let mut bytes = [0_u8; 15];
    bytes[..2].copy_from_slice(&slot.0.to_le_bytes());
    bytes[2] = u8::from(capacity.is_some());
    bytes[3..7].copy_from_slice(&capacity.unwrap_or(0).to_le_bytes());
    bytes[7..].copy_from_slice(&epoch.to_le_bytes());
    xxh3_128(&bytes)
}
