//! Tests of when circuits open and close, and which requests they admit.

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
fn the_failure_share_opens_the_circuit() {
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
    assert!(!circuits.failed(backend(1), None, now), "already open");
    assert_eq!(circuits.view(backend(1), now).pause_ms, 1000);
}

#[test]
fn one_users_failures_open_no_circuit_that_serves_others() {
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
fn a_user_that_failed_a_trial_goes_last_at_no_longer_pause() {
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
fn some_backends_may_be_ejected_but_never_all() {
    let circuits = CircuitBreakers::new(SETTINGS);
    let most = [0, 1, 2, 3, 4, 10].map(|backends| circuits.ejected_max(backends));
    assert_eq!(most, [0, 0, 1, 1, 2, 5]);
}

#[test]
fn single_trial_requests_pass_after_a_pause() {
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
fn failures_soon_after_a_trial_passed_prolong_the_pause() {
    let (circuits, mut now) = opened();
    for pause_ms in [2000, 4000, 4000] {
        now += Duration::from_secs(4);
        drop(tried(&circuits, now));
        assert!(circuits.passed(backend(1), ADA, now));
        for _ in 0..3 {
            circuits.passed(backend(1), BOB, now);
            circuits.failed_late(backend(1), BOB, now);
        }
        for _ in 0..3 {
            circuits.failed(backend(1), None, now);
        }
        assert_eq!(circuits.view(backend(1), now).pause_ms, pause_ms);
    }
    now += Duration::from_secs(4);
    drop(tried(&circuits, now));
    assert!(circuits.passed(backend(1), ADA, now));
    now += Duration::from_secs(5);
    for _ in 0..5 {
        circuits.failed(backend(1), None, now);
    }
    assert_eq!(circuits.view(backend(1), now).pause_ms, 1000, "it was well");
}

#[test]
fn a_hanging_trial_is_abandoned_after_the_longest_pause() {
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
fn a_new_incarnation_starts_with_a_closed_circuit() {
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
fn a_threshold_of_zero_never_opens() {
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

#[test]
fn a_circuit_is_removed_with_its_backend() {
    let (circuits, now) = opened();
    assert_eq!(circuits.not_closed.load(Relaxed), 1);
    circuits.forget(backend(1).slot);
    assert_eq!(
        circuits.not_closed.load(Relaxed),
        0,
        "decisions look at none of them again"
    );
    assert!(circuits.allows(backend(1), ada, now));
    circuits.forget(backend(1).slot);
    assert_eq!(circuits.not_closed.load(Relaxed), 0);
}
