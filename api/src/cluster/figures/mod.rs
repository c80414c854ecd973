//! Figures that replicas exchange once a second, so that each can show all of them side by side:
//! role, indexes, rates, times, queue, disk.
//!
//! No decision depends on these figures. They travel with messages that replicas send each other
//! anyway (docs/adr/0043), as a list of 64-bit numbers that grows at the end. A replica ignores
//! numbers that it does not know, and reads numbers that another build does not send as 0.

mod recent;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use state::ids::{ReplicaId, UserKey};
use tokio::time::Instant;

pub use recent::{CounterSample, RecentRates, RecentWindow, TimeBuckets, TimeCounts, WINDOW};

/// Roles in the order of their numbers, named as in [`crate::ports::ClusterStatus::role`].
const ROLES: [&str; 7] = [
    "leader",
    "follower",
    "candidate",
    "learner",
    "forming",
    "removed",
    "stopped",
];
/// Number of figures in a report.
const FIGURES: usize = 28;
/// Maximum length of a report, in bytes. Later builds may send figures that this one does not know.
pub const REPORT_BYTES_MAX: usize = 8 * 128;
const _: () = assert!(8 * FIGURES <= REPORT_BYTES_MAX);

/// Figures that one replica reports about itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReplicaFigures {
    /// Role; `None` if this build does not know it.
    pub role: Option<&'static str>,
    /// Raft term.
    pub term: u64,
    /// Last index known to be committed.
    pub committed_index: u64,
    /// Last applied index.
    pub applied_index: u64,
    /// Index of the newest snapshot, if any.
    pub snapshot_index: Option<u64>,
    /// Whether a quorum responds, as far as the replica knows.
    pub has_quorum: bool,
    /// Whether the storage has a fault.
    pub has_fault: bool,
    /// Whether the log waits, for example for disk space.
    pub is_waiting: bool,
    /// Whether most voters hold a different state.
    pub is_minority: bool,
    /// Whether the replica accepts traffic.
    pub is_ready: bool,
    /// Number of digest comparisons in which a peer differed.
    pub digest_mismatches: u64,
    /// Recent rates and times.
    pub recent: RecentRates,
    /// Number of requests in flight.
    pub in_flight: u64,
    /// Number of requests that wait for a backend.
    pub waiting: u64,
    /// Number of users with waiting requests.
    pub waiting_users: u64,
    /// The request that has waited longest, if any waits.
    pub longest: Option<LongestWait>,
    /// Free and total bytes of the disk with the data directory; `None` if unknown.
    pub disk: Option<(u64, u64)>,
    /// Number of outbox items that the log does not have yet.
    pub outbox_items: u64,
    /// Time since the replica started, in seconds.
    pub uptime_s: u64,
    /// Number of streams since then that went on after their engine or router had failed.
    pub streams_continued: u64,
    /// Number of streams since then that ended because their engine or router had failed.
    pub streams_lost: u64,
}

/// The request that has waited longest at a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LongestWait {
    /// User of the request.
    pub user: UserKey,
    /// Wait so far, in milliseconds.
    pub waited_ms: u64,
}

impl ReplicaFigures {
    /// Encodes the figures as a report.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let role = ROLES.iter().position(|role| Some(*role) == self.role);
        let conditions = [
            self.has_quorum,
            self.has_fault,
            self.is_waiting,
            self.is_minority,
            self.is_ready,
            self.longest.is_some(),
        ];
        let conditions = conditions.iter().enumerate();
        let (free, size) = self.disk.unwrap_or_default();
        let recent = &self.recent;
        let numbers: [u64; FIGURES] = [
            role.map_or(0, |role| role as u64 + 1),
            self.term,
            self.committed_index,
            self.applied_index,
            self.snapshot_index
                .map_or(0, |index| index.saturating_add(1)),
            conditions.fold(0, |bits, (bit, is)| bits | u64::from(*is) << bit),
            self.digest_mismatches,
            recent.requests_milli_per_s,
            recent.failed_milli_per_s,
            recent.ttft_p50_us,
            recent.ttft_p99_us,
            recent.routing_p50_us,
            recent.routing_p99_us,
            recent.prompt_tokens,
            recent.cached_tokens,
            recent.predicted_tokens,
            recent.shared_tokens,
            self.in_flight,
            self.waiting,
            self.waiting_users,
            self.longest.map_or(0, |longest| longest.waited_ms),
            self.longest.map_or(0, |longest| longest.user.0),
            free,
            size,
            self.outbox_items,
            self.uptime_s,
            self.streams_continued,
            self.streams_lost,
        ];
        numbers.iter().flat_map(|it| it.to_le_bytes()).collect()
    }

    /// Decodes a report; `None` if the bytes are not a report.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (numbers, rest) = bytes.as_chunks::<8>();
        if !rest.is_empty() || numbers.is_empty() || bytes.len() > REPORT_BYTES_MAX {
            return None;
        }
        let at = |place: usize| numbers.get(place).map_or(0, |it| u64::from_le_bytes(*it));
        let is = |bit: u32| at(5) & (1 << bit) != 0;
        let role = at(0).checked_sub(1).and_then(|it| usize::try_from(it).ok());
        Some(Self {
            role: role.and_then(|role| ROLES.get(role).copied()),
            term: at(1),
            committed_index: at(2),
            applied_index: at(3),
            snapshot_index: at(4).checked_sub(1),
            has_quorum: is(0),
            has_fault: is(1),
            is_waiting: is(2),
            is_minority: is(3),
            is_ready: is(4),
            digest_mismatches: at(6),
            recent: RecentRates {
                requests_milli_per_s: at(7),
                failed_milli_per_s: at(8),
                ttft_p50_us: at(9),
                ttft_p99_us: at(10),
                routing_p50_us: at(11),
                routing_p99_us: at(12),
                prompt_tokens: at(13),
                cached_tokens: at(14),
                predicted_tokens: at(15),
                shared_tokens: at(16),
            },
            in_flight: at(17),
            waiting: at(18),
            waiting_users: at(19),
            longest: is(5).then(|| LongestWait {
                waited_ms: at(20),
                user: UserKey(at(21)),
            }),
            disk: Some((at(22), at(23))).filter(|(_, size)| *size > 0),
            outbox_items: at(24),
            uptime_s: at(25),
            streams_continued: at(26),
            streams_lost: at(27),
        })
    }
}

/// Error for bytes that are not a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("figures: expected 1 to {} numbers of 8 bytes", REPORT_BYTES_MAX / 8)]
pub struct FiguresError;

/// The figures of this replica and those received from others.
#[derive(Debug, Default)]
pub struct FigureBoard(Mutex<BoardInner>);

#[derive(Debug, Default)]
struct BoardInner {
    own: Option<ReplicaFigures>,
    /// Encoded own figures; empty before the first.
    own_bytes: Arc<[u8]>,
    heard: BTreeMap<ReplicaId, (Instant, ReplicaFigures)>,
}

impl FigureBoard {
    /// Replaces this replica's figures.
    pub fn set_own(&self, figures: &ReplicaFigures) {
        let bytes = figures.encode().into();
        let mut inner = self.lock();
        inner.own = Some(*figures);
        inner.own_bytes = bytes;
    }

    /// Returns this replica's encoded figures; empty before [`FigureBoard::set_own`].
    #[must_use]
    pub fn report(&self) -> Arc<[u8]> {
        Arc::clone(&self.lock().own_bytes)
    }

    /// Returns this replica's figures; `None` before [`FigureBoard::set_own`].
    #[must_use]
    pub fn own(&self) -> Option<ReplicaFigures> {
        self.lock().own
    }

    /// Stores a peer's report that arrived at `now`.
    ///
    /// # Errors
    /// Returns [`FiguresError`] if the bytes are not a report.
    pub fn receive(
        &self,
        peer: ReplicaId,
        report: &[u8],
        now: Instant,
    ) -> Result<(), FiguresError> {
        let figures = ReplicaFigures::decode(report).ok_or(FiguresError)?;
        self.lock().heard.insert(peer, (now, figures));
        Ok(())
    }

    /// Returns a peer's last figures and the time of their arrival; `None` before the first.
    #[must_use]
    pub fn heard(&self, peer: ReplicaId) -> Option<(Instant, ReplicaFigures)> {
        self.lock().heard.get(&peer).copied()
    }

    fn lock(&self) -> MutexGuard<'_, BoardInner> {
        // Each change replaces a value as a whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures() -> ReplicaFigures {
        ReplicaFigures {
            role: Some("follower"),
            term: 2,
            committed_index: 2,
            applied_index: 3,
            snapshot_index: Some(0),
            has_quorum: true,
            is_ready: true,
            digest_mismatches: 6,
            recent: RecentRates {
                requests_milli_per_s: 7,
                failed_milli_per_s: 8,
                ttft_p50_us: 9,
                ttft_p99_us: 10,
                routing_p50_us: 11,
                routing_p99_us: 12,
                prompt_tokens: 13,
                cached_tokens: 14,
                predicted_tokens: 15,
                shared_tokens: 16,
            },
            in_flight: 17,
            waiting: 18,
            waiting_users: 19,
            longest: Some(LongestWait {
                waited_ms: 20,
                user: UserKey(21),
            }),
            disk: Some((22, 23)),
            outbox_items: 24,
            uptime_s: 25,
            streams_continued: 26,
            streams_lost: 27,
            ..ReplicaFigures::default()
        }
    }

    #[test]
    fn figures_keep_their_positions_in_a_report() {
        let numbers: Vec<u8> = figures().encode();
        let numbers = numbers.as_chunks::<8>().0.iter();
        let numbers: Vec<u64> = numbers.map(|it| u64::from_le_bytes(*it)).collect();
        let mut expected: Vec<u64> = (0..28).collect();
        // Role 2 is the second of `ROLES`; a snapshot at index 0 is encoded as 1; the flags are a
        // quorum, readiness and a waiting request.
        (expected[0], expected[1], expected[4], expected[5]) = (2, 2, 1, 0b11_0001);
        assert_eq!(numbers, expected);
    }

    #[test]
    fn figures_round_trip() {
        let report = figures().encode();
        assert_eq!(ReplicaFigures::decode(&report), Some(figures()));
        let nothing = ReplicaFigures::default();
        assert_eq!(ReplicaFigures::decode(&nothing.encode()), Some(nothing));
    }

    #[test]
    fn shorter_and_longer_reports_are_accepted() {
        let report = figures().encode();
        let longer = [&report[..], &[9; 8]].concat();
        assert_eq!(ReplicaFigures::decode(&longer), Some(figures()));
        let shorter = ReplicaFigures::decode(&report[..16]).unwrap();
        assert_eq!((shorter.term, shorter.applied_index), (2, 0));
        for wrong in [&[][..], &[1; 7], &[0; REPORT_BYTES_MAX + 8]] {
            assert_eq!(ReplicaFigures::decode(wrong), None);
        }
    }
}
