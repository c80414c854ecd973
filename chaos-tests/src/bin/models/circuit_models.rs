//! Models of circuit breakers: if several requests find an open circuit due, exactly one of them
//! probes it.

use std::sync::Arc;
use std::time::Duration;

use loom::thread;
use state::ids::{BackendRef, Incarnation, Slot, UserKey};
use tokio::time::Instant;

use crate::circuit::{BreakerState, CircuitBreakers, CircuitSettings, HalfOpenProbe};
use crate::sync::{AtomicUsize, Ordering};
use crate::{ModelRun, explore};

pub(crate) const ALL: &[ModelRun] = &[
    (
        "circuit: one request at a time tries an open one",
        one_at_a_time,
    ),
    (
        "circuit: a trial without a verdict makes room for one",
        without_a_verdict,
    ),
    (
        "circuit: an answer closes it beside a late failure",
        closed_or_paused,
    ),
    (
        "circuit: a new life is not barred by trials of the old",
        new_life,
    ),
];

const BACKEND: BackendRef = BackendRef {
    slot: Slot(0),
    incarnation: Incarnation(1),
};

const USER: UserKey = UserKey(1);

fn user() -> UserKey {
    USER
}

/// Returns circuit breakers with an open circuit, and the time of its next probe.
fn opened() -> (Arc<CircuitBreakers>, Instant) {
    let settings = CircuitSettings {
        failures: 1,
        failure_percent: 50,
        ejection_percent_max: 50,
        backoff: Duration::from_secs(1),
        backoff_max: Duration::from_secs(4),
    };
    let (circuits, now) = (
        Arc::new(CircuitBreakers::of_slots(1, settings)),
        Instant::now(),
    );
    assert!(circuits.failed(BACKEND, Some(USER), now));
    (circuits, now + Duration::from_secs(1))
}

/// Acts as a request: asks the circuit breaker, and starts a probe if allowed.
fn attempt(circuits: &Arc<CircuitBreakers>, now: Instant) -> Option<HalfOpenProbe> {
    if !circuits.allows(BACKEND, user, now) {
        return None;
    }
    match circuits.enter(BACKEND, user, now) {
        BreakerState::HalfOpen(trial) => Some(trial),
        BreakerState::Open => None,
        BreakerState::Closed => panic!("nobody has closed it"),
    }
}

fn one_at_a_time() {
    explore(|| {
        let (circuits, due) = opened();
        let under_way = Arc::new(AtomicUsize::new(0));
        let run = move |circuits: Arc<CircuitBreakers>, under_way: Arc<AtomicUsize>| {
            if let Some(trial) = attempt(&circuits, due) {
                assert_eq!(under_way.fetch_add(1, Ordering::Relaxed), 0);
                under_way.fetch_sub(1, Ordering::Relaxed);
                drop(trial);
            }
        };
        let other = thread::spawn({
            let (circuits, under_way) = (circuits.clone(), under_way.clone());
            move || run(circuits, under_way)
        });
        run(circuits.clone(), under_way);
        other.join().expect("the other does not panic");
        assert!(
            attempt(&circuits, due).is_some(),
            "neither came to a verdict"
        );
    });
}

fn without_a_verdict() {
    explore(|| {
        let (circuits, due) = opened();
        let hanging = attempt(&circuits, due).expect("it is due");
        let later = due + Duration::from_secs(4);
        let gone = thread::spawn(move || drop(hanging));
        let second = attempt(&circuits, later);
        gone.join().expect("the other does not panic");
        // The first probe has expired or is gone; the second is still running.
        assert!(second.is_some());
        assert!(
            attempt(&circuits, later).is_none(),
            "the second is under way"
        );
        drop(second);
        assert!(attempt(&circuits, later).is_some());
    });
}

fn closed_or_paused() {
    explore(|| {
        let (circuits, due) = opened();
        let trial = attempt(&circuits, due).expect("it is due");
        let late = thread::spawn({
            let circuits = circuits.clone();
            move || circuits.failed(BACKEND, Some(USER), due)
        });
        circuits.passed(BACKEND, USER, due);
        drop(trial);
        late.join().expect("the other does not panic");
        let view = circuits.view(BACKEND, due);
        if !view.is_open {
            assert!(circuits.allows(BACKEND, user, due));
        } else {
            // The failure came last: the circuit is open, and due again after the pause.
            assert!(view.is_open && !circuits.allows(BACKEND, user, due));
            assert!(attempt(&circuits, due + Duration::from_secs(4)).is_some());
        }
    });
}

fn new_life() {
    explore(|| {
        let (circuits, due) = opened();
        let old = attempt(&circuits, due).expect("it is due");
        let next = BackendRef {
            incarnation: Incarnation(2),
            ..BACKEND
        };
        let gone = thread::spawn(move || drop(old));
        circuits.failed(next, Some(USER), due);
        assert!(!circuits.allows(next, user, due), "one failure opens it");
        gone.join().expect("the other does not panic");
        assert!(!circuits.allows(next, user, due));
        assert!(circuits.allows(BACKEND, user, due), "whose life is over");
    });
}
