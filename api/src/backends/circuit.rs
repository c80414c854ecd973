//! Circuits: backends whose requests fail are passed over for a while, whatever their probes say.
//!
//! A probe asks whether an engine is there; only requests show that it fails at its work. When a
//! share of a backend's last attempts failed (no connection, broken off or timed out before the first
//! byte, a 5xx), its circuit opens. After a pause single requests are let through, one at a time: one
//! that is answered closes the circuit, one that fails opens it for twice as long.
//!
//! A failure may be the request's fault. One user's failures alone open no circuit while the backend
//! answers others, and a user whose trial failed comes after the others at the next one and does not
//! prolong the pause again.
//!
//! Circuits are local and last no longer than the life of a backend. The hot path reads one word
//! per backend; who changes one takes its short lock.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use serde::Serialize;
use state::command::BACKENDS_MAX;
use state::ids::{BackendRef, UserKey};
use tokio::time::Instant;

use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering::Relaxed};

/// Attempts at a backend that are looked at, the last ones.
const RECENT_MAX: usize = 20;

/// When circuits open, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CircuitSettings {
    /// Least failed ones among the last attempts that open a circuit; 0: none ever does.
    pub failures: u32,
    /// Least share of failed ones among them, in percent.
    pub failure_percent: u32,
    /// Most of a model's backends that are passed over at a time for their circuits, in percent. One
    /// may be, all may not.
    pub ejection_percent_max: u32,
    /// First pause.
    pub backoff: Duration,
    /// Longest pause; also how long a request let through may take until the next one is.
    pub backoff_max: Duration,
}

impl Default for CircuitSettings {
    fn default() -> Self {
        Self {
            failures: 5,
            failure_percent: 50,
            ejection_percent_max: 50,
            backoff: Duration::from_secs(1),
            backoff_max: Duration::from_secs(30),
        }
    }
}

/// A circuit as the admin API shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct CircuitView {
    /// Whether requests pass the backend over.
    pub is_open: bool,
    /// Failed attempts among the last ones.
    pub recent_failures: u32,
    /// How often in a row it was opened.
    pub openings_in_row: u32,
    /// Until a request is let through; 0 when one may be, or the circuit is closed.
    pub pause_ms: u64,
}

#[derive(Debug, Default)]
struct CircuitBreaker {
    backend: Option<BackendRef>,
    /// The last attempts, the latest last.
    recent: VecDeque<AttemptRecord>,
    openings: u32,
    /// When it opened, microseconds since `began`.
    opened_us: u64,
    /// When a request was answered last, unless one could not even be sent since.
    answered_us: Option<u64>,
    /// Whose trial failed last, while others used the backend too: may try only from then on.
    blamed: Option<(UserKey, u64)>,
    /// The last trial, while it is under way, and whose it is.
    trial: Option<(u64, UserKey)>,
    /// Trials so far, by which they are told apart.
    trials: u64,
}

/// How an attempt went.
#[derive(Debug, Clone, Copy)]
struct AttemptRecord {
    /// `None`: it did not come so far that the request could be at fault.
    user: Option<UserKey>,
    is_failure: bool,
}

#[derive(Default)]
struct BreakerCell {
    /// 0: closed. Else microseconds since `began` from which on a request is let through.
    closed_until_us: AtomicU64,
    circuit: Mutex<CircuitBreaker>,
}

/// All circuits, by slot.
pub(super) struct CircuitBreakers {
    cells: Box<[BreakerCell]>,
    settings: CircuitSettings,
    began: Instant,
}

/// A request let through an open circuit. When dropped without a verdict, the next one may be.
pub(crate) struct HalfOpenProbe {
    circuits: Arc<CircuitBreakers>,
    backend: BackendRef,
    number: u64,
}

/// Whether a request may go.
pub(crate) enum BreakerState {
    /// Yes: the circuit is closed.
    Closed,
    /// Yes, as the one that tries a backend whose circuit is open.
    HalfOpen(HalfOpenProbe),
    /// No: there is another such, or the pause is not over.
    Open,
}

impl CircuitBreakers {
    pub(super) fn new(settings: CircuitSettings) -> Self {
        Self::of_slots(BACKENDS_MAX, settings)
    }

    pub(super) fn of_slots(slots: usize, settings: CircuitSettings) -> Self {
        Self {
            cells: (0..slots).map(|_| BreakerCell::default()).collect(),
            settings,
            began: Instant::now(),
        }
    }

    /// Whether a request of `user` may go to `backend` at `now`. `user` is asked when it matters.
    pub(super) fn allows(
        &self,
        backend: BackendRef,
        user: impl FnOnce() -> UserKey,
        now: Instant,
    ) -> bool {
        let Some(cell) = self.cell(backend) else {
            return true;
        };
        let until_us = cell.closed_until_us.load(Relaxed);
        if until_us == 0 {
            return true;
        }
        let now_us = self.micros(now);
        let circuit = cell.lock();
        circuit.backend != Some(backend) || now_us >= until_us && !circuit.is_barred(user, now_us)
    }

    /// When the circuit of `backend` opened, if it is open: for who compares several.
    pub(super) fn opened_us(&self, backend: BackendRef) -> u64 {
        self.cell(backend).map_or(0, |cell| cell.lock().opened_us)
    }

    /// Of so many backends of a model, how many may be passed over at a time.
    pub(super) fn ejected_max(&self, backends: usize) -> usize {
        let percent = usize::try_from(self.settings.ejection_percent_max).unwrap_or(100);
        let share = backends * percent / 100;
        share.max(1).min(backends.saturating_sub(1))
    }

    /// A request is to go to `backend`. Of several that [`CircuitBreakers::allows`] told so at once one is
    /// let through an open circuit, and while it is under way no other one is.
    pub(super) fn enter(
        self: &Arc<Self>,
        backend: BackendRef,
        user: impl FnOnce() -> UserKey,
        now: Instant,
    ) -> BreakerState {
        let Some(cell) = self.cell(backend) else {
            return BreakerState::Closed;
        };
        if cell.closed_until_us.load(Relaxed) == 0 {
            return BreakerState::Closed;
        }
        let mut circuit = cell.lock();
        let until_us = cell.closed_until_us.load(Relaxed);
        if circuit.backend != Some(backend) || until_us == 0 {
            return BreakerState::Closed;
        }
        if self.micros(now) < until_us {
            return BreakerState::Open;
        }
        let user = user();
        if circuit.is_barred(|| user, self.micros(now)) {
            return BreakerState::Open;
        }
        circuit.trials += 1;
        circuit.trial = Some((circuit.trials, user));
        cell.pause(self.micros(now + self.settings.backoff_max));
        BreakerState::HalfOpen(HalfOpenProbe {
            circuits: Arc::clone(self),
            backend,
            number: circuit.trials,
        })
    }

    /// An attempt of `user` was answered; whether that closed the circuit.
    pub(super) fn passed(&self, backend: BackendRef, user: UserKey, now: Instant) -> bool {
        let Some(cell) = self.cell(backend) else {
            return false;
        };
        let mut circuit = cell.lock();
        if circuit.backend != Some(backend) {
            *circuit = circuit.anew(backend);
            cell.closed_until_us.store(0, Relaxed);
        }
        let was_open = circuit.openings > 0;
        if was_open {
            *circuit = circuit.anew(backend);
            cell.closed_until_us.store(0, Relaxed);
        }
        circuit.note(Some(user), false);
        circuit.answered_us = Some(self.micros(now));
        was_open
    }

    /// Whether `backend` has answered a request within the time before `now`, and could be reached since.
    pub(super) fn answered_within(
        &self,
        backend: BackendRef,
        time: Duration,
        now: Instant,
    ) -> bool {
        let now_us = self.micros(now);
        let is_within = |at_us| Duration::from_micros(now_us.saturating_sub(at_us)) <= time;
        self.cell(backend).is_some_and(|cell| {
            let circuit = cell.lock();
            circuit.backend == Some(backend) && circuit.answered_us.is_some_and(is_within)
        })
    }

    /// An attempt failed; whether that opened the circuit. Without a `user` the request had no part
    /// in it.
    pub(super) fn failed(&self, backend: BackendRef, user: Option<UserKey>, now: Instant) -> bool {
        let settings = &self.settings;
        let Some(cell) = self.cell(backend) else {
            return false;
        };
        let mut circuit = cell.lock();
        if circuit.backend != Some(backend) {
            *circuit = circuit.anew(backend);
            cell.closed_until_us.store(0, Relaxed);
        }
        if user.is_none() {
            circuit.answered_us = None;
        }
        if settings.failures == 0 {
            return false;
        }
        circuit.note(user, true);
        let is_first = circuit.openings == 0 && circuit.is_bad(settings);
        let is_trial = circuit
            .trial
            .is_some_and(|(_, tries)| user.is_none_or(|user| user == tries));
        // What was dispatched before the circuit opened says nothing new.
        if !is_first && !is_trial {
            return false;
        }
        circuit.trial = None;
        let is_alone = user.is_none_or(|user| circuit.is_alone(user));
        let is_again = circuit
            .blamed
            .is_some_and(|(blamed, _)| Some(blamed) == user);
        if is_first {
            circuit.opened_us = self.micros(now).max(1);
        }
        if is_first || !is_again {
            circuit.openings = circuit.openings.saturating_add(1);
        }
        let doublings = circuit.openings.saturating_sub(1).min(16);
        let pause = settings.backoff.saturating_mul(1 << doublings);
        let pause = pause.min(settings.backoff_max);
        circuit.blamed = user
            .filter(|_| is_trial && !is_alone)
            .map(|user| (user, self.micros(now + 2 * pause)));
        cell.pause(self.micros(now + pause));
        true
    }

    pub(super) fn view(&self, backend: BackendRef, now: Instant) -> CircuitView {
        let Some(cell) = self.cell(backend) else {
            return CircuitView::default();
        };
        let circuit = cell.lock();
        if circuit.backend != Some(backend) {
            return CircuitView::default();
        }
        let until_us = cell.closed_until_us.load(Relaxed);
        CircuitView {
            is_open: circuit.openings > 0,
            recent_failures: circuit.failures(),
            openings_in_row: circuit.openings,
            pause_ms: until_us.saturating_sub(self.micros(now)).div_ceil(1000),
        }
    }

    fn cell(&self, backend: BackendRef) -> Option<&BreakerCell> {
        self.cells.get(usize::from(backend.slot.0))
    }

    fn micros(&self, at: Instant) -> u64 {
        let since = at.saturating_duration_since(self.began).as_micros();
        u64::try_from(since).unwrap_or(u64::MAX)
    }
}

impl CircuitBreaker {
    fn note(&mut self, user: Option<UserKey>, is_failure: bool) {
        if self.recent.len() == RECENT_MAX {
            // A busy user does not push all others out.
            let mine = self.recent.iter().filter(|it| it.user == user).count();
            let oldest = self.recent.iter().position(|it| it.user == user);
            let out = oldest.filter(|_| mine >= RECENT_MAX / 2).unwrap_or(0);
            self.recent.remove(out);
        }
        self.recent.push_back(AttemptRecord { user, is_failure });
    }

    fn failures(&self) -> u32 {
        let failures = self.recent.iter().filter(|it| it.is_failure).count();
        u32::try_from(failures).unwrap_or(u32::MAX)
    }

    /// Whether enough of the last attempts failed, and not one user's only while others are served.
    fn is_bad(&self, settings: &CircuitSettings) -> bool {
        let (failures, all) = (self.failures(), self.recent.len() as u64);
        let is_share = u64::from(failures) * 100 >= all * u64::from(settings.failure_percent);
        if failures < settings.failures || !is_share {
            return false;
        }
        let mut users = self
            .recent
            .iter()
            .filter(|it| it.is_failure)
            .map(|it| it.user);
        match users.next() {
            Some(Some(first)) => users.any(|user| user != Some(first)) || self.is_alone(first),
            Some(None) | None => true,
        }
    }

    /// Whether nobody but `user` has used the backend lately.
    fn is_alone(&self, user: UserKey) -> bool {
        self.recent
            .iter()
            .all(|it| it.user.is_none_or(|other| other == user))
    }

    fn is_barred(&self, user: impl FnOnce() -> UserKey, now_us: u64) -> bool {
        self.blamed
            .is_some_and(|(blamed, until_us)| now_us < until_us && user() == blamed)
    }

    /// A closed one. Trials under way are not of it.
    fn anew(&self, backend: BackendRef) -> Self {
        Self {
            backend: Some(backend),
            trials: self.trials,
            ..Self::default()
        }
    }
}

impl BreakerCell {
    fn lock(&self) -> MutexGuard<'_, CircuitBreaker> {
        // Every change leaves it well formed.
        self.circuit.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pause(&self, until_us: u64) {
        self.closed_until_us.store(until_us.max(1), Relaxed);
    }
}

impl fmt::Debug for HalfOpenProbe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Trial").field(&self.backend).finish()
    }
}

impl Drop for HalfOpenProbe {
    fn drop(&mut self) {
        let Some(cell) = self.circuits.cell(self.backend) else {
            return;
        };
        let mut circuit = cell.lock();
        // After a verdict, or when it was waited for too long, it is not the one any more.
        if circuit.backend == Some(self.backend)
            && circuit
                .trial
                .is_some_and(|(number, _)| number == self.number)
        {
            circuit.trial = None;
            cell.pause(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use state::ids::{Incarnation, Slot};

    use super::*;

    const SETTINGS: CircuitSettings = CircuitSettings {
        failures: 3,
        failure_percent: 50,
        ejection_percent_max: 50,
        backoff: Duration::from_secs(1),
        backoff_max: Duration::from_secs(4),
    };

    const ADA: UserKey = UserKey(1);
    const BOB: UserKey = UserKey(2);

    fn ada() -> UserKey {
        ADA
    }

    fn backend(incarnation: u32) -> BackendRef {
        BackendRef {
            slot: Slot(5),
            incarnation: Incarnation(incarnation),
        }
    }

    fn opened() -> (Arc<CircuitBreakers>, Instant) {
        let (circuits, now) = (Arc::new(CircuitBreakers::new(SETTINGS)), Instant::now());
        assert!(!circuits.failed(backend(1), None, now));
        assert!(!circuits.failed(backend(1), None, now));
        assert!(circuits.failed(backend(1), None, now));
        (circuits, now)
    }

    fn tried(circuits: &Arc<CircuitBreakers>, now: Instant) -> HalfOpenProbe {
        match circuits.enter(backend(1), ada, now) {
            BreakerState::HalfOpen(trial) => trial,
            BreakerState::Closed | BreakerState::Open => panic!("it is due and nobody tries it"),
        }
    }

    #[test]
    fn a_share_of_failures_opens_and_a_lesser_one_does_not() {
        let (circuits, now) = (Arc::new(CircuitBreakers::new(SETTINGS)), Instant::now());
        for _ in 0..10 {
            assert!(!circuits.failed(backend(1), None, now));
            assert!(!circuits.passed(backend(1), ADA, now), "it was not open");
            assert!(!circuits.passed(backend(1), BOB, now));
        }
        assert!(circuits.allows(backend(1), ada, now));
        let opening = (0..20).position(|_| circuits.failed(backend(1), None, now));
        assert_eq!(opening, Some(4), "half of the last twenty");
        let (circuits, now) = opened();
        assert!(!circuits.allows(backend(1), ada, now));
        assert!(
            !circuits.failed(backend(1), None, now),
            "it is open already"
        );
        assert_eq!(circuits.view(backend(1), now).pause_ms, 1000);
    }

    #[test]
    fn one_user_alone_opens_no_circuit_that_serves_others() {
        let (circuits, now) = (Arc::new(CircuitBreakers::new(SETTINGS)), Instant::now());
        assert!(!circuits.passed(backend(1), BOB, now));
        for _ in 0..100 {
            assert!(!circuits.failed(backend(1), Some(ADA), now));
        }
        assert!(
            circuits.failed(backend(1), Some(BOB), now),
            "two see it fail"
        );
        let (circuits, now) = (Arc::new(CircuitBreakers::new(SETTINGS)), Instant::now());
        assert!(!circuits.failed(backend(1), Some(ADA), now));
        assert!(!circuits.failed(backend(1), Some(ADA), now));
        assert!(
            circuits.failed(backend(1), Some(ADA), now),
            "nobody else is there"
        );
    }

    #[test]
    fn whoever_failed_a_trial_comes_after_others_and_does_not_prolong_the_pause() {
        let (circuits, start) = (Arc::new(CircuitBreakers::new(SETTINGS)), Instant::now());
        circuits.failed(backend(1), Some(BOB), start);
        circuits.failed(backend(1), Some(ADA), start);
        assert!(circuits.failed(backend(1), Some(ADA), start));
        let due = start + Duration::from_secs(1);
        let _trial = tried(&circuits, due);
        assert!(
            !circuits.failed(backend(1), Some(BOB), due),
            "not whose trial it is"
        );
        assert!(circuits.failed(backend(1), Some(ADA), due));
        let due = due + Duration::from_secs(2);
        assert!(!circuits.allows(backend(1), ada, due));
        assert!(circuits.allows(backend(1), || BOB, due));
        let last = due + Duration::from_secs(2);
        let _trial = tried(&circuits, last);
        assert!(circuits.failed(backend(1), Some(ADA), last));
        assert_eq!(circuits.view(backend(1), last).pause_ms, 2000);
        assert_eq!(circuits.view(backend(1), last).openings_in_row, 2);
    }

    #[test]
    fn some_may_be_passed_over_and_never_all() {
        let circuits = CircuitBreakers::new(SETTINGS);
        let most = [0, 1, 2, 3, 4, 10].map(|backends| circuits.ejected_max(backends));
        assert_eq!(most, [0, 0, 1, 1, 2, 5]);
    }

    #[test]
    fn single_requests_are_let_through_after_a_pause() {
        let (circuits, now) = opened();
        let due = now + Duration::from_secs(1);
        assert!(matches!(
            circuits.enter(backend(1), ada, now),
            BreakerState::Open
        ));
        assert!(circuits.allows(backend(1), ada, due));
        let trial = tried(&circuits, due);
        assert!(!circuits.allows(backend(1), ada, due), "one at a time");
        assert!(matches!(
            circuits.enter(backend(1), ada, due),
            BreakerState::Open
        ));
        drop(trial);
        assert!(
            circuits.allows(backend(1), ada, due),
            "it came to no verdict"
        );
        let _trial = tried(&circuits, due);
        assert!(circuits.failed(backend(1), Some(ADA), due));
        assert!(!circuits.allows(backend(1), ada, due + Duration::from_millis(1999)));
        let later = due + Duration::from_secs(2);
        assert!(circuits.allows(backend(1), ada, later), "twice as long");
        let _trial = tried(&circuits, later);
        assert!(circuits.passed(backend(1), ADA, now));
        assert!(circuits.allows(backend(1), ada, later));
        assert_eq!(
            circuits.view(backend(1), later),
            CircuitView::default(),
            "as if nothing had been"
        );
    }

    #[test]
    fn a_trial_that_hangs_is_not_waited_for_longer_than_the_longest_pause() {
        let (circuits, now) = opened();
        let due = now + Duration::from_secs(1);
        let hanging = tried(&circuits, due);
        assert!(!circuits.allows(backend(1), ada, due + Duration::from_secs(3)));
        let later = due + Duration::from_secs(4);
        assert!(circuits.allows(backend(1), ada, later));
        let _second = tried(&circuits, later);
        drop(hanging);
        assert!(
            !circuits.allows(backend(1), ada, later),
            "the second is under way"
        );
    }

    #[test]
    fn a_new_life_starts_closed() {
        let (circuits, now) = opened();
        assert!(circuits.allows(backend(2), ada, now));
        assert!(matches!(
            circuits.enter(backend(2), ada, now),
            BreakerState::Closed
        ));
        assert!(!circuits.failed(backend(2), None, now));
        assert!(circuits.allows(backend(2), ada, now));
    }

    #[test]
    fn zero_failures_never_open() {
        let settings = CircuitSettings {
            failures: 0,
            ..SETTINGS
        };
        let (circuits, now) = (CircuitBreakers::new(settings), Instant::now());
        for _ in 0..100 {
            assert!(!circuits.failed(backend(1), None, now));
        }
        assert!(circuits.allows(backend(1), ada, now));
    }
}
