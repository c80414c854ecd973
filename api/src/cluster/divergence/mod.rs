//! Digests of the state by log index: kept for the admin API and compared between replicas.
//!
//! At any moment, replicas are at different indexes, so digests can only be compared where two
//! replicas recorded the same index. Every replica records each index divisible by
//! [`STEP_ENTRIES`], any index requested before it was applied, and one where the log stands still.
//! Peers receive those divisible by [`BOUNDARY_ENTRIES`], which last long enough for all to report
//! them. If the log is slow, they receive every recorded step, and if it stands still, that index.
//! So a fault also shows soon in a quiet cluster, which may be quiet because its leader has a wrong
//! state. A peer's last claims about indexes not reached here yet are kept until they are.
//!
//! A mismatch means that the same log produced different states. It is logged, counted and
//! announced. If most voters of the cluster agree on another digest than this replica's, the fault
//! is here ([`Digests::judge`]) until the whole state is replaced, because nothing shows which part
//! is wrong.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use state::ids::ReplicaId;
use tokio::sync::{Notify, watch};

use crate::cluster::events::{ClusterEvent, EventBus};
use crate::planted::{self, Bug};

/// Interval between indexes whose digest is sent to peers.
pub const BOUNDARY_ENTRIES: u64 = 256;
/// Interval between indexes recorded on every replica.
pub const STEP_ENTRIES: u64 = 16;
/// Growth per check below which the log counts as slow. Checks are a second apart, so a step of a
/// slow log is the newest one for at least 250 ms. Peers receive it at least twice in that time,
/// because they get a message every 100 ms.
pub const SLOW_ENTRIES: u64 = 4 * STEP_ENTRIES;
/// Maximum number of digests kept.
pub const DIGESTS_KEPT_MAX: usize = 4096;
const _: () = assert!(BOUNDARY_ENTRIES.is_multiple_of(STEP_ENTRIES));
/// Maximum number of claims of one peer kept until their index is reached.
pub const CLAIMS_PER_PEER_MAX: usize = 16;
/// Maximum number of indexes awaited at a time.
pub const WANTED_MAX: usize = 256;
/// Maximum number of indexes for which compared claims of peers are kept.
pub const COMPARED_MAX: usize = 16;
/// Length of an exchanged message (version, index, digest), in bytes.
pub const MESSAGE_BYTES: usize = 1 + 8 + 16;

const MESSAGE_VERSION: u8 = 1;

/// A peer's state that differs from this replica's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mismatch {
    /// Id of the peer.
    pub peer: ReplicaId,
    /// Log index of the comparison.
    pub index: u64,
    /// This replica's digest at that index.
    pub ours: u128,
    /// The peer's digest at that index.
    pub theirs: u128,
}

/// Evidence that most voters hold a different state than this replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Minority {
    /// Log index of the comparison.
    pub index: u64,
    /// This replica's digest at that index.
    pub ours: u128,
    /// The majority's digest at that index.
    pub theirs: u128,
    /// Voters that hold the majority's state.
    pub holders: Vec<ReplicaId>,
}

/// This replica's digests by index, and the peers' claims. [`Digests`] shares it between tasks.
#[derive(Debug, Default)]
pub struct DigestRing {
    recorded: VecDeque<(u64, u128)>,
    claims: BTreeMap<ReplicaId, VecDeque<(u64, u128)>>,
    /// Peers' claims about the highest [`COMPARED_MAX`] indexes that were compared.
    compared: BTreeMap<u64, BTreeMap<ReplicaId, u128>>,
    /// Index at which the log last stood still.
    rested_at: u64,
    /// Whether the log is slow, so that peers receive every step.
    is_slow: bool,
}

impl DigestRing {
    /// Records the digest at `index` and returns the peers that claimed another one.
    pub fn record(&mut self, index: u64, digest: u128) -> Vec<Mismatch> {
        let place = self.recorded.partition_point(|(at, _)| *at < index);
        if self.recorded.get(place).is_none_or(|(at, _)| *at != index) {
            self.recorded.insert(place, (index, digest));
        }
        while self.recorded.len() > DIGESTS_KEPT_MAX {
            self.recorded.pop_front();
        }
        let mut reached = Vec::new();
        for (&peer, claims) in &mut self.claims {
            claims.retain(|&(at, theirs)| {
                if at == index {
                    reached.push((peer, theirs));
                }
                at > index
            });
        }
        let reached = reached.into_iter();
        reached
            .filter_map(|(peer, theirs)| self.compare(peer, index, digest, theirs))
            .collect()
    }

    /// Records the digest at `index`, where the log stands still, and returns the peers that hold
    /// another one. Replaces an earlier record there: a state that changes without the log is wrong
    /// from then on.
    pub fn rest(&mut self, index: u64, digest: u128) -> Vec<Mismatch> {
        self.rested_at = index;
        if self.get(index).is_none_or(|before| before == digest) {
            return self.record(index, digest);
        }
        self.recorded.retain(|(at, _)| *at != index);
        let mut found = self.record(index, digest);
        let said = self.compared.get(&index).into_iter().flatten();
        found.extend(
            said.filter(|(_, theirs)| **theirs != digest)
                .map(|(&peer, &theirs)| Mismatch {
                    peer,
                    index,
                    ours: digest,
                    theirs,
                }),
        );
        found
    }

    /// Compares a claim with `ours`. Reports a mismatch once, because a peer repeats its claim.
    fn compare(
        &mut self,
        peer: ReplicaId,
        index: u64,
        ours: u128,
        theirs: u128,
    ) -> Option<Mismatch> {
        let said = self.compared.entry(index).or_default();
        let is_new = said.insert(peer, theirs) != Some(theirs);
        while self.compared.len() > COMPARED_MAX {
            self.compared.pop_first();
        }
        (is_new && ours != theirs).then_some(Mismatch {
            peer,
            index,
            ours,
            theirs,
        })
    }

    /// Returns the evidence if, at some index, over half of `voters` hold one digest that differs
    /// from this replica's. Learners do not count, because their state comes from the leader.
    #[must_use]
    pub fn minority(&self, voters: &[ReplicaId]) -> Option<Minority> {
        self.compared.iter().rev().find_map(|(&index, said)| {
            let ours = self.get(index)?;
            let mut votes: BTreeMap<u128, usize> = BTreeMap::new();
            for (_, theirs) in said.iter().filter(|(peer, _)| voters.contains(peer)) {
                *votes.entry(*theirs).or_default() += 1;
            }
            votes.remove(&ours);
            let (theirs, _) = votes.into_iter().find(|(_, n)| n * 2 > voters.len())?;
            let holders = said.iter().filter(|(peer, _)| voters.contains(peer));
            let holders = holders.filter(|(_, said)| **said == theirs);
            Some(Minority {
                index,
                ours,
                theirs,
                holders: holders.map(|(peer, _)| *peer).collect(),
            })
        })
    }

    /// Handles a peer's claim. It is compared at once if its index is recorded, kept if it is ahead
    /// of everything recorded, and dropped otherwise.
    pub fn claim(&mut self, peer: ReplicaId, index: u64, theirs: u128) -> Option<Mismatch> {
        if let Some(ours) = self.get(index) {
            return self.compare(peer, index, ours, theirs);
        }
        if self.recorded.back().is_none_or(|(last, _)| *last < index) {
            let claims = self.claims.entry(peer).or_default();
            // A claim is repeated until there is a newer one.
            if claims.back() != Some(&(index, theirs)) {
                claims.push_back((index, theirs));
            }
            while claims.len() > CLAIMS_PER_PEER_MAX {
                claims.pop_front();
            }
        }
        None
    }

    /// Returns the last index at which a peer's digest was compared with this replica's, and
    /// whether they were equal; `None` if there is none.
    #[must_use]
    pub fn compared_with(&self, peer: ReplicaId) -> Option<(u64, bool)> {
        let mut newest = self.compared.iter().rev();
        newest.find_map(|(&index, said)| Some((index, *said.get(&peer)? == self.get(index)?)))
    }

    /// Returns the digest recorded at `index`, if there is one.
    #[must_use]
    pub fn get(&self, index: u64) -> Option<u128> {
        let place = self.recorded.partition_point(|(at, _)| *at < index);
        let (at, digest) = self.recorded.get(place)?;
        (*at == index).then_some(*digest)
    }

    /// Returns the newest digest that peers can compare with theirs, and its index; `None` if there
    /// is none.
    #[must_use]
    pub fn to_tell(&self) -> Option<(u64, u128)> {
        let rested = self.get(self.rested_at);
        let rested = rested.map(|digest| (self.rested_at, digest));
        let every = if self.is_slow {
            STEP_ENTRIES
        } else {
            BOUNDARY_ENTRIES
        };
        rested.max(self.newest(every))
    }

    /// Returns the newest digest at an index divisible by `every`, and its index; `None` if there
    /// is none.
    fn newest(&self, every: u64) -> Option<(u64, u128)> {
        let is_such = |(index, _): &&(u64, u128)| index.is_multiple_of(every);
        self.recorded.iter().rev().find(is_such).copied()
    }

    /// Decides whether the log is slow, given how many entries it has grown by since the last
    /// check.
    pub fn grew(&mut self, entries: u64) {
        self.is_slow = entries < SLOW_ENTRIES;
    }

    /// Iterates over the recorded indexes, ascending.
    pub fn indexes(&self) -> impl DoubleEndedIterator<Item = u64> {
        self.recorded.iter().map(|(index, _)| *index)
    }
}

/// The digests of one replica, shared by the apply loop, the peers' messages and the admin API.
pub struct Digests {
    inner: Mutex<DigestsInner>,
    /// Smallest awaited index; `u64::MAX` if none. Read on every apply.
    wanted_from: AtomicU64,
    /// Last index seen by [`Digests::applied`] that was recorded or passed an awaited one.
    progress: watch::Sender<u64>,
    mismatches: AtomicU64,
    differs: Notify,
    minority: ArcSwapOption<Minority>,
    events: OnceLock<EventBus>,
}

#[derive(Default)]
struct DigestsInner {
    ring: DigestRing,
    wanted: BTreeSet<u64>,
}

impl Default for Digests {
    fn default() -> Self {
        Self {
            inner: Mutex::default(),
            wanted_from: AtomicU64::new(u64::MAX),
            progress: watch::Sender::new(0),
            mismatches: AtomicU64::new(0),
            differs: Notify::new(),
            minority: ArcSwapOption::empty(),
            events: OnceLock::new(),
        }
    }
}

/// Error for bytes that are not a digest message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("digest message: expected {MESSAGE_BYTES} bytes of version {MESSAGE_VERSION}")]
pub struct ClaimError;

/// Error when too many indexes are awaited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("callers are waiting for {WANTED_MAX} indexes, which is the limit")]
pub struct TooManyWaitsRejection;

impl Digests {
    /// Sends mismatches to `events`. Only the first call has an effect.
    pub fn announce(&self, events: EventBus) {
        // A second sink would be a wiring fault; ignoring it does not affect comparisons.
        drop(self.events.set(events));
    }

    /// Records the digest at `index` if it is a step or requested. Must be called after every
    /// applied or skipped index, before the state can change again. Calls `digest` only if it
    /// records it.
    pub fn applied(&self, index: u64, digest: impl FnOnce() -> u128) {
        let is_step = index.is_multiple_of(STEP_ENTRIES);
        let passes_wanted = self.wanted_from.load(Ordering::Acquire) <= index;
        if !is_step && !passes_wanted {
            return;
        }
        let mut inner = self.lock();
        let is_wanted = inner.wanted.contains(&index);
        inner.wanted = inner.wanted.split_off(&index.saturating_add(1));
        self.publish_wanted(&inner);
        let mismatches = if is_step || is_wanted {
            inner.ring.record(index, digest())
        } else {
            Vec::new()
        };
        // A waiting task reads the ring while it holds the progress, so that lock must never be
        // taken within this one.
        drop(inner);
        mismatches.iter().for_each(|mismatch| self.sound(mismatch));
        self.progress.send_replace(index);
    }

    /// Records the digest at the applied index outside the regular steps, for example on request.
    pub fn record(&self, index: u64, digest: u128) {
        let mismatches = self.lock().ring.record(index, digest);
        mismatches.iter().for_each(|mismatch| self.sound(mismatch));
    }

    /// Requests the digest at an index that is not applied yet. Must be called between two applies,
    /// or the index may be missed. If too many are requested already, it replaces one further
    /// ahead.
    ///
    /// # Errors
    /// Returns [`TooManyWaitsRejection`] if [`WANTED_MAX`] indexes, all lower, are requested
    /// already.
    pub fn want(&self, index: u64) -> Result<(), TooManyWaitsRejection> {
        let mut inner = self.lock();
        if inner.wanted.len() >= WANTED_MAX && !inner.wanted.contains(&index) {
            if inner.wanted.last().is_none_or(|last| *last < index) {
                return Err(TooManyWaitsRejection);
            }
            inner.wanted.pop_last();
        }
        inner.wanted.insert(index);
        self.publish_wanted(&inner);
        Ok(())
    }

    /// Waits until a requested index is applied or skipped. Returns its digest if it was recorded
    /// within `timeout`.
    pub async fn wait(&self, index: u64, timeout: Duration) -> Option<u128> {
        let mut progress = self.progress.subscribe();
        let passed = progress.wait_for(|last| *last >= index || self.get(index).is_some());
        // Whether or not it timed out, the ring decides.
        drop(tokio::time::timeout(timeout, passed).await);
        self.get(index)
    }

    /// Returns the digest recorded at `index`, if there is one.
    #[must_use]
    pub fn get(&self, index: u64) -> Option<u128> {
        self.lock().ring.get(index)
    }

    /// Returns the last index at which a peer's digest was compared, and whether both were equal;
    /// `None` if there is none.
    #[must_use]
    pub fn compared_with(&self, peer: ReplicaId) -> Option<(u64, bool)> {
        self.lock().ring.compared_with(peer)
    }

    /// Returns the newest recorded index at or below `index`, if there is one.
    #[must_use]
    pub fn nearest(&self, index: u64) -> Option<u64> {
        self.lock().ring.indexes().rev().find(|at| *at <= index)
    }

    /// Records that the log stands still at `index` with this digest. Must be called between two
    /// applies.
    pub fn rest(&self, index: u64, digest: u128) {
        let mismatches = self.lock().ring.rest(index, digest);
        mismatches.iter().for_each(|mismatch| self.sound(mismatch));
    }

    /// Decides whether the log is slow, given how many entries it has grown by since the last
    /// check.
    pub fn grew(&self, entries: u64) {
        self.lock().ring.grew(entries);
    }

    /// Encodes this replica's claim for its peers; `None` before there is anything to compare.
    #[must_use]
    pub fn message(&self) -> Option<[u8; MESSAGE_BYTES]> {
        let (index, digest) = self.lock().ring.to_tell()?;
        let mut message = [0; MESSAGE_BYTES];
        message[0] = MESSAGE_VERSION;
        message[1..9].copy_from_slice(&index.to_le_bytes());
        message[9..].copy_from_slice(&digest.to_le_bytes());
        Some(message)
    }

    /// Decodes a peer's claim and compares it, now or once its index is reached.
    ///
    /// # Errors
    /// Returns [`ClaimError`] if the bytes are not a claim.
    pub fn receive(&self, peer: ReplicaId, message: &[u8]) -> Result<(), ClaimError> {
        let (index, theirs) = match message.split_first() {
            Some((&MESSAGE_VERSION, rest)) => rest.split_at_checked(8).ok_or(ClaimError)?,
            _ => return Err(ClaimError),
        };
        let index = u64::from_le_bytes(index.try_into().map_err(|_| ClaimError)?);
        let theirs = u128::from_le_bytes(theirs.try_into().map_err(|_| ClaimError)?);
        let mismatch = self.lock().ring.claim(peer, index, theirs);
        if let Some(mismatch) = mismatch {
            self.sound(&mismatch);
        }
        Ok(())
    }

    /// Returns the number of mismatches found since the start.
    #[must_use]
    pub fn mismatches(&self) -> u64 {
        self.mismatches.load(Ordering::Relaxed)
    }

    /// Waits until a peer's state is found to differ after the previous call returned. For a single
    /// caller.
    pub async fn differs(&self) {
        self.differs.notified().await;
    }

    /// Decides whether this replica's state is the wrong one, judged by all `voters` (which may or
    /// may not include this replica). Returns a result only from the call that found it. It is
    /// kept, see [`Digests::minority`], until [`Digests::forget`].
    pub fn judge(&self, voters: &[ReplicaId]) -> Option<Minority> {
        if planted::is(Bug::MinorityUnnoticed) {
            return None;
        }
        if self.mismatches() == 0 || self.minority.load().is_some() {
            return None;
        }
        let found = self.lock().ring.minority(voters)?;
        self.minority.store(Some(Arc::new(found.clone())));
        Some(found)
    }

    /// Returns what [`Digests::judge`] found, if it has not been repaired since.
    #[must_use]
    pub fn minority(&self) -> Option<Minority> {
        self.minority.load().as_deref().cloned()
    }

    /// Forgets all records and findings after the state was replaced.
    pub fn forget(&self) {
        self.lock().ring = DigestRing::default();
        self.minority.store(None);
    }

    fn sound(&self, mismatch: &Mismatch) {
        let Mismatch {
            peer,
            index,
            ours,
            theirs,
        } = *mismatch;
        let (ours, theirs) = (hex(ours), hex(theirs));
        self.mismatches.fetch_add(1, Ordering::Relaxed);
        self.differs.notify_one();
        tracing::error!(
            peer = peer.0,
            log_index = index,
            ours,
            theirs,
            "replicas differ at the same log index"
        );
        if let Some(events) = self.events.get() {
            events.send(ClusterEvent::DigestMismatch {
                peer,
                index,
                ours,
                theirs,
            });
        }
    }

    fn publish_wanted(&self, inner: &DigestsInner) {
        let first = inner.wanted.first().copied().unwrap_or(u64::MAX);
        self.wanted_from.store(first, Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, DigestsInner> {
        // The ring is consistent between any two changes, so a panic elsewhere does not corrupt it.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Formats a digest for the API: 32 hex digits.
#[must_use]
pub fn hex(digest: u128) -> String {
    format!("{digest:032x}")
}
