//! Circuit breakers: backends whose requests fail are skipped for a while, regardless of their
//! probes.
//!
//! A probe checks whether an engine is reachable, but only requests show that its work fails. The
//! circuit opens when enough of a backend's last attempts failed, in number and in share: no
//! connection, broken off, timed out or left by a client before any output, a 5xx, or an error
//! within a response (`dispatch/attempt/report.rs` judges clients that leave). After a pause it is
//! half-open and admits requests one at a time. A successful one closes the circuit; a failed one
//! reopens it for twice as long, up to a bound. So do failures soon after it closed, because a
//! response that begins well may fail later. Only a share of a model's backends is skipped at a
//! time.
//!
//! A failure may be the request's fault. One user's failures alone do not open a circuit while the
//! backend serves other users. A user whose half-open request failed must wait behind the others
//! before the next one, and cannot prolong the pause again.
//!
//! Circuits are local and end with a backend's incarnation. The hot path reads one word while all
//! are closed. Otherwise it reads one per backend and takes the short lock of each circuit that is
//! not closed. Recording the result of an attempt takes that lock too.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use state::command::BACKENDS_MAX;
use state::ids::{BackendRef, Slot, UserKey};
use tokio::time::Instant;

use crate::sync::{AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering::Relaxed};

/// Number of recent attempts at a backend that a circuit remembers.
const RECENT_MAX: usize = 20;

/// Keys of `[circuit]`: when a failing backend gets no more requests, and when it is tried again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CircuitSettings {
    /// Number of failures among the last 20 attempts (no connection, broken or timed out before any
    /// output, a 5xx, an error within the response, or a client that left a silent backend after a
    /// long wait) that opens a backend's circuit if at least half of them failed; 0 disables it.
    /// Failures of a single user do not count while others are answered. Open circuits
    /// exclude at most half of a model's backends at a time, at least one, never all. One allows a
    /// trial request after 1 s, and after twice as long for each failed trial, up to 30 s.
    pub failures: u32,
    /// How long an open circuit rejects requests before a single trial request is allowed. Doubles
    /// with each failed trial, so its first value hardly matters.
    #[serde(skip)]
    pub backoff: Duration,
    /// Minimum share of failures among the recent attempts that opens a circuit, in percent.
    #[serde(skip)]
    pub failure_percent: u32,
    /// Maximum share of a model's backends skipped at a time because of their circuits, in percent.
    /// One may always be skipped, but never all.
    #[serde(skip)]
    pub ejection_percent_max: u32,
    /// Maximum length of a pause, unless [`Self::backoff`] is longer. Also the time after which
    /// another request is admitted if a half-open request has not ended.
    #[serde(skip)]
    pub backoff_max: Duration,
}

impl Default for CircuitSettings {
    fn default() -> Self {
        Self {
            failures: 5,
            backoff: Duration::from_secs(1),
            failure_percent: 50,
            ejection_percent_max: 50,
            backoff_max: Duration::from_secs(30),
        }
    }
}

/// Status of a circuit breaker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, JsonSchema)]
pub struct CircuitView {
    /// Whether the circuit is open.
    pub is_open: bool,
    /// Number of failures among the last attempts.
    pub recent_failures: u32,
    /// Number of times that it opened in a row.
    pub openings_in_row: u32,
    /// Time until the next trial request is allowed, in milliseconds; 0 if one is allowed now or
    /// the circuit is closed.
    pub pause_ms: u64,
}

#[derive(Debug, Default)]
struct CircuitBreaker {
    backend: Option<BackendRef>,
    /// Recent attempts, oldest first.
    recent: VecDeque<AttemptRecord>,
    openings: u32,
    /// Number of openings before it last closed, and the time of that, in microseconds since
    /// `began`; `None` if it never closed.
    relapse: Option<(u32, u64)>,
    /// When the circuit opened, in microseconds since `began`.
    opened_us: u64,
    /// Time of the last response, in microseconds since `began`; `None` if there was none, or if a
    /// request could not be sent since.
    answered_us: Option<u64>,
    /// User of the last half-open request, if it failed while others used the backend too, and the
    /// time until which this user's requests are not let through, in microseconds since `began`.
    /// `None` if the last one cannot have failed because of its user.
    blamed: Option<(UserKey, u64)>,
    /// Number and user of the half-open request in flight.
    trial: Option<(u64, UserKey)>,
    /// Number of half-open requests so far, which identifies them.
    trials: u64,
}

/// Result of an attempt to serve a request.
#[derive(Debug, Clone, Copy)]
struct AttemptRecord {
    /// User of the request; `None` if the request cannot be at fault.
    user: Option<UserKey>,
    is_failure: bool,
}

#[derive(Default)]
struct BreakerCell {
    /// 0 if the circuit is closed, otherwise the time from which a request is admitted, in
    /// microseconds since `began`.
    closed_until_us: AtomicU64,
    circuit: Mutex<CircuitBreaker>,
}

/// All circuit breakers, by slot.
pub(super) struct CircuitBreakers {
    cells: Box<[BreakerCell]>,
    /// Number of cells whose circuit is not closed.
    not_closed: AtomicUsize,
    settings: CircuitSettings,
    began: Instant,
}

/// A half-open request in flight. Dropping it without a result admits the next one.
pub(crate) struct HalfOpenProbe {
    circuits: Arc<CircuitBreakers>,
    backend: BackendRef,
    number: u64,
}

/// Decision of a circuit breaker on a request.
pub(crate) enum BreakerState {
    /// The circuit is closed, so the request may go.
    Closed,
    /// The circuit is half-open, and this request is the only one in flight.
    HalfOpen(HalfOpenProbe),
    /// The circuit is open, and another request is trying the backend or the pause is not over.
    Open,
}

impl CircuitBreakers {
    pub(super) fn new(settings: CircuitSettings) -> Self {
        Self::of_slots(BACKENDS_MAX, settings)
    }

    pub(super) fn of_slots(slots: usize, settings: CircuitSettings) -> Self {
        Self {
            cells: (0..slots).map(|_| BreakerCell::default()).collect(),
            not_closed: AtomicUsize::new(0),
            settings,
            began: Instant::now(),
        }
    }

    /// Whether a request of `user` may go to `backend` at `now`. Calls `user` only if it matters.
    pub(super) fn allows(
        &self,
        backend: BackendRef,
        user: impl FnOnce() -> UserKey,
        now: Instant,
    ) -> bool {
        // This is called for every backend at every decision, and usually all circuits are closed.
        if self.not_closed.load(Relaxed) == 0 {
            return true;
        }
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

    /// Returns when the circuit of `backend` last opened, for comparison between backends.
    pub(super) fn opened_us(&self, backend: BackendRef) -> u64 {
        self.cell(backend).map_or(0, |cell| cell.lock().opened_us)
    }

    /// Returns how many of a model's `backends` may be skipped at a time.
    pub(super) fn ejected_max(&self, backends: usize) -> usize {
        let percent = usize::try_from(self.settings.ejection_percent_max).unwrap_or(100);
        let share = backends * percent / 100;
        share.max(1).min(backends.saturating_sub(1))
    }

    /// Lets a request go to `backend` if its circuit allows. Of several requests that
    /// [`CircuitBreakers::allows`] admitted at once, only one passes an open circuit, and no other
    /// while it is in flight.
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
        self.pause(cell, self.micros(now + self.settings.backoff_max));
        BreakerState::HalfOpen(HalfOpenProbe {
            circuits: Arc::clone(self),
            backend,
            number: circuit.trials,
        })
    }

    /// Lets a request go to `backend` as if its circuit were half-open, so that no other is in
    /// flight meanwhile. Used for a backend without recent responses that only probes consider
    /// unhealthy.
    pub(super) fn enter_doubted(
        self: &Arc<Self>,
        backend: BackendRef,
        user: impl FnOnce() -> UserKey,
        now: Instant,
    ) -> BreakerState {
        let Some((cell, mut circuit)) = self.circuit(backend) else {
            return BreakerState::Open;
        };
        if cell.closed_until_us.load(Relaxed) == 0 {
            circuit.openings = 1;
            circuit.opened_us = self.micros(now).max(1);
            self.pause(cell, self.micros(now));
        }
        drop(circuit);
        self.enter(backend, user, now)
    }

    /// Whether `backend` has ever answered a request and has been reachable since.
    pub(super) fn has_answered(&self, backend: BackendRef) -> bool {
        self.answered_us(backend).is_some()
    }

    /// Records a successful attempt for `user`. Returns whether it closed the circuit.
    pub(super) fn passed(&self, backend: BackendRef, user: UserKey, now: Instant) -> bool {
        let Some(cell) = self.cell(backend) else {
            return false;
        };
        let mut circuit = cell.lock();
        if circuit.backend != Some(backend) {
            self.close(cell, &mut circuit, Some(backend));
        }
        let was_open = circuit.openings > 0;
        if was_open {
            let relapse = Some((circuit.openings, self.micros(now)));
            self.close(cell, &mut circuit, Some(backend));
            circuit.relapse = relapse;
        }
        circuit.note(Some(user), false);
        circuit.answered_us = Some(self.micros(now));
        was_open
    }

    /// Whether `backend` responded within `time` before `now` and has been reachable since.
    pub(super) fn answered_within(
        &self,
        backend: BackendRef,
        time: Duration,
        now: Instant,
    ) -> bool {
        let now_us = self.micros(now);
        let is_within = |at_us| Duration::from_micros(now_us.saturating_sub(at_us)) <= time;
        self.answered_us(backend).is_some_and(is_within)
    }

    /// Records a failed attempt and returns whether it opened or reopened the circuit. `user` is
    /// `None` if the request cannot be at fault.
    pub(super) fn failed(&self, backend: BackendRef, user: Option<UserKey>, now: Instant) -> bool {
        self.fail(backend, user, false, now)
    }

    /// Records that an attempt for `user`, recorded as successful when its response began, has failed
    /// after all. Returns whether it opened the circuit.
    pub(super) fn failed_late(&self, backend: BackendRef, user: UserKey, now: Instant) -> bool {
        self.fail(backend, Some(user), true, now)
    }

    fn fail(
        &self,
        backend: BackendRef,
        user: Option<UserKey>,
        has_passed: bool,
        now: Instant,
    ) -> bool {
        let settings = &self.settings;
        let Some(cell) = self.cell(backend) else {
            return false;
        };
        let mut circuit = cell.lock();
        if circuit.backend != Some(backend) {
            self.close(cell, &mut circuit, Some(backend));
        }
        if user.is_none() {
            circuit.answered_us = None;
        }
        if settings.failures == 0 {
            return false;
        }
        if has_passed {
            circuit.withdraw(user);
        }
        circuit.note(user, true);
        let is_first = circuit.openings == 0 && circuit.is_bad(settings);
        let is_trial = circuit
            .trial
            .is_some_and(|(_, tries)| user.is_none_or(|user| user == tries));
        // Attempts dispatched before the circuit opened provide no new information.
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
            circuit.openings = self.relapses(circuit.relapse, now);
        }
        if is_first || !is_again {
            circuit.openings = circuit.openings.saturating_add(1);
        }
        let doublings = circuit.openings.saturating_sub(1).min(16);
        let pause = settings.backoff.saturating_mul(1 << doublings);
        let pause = pause.min(settings.backoff_max.max(settings.backoff));
        circuit.blamed = user
            .filter(|_| is_trial && !is_alone)
            .map(|user| (user, self.micros(now + 2 * pause)));
        self.pause(cell, self.micros(now + pause));
        true
    }

    /// Returns the number of openings that one at `now` continues. A circuit that was closed for
    /// longer than the longest pause begins anew.
    fn relapses(&self, relapse: Option<(u32, u64)>, now: Instant) -> u32 {
        let longest = self.settings.backoff_max.as_micros();
        let is_soon = |closed_us| u128::from(self.micros(now).saturating_sub(closed_us)) <= longest;
        let recent = relapse.filter(|(_, closed_us)| is_soon(*closed_us));
        recent.map_or(0, |(openings, _)| openings)
    }

    pub(super) fn view(&self, backend: BackendRef, now: Instant) -> CircuitView {
        let Some((cell, circuit)) = self.circuit(backend) else {
            return CircuitView::default();
        };
        let until_us = cell.closed_until_us.load(Relaxed);
        CircuitView {
            is_open: circuit.openings > 0,
            recent_failures: circuit.failures(),
            openings_in_row: circuit.openings,
            pause_ms: until_us.saturating_sub(self.micros(now)).div_ceil(1000),
        }
    }

    /// Resets the circuit of an empty slot.
    pub(super) fn forget(&self, slot: Slot) {
        if let Some(cell) = self.cells.get(usize::from(slot.0)) {
            self.close(cell, &mut cell.lock(), None);
        }
    }

    /// Resets `circuit`, that of `cell`, to a closed circuit of `backend`.
    fn close(&self, cell: &BreakerCell, circuit: &mut CircuitBreaker, backend: Option<BackendRef>) {
        *circuit = circuit.anew(backend);
        if cell.closed_until_us.swap(0, Relaxed) != 0 {
            self.not_closed.fetch_sub(1, Relaxed);
        }
    }

    /// Admits no request before `until_us`. The caller holds the lock on the circuit of `cell`.
    fn pause(&self, cell: &BreakerCell, until_us: u64) {
        if cell.closed_until_us.swap(until_us.max(1), Relaxed) == 0 {
            self.not_closed.fetch_add(1, Relaxed);
        }
    }

    fn cell(&self, backend: BackendRef) -> Option<&BreakerCell> {
        self.cells.get(usize::from(backend.slot.0))
    }

    /// Returns the circuit of `backend`; `None` if the slot's circuit is not that of `backend`.
    fn circuit(
        &self,
        backend: BackendRef,
    ) -> Option<(&BreakerCell, MutexGuard<'_, CircuitBreaker>)> {
        let cell = self.cell(backend)?;
        let circuit = cell.lock();
        (circuit.backend == Some(backend)).then_some((cell, circuit))
    }

    fn answered_us(&self, backend: BackendRef) -> Option<u64> {
        self.circuit(backend)?.1.answered_us
    }

    fn micros(&self, at: Instant) -> u64 {
        let since = at.saturating_duration_since(self.began).as_micros();
        u64::try_from(since).unwrap_or(u64::MAX)
    }
}

impl CircuitBreaker {
    fn note(&mut self, user: Option<UserKey>, is_failure: bool) {
        if self.recent.len() == RECENT_MAX {
            // Keep a busy user from displacing all others.
            let mine = self.recent.iter().filter(|it| it.user == user).count();
            let oldest = self.recent.iter().position(|it| it.user == user);
            let out = oldest.filter(|_| mine >= RECENT_MAX / 2).unwrap_or(0);
            self.recent.remove(out);
        }
        self.recent.push_back(AttemptRecord { user, is_failure });
    }

    /// Removes the last success of `user`, if it is remembered.
    fn withdraw(&mut self, user: Option<UserKey>) {
        let is_theirs = |it: &AttemptRecord| it.user == user && !it.is_failure;
        if let Some(at) = self.recent.iter().rposition(is_theirs) {
            self.recent.remove(at);
        }
    }

    fn failures(&self) -> u32 {
        let failures = self.recent.iter().filter(|it| it.is_failure).count();
        u32::try_from(failures).unwrap_or(u32::MAX)
    }

    /// Whether enough recent attempts failed, and not only those of one user while others succeed.
    fn is_bad(&self, settings: &CircuitSettings) -> bool {
        let (failures, all) = (self.failures(), self.recent.len() as u64);
        let is_share = u64::from(failures) * 100 >= all * u64::from(settings.failure_percent);
        if failures < settings.failures || !is_share {
            return false;
        }
        let failed = self.recent.iter().filter(|it| it.is_failure);
        let mut users = failed.map(|it| it.user);
        match users.next() {
            Some(Some(first)) => users.any(|user| user != Some(first)) || self.is_alone(first),
            Some(None) | None => true,
        }
    }

    /// Whether only `user` has used the backend recently.
    fn is_alone(&self, user: UserKey) -> bool {
        let is_theirs = |it: &AttemptRecord| it.user.is_none_or(|other| other == user);
        self.recent.iter().all(is_theirs)
    }

    fn is_barred(&self, user: impl FnOnce() -> UserKey, now_us: u64) -> bool {
        self.blamed
            .is_some_and(|(blamed, until_us)| now_us < until_us && user() == blamed)
    }

    /// Returns a closed circuit for `backend`. Half-open requests in flight do not belong to it.
    fn anew(&self, backend: Option<BackendRef>) -> Self {
        Self {
            backend,
            trials: self.trials,
            ..Self::default()
        }
    }
}

impl BreakerCell {
    fn lock(&self) -> MutexGuard<'_, CircuitBreaker> {
        // Every change leaves the circuit consistent, so a poisoned lock is harmless.
        self.circuit.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for HalfOpenProbe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HalfOpenProbe").field(&self.backend).finish()
    }
}

impl Drop for HalfOpenProbe {
    fn drop(&mut self) {
        let Some((cell, mut circuit)) = self.circuits.circuit(self.backend) else {
            return;
        };
        // After a result or a long wait, this request is no longer the current one.
        let is_current = circuit.trial.is_some_and(|(it, _)| it == self.number);
        if is_current {
            circuit.trial = None;
            self.circuits.pause(cell, 1);
        }
    }
}

#[cfg(test)]
mod tests;
