//! A user's admission account: waiting requests, limits and their usage.
//!
//! It is stored next to the user but encoded separately, so that users without one are written and
//! hashed as in format version 1.

use bincode::{Decode, Encode};

use super::{User, UserUsage};
use crate::charge::Charge;
use crate::ids::ReplicaId;
use crate::quotas::Consumed;
use crate::settings::UserLimits;

/// Admission account of a user. An account with default values is not stored.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub(super) struct AdmissionAccount {
    /// Number of waiting requests by replica, ascending, without zeros.
    pub(super) waiting: Vec<(ReplicaId, u32)>,
    /// The user's own limits. `None` if the default ones apply.
    pub(super) limits: Option<UserLimits>,
    /// Usage counted against the limits.
    pub(super) consumed: Consumed,
}

impl AdmissionAccount {
    /// Whether a restored account is one that this code could have created.
    pub(super) fn is_valid(&self) -> bool {
        let waiting = &self.waiting;
        *self != Self::default()
            && waiting.is_sorted_by(|a, b| a.0 < b.0)
            && waiting.iter().all(|(_, requests)| *requests > 0)
            && self.limits.is_none_or(|limits| limits.validate().is_ok())
            && self.consumed.is_valid()
    }
}

impl User {
    /// Applies a charge to the admission account.
    pub(super) fn apply_charge(
        &mut self,
        replica: ReplicaId,
        charge: &Charge,
        usage: &UserUsage,
        of_all: &UserLimits,
        now_ms: u64,
    ) {
        let limits = self.limits(of_all);
        let has_spent = |account: &AdmissionAccount| account.consumed != Consumed::default();
        let is_counted =
            limits.has_rate() || self.admission_account.as_deref().is_some_and(has_spent);
        if !is_counted && charge.queued == 0 && charge.dequeued == 0 {
            return;
        }
        let tokens = usage.input_uncached.saturating_add(usage.output);
        self.update_account(|account| {
            add(&mut account.waiting, replica, charge.queued);
            take(&mut account.waiting, replica, charge.dequeued);
            if is_counted {
                account
                    .consumed
                    .spend(&limits, now_ms, usage.requests, tokens);
            }
        });
    }
}

/// Adds `requests` to the count of `replica`.
pub(super) fn add(counts: &mut Vec<(ReplicaId, u32)>, replica: ReplicaId, requests: u32) {
    if requests == 0 {
        return;
    }
    match counts.binary_search_by_key(&replica, |(replica, _)| *replica) {
        Ok(place) => counts[place].1 = counts[place].1.saturating_add(requests),
        Err(place) => counts.insert(place, (replica, requests)),
    }
}

/// Subtracts `requests` from the count of `replica`, stopping at 0.
pub(super) fn take(counts: &mut Vec<(ReplicaId, u32)>, replica: ReplicaId, requests: u32) {
    if let Ok(place) = counts.binary_search_by_key(&replica, |(replica, _)| *replica) {
        counts[place].1 = counts[place].1.saturating_sub(requests);
        if counts[place].1 == 0 {
            counts.remove(place);
        }
    }
}

/// Returns the sum of the counts over all replicas.
pub(super) fn sum(counts: &[(ReplicaId, u32)]) -> u64 {
    counts
        .iter()
        .map(|(_, requests)| u64::from(*requests))
        .sum()
}
