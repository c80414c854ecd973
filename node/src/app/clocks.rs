//! Cluster time: the median of the members' clocks, and each member's skew from this replica.
//!
//! Members include their wall clock in every message. The cluster's clock, which stamps commands,
//! is the median of this replica's clock and those heard in the last ten seconds. If fewer than
//! half of them are wrong, even if this replica's own is, they cannot move it beyond the range of
//! the correct ones. Between two updates it advances with the monotonic clock, which is never set.
//! If the number of clocks is even, the median is the middle value that is closer to the previous
//! time, so a clock that jumps is not followed. A replica that receives no messages follows its own
//! clock.
//!
//! A clock reading is as old as its message was in transit, so of the messages of the last one or
//! two seconds, the fastest one counts. A delay only makes a clock look late: a skew ahead is
//! certain, and one behind counts only if no message of ten seconds was faster. Until then, the
//! skew is unknown.
//! Replicated time follows the stamps, see `state/src/machine/time.rs`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use api::base::clock::Clock;
use tokio::time::Instant;

/// Time for which a peer's clock counts after its last reading.
const SILENT: Duration = Duration::from_secs(10);
/// Length of the periods of clock readings. The fastest message of the last one or two periods
/// counts.
const STRETCH: Duration = Duration::from_secs(1);
/// Maximum time after the start that a replica waits for the others' clocks before it stamps
/// commands.
const ASKING: Duration = Duration::from_secs(1);
/// Time for which a clock must look late before its skew is known: a busy host can delay each
/// message of several seconds.
const LATE: Duration = Duration::from_secs(10);
/// Skew above which a warning about a clock is logged, in milliseconds.
pub(super) const SKEW_MS_MAX: u64 = 1000;

/// The clocks of all members, and the cluster's clock that is derived from them.
#[derive(Debug)]
pub(super) struct ClusterClocks {
    own: Clock,
    began: Instant,
    /// The cluster's Unix time minus the time since `began`, in milliseconds.
    offset_ms: AtomicI64,
    peers: Mutex<BTreeMap<u8, PeerClock>>,
}

/// A peer's clock reading minus the time since `began` at which it arrived here.
#[derive(Debug)]
struct PeerClock {
    /// Highest value of the current period, from the fastest message.
    offset_ms: i64,
    /// Highest value of the previous period.
    before_ms: i64,
    stretch: Instant,
    heard: Instant,
    /// Since when the clock looks late by more than [`SKEW_MS_MAX`].
    late_since: Option<Instant>,
    is_skewed: bool,
}

impl PeerClock {
    fn offset_ms(&self) -> i64 {
        self.offset_ms.max(self.before_ms)
    }

    /// Returns how far the clock is ahead of the one with the offset `own_ms`, in milliseconds;
    /// `None` if it is unknown, because the delay of messages may explain it.
    fn skew_ms(&self, own_ms: i64) -> Option<i64> {
        let skew_ms = self.offset_ms().saturating_sub(own_ms);
        let is_proven = || self.late_since.is_some_and(|since| since.elapsed() >= LATE);
        (!is_late(skew_ms) || is_proven()).then_some(skew_ms)
    }
}

impl ClusterClocks {
    /// Creates an instance that knows only this replica's clock.
    pub(super) fn new(own: Clock) -> Self {
        let began = Instant::now();
        let offset_ms = AtomicI64::new(signed(own.unix_ms()));
        Self {
            own,
            began,
            offset_ms,
            peers: Mutex::default(),
        }
    }

    /// Returns the cluster's clock as a [`Clock`].
    pub(super) fn clock(self: &Arc<Self>) -> Clock {
        let clocks = Arc::clone(self);
        Clock::of(move || clocks.unix_ms())
    }

    /// Returns the time of this replica's own clock, in Unix milliseconds.
    pub(super) fn own_unix_ms(&self) -> u64 {
        self.own.unix_ms()
    }

    /// Returns the time of the cluster's clock, in Unix milliseconds.
    pub(super) fn unix_ms(&self) -> u64 {
        let offset_ms = self.offset_ms.load(Ordering::Relaxed);
        u64::try_from(offset_ms.saturating_add(self.passed_ms())).unwrap_or(0)
    }

    /// Whether all other members have been heard, or enough time has passed. Before that, the
    /// cluster's clock would follow a wrong clock of this replica.
    pub(super) fn is_settled(&self, others: impl FnOnce() -> usize) -> bool {
        self.began.elapsed() >= ASKING || self.peers().len() >= others()
    }

    /// Records that a peer's clock showed `unix_ms` when it sent the message that has just arrived.
    pub(super) fn heard(&self, peer: u8, unix_ms: u64) {
        let now = Instant::now();
        let told_ms = signed(unix_ms).saturating_sub(self.passed_ms());
        let mut peers = self.peers();
        let known = peers.entry(peer).or_insert(PeerClock {
            offset_ms: told_ms,
            before_ms: told_ms,
            stretch: now,
            heard: now,
            late_since: None,
            is_skewed: false,
        });
        let age = now.duration_since(known.stretch);
        if age >= 2 * STRETCH {
            (known.before_ms, known.offset_ms, known.stretch) = (told_ms, told_ms, now);
        } else if age >= STRETCH {
            (known.before_ms, known.offset_ms, known.stretch) = (known.offset_ms, told_ms, now);
        }
        known.offset_ms = known.offset_ms.max(told_ms);
        known.heard = now;
        let own_ms = self.own_offset_ms();
        known.late_since = match is_late(known.offset_ms().saturating_sub(own_ms)) {
            true => known.late_since.or(Some(now)),
            false => None,
        };
        if let Some(skew_ms) = known.skew_ms(own_ms) {
            let is_skewed = skew_ms.unsigned_abs() > SKEW_MS_MAX;
            let was_skewed = std::mem::replace(&mut known.is_skewed, is_skewed);
            if is_skewed && !was_skewed {
                tracing::warn!(peer, skew_ms, "peer's clock differs from this replica's");
            } else if was_skewed && !is_skewed {
                tracing::info!(
                    peer,
                    skew_ms,
                    "peer's clock agrees with this replica's again"
                );
            }
        }
        self.settle(&peers);
    }

    /// Takes this replica's own clock into account, and forgets silent peers. Call it often.
    pub(super) fn turn(&self) {
        let mut peers = self.peers();
        peers.retain(|_, peer| peer.heard.elapsed() < SILENT);
        self.settle(&peers);
    }

    /// Returns how far each peer's clock is ahead of this replica's own, in milliseconds, as far as
    /// it is known.
    pub(super) fn skews_ms(&self) -> BTreeMap<u8, i64> {
        let own_ms = self.own_offset_ms();
        let peers = self.peers();
        let known = |(id, peer): (&u8, &PeerClock)| Some((*id, peer.skew_ms(own_ms)?));
        peers.iter().filter_map(known).collect()
    }

    fn settle(&self, peers: &BTreeMap<u8, PeerClock>) {
        let offsets = peers.values().map(PeerClock::offset_ms);
        let mut offsets: Vec<i64> = offsets.chain([self.own_offset_ms()]).collect();
        offsets.sort_unstable();
        let before_ms = self.offset_ms.load(Ordering::Relaxed);
        self.offset_ms
            .store(median(&offsets, before_ms), Ordering::Relaxed);
    }

    fn own_offset_ms(&self) -> i64 {
        signed(self.own.unix_ms()).saturating_sub(self.passed_ms())
    }

    fn passed_ms(&self) -> i64 {
        i64::try_from(self.began.elapsed().as_millis()).unwrap_or(i64::MAX)
    }

    fn peers(&self) -> MutexGuard<'_, BTreeMap<u8, PeerClock>> {
        // Entries are always complete, so a poisoned lock is harmless.
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the middle value of `sorted`; of two middle values, the one closer to `before`.
fn median(sorted: &[i64], before: i64) -> i64 {
    let (low, high) = (sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
    if before.abs_diff(low) <= before.abs_diff(high) {
        low
    } else {
        high
    }
}

/// Whether a clock with this skew looks late by more than [`SKEW_MS_MAX`].
fn is_late(skew_ms: i64) -> bool {
    skew_ms.saturating_add_unsigned(SKEW_MS_MAX) < 0
}

fn signed(unix_ms: u64) -> i64 {
    i64::try_from(unix_ms).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    const DAY_MS: u64 = 24 * 60 * 60 * 1000;
    const START_MS: u64 = 20_000 * DAY_MS;

    /// Returns the clocks of a replica, and the error of its own clock.
    fn clocks() -> (Arc<ClusterClocks>, Arc<AtomicI64>) {
        let (error_ms, began) = (Arc::new(AtomicI64::new(0)), Instant::now());
        let wrong_ms = Arc::clone(&error_ms);
        let own = Clock::of(move || {
            let right_ms = START_MS + u64::try_from(began.elapsed().as_millis()).unwrap();
            right_ms.saturating_add_signed(wrong_ms.load(Ordering::Relaxed))
        });
        (Arc::new(ClusterClocks::new(own)), error_ms)
    }

    async fn pass(ms: u64) {
        tokio::time::advance(Duration::from_millis(ms)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn one_wrong_clock_of_three_is_ignored() {
        let (clocks, error_ms) = clocks();
        let clock = clocks.clock();
        let right_ms = AtomicU64::new(START_MS);
        let turn = async |passes_ms, peers_off: [i64; 2]| {
            pass(passes_ms).await;
            let now_ms = right_ms.fetch_add(passes_ms, Ordering::Relaxed) + passes_ms;
            for (peer, off) in (2..).zip(peers_off) {
                clocks.heard(peer, now_ms.saturating_add_signed(off));
            }
            clocks.turn();
            i64::try_from(clock.unix_ms()).unwrap() - i64::try_from(now_ms).unwrap()
        };
        let day = i64::try_from(DAY_MS).unwrap();
        assert!(!clocks.is_settled(|| 2) && clocks.is_settled(|| 0));
        assert_eq!(turn(100, [0, 0]).await, 0);
        assert!(clocks.is_settled(|| 2) && !clocks.is_settled(|| 3));
        assert_eq!(turn(100, [day, 3]).await, 3);
        assert_eq!(turn(2000, [-day, 3]).await, 0);
        assert_eq!(turn(2000, [-day, 3]).await, 0);
        error_ms.store(day, Ordering::Relaxed);
        assert_eq!(turn(2000, [0, 5]).await, 5, "the own one is one of them");
        for _ in 0..5 {
            assert!(
                !clocks.skews_ms().contains_key(&3),
                "its messages may be late"
            );
            assert_eq!(turn(2000, [0, 5]).await, 5);
        }
        assert_eq!(clocks.skews_ms(), BTreeMap::from([(2, -day), (3, 5 - day)]));
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_clock_that_stays_late_counts_as_skewed() {
        let (clocks, _) = clocks();
        let is_skewed = || clocks.peers()[&2].is_skewed;
        // Every message takes 1.7 s for as long as the host is busy.
        for second in 1..=8 {
            pass(1000).await;
            clocks.heard(2, START_MS + second * 1000 - 1700);
            assert!(clocks.skews_ms().is_empty() && !is_skewed());
        }
        pass(1000).await;
        clocks.heard(2, START_MS + 9000);
        assert_eq!(clocks.skews_ms(), BTreeMap::from([(2, 0)]));
        // A late clock is late in every message, an early one is wrong in the first.
        for second in 10..=22 {
            pass(1000).await;
            clocks.heard(2, START_MS + second * 1000 - 1700);
        }
        assert_eq!(clocks.skews_ms(), BTreeMap::from([(2, -1700)]));
        assert!(is_skewed());
        pass(1000).await;
        clocks.heard(2, START_MS + 23_000 + 1700);
        assert_eq!(clocks.skews_ms(), BTreeMap::from([(2, 1700)]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_jumping_clock_of_two_is_not_followed() {
        let (clocks, error_ms) = clocks();
        let clock = clocks.clock();
        pass(10).await;
        clocks.heard(2, START_MS + 10);
        error_ms.store(-5_000_000, Ordering::Relaxed);
        clocks.turn();
        assert_eq!(clock.unix_ms(), START_MS + 10);
        error_ms.store(0, Ordering::Relaxed);
        clocks.turn();
        pass(2000).await;
        clocks.heard(2, START_MS + 2010 + DAY_MS);
        assert_eq!(clock.unix_ms(), START_MS + 2010);
        assert!(clocks.is_settled(|| 3), "nobody is waited for that long");
        // Without peers, it has only its own clock.
        error_ms.store(7000, Ordering::Relaxed);
        pass(10_000).await;
        clocks.turn();
        assert_eq!(clock.unix_ms(), START_MS + 19_010);
        assert!(clocks.skews_ms().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_delayed_message_does_not_change_the_skew() {
        let (clocks, _) = clocks();
        clocks.heard(2, START_MS);
        pass(600).await;
        clocks.heard(2, START_MS + 100);
        assert_eq!(clocks.skews_ms(), BTreeMap::from([(2, 0)]));
        pass(600).await;
        clocks.heard(2, START_MS + 1200);
        assert_eq!(clocks.skews_ms(), BTreeMap::from([(2, 0)]));
    }
}
