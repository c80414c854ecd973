//! Tests panic mode: which probes are in doubt, and for how long.

use state::ids::UserKey;

use super::*;
use crate::engines::backends::{FAILURES_MAX, Fault, Occupancy, SlotTable};

/// Probe results that a test controls.
struct Probes(SlotTable<Occupancy>);

impl Probes {
    /// Creates results in which all probes have passed.
    fn of(bench: &Bench) -> Self {
        let mut roster = SlotTable::new(Arc::clone(&bench.router.decider().backends));
        roster.follow(bench.router.view.registry(), |stay, _| {
            stay.passed();
            stay
        });
        Self(roster)
    }

    fn fail(&mut self, slots: &[u16], fault: Fault) {
        let stays = self.0.watchers();
        for (_, stay) in stays.filter(|(slot, _)| slots.contains(&slot.0)) {
            for _ in 0..FAILURES_MAX {
                stay.failed(fault, "as told".to_owned());
            }
        }
    }
}

impl Bench {
    /// Makes each of these backends answer a request.
    fn answer(&self, slots: &[u16]) {
        for slot in slots {
            let handle = self.port.log.lock().unwrap().handle(*slot);
            self.router
                .decider()
                .backends
                .report_answer(handle, UserKey(1), Instant::now());
        }
    }

    /// Returns the backends that may take a request.
    fn candidates(&self) -> Vec<bool> {
        let identity = self.identify("hello");
        let verdicts = self.verdicts(&ask(&identity, &[]));
        let is_in = |verdict| match verdict {
            FilterVerdict::Candidate => true,
            FilterVerdict::Unhealthy => false,
            other => panic!("{other:?}"),
        };
        verdicts.into_iter().map(is_in).collect()
    }

    fn panicking(&self) -> std::collections::BTreeSet<String> {
        let registry = self.router.view.registry();
        self.router.decider().backends.panicking(&registry)
    }

    fn is_panic(&self) -> bool {
        let identity = self.identify("hello");
        self.explain(&ask(&identity, &[])).is_panic
    }
}

#[test]
fn probes_are_doubted_if_most_answering_backends_fail_them() {
    let bench = Bench::new(4);
    let mut probes = Probes::of(&bench);
    bench.answer(&[0, 1, 2, 3]);
    probes.fail(&[0, 1], Fault::Unwell);
    assert_eq!(bench.candidates(), [false, false, true, true]);
    assert!(!bench.is_panic() && bench.panicking().is_empty());
    probes.fail(&[2], Fault::Unwell);
    assert_eq!(bench.candidates(), [true; 4]);
    assert!(bench.is_panic());
    assert_eq!(bench.panicking(), ["m".to_owned()].into());
}

#[test]
fn panic_mode_skips_backends_without_recent_answers() {
    let bench = Bench::new(4);
    let mut probes = Probes::of(&bench);
    probes.fail(&[0, 1, 2, 3], Fault::Unwell);
    assert_eq!(bench.candidates(), [false; 4]);
    assert!(!bench.is_panic(), "it would change nothing");
    bench.answer(&[0, 2]);
    assert_eq!(bench.candidates(), [true, false, true, false]);
}

#[test]
fn refusing_and_draining_backends_do_not_count_for_panic() {
    let bench = Bench::new(4);
    let mut probes = Probes::of(&bench);
    bench.answer(&[0, 1, 2, 3]);
    probes.fail(&[0], Fault::Unwell);
    probes.fail(&[1, 2], Fault::Unreachable);
    assert_eq!(bench.candidates(), [false, false, false, true]);
    probes.fail(&[3], Fault::Unreachable);
    assert_eq!(bench.candidates(), [true, false, false, false]);

    let bench = Bench::new(2);
    let mut probes = Probes::of(&bench);
    bench.answer(&[0, 1]);
    probes.fail(&[0], Fault::Unwell);
    assert_eq!(bench.candidates(), [false, true]);
    bench.admin(Command::SetDraining {
        name: "b1".to_owned(),
        draining: true,
        moves_streams: false,
    });
    let identity = bench.identify("hello");
    let alone = [FilterVerdict::Candidate, FilterVerdict::Draining];
    assert_eq!(bench.verdicts(&ask(&identity, &[])), alone);
}

#[tokio::test(start_paused = true)]
async fn an_answer_vouches_for_a_backend_until_it_is_unreachable() {
    let bench = Bench::new(2);
    let mut probes = Probes::of(&bench);
    bench.answer(&[0, 1]);
    probes.fail(&[0, 1], Fault::Unwell);
    tokio::time::advance(Duration::from_secs(15)).await;
    bench.answer(&[1]);
    assert_eq!(bench.candidates(), [true, true]);
    tokio::time::advance(Duration::from_secs(2)).await;
    assert_eq!(bench.candidates(), [false, true]);
    let handle = bench.port.log.lock().unwrap().handle(1);
    bench
        .router
        .decider()
        .backends
        .report_no_answer(handle, None, Instant::now());
    assert_eq!(bench.candidates(), [true, false], "it is tried again");
}

#[tokio::test(start_paused = true)]
async fn a_stale_backend_is_tried_by_one_request_at_a_time() {
    let bench = Bench::new(3);
    let mut probes = Probes::of(&bench);
    bench.answer(&[0, 1]);
    tokio::time::advance(Duration::from_secs(60)).await;
    probes.fail(&[0], Fault::Unwell);
    probes.fail(&[1], Fault::Unreachable);
    assert_eq!(bench.candidates(), [false, false, true], "one is healthy");
    probes.fail(&[2], Fault::Unwell);
    assert_eq!(bench.candidates(), [true, false, false]);
    assert!(!bench.is_panic() && bench.panicking().is_empty());

    let identity = bench.identify("hello");
    let trial = bench.decide(&identity, &[]).unwrap();
    assert!(trial.trial.is_some());
    let beside = bench.decide(&identity, &[]);
    assert_eq!(beside.unwrap_err(), RoutingRejection::NoneHealthy);
    drop(trial);
    assert!(bench.decide(&identity, &[]).is_ok(), "it told nothing");

    let handle = bench.port.log.lock().unwrap().handle(0);
    let backends = &bench.router.decider().backends;
    let trial = bench.decide(&identity, &[]).unwrap();
    let user = ask(&identity, &[])
        .user
        .key(bench.router.view.registry().hash_seed);
    backends.report_no_answer(handle, Some(user), Instant::now());
    drop(trial);
    let soon = bench.decide(&identity, &[]);
    assert_eq!(soon.unwrap_err(), RoutingRejection::NoneHealthy);
    tokio::time::advance(Duration::from_secs(60)).await;
    let trial = bench.decide(&identity, &[]).unwrap();
    bench.answer(&[0]);
    drop(trial);
    assert!(bench.is_panic(), "there is evidence");
    assert!(bench.decide(&identity, &[]).unwrap().trial.is_none());
}

#[test]
fn circuits_apply_while_probes_are_doubted() {
    let bench = Bench::new(4);
    let mut probes = Probes::of(&bench);
    bench.answer(&[0, 1, 2, 3]);
    probes.fail(&[0, 1, 2, 3], Fault::Unwell);
    let handle = bench.port.log.lock().unwrap().handle(2);
    for user in 0..6 {
        let user = Some(UserKey(user));
        bench
            .router
            .decider()
            .backends
            .report_no_answer(handle, user, Instant::now());
    }
    let identity = bench.identify("hello");
    let verdicts = bench.verdicts(&ask(&identity, &[]));
    let is_out = |verdict: &FilterVerdict| *verdict == FilterVerdict::CircuitOpen;
    assert_eq!(verdicts.iter().position(is_out), Some(2));
    assert_eq!(verdicts.iter().filter(|it| is_out(it)).count(), 1);
    for _ in 0..20 {
        assert_ne!(bench.decide(&identity, &[]).unwrap().backend.slot, Slot(2));
    }
    // Backends that were tried do not end panic mode for the next attempt.
    let tried = [Slot(0), Slot(1), Slot(2)];
    assert_eq!(
        bench.decide(&identity, &tried).unwrap().backend.slot,
        Slot(3)
    );
}
