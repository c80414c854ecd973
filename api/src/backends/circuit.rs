//! Circuits: backends whose requests fail are passed over for a while, whatever their probes say.
//!
//! A probe asks whether an engine is there; only requests show that it fails at its work. Attempts
//! that fail one after the other (no connection, broken off or timed out before the first byte, a
//! 5xx) open the backend's circuit. After a pause single requests are let through, one at a time:
//! one that is answered closes the circuit, one that fails opens it for twice as long.
//!
//! Circuits are local and last no longer than the life of a backend. The hot path reads one word
//! per backend; who changes one takes its short lock.

use std::fmt;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use serde::Serialize;
use state::command::BACKENDS_MAX;
use state::ids::BackendRef;
use tokio::time::Instant;

use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering::Relaxed};

/// When circuits open, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CircuitSettings {
    /// Failed attempts in a row that open a circuit; 0: none ever does.
    pub failures: u32,
    /// First pause.
    pub backoff: Duration,
    /// Longest pause; also how long a request let through may take until the next one is.
    pub backoff_max: Duration,
}

impl Default for CircuitSettings {
    fn default() -> Self {
        Self {
            failures: 5,
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
    /// Failed attempts in a row.
    pub failures_in_row: u32,
    /// How often in a row it was opened.
    pub openings_in_row: u32,
    /// Until a request is let through; 0 when one may be, or the circuit is closed.
    pub pause_ms: u64,
}

#[derive(Debug, Default)]
struct Circuit {
    backend: Option<BackendRef>,
    failures: u32,
    openings: u32,
    /// The last trial, while it is under way.
    trial: Option<u64>,
    /// Trials so far, by which they are told apart.
    trials: u64,
}

#[derive(Default)]
struct Cell {
    /// 0: closed. Else microseconds since `began` from which on a request is let through.
    closed_until_us: AtomicU64,
    circuit: Mutex<Circuit>,
}

/// All circuits, by slot.
pub(super) struct Circuits {
    cells: Box<[Cell]>,
    settings: CircuitSettings,
    began: Instant,
}

/// A request let through an open circuit. When dropped without a verdict, the next one may be.
pub(crate) struct Trial {
    circuits: Arc<Circuits>,
    backend: BackendRef,
    number: u64,
}

/// Whether a request may go.
pub(crate) enum Passage {
    /// Yes: the circuit is closed.
    Closed,
    /// Yes, as the one that tries a backend whose circuit is open.
    Trial(Trial),
    /// No: there is another such, or the pause is not over.
    Barred,
}

impl Circuits {
    pub(super) fn new(settings: CircuitSettings) -> Self {
        Self::of_slots(BACKENDS_MAX, settings)
    }

    pub(super) fn of_slots(slots: usize, settings: CircuitSettings) -> Self {
        Self {
            cells: (0..slots).map(|_| Cell::default()).collect(),
            settings,
            began: Instant::now(),
        }
    }

    /// Whether a request may go to `backend` at `now`.
    pub(super) fn allows(&self, backend: BackendRef, now: Instant) -> bool {
        let Some(cell) = self.cell(backend) else {
            return true;
        };
        match cell.closed_until_us.load(Relaxed) {
            0 => true,
            until => self.micros(now) >= until || cell.lock().backend != Some(backend),
        }
    }

    /// A request is to go to `backend`. Of several that [`Circuits::allows`] told so at once one is
    /// let through an open circuit, and while it is under way no other one is.
    pub(super) fn enter(self: &Arc<Self>, backend: BackendRef, now: Instant) -> Passage {
        let Some(cell) = self.cell(backend) else {
            return Passage::Closed;
        };
        if cell.closed_until_us.load(Relaxed) == 0 {
            return Passage::Closed;
        }
        let mut circuit = cell.lock();
        let until_us = cell.closed_until_us.load(Relaxed);
        if circuit.backend != Some(backend) || until_us == 0 {
            return Passage::Closed;
        }
        if self.micros(now) < until_us {
            return Passage::Barred;
        }
        circuit.trials += 1;
        circuit.trial = Some(circuit.trials);
        cell.pause(self.micros(now + self.settings.backoff_max));
        Passage::Trial(Trial {
            circuits: Arc::clone(self),
            backend,
            number: circuit.trials,
        })
    }

    /// An attempt was answered; whether that closed the circuit.
    pub(super) fn passed(&self, backend: BackendRef) -> bool {
        let Some(cell) = self.cell(backend) else {
            return false;
        };
        let mut circuit = cell.lock();
        if circuit.backend != Some(backend) || circuit.failures == 0 {
            return false;
        }
        let was_open = circuit.openings > 0;
        *circuit = circuit.anew(backend);
        cell.closed_until_us.store(0, Relaxed);
        was_open
    }

    /// An attempt failed; whether that opened the circuit.
    pub(super) fn failed(&self, backend: BackendRef, now: Instant) -> bool {
        let settings = &self.settings;
        let Some(cell) = self.cell(backend).filter(|_| settings.failures > 0) else {
            return false;
        };
        let mut circuit = cell.lock();
        if circuit.backend != Some(backend) {
            *circuit = circuit.anew(backend);
            cell.closed_until_us.store(0, Relaxed);
        }
        circuit.failures = circuit.failures.saturating_add(1);
        // What was dispatched before the circuit opened says nothing new.
        let is_first = circuit.openings == 0 && circuit.failures >= settings.failures;
        if !is_first && circuit.trial.is_none() {
            return false;
        }
        circuit.trial = None;
        let doublings = circuit.openings.min(16);
        circuit.openings = circuit.openings.saturating_add(1);
        let pause = settings.backoff.saturating_mul(1 << doublings);
        cell.pause(self.micros(now + pause.min(settings.backoff_max)));
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
            failures_in_row: circuit.failures,
            openings_in_row: circuit.openings,
            pause_ms: until_us.saturating_sub(self.micros(now)).div_ceil(1000),
        }
    }

    fn cell(&self, backend: BackendRef) -> Option<&Cell> {
        self.cells.get(usize::from(backend.slot.0))
    }

    fn micros(&self, at: Instant) -> u64 {
        let since = at.saturating_duration_since(self.began).as_micros();
        u64::try_from(since).unwrap_or(u64::MAX)
    }
}

impl Circuit {
    /// A closed one. Trials under way are not of it.
    fn anew(&self, backend: BackendRef) -> Self {
        Self {
            backend: Some(backend),
            trials: self.trials,
            ..Self::default()
        }
    }
}

impl Cell {
    fn lock(&self) -> MutexGuard<'_, Circuit> {
        // Every change leaves it well formed.
        self.circuit.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pause(&self, until_us: u64) {
        self.closed_until_us.store(until_us.max(1), Relaxed);
    }
}

impl fmt::Debug for Trial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Trial").field(&self.backend).finish()
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        let Some(cell) = self.circuits.cell(self.backend) else {
            return;
        };
        let mut circuit = cell.lock();
        // After a verdict, or when it was waited for too long, it is not the one any more.
        if circuit.backend == Some(self.backend) && circuit.trial == Some(self.number) {
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
        backoff: Duration::from_secs(1),
        backoff_max: Duration::from_secs(4),
    };

    fn backend(incarnation: u32) -> BackendRef {
        BackendRef {
            slot: Slot(5),
            incarnation: Incarnation(incarnation),
        }
    }

    fn opened() -> (Arc<Circuits>, Instant) {
        let (circuits, now) = (Arc::new(Circuits::new(SETTINGS)), Instant::now());
        assert!(!circuits.failed(backend(1), now));
        assert!(!circuits.failed(backend(1), now));
        assert!(circuits.failed(backend(1), now));
        (circuits, now)
    }

    fn tried(circuits: &Arc<Circuits>, now: Instant) -> Trial {
        match circuits.enter(backend(1), now) {
            Passage::Trial(trial) => trial,
            Passage::Closed | Passage::Barred => panic!("it is due and nobody tries it"),
        }
    }

    #[test]
    fn failures_in_a_row_open_and_one_answer_in_between_does_not_let_them() {
        let (circuits, now) = (Arc::new(Circuits::new(SETTINGS)), Instant::now());
        for _ in 0..10 {
            assert!(!circuits.failed(backend(1), now));
            assert!(!circuits.failed(backend(1), now));
            assert!(!circuits.passed(backend(1)), "it was not open");
        }
        assert!(circuits.allows(backend(1), now));
        let (circuits, now) = opened();
        assert!(!circuits.allows(backend(1), now));
        assert!(!circuits.failed(backend(1), now), "it is open already");
        assert_eq!(circuits.view(backend(1), now).pause_ms, 1000);
    }

    #[test]
    fn single_requests_are_let_through_after_a_pause() {
        let (circuits, now) = opened();
        let due = now + Duration::from_secs(1);
        assert!(matches!(circuits.enter(backend(1), now), Passage::Barred));
        assert!(circuits.allows(backend(1), due));
        let trial = tried(&circuits, due);
        assert!(!circuits.allows(backend(1), due), "one at a time");
        assert!(matches!(circuits.enter(backend(1), due), Passage::Barred));
        drop(trial);
        assert!(circuits.allows(backend(1), due), "it came to no verdict");
        let _trial = tried(&circuits, due);
        assert!(circuits.failed(backend(1), due));
        assert!(!circuits.allows(backend(1), due + Duration::from_millis(1999)));
        let later = due + Duration::from_secs(2);
        assert!(circuits.allows(backend(1), later), "twice as long");
        let _trial = tried(&circuits, later);
        assert!(circuits.passed(backend(1)));
        assert!(circuits.allows(backend(1), later));
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
        assert!(!circuits.allows(backend(1), due + Duration::from_secs(3)));
        let later = due + Duration::from_secs(4);
        assert!(circuits.allows(backend(1), later));
        let _second = tried(&circuits, later);
        drop(hanging);
        assert!(
            !circuits.allows(backend(1), later),
            "the second is under way"
        );
    }

    #[test]
    fn a_new_life_starts_closed() {
        let (circuits, now) = opened();
        assert!(circuits.allows(backend(2), now));
        assert!(matches!(circuits.enter(backend(2), now), Passage::Closed));
        assert!(!circuits.failed(backend(2), now));
        assert!(circuits.allows(backend(2), now));
    }

    #[test]
    fn zero_failures_never_open() {
        let settings = CircuitSettings {
            failures: 0,
            ..SETTINGS
        };
        let (circuits, now) = (Circuits::new(settings), Instant::now());
        for _ in 0..100 {
            assert!(!circuits.failed(backend(1), now));
        }
        assert!(circuits.allows(backend(1), now));
    }
}
