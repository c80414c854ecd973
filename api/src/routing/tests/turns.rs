//! Tests what the log learns of the turns of a session.

use state::ids::{AgentSessionKey, BackendRef};
use state::trees::{AgentSession, SessionTree};

use super::*;
use crate::routing::EarlierAttempts;
use crate::sessions::NamedSession;

const ROOT: NamedSession = NamedSession {
    key: AgentSessionKey(1),
    parent: None,
    is_final: false,
    source: "header:x-quorate-session",
};
const CHILD: NamedSession = NamedSession {
    key: AgentSessionKey(2),
    parent: Some(ROOT.key),
    ..ROOT
};

impl Bench {
    /// Runs one turn of `session` at any backend but those in the slots `excluded`, which reports
    /// 100 prompt tokens, `cached` of them cached, and 7 output tokens.
    fn turn(&self, session: NamedSession, excluded: &[Slot], cached: u64) -> BackendRef {
        let identity = self.identify("What is next?");
        let request = RoutingRequest {
            session: Some(session),
            ..ask(&identity, excluded)
        };
        let decision = self.decide_on(&request).unwrap();
        let mut attempt = self.dispatch(&decision, &request);
        attempt.usage(usage(100, Some(cached), 7), Instant::now());
        attempt.end(AttemptEnd::Finished, Instant::now());
        self.flush();
        decision.backend
    }

    fn session(&self, session: NamedSession) -> Option<AgentSession> {
        let log = self.port.log.lock().unwrap();
        log.state.view().trees().session(session.key).copied()
    }

    fn tree(&self) -> Option<SessionTree> {
        let log = self.port.log.lock().unwrap();
        log.state.view().trees().tree(ROOT.key).copied()
    }
}

#[test]
fn the_log_knows_home_turns_and_usage_of_a_session() {
    let bench = Bench::new(2);
    let first = bench.turn(ROOT, &[], 0);
    let begun = bench.session(ROOT).expect("it has begun");
    assert_eq!((begun.home, begun.turns, begun.parent), (first, 1, None));
    let second = bench.turn(ROOT, &[first.slot], 90);
    assert_ne!(second, first);
    let moved = bench.session(ROOT).expect("it goes on");
    assert_eq!((moved.home, moved.turns, moved.tokens), (second, 2, 107));
    let used = [moved.usage.input_uncached, moved.usage.input_cached];
    assert_eq!((used, moved.usage.output), ([110, 90], 14));
    assert_eq!(bench.charged(), [110, 90, 14]);
}

#[test]
fn a_tree_sums_up_its_sessions_also_after_they_ended() {
    let bench = Bench::new(1);
    bench.turn(ROOT, &[], 0);
    bench.turn(CHILD, &[], 50);
    let child = bench.session(CHILD).expect("it has begun");
    assert_eq!((child.parent, child.root), (CHILD.parent, ROOT.key));
    let last = NamedSession {
        is_final: true,
        ..CHILD
    };
    bench.turn(last, &[], 50);
    assert_eq!(bench.session(CHILD), None);
    let tree = bench.tree().expect("its root goes on");
    assert_eq!((tree.sessions, tree.turns), (1, 3));
    assert_eq!(tree.usage.tokens(), 3 * 107);
    bench.assert_quiet();
}

#[test]
fn a_turn_that_ends_before_its_beginning_is_applied_counts() {
    let bench = Bench::new(1);
    let identity = bench.identify("What is next?");
    let request = RoutingRequest {
        session: Some(ROOT),
        ..ask(&identity, &[])
    };
    for _ in 0..2 {
        let decision = bench.decide_on(&request).unwrap();
        let mut attempt = bench.dispatch(&decision, &request);
        attempt.usage(usage(100, Some(0), 7), Instant::now());
        attempt.end(AttemptEnd::Finished, Instant::now());
    }
    bench.flush();
    assert_eq!(bench.session(ROOT).map(|it| it.turns), Some(2));
}

#[test]
fn a_turn_that_no_engine_ran_does_not_count() {
    let bench = Bench::new(1);
    let identity = bench.identify("What is next?");
    let request = RoutingRequest {
        session: Some(ROOT),
        ..ask(&identity, &[])
    };
    let decision = bench.decide_on(&request).unwrap();
    let attempt = bench.dispatch(&decision, &request);
    attempt.end(AttemptEnd::NotRun, Instant::now());
    bench.flush();
    assert_eq!(bench.session(ROOT).map(|it| it.turns), Some(0));
    bench.assert_quiet();
}

#[test]
fn an_answer_of_two_backends_is_one_turn_and_is_charged_once() {
    let bench = Bench::new(2);
    let identity = bench.identify("What is next?");
    let first_ask = RoutingRequest {
        session: Some(ROOT),
        ..ask(&identity, &[])
    };
    let decision = bench.decide_on(&first_ask).unwrap();
    let mut first = bench.dispatch(&decision, &first_ask);
    first.usage(usage(100, Some(40), 7), Instant::now());
    let earlier = first.hand_over(AttemptEnd::Broken, Instant::now());
    let earlier = earlier.expect("it was open");
    let next_ask = RoutingRequest {
        excluded: &[decision.backend.slot],
        ..first_ask
    };
    let next = bench.decide_on(&next_ask).unwrap();
    let terms = DispatchTerms {
        earlier: Some(earlier.charge()),
        ..DispatchTerms::default()
    };
    // A backend that does not go on costs nothing more.
    let failed = bench.router.dispatcher();
    let failed = failed.dispatch(&next, &next_ask, terms, Instant::now());
    failed.end(AttemptEnd::Failed, Instant::now());
    let second = bench.router.dispatcher();
    let mut second = second.dispatch(&next, &next_ask, terms, Instant::now());
    second.continues(earlier, "and then");
    second.usage(usage(100, Some(90), 60), Instant::now());
    second.end(AttemptEnd::Finished, Instant::now());
    bench.flush();
    assert_eq!(bench.charged(), [60, 40, 60]);
    let session = bench.session(ROOT).expect("it has begun");
    assert_eq!((session.turns, session.home), (1, next.backend));
    let used = &session.usage;
    assert_eq!(
        [used.input_uncached, used.input_cached, used.output],
        [60, 40, 60]
    );
    bench.assert_quiet();
}

#[test]
fn an_answer_that_does_not_go_on_is_a_turn_if_an_engine_ran_it() {
    for (end, turns) in [(AttemptEnd::Broken, 1), (AttemptEnd::NotRun, 0)] {
        let bench = Bench::new(1);
        let identity = bench.identify("What is next?");
        let request = RoutingRequest {
            session: Some(ROOT),
            ..ask(&identity, &[])
        };
        let decision = bench.decide_on(&request).unwrap();
        let attempt = bench.dispatch(&decision, &request);
        drop(attempt.hand_over(end, Instant::now()));
        bench.flush();
        assert_eq!(bench.session(ROOT).map(|it| it.turns), Some(turns));
        bench.assert_quiet();
    }
}

#[test]
fn an_answer_without_any_report_is_charged_once() {
    let bench = Bench::new(2);
    let identity = bench.identify("What is next?");
    let request = RoutingRequest {
        session: Some(ROOT),
        ..ask(&identity, &[])
    };
    let decision = bench.decide_on(&request).unwrap();
    let first = bench.dispatch(&decision, &request);
    let earlier = first.hand_over(AttemptEnd::Failed, Instant::now());
    let earlier = earlier.expect("it was open");
    let terms = DispatchTerms {
        earlier: Some(earlier.charge()),
        ..DispatchTerms::default()
    };
    // The client leaves before the next backend says anything.
    let dispatcher = bench.router.dispatcher();
    drop(dispatcher.dispatch(&decision, &request, terms, Instant::now()));
    drop(earlier);
    bench.flush();
    assert_eq!(bench.charged(), [u64::from(identity.tokens), 0, 0]);
    assert_eq!(bench.session(ROOT).map(|it| it.turns), Some(1));
    bench.assert_quiet();
}

#[test]
fn an_attempt_after_one_that_has_not_run_pays_for_itself() {
    for reports in [false, true] {
        let bench = Bench::new(2);
        let identity = bench.identify("What is next?");
        let request = RoutingRequest {
            session: Some(ROOT),
            ..ask(&identity, &[])
        };
        let decision = bench.decide_on(&request).unwrap();
        let mut first = bench.dispatch(&decision, &request);
        if reports {
            // Then it has run, whatever it says.
            first.usage(usage(100, Some(40), 0), Instant::now());
        }
        let earlier = EarlierAttempts::default();
        earlier.hand_over(first, AttemptEnd::NotRun, Instant::now());
        assert_eq!(earlier.charge().is_some(), reports);
        let terms = DispatchTerms {
            earlier: earlier.charge(),
            ..DispatchTerms::default()
        };
        let dispatcher = bench.router.dispatcher();
        let second = dispatcher.dispatch(&decision, &request, terms, Instant::now());
        second.end(AttemptEnd::Failed, Instant::now());
        drop(earlier);
        bench.flush();
        let expected = match reports {
            true => [60, 40, 0],
            false => [u64::from(identity.tokens), 0, 0],
        };
        assert_eq!(bench.charged(), expected);
        assert_eq!(bench.session(ROOT).map(|it| it.turns), Some(1));
        bench.assert_quiet();
    }
}

#[test]
fn an_attempt_that_goes_on_pays_what_one_without_a_report_owes() {
    for end in [AttemptEnd::Broken, AttemptEnd::Failed] {
        for next_end in [AttemptEnd::Finished, AttemptEnd::NotRun] {
            let bench = Bench::new(2);
            let identity = bench.identify("What is next?");
            let prompt = u64::from(identity.tokens);
            let request = ask(&identity, &[]);
            let decision = bench.decide_on(&request).unwrap();
            let earlier = EarlierAttempts::default();
            earlier.hand_over(bench.dispatch(&decision, &request), end, Instant::now());
            let terms = DispatchTerms {
                earlier: earlier.charge(),
                ..DispatchTerms::default()
            };
            let dispatcher = bench.router.dispatcher();
            let mut second = dispatcher.dispatch(&decision, &request, terms, Instant::now());
            earlier.go_on(&mut second, "");
            let mut expected = [prompt, 0, 0];
            if next_end == AttemptEnd::Finished {
                // The first backend's cached tokens are not known, so those of this one count.
                second.usage(usage(prompt, Some(prompt - 1), 5), Instant::now());
                expected = [1, prompt - 1, 5];
            }
            second.end(next_end, Instant::now());
            bench.flush();
            assert_eq!(bench.charged(), expected, "{end:?}, then {next_end:?}");
            bench.assert_quiet();
        }
    }
}
