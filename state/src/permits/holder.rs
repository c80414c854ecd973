//! [`PermitHolder`]: the permits of the requests that run or wait at this replica.

use std::collections::{BTreeMap, BTreeSet};

use super::{ClaimAnswer, ClaimMessage, PermitClaim, PermitSubject, issuer_of};
use crate::ids::ReplicaId;
use crate::shares::EpochMembers;

/// One replica as a holder of permits.
#[derive(Debug, Clone, Default)]
pub struct PermitHolder {
    now: EpochMembers,
    number: u64,
    subjects: BTreeMap<PermitSubject, HeldPermits>,
    /// Users of whom the issuer is to be told.
    news: BTreeSet<PermitSubject>,
    /// Users with requests that wait.
    waiting: BTreeSet<PermitSubject>,
    issuers: BTreeMap<ReplicaId, IssuerLink>,
}

/// Permits of one user at this replica.
#[derive(Debug, Clone, Copy, Default)]
struct HeldPermits {
    /// Number of permits that the issuer counts, at least.
    issued: u32,
    /// Number of requests that use a permit, including unconfirmed ones.
    used: u32,
    /// Number of requests that wait for a permit.
    waiting: u32,
    /// Whether the issuer had no more permits when it was last asked.
    is_full: bool,
}

/// What this replica has told an issuer in this epoch.
#[derive(Debug, Clone, Default)]
struct IssuerLink {
    /// Whether the issuer knows all that this replica holds.
    is_complete: bool,
    /// The message that has no answer yet.
    open: Option<OpenMessage>,
}

#[derive(Debug, Clone)]
struct OpenMessage {
    number: u64,
    is_complete: bool,
    /// Users of its claims, in their order, with the permits that each claims in all.
    subjects: Vec<(PermitSubject, u32)>,
}

impl PermitHolder {
    /// Starts again with all issuers if this is another epoch. Answers to earlier messages do not
    /// count any more.
    pub fn follow(&mut self, now: &EpochMembers) {
        if self.now.epoch != now.epoch {
            self.issuers.clear();
            for held in self.subjects.values_mut() {
                held.issued = held.used;
                held.is_full = false;
            }
        }
        self.now.clone_from(now);
    }

    /// Returns the members of the epoch.
    #[must_use]
    pub fn members(&self) -> &[ReplicaId] {
        &self.now.members
    }

    /// Takes a permit of `subject` that this replica has and does not use. Returns whether there was
    /// one.
    pub fn take(&mut self, subject: PermitSubject) -> bool {
        let Some(held) = self.subjects.get_mut(&subject) else {
            return false;
        };
        let is_free = held.used < held.issued;
        held.used += u32::from(is_free);
        is_free
    }

    /// Takes a permit of `subject` that no issuer has confirmed.
    pub fn take_unconfirmed(&mut self, subject: PermitSubject) {
        let held = self.subjects.entry(subject).or_default();
        held.used = held.used.saturating_add(1);
        self.news.insert(subject);
    }

    /// Returns a permit that was taken.
    pub fn put_back(&mut self, subject: PermitSubject) {
        if let Some(held) = self.subjects.get_mut(&subject) {
            held.used = held.used.saturating_sub(1);
            self.news.insert(subject);
        }
    }

    /// Adds one request that waits for a permit.
    pub fn begin_wait(&mut self, subject: PermitSubject) {
        let held = self.subjects.entry(subject).or_default();
        held.waiting = held.waiting.saturating_add(1);
        // The issuer may have a permit by now.
        held.is_full = false;
        self.waiting.insert(subject);
        self.news.insert(subject);
    }

    /// Removes one request that waits for a permit.
    pub fn end_wait(&mut self, subject: PermitSubject) {
        if let Some(held) = self.subjects.get_mut(&subject) {
            held.waiting = held.waiting.saturating_sub(1);
            self.news.insert(subject);
            if held.waiting == 0 {
                self.waiting.remove(&subject);
            }
        }
    }

    /// Whether any request waits for a permit.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Number of requests of `subject` that have a permit here or wait for one.
    #[must_use]
    pub fn open(&self, subject: PermitSubject) -> u32 {
        let open = |held: &HeldPermits| held.used.saturating_add(held.waiting);
        self.subjects.get(&subject).map_or(0, open)
    }

    /// Whether the issuer of `subject` had no more permits when it was last asked.
    #[must_use]
    pub fn is_full(&self, subject: PermitSubject) -> bool {
        self.subjects.get(&subject).is_some_and(|held| held.is_full)
    }

    /// Whether nothing is held, waits, or is to be told.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.subjects.is_empty() && self.news.is_empty()
    }

    /// Makes the next message to each issuer that `is_asked` ask again for those who wait.
    pub fn ask_again(&mut self, is_asked: impl Fn(ReplicaId) -> bool) {
        let now = &self.now;
        let waiting = self.waiting.iter();
        let asked = waiting.filter(|subject| issuer_of(now, **subject).is_some_and(&is_asked));
        self.news.extend(asked);
    }

    /// Returns the next message to `issuer`; `None` if it has still to answer the last one, or
    /// there is nothing to tell. Permits that nobody wants are returned with it.
    pub fn message(&mut self, issuer: ReplicaId) -> Option<ClaimMessage> {
        let link = self.issuers.entry(issuer).or_default();
        if link.open.is_some() {
            return None;
        }
        let is_complete = !link.is_complete;
        let is_issued = |subject: &PermitSubject| issuer_of(&self.now, *subject) == Some(issuer);
        let told: Vec<PermitSubject> = match is_complete {
            true => self.subjects.keys().copied().filter(is_issued).collect(),
            false => self.news.iter().copied().filter(is_issued).collect(),
        };
        if told.is_empty() && !is_complete {
            return None;
        }
        let claims = told.iter().map(|subject| {
            self.news.remove(subject);
            let held = self.subjects.entry(*subject).or_default();
            let wanted = held.used.saturating_add(held.waiting);
            // Those that a waiting request is about to take stay here.
            held.issued = held.issued.clamp(held.used, wanted);
            PermitClaim {
                subject: *subject,
                held: held.issued,
                wanted,
            }
        });
        let claims: Vec<PermitClaim> = claims.collect();
        self.number += 1;
        link.open = Some(OpenMessage {
            number: self.number,
            is_complete,
            subjects: claims.iter().map(|it| (it.subject, it.wanted)).collect(),
        });
        Some(ClaimMessage {
            epoch: self.now.epoch,
            number: self.number,
            is_complete,
            claims,
        })
    }

    /// Applies the answer of `issuer` to the message with this number; `None` if there was none.
    /// Returns whether requests that wait should look again: there is a permit, or none is left.
    pub fn answered(
        &mut self,
        issuer: ReplicaId,
        number: u64,
        answer: Option<&ClaimAnswer>,
    ) -> bool {
        let link = self.issuers.get_mut(&issuer);
        let Some((link, open)) = link.and_then(|link| {
            let open = link.open.take_if(|open| open.number == number)?;
            Some((link, open))
        }) else {
            return false;
        };
        let Some(ClaimAnswer::Counted {
            permits,
            is_settled,
        }) = answer.filter(|answer| answer.permits_len() == open.subjects.len())
        else {
            self.news
                .extend(open.subjects.into_iter().map(|(subject, _)| subject));
            return false;
        };
        link.is_complete |= open.is_complete;
        let mut is_change = false;
        for (claimed, permits) in open.subjects.into_iter().zip(permits) {
            is_change |= self.count(claimed, *permits, *is_settled);
        }
        is_change
    }

    /// Sets the permits of a user who claimed `wanted`. Returns whether its requests that wait
    /// should look again.
    fn count(
        &mut self,
        (subject, wanted): (PermitSubject, u32),
        permits: u32,
        is_settled: bool,
    ) -> bool {
        let Some(held) = self.subjects.get_mut(&subject) else {
            return false;
        };
        held.issued = permits;
        let was_full = held.is_full;
        // A claim made before a request began to wait says nothing about that one.
        held.is_full = is_settled && permits < wanted;
        let is_change = held.waiting > 0 && (held.used < permits || held.is_full != was_full);
        if held.used.saturating_add(held.waiting) < permits {
            // More than is wanted by now.
            self.news.insert(subject);
        }
        if permits == 0 && held.used == 0 && held.waiting == 0 {
            self.subjects.remove(&subject);
            self.news.remove(&subject);
        }
        is_change
    }
}
