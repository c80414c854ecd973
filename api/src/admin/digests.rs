//! Digests of the state by log index: kept for the admin API and compared between replicas.
//!
//! Replicas are at different indexes at any moment, so a digest is only worth something where two
//! of them recorded the same index. Every replica records each index divisible by
//! [`BOUNDARY_ENTRIES`], and any index somebody asked for before it was applied. A peer's claim
//! about an index not reached here yet is kept until it is.
//!
//! A mismatch means that the same log gave different states: it is logged, counted and announced.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use state::ids::ReplicaId;
use tokio::sync::watch;

use super::events::{Event, Events};

/// Every index divisible by this is recorded on every replica.
pub const BOUNDARY_ENTRIES: u64 = 256;
/// Digests kept.
pub const DIGESTS_KEPT_MAX: usize = 1024;
/// Claims of one peer kept until their index is reached.
pub const CLAIMS_PER_PEER_MAX: usize = 16;
/// Indexes that may be waited for at one time.
pub const WANTED_MAX: usize = 256;
/// Length of an exchanged message: version, index, digest.
pub const MESSAGE_BYTES: usize = 1 + 8 + 16;

const MESSAGE_VERSION: u8 = 1;

/// A peer's state that differs from this replica's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mismatch {
    /// The peer.
    pub peer: ReplicaId,
    /// Where both stood.
    pub index: u64,
    /// This replica's digest there.
    pub ours: u128,
    /// The peer's.
    pub theirs: u128,
}

/// Digests by index and what peers claimed. Pure; [`Digests`] shares it between tasks.
#[derive(Debug, Default)]
pub struct DigestRing {
    recorded: VecDeque<(u64, u128)>,
    claims: BTreeMap<ReplicaId, VecDeque<(u64, u128)>>,
}

impl DigestRing {
    /// Records the digest at `index`; answers what peers claimed otherwise.
    pub fn record(&mut self, index: u64, digest: u128) -> Vec<Mismatch> {
        let place = self.recorded.partition_point(|(at, _)| *at < index);
        if self.recorded.get(place).is_none_or(|(at, _)| *at != index) {
            self.recorded.insert(place, (index, digest));
        }
        while self.recorded.len() > DIGESTS_KEPT_MAX {
            self.recorded.pop_front();
        }
        let mut mismatches = Vec::new();
        for (&peer, claims) in &mut self.claims {
            claims.retain(|&(at, theirs)| {
                if at == index && theirs != digest {
                    mismatches.push(Mismatch {
                        peer,
                        index,
                        ours: digest,
                        theirs,
                    });
                }
                at > index
            });
        }
        mismatches
    }

    /// Takes a peer's claim: compared at once when its index is recorded, kept when it is ahead of
    /// everything recorded, dropped when it is behind and unknown.
    pub fn claim(&mut self, peer: ReplicaId, index: u64, theirs: u128) -> Option<Mismatch> {
        if let Some(ours) = self.get(index) {
            return (ours != theirs).then_some(Mismatch {
                peer,
                index,
                ours,
                theirs,
            });
        }
        if self.recorded.back().is_none_or(|(last, _)| *last < index) {
            let claims = self.claims.entry(peer).or_default();
            claims.push_back((index, theirs));
            while claims.len() > CLAIMS_PER_PEER_MAX {
                claims.pop_front();
            }
        }
        None
    }

    /// The digest recorded at `index`.
    #[must_use]
    pub fn get(&self, index: u64) -> Option<u128> {
        let place = self.recorded.partition_point(|(at, _)| *at < index);
        let (at, digest) = self.recorded.get(place)?;
        (*at == index).then_some(*digest)
    }

    /// The newest digest at an index every replica records.
    #[must_use]
    pub fn newest_boundary(&self) -> Option<(u64, u128)> {
        let is_boundary = |(index, _): &&(u64, u128)| index.is_multiple_of(BOUNDARY_ENTRIES);
        self.recorded.iter().rev().find(is_boundary).copied()
    }

    /// Recorded indexes, ascending.
    pub fn indexes(&self) -> impl DoubleEndedIterator<Item = u64> {
        self.recorded.iter().map(|(index, _)| *index)
    }
}

/// The digests of one replica, shared by the apply loop, the peers' messages and the admin API.
pub struct Digests {
    inner: Mutex<Inner>,
    /// Smallest index somebody waits for; `u64::MAX` for none. Read at every apply.
    wanted_from: AtomicU64,
    /// Last index seen by [`Digests::applied`] that was recorded or passed a wanted one.
    progress: watch::Sender<u64>,
    mismatches: AtomicU64,
    events: OnceLock<Events>,
}

#[derive(Default)]
struct Inner {
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
            events: OnceLock::new(),
        }
    }
}

/// A message that is no claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("digest message: expected {MESSAGE_BYTES} bytes of version {MESSAGE_VERSION}")]
pub struct BadClaim;

/// Too many indexes are waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{WANTED_MAX} indexes are waited for, which is the limit")]
pub struct TooManyWanted;

impl Digests {
    /// Tells mismatches to `events`; only the first call counts.
    pub fn announce(&self, events: Events) {
        // A second sink would be a wiring fault without effect on what is compared.
        drop(self.events.set(events));
    }

    /// Call after every applied or skipped index, before the state can change again. `digest` is
    /// taken only where it is recorded; elsewhere this is one load and a mask.
    pub fn applied(&self, index: u64, digest: impl FnOnce() -> u128) {
        let is_boundary = index.is_multiple_of(BOUNDARY_ENTRIES);
        let passes_wanted = self.wanted_from.load(Ordering::Acquire) <= index;
        if !is_boundary && !passes_wanted {
            return;
        }
        let mut inner = self.lock();
        let is_wanted = inner.wanted.contains(&index);
        inner.wanted = inner.wanted.split_off(&index.saturating_add(1));
        self.publish_wanted(&inner);
        if is_boundary || is_wanted {
            let mismatches = inner.ring.record(index, digest());
            drop(inner);
            mismatches.iter().for_each(|mismatch| self.sound(mismatch));
        }
        self.progress.send_replace(index);
    }

    /// Records the digest at the applied index out of turn, as when somebody asked for it.
    pub fn record(&self, index: u64, digest: u128) {
        let mismatches = self.lock().ring.record(index, digest);
        mismatches.iter().for_each(|mismatch| self.sound(mismatch));
    }

    /// Asks for an index that is not applied yet. Call between two applies, or it may be missed.
    ///
    /// # Errors
    /// [`TooManyWanted`].
    pub fn want(&self, index: u64) -> Result<(), TooManyWanted> {
        let mut inner = self.lock();
        if inner.wanted.len() >= WANTED_MAX && !inner.wanted.contains(&index) {
            return Err(TooManyWanted);
        }
        inner.wanted.insert(index);
        self.publish_wanted(&inner);
        Ok(())
    }

    /// Waits until a wanted index was applied or passed over; the digest there, if recorded within
    /// `timeout`.
    pub async fn wait(&self, index: u64, timeout: Duration) -> Option<u128> {
        let mut progress = self.progress.subscribe();
        let passed = progress.wait_for(|last| *last >= index || self.get(index).is_some());
        // Timed out or not, the ring has the last word.
        drop(tokio::time::timeout(timeout, passed).await);
        self.get(index)
    }

    /// The digest recorded at `index`.
    #[must_use]
    pub fn get(&self, index: u64) -> Option<u128> {
        self.lock().ring.get(index)
    }

    /// The newest recorded index at or below `index`.
    #[must_use]
    pub fn nearest(&self, index: u64) -> Option<u64> {
        self.lock().ring.indexes().rev().find(|at| *at <= index)
    }

    /// This replica's claim for its peers; `None` before the first boundary.
    #[must_use]
    pub fn message(&self) -> Option<[u8; MESSAGE_BYTES]> {
        let (index, digest) = self.lock().ring.newest_boundary()?;
        let mut message = [0; MESSAGE_BYTES];
        message[0] = MESSAGE_VERSION;
        message[1..9].copy_from_slice(&index.to_le_bytes());
        message[9..].copy_from_slice(&digest.to_le_bytes());
        Some(message)
    }

    /// Takes a peer's claim.
    ///
    /// # Errors
    /// [`BadClaim`] for bytes that are none.
    pub fn receive(&self, peer: ReplicaId, message: &[u8]) -> Result<(), BadClaim> {
        let (index, theirs) = match message.split_first() {
            Some((&MESSAGE_VERSION, rest)) => rest.split_at_checked(8).ok_or(BadClaim)?,
            _ => return Err(BadClaim),
        };
        let index = u64::from_le_bytes(index.try_into().map_err(|_| BadClaim)?);
        let theirs = u128::from_le_bytes(theirs.try_into().map_err(|_| BadClaim)?);
        let mismatch = self.lock().ring.claim(peer, index, theirs);
        if let Some(mismatch) = mismatch {
            self.sound(&mismatch);
        }
        Ok(())
    }

    /// Mismatches found since the start.
    #[must_use]
    pub fn mismatches(&self) -> u64 {
        self.mismatches.load(Ordering::Relaxed)
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
        tracing::error!(
            peer = peer.0,
            log_index = index,
            ours,
            theirs,
            "replicas differ at the same log index"
        );
        if let Some(events) = self.events.get() {
            events.send(Event::DigestMismatch {
                peer,
                index,
                ours,
                theirs,
            });
        }
    }

    fn publish_wanted(&self, inner: &Inner) {
        let first = inner.wanted.first().copied().unwrap_or(u64::MAX);
        self.wanted_from.store(first, Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // The ring is whole between any two of its changes: a panic elsewhere does not spoil it.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A digest as the API writes it: 32 hex digits.
#[must_use]
pub fn hex(digest: u128) -> String {
    format!("{digest:032x}")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PEER: ReplicaId = ReplicaId(2);

    fn message(index: u64, digest: u128) -> Vec<u8> {
        let other = Digests::default();
        other.record(index, digest);
        other.message().unwrap().to_vec()
    }

    #[test]
    fn boundaries_are_recorded_and_others_are_not_even_computed() {
        let digests = Digests::default();
        for index in 1..=600 {
            digests.applied(index, || {
                assert_eq!(index % BOUNDARY_ENTRIES, 0);
                u128::from(index)
            });
        }
        assert_eq!(digests.get(512), Some(512));
        assert_eq!(digests.get(511), None);
        assert_eq!(digests.nearest(600), Some(512));
        assert_eq!(digests.nearest(255), None);
    }

    #[test]
    fn equal_claims_are_silent_and_different_ones_are_counted() {
        let digests = Digests::default();
        digests.applied(256, || 7);
        digests.receive(PEER, &message(256, 7)).unwrap();
        assert_eq!(digests.mismatches(), 0);
        digests.receive(PEER, &message(256, 8)).unwrap();
        assert_eq!(digests.mismatches(), 1);
    }

    #[test]
    fn a_claim_ahead_is_compared_when_its_index_is_reached() {
        let digests = Digests::default();
        let events = Events::default();
        let mut stream = events.subscribe();
        digests.announce(events);
        digests.receive(PEER, &message(512, 8)).unwrap();
        digests.applied(256, || 1);
        assert_eq!(digests.mismatches(), 0);
        digests.applied(512, || 9);
        assert_eq!(digests.mismatches(), 1);
        assert_eq!(
            stream.try_recv().unwrap().event,
            Event::DigestMismatch {
                peer: PEER,
                index: 512,
                ours: hex(9),
                theirs: hex(8),
            }
        );
        // Compared once.
        digests.applied(768, || 9);
        assert_eq!(digests.mismatches(), 1);
    }

    #[test]
    fn garbage_is_refused() {
        let digests = Digests::default();
        for bad in [&[][..], &[1], &[2; MESSAGE_BYTES], &[1; MESSAGE_BYTES + 1]] {
            assert_eq!(digests.receive(PEER, bad), Err(BadClaim));
        }
    }

    #[test]
    fn memory_is_bounded() {
        let mut ring = DigestRing::default();
        for index in 1..=3000 {
            ring.claim(PEER, 10_000 + index, 0);
            ring.record(index, 0);
        }
        assert_eq!(ring.indexes().count(), DIGESTS_KEPT_MAX);
        assert_eq!(ring.claims[&PEER].len(), CLAIMS_PER_PEER_MAX);
        let digests = Digests::default();
        for index in 0..WANTED_MAX as u64 {
            digests.want(index + 1).unwrap();
        }
        assert_eq!(digests.want(9999), Err(TooManyWanted));
        assert_eq!(digests.want(1), Ok(()));
    }

    #[tokio::test]
    async fn a_wanted_index_is_recorded_when_applied() {
        let digests = Digests::default();
        digests.want(5).unwrap();
        let waiting = digests.wait(5, Duration::from_secs(60));
        let applying = async {
            digests.applied(4, || unreachable!("4 is not wanted"));
            digests.applied(5, || 55);
            digests.applied(6, || unreachable!("6 is not wanted"));
        };
        let (digest, ()) = tokio::join!(waiting, applying);
        assert_eq!(digest, Some(55));
    }

    #[tokio::test]
    async fn a_wanted_index_that_is_passed_over_is_answered() {
        let digests = Digests::default();
        digests.want(5).unwrap();
        let waiting = digests.wait(5, Duration::from_secs(60));
        // A snapshot moved the state from 3 to 9.
        let applying = async { digests.applied(9, || unreachable!("9 is not wanted")) };
        let (digest, ()) = tokio::join!(waiting, applying);
        assert_eq!(digest, None);
    }

    proptest! {
        #[test]
        fn any_message_is_answered(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let digests = Digests::default();
            prop_assert_eq!(
                digests.receive(PEER, &bytes).is_ok(),
                bytes.len() == MESSAGE_BYTES && bytes[0] == MESSAGE_VERSION
            );
        }

        #[test]
        fn a_mismatch_is_found_in_whatever_order_both_sides_speak(
            order in proptest::collection::vec((any::<bool>(), 1u64..20), 1..40)
        ) {
            // Claims and records at even indexes agree, at odd ones they do not. A claim that comes
            // while it is ahead or recorded is compared; one that is behind is dropped.
            let mut ring = DigestRing::default();
            let mut found = 0;
            let mut expected = 0;
            let mut kept: Vec<u64> = Vec::new();
            let mut last = 0;
            for (is_claim, index) in order {
                if is_claim {
                    found += usize::from(ring.claim(PEER, index, u128::from(index % 2)).is_some());
                    if ring.get(index).is_some() {
                        expected += usize::from(index % 2 == 1);
                    } else if index > last {
                        kept.push(index);
                        if kept.len() > CLAIMS_PER_PEER_MAX {
                            kept.remove(0);
                        }
                    }
                } else if index > last {
                    last = index;
                    found += ring.record(index, 0).len();
                    expected += kept.iter().filter(|k| **k == index && index % 2 == 1).count();
                    kept.retain(|k| *k > index);
                }
            }
            prop_assert_eq!(found, expected);
        }
    }
}
