//! A user's standing in admission: waiting requests, limits, and usage.
//!
//! It stands beside the account and takes no part in its encoding, so that users whom admission knows
//! nothing of are written, and hashed, as in format version 1.

use bincode::{Decode, Encode};

use crate::ids::ReplicaId;
use crate::quotas::Consumed;
use crate::settings::UserLimits;

/// What admission keeps of a user. A default one is not kept.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub(super) struct AdmissionAccount {
    /// Requests that wait, by replica, ascending, without zeros.
    pub(super) waiting: Vec<(ReplicaId, u32)>,
    /// The user's own limits; `None`: those of all.
    pub(super) limits: Option<UserLimits>,
    /// What was used of the limits.
    pub(super) consumed: Consumed,
}

impl AdmissionAccount {
    /// Whether a restored one could have been made here.
    pub(super) fn is_valid(&self) -> bool {
        let waiting = &self.waiting;
        *self != Self::default()
            && waiting.is_sorted_by(|a, b| a.0 < b.0)
            && waiting.iter().all(|(_, requests)| *requests > 0)
            && self.limits.is_none_or(|limits| limits.validate().is_ok())
            && self.consumed.is_valid()
    }
}

/// Adds requests to a replica's count.
pub(super) fn add(counts: &mut Vec<(ReplicaId, u32)>, replica: ReplicaId, requests: u32) {
    if requests == 0 {
        return;
    }
    match counts.binary_search_by_key(&replica, |(replica, _)| *replica) {
        Ok(place) => counts[place].1 = counts[place].1.saturating_add(requests),
        Err(place) => counts.insert(place, (replica, requests)),
    }
}

/// Takes requests off a replica's count, as many as there are.
pub(super) fn take(counts: &mut Vec<(ReplicaId, u32)>, replica: ReplicaId, requests: u32) {
    if let Ok(place) = counts.binary_search_by_key(&replica, |(replica, _)| *replica) {
        counts[place].1 = counts[place].1.saturating_sub(requests);
        if counts[place].1 == 0 {
            counts.remove(place);
        }
    }
}

/// All replicas' counts.
pub(super) fn sum(counts: &[(ReplicaId, u32)]) -> u64 {
    counts
        .iter()
        .map(|(_, requests)| u64::from(*requests))
        .sum()
}
