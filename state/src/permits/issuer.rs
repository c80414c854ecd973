//! [`PermitIssuer`]: the counts of the users whose permits this replica issues.

use std::collections::{BTreeMap, BTreeSet};

use super::{ClaimAnswer, ClaimMessage, PermitClaim, PermitSubject};
use crate::ids::ReplicaId;
use crate::shares::{EpochMembers, SILENT_MS};

/// One replica as the issuer of permits.
#[derive(Debug, Clone, Default)]
pub struct PermitIssuer {
    now: EpochMembers,
    /// Awake time at which this replica entered the epoch, in milliseconds.
    since_ms: u64,
    /// Number of each member's last message in this epoch.
    heard: BTreeMap<ReplicaId, u64>,
    /// Members that have told all they hold.
    complete: BTreeSet<ReplicaId>,
    /// Number of permits by user and holder, without zeros.
    issued: BTreeMap<PermitSubject, BTreeMap<ReplicaId, u32>>,
}

impl PermitIssuer {
    /// Advances the time, and forgets everything if this is another epoch.
    pub fn follow(&mut self, now: &EpochMembers) {
        if self.now.epoch != now.epoch {
            *self = Self {
                since_ms: now.awake_ms,
                ..Self::default()
            };
        }
        self.now.clone_from(now);
    }

    /// Whether this replica knows what all members hold, or has waited long enough for it.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        let mut members = self.now.members.iter();
        let waited_ms = self.now.awake_ms.saturating_sub(self.since_ms);
        self.now.is_settled
            && (waited_ms > SILENT_MS || members.all(|it| self.complete.contains(it)))
    }

    /// Whether nothing is issued.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.issued.is_empty()
    }

    /// Counts the claims of `holder`, and grants what `limit` of each user leaves; `None` if the user
    /// has no limit.
    pub fn answer(
        &mut self,
        holder: ReplicaId,
        message: &ClaimMessage,
        limit: impl Fn(PermitSubject) -> Option<u32>,
    ) -> ClaimAnswer {
        let is_late = self
            .heard
            .get(&holder)
            .is_some_and(|last| *last >= message.number);
        if message.epoch != self.now.epoch || is_late {
            return ClaimAnswer::Ignored;
        }
        self.heard.insert(holder, message.number);
        if message.is_complete {
            self.issued.retain(|_, held| {
                held.remove(&holder);
                !held.is_empty()
            });
            self.complete.insert(holder);
        }
        // All that is held counts before anything is granted.
        let is_settled = self.is_settled();
        let permits = message.claims.iter().map(|claim| {
            let most = match (is_settled, limit(claim.subject)) {
                (false, _) => Some(0),
                (true, limit) => limit,
            };
            self.count(holder, *claim, most)
        });
        let permits = permits.collect();
        ClaimAnswer::Counted {
            permits,
            is_settled,
        }
    }

    /// Counts a claim within `limit`. What is held already counts in any case.
    fn count(&mut self, holder: ReplicaId, claim: PermitClaim, limit: Option<u32>) -> u32 {
        let held = self.issued.entry(claim.subject).or_default();
        held.remove(&holder);
        let others = held
            .values()
            .fold(0, |sum: u32, it| sum.saturating_add(*it));
        let room = limit.map_or(u32::MAX, |limit| limit.saturating_sub(others));
        let permits = claim.wanted.min(room).max(claim.held);
        if permits > 0 {
            held.insert(holder, permits);
        } else if held.is_empty() {
            self.issued.remove(&claim.subject);
        }
        permits
    }
}
