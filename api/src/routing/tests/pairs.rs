//! Tests requests on two backends: choice, leases and charges.

use state::admission::{AdmissionSettings, Concurrency};
use state::command::{BackendRole, BackendSpec};
use state::policy::{Disaggregate, PairSettings, WholeReason};

use super::super::fixture::{router_with, spec};
use super::*;
use crate::prompt::ModelSettings;

/// Prompt of some 1,000 tokens, in blocks of four tokens.
const LONG: usize = 4_000;

impl Bench {
    /// Creates a cluster where `b0` and `b1` compute prompts and `b2` and `b3` answer.
    fn apart(disaggregate: Disaggregate) -> Self {
        let mut bench = Self::new(4);
        let (prefill, decode) = (BackendRole::Prefill, BackendRole::Decode);
        for (at, role) in [prefill, prefill, decode, decode].into_iter().enumerate() {
            bench.admin(Command::PutBackend(BackendSpec {
                role,
                ..spec(at, None)
            }));
        }
        let model = ModelSettings {
            pairs: PairSettings {
                disaggregate,
                above_tokens: 500,
            },
            ..ModelSettings::characters("*", 16)
        };
        bench.router = router_with(&bench.port, OutboxSettings::default(), model);
        bench
    }

    fn whole(&self, ask: &RoutingRequest<'_>) -> Option<WholeReason> {
        let explained = self.explain(ask);
        assert!(explained.prefill.is_none());
        let decision = self.decide_on(ask).unwrap();
        assert!(decision.prefill.is_none());
        assert!([2, 3].contains(&decision.backend.slot.0), "it answers");
        explained.whole
    }

    fn running(&self, slot: u16) -> u32 {
        let handle = self.port.log.lock().unwrap().handle(slot);
        self.router.load().here(handle).running
    }
}

fn text(seed: u8, bytes: usize) -> String {
    let letters = (0..bytes).map(|at| char::from(b'a' + (at as u8 ^ seed) % 26));
    letters.collect()
}

#[test]
fn a_long_prompt_uses_a_prefill_backend_as_explained() {
    let bench = Bench::apart(Disaggregate::Auto);
    let identity = bench.identify(&text(0, LONG));
    let asked = ask(&identity, &[]);
    let decision = bench.decide_on(&asked).unwrap();
    let prefill = decision.prefill.as_ref().unwrap();
    assert!(prefill.backend.slot.0 < 2 && decision.backend.slot.0 >= 2);
    let explained = bench.explain(&asked);
    assert_eq!(explained.choice.as_deref(), Some(&*decision.name));
    let shown = explained.prefill.unwrap();
    assert_eq!(shown.choice, *prefill.name);
    assert_eq!(shown.backends.len(), 2);
    assert_eq!(explained.whole, None);
    let verdicts = explained.backends.iter().map(|it| it.verdict);
    let (out, may) = (FilterVerdict::OtherRole, FilterVerdict::Candidate);
    assert!(verdicts.eq([out, out, may, may]));
}

#[test]
fn short_cached_and_inseparable_requests_use_one_backend() {
    let bench = Bench::apart(Disaggregate::Auto);
    let short = bench.identify(&text(0, 1_600));
    assert_eq!(bench.whole(&ask(&short, &[])), Some(WholeReason::Short));
    let long = bench.identify(&text(0, LONG));
    let tied = RoutingRequest {
        stages: RequestStages::Monolithic,
        ..ask(&long, &[])
    };
    assert_eq!(bench.whole(&tied), Some(WholeReason::NotSeparable));
    let (first, attempt) = bench.start(&long);
    attempt.end(AttemptEnd::Finished, Instant::now());
    bench.flush();
    // The backend that answered holds all blocks but the last.
    let again = bench.decide(&long, &[]).unwrap();
    assert!(again.prefill.is_none());
    assert_eq!(again.backend, first.backend);
    bench.assert_quiet();

    let off = Bench::apart(Disaggregate::Off);
    assert_eq!(off.whole(&ask(&long, &[])), Some(WholeReason::Off));
    let always = Bench::apart(Disaggregate::Always);
    assert!(always.decide(&short, &[]).unwrap().prefill.is_some());
}

#[test]
fn the_prefix_is_matched_at_the_prefill_backend() {
    let bench = Bench::apart(Disaggregate::Always);
    let first = bench.identify(&text(0, LONG));
    let (decision, mut attempt) = bench.start(&first);
    let computing = decision.prefill.unwrap().backend;
    let prefill = attempt.take_prefill().unwrap();
    prefill.sent();
    attempt.prefilled(prefill, None, Instant::now());
    attempt.end(AttemptEnd::Finished, Instant::now());
    bench.flush();
    let longer = bench.identify(&(text(0, LONG) + &text(9, LONG)));
    let next = bench.decide(&longer, &[decision.backend.slot]).unwrap();
    let prefill = next.prefill.unwrap();
    assert_eq!((prefill.backend, prefill.matched), (computing, 250));
    assert_eq!(next.matched, 0, "the other one has nothing of it");
    bench.assert_quiet();
}

#[test]
fn both_backends_lease_the_prompt_until_the_answer_begins() {
    let bench = Bench::apart(Disaggregate::Auto);
    let identity = bench.identify(&text(0, LONG));
    let (decision, mut attempt) = bench.start(&identity);
    let computing = decision.prefill.unwrap().backend;
    let [at, answering] = [computing.slot.0, decision.backend.slot.0];
    let load = |backend| bench.router.load().here(backend);
    assert_eq!((bench.running(at), bench.running(answering)), (1, 1));
    assert_eq!(load(computing).pending_prefill_tokens, 1_000);
    assert_eq!(load(decision.backend).pending_prefill_tokens, 0);
    bench.flush();
    let leases = || bench.port.log.lock().unwrap().state.open_leases();
    assert_eq!(leases(), 2);
    let mut prefill = attempt.take_prefill().unwrap();
    prefill.sent();
    prefill.answered(Some(usage(1_000, Some(0), 1)), Instant::now());
    assert_eq!(load(computing).pending_prefill_tokens, 0);
    attempt.prefilled(prefill, Some(usage(1_000, Some(0), 1)), Instant::now());
    bench.flush();
    assert_eq!((leases(), bench.running(at)), (2, 1));
    attempt.first_byte(Instant::now());
    bench.flush();
    assert_eq!((leases(), bench.running(at)), (1, 0));
    attempt.end(AttemptEnd::Finished, Instant::now());
    bench.assert_quiet();
}

#[test]
fn a_prompt_is_charged_once_as_its_prefill_backend_reports() {
    let bench = Bench::apart(Disaggregate::Auto);
    let identity = bench.identify(&text(0, LONG));
    let (_, mut attempt) = bench.start(&identity);
    let mut prefill = attempt.take_prefill().unwrap();
    prefill.sent();
    let told = Some(usage(1_010, Some(400), 1));
    prefill.answered(told, Instant::now());
    attempt.prefilled(prefill, told, Instant::now());
    attempt.first_byte(Instant::now());
    // The backend that fetched the prompt reports all of it as cached.
    attempt.usage(usage(1_010, Some(1_009), 30), Instant::now());
    attempt.end(AttemptEnd::Finished, Instant::now());
    assert_eq!(bench.charged(), [610, 400, 30]);
    bench.assert_quiet();
}

#[test]
fn an_attempt_without_its_prefill_stage_is_charged_normally() {
    let bench = Bench::apart(Disaggregate::Auto);
    let identity = bench.identify(&text(0, LONG));
    let (decision, mut attempt) = bench.start(&identity);
    let prefill = attempt.take_prefill().unwrap();
    prefill.sent();
    prefill.end(AttemptEnd::Failed);
    attempt.fall_back_to_single_backend();
    let here = bench.router.load().here(decision.backend);
    assert_eq!(here.pending_prefill_tokens, 1_000);
    attempt.first_byte(Instant::now());
    attempt.usage(usage(1_010, Some(16), 30), Instant::now());
    attempt.end(AttemptEnd::Finished, Instant::now());
    assert_eq!(bench.charged(), [994, 16, 30]);
    bench.assert_quiet();
}

#[test]
fn a_dropped_attempt_releases_both_backends() {
    for steps in 0..4 {
        let bench = Bench::apart(Disaggregate::Auto);
        let identity = bench.identify(&text(0, LONG));
        let (_, mut attempt) = bench.start(&identity);
        let mut prefill = attempt.take_prefill().unwrap();
        if steps > 0 {
            prefill.sent();
        }
        if steps > 1 {
            prefill.answered(None, Instant::now());
        }
        if steps > 2 {
            attempt.prefilled(prefill, None, Instant::now());
        } else {
            drop(prefill);
        }
        drop(attempt);
        bench.assert_quiet();
    }
}

#[test]
fn prefill_backends_answer_if_no_other_can() {
    let bench = Bench::apart(Disaggregate::Auto);
    let identity = bench.identify("hello");
    let decided = bench.decide(&identity, &[Slot(2), Slot(3)]).unwrap();
    assert!(decided.backend.slot.0 < 2 && decided.prefill.is_none());
}

#[test]
fn a_prompt_does_not_wait_for_a_full_prefill_backend() {
    let bench = Bench::apart(Disaggregate::Always);
    bench.admin(Command::PutAdmission(AdmissionSettings {
        concurrency: Concurrency::Fixed(2),
        ..AdmissionSettings::default()
    }));
    let shares = bench.router.shares();
    shares.turn(Instant::now(), &[]);
    let identity = bench.identify(&text(0, LONG));
    let asked = ask(&identity, &[]);
    let decider = bench.router.decider();
    let place = || shares.place(decider, &asked, Instant::now());
    let placed: Vec<_> = (0..4).map(|_| place().unwrap()).collect();
    assert!(placed.iter().all(|it| it.prefill.is_some()));
    assert_eq!(place().unwrap_err(), AT_LIMIT);
    let registry = bench.router.view().registry();
    for backend in &registry.backends {
        assert_eq!(bench.router.load().here(backend.handle).running, 2);
    }
    drop(placed);
    bench.admin(Command::PutBackend(BackendSpec {
        role: BackendRole::Decode,
        ..spec(1, None)
    }));
    // One prefill backend for three decode backends: two prompts fit, the others stay whole.
    let placed: Vec<_> = (0..6).map(|_| place().unwrap()).collect();
    let staged = placed.iter().filter(|it| it.prefill.is_some());
    assert_eq!(staged.count(), 2);
}
