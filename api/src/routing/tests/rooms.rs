//! Tests requests on two backends that cannot work alone: choice and free places.

use state::admission::{AdmissionSettings, Concurrency};
use state::command::{BackendRole, BackendSpec};
use state::policy::{Disaggregate, Handover, PairSettings, WholeReason};

use super::super::fixture::{router_with, spec};
use super::*;
use crate::engines::backends::BOOTSTRAP_PORT_LABEL;
use crate::prompt::ModelSettings;

const PREFILL: BackendRole = BackendRole::Prefill;
const DECODE: BackendRole = BackendRole::Decode;

/// Creates backends `b0` and up with these roles; all but [`BackendRole::Both`] meet in rooms.
fn meeting(roles: &[BackendRole], disaggregate: Disaggregate) -> Bench {
    let mut bench = Bench::new(roles.len());
    for (at, role) in roles.iter().enumerate() {
        put(&bench, at, *role);
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

fn put(bench: &Bench, at: usize, role: BackendRole) {
    let label = (BOOTSTRAP_PORT_LABEL.to_owned(), "8998".to_owned());
    bench.admin(Command::PutBackend(BackendSpec {
        role,
        labels: [label].into(),
        ..spec(at, None)
    }));
}

/// Returns the slots of the backends in a decision, that of the prefill backend first.
fn slots(bench: &Bench, ask: &RoutingRequest<'_>) -> Result<(Option<u16>, u16), RoutingRejection> {
    let explained = bench.explain(ask);
    let decision = bench.decide_on(ask);
    assert_eq!(explained.no_choice, decision.as_ref().err().copied());
    let decision = decision?;
    assert_eq!(explained.choice.as_deref(), Some(&*decision.name));
    let prefill = decision.prefill.as_ref();
    let shown = explained.prefill.map(|shown| shown.choice);
    assert_eq!(shown.as_deref(), prefill.map(|prefill| &*prefill.name));
    assert!(prefill.is_none_or(|prefill| prefill.handover == Handover::Room));
    Ok((prefill.map(|it| it.backend.slot.0), decision.backend.slot.0))
}

fn of<'a>(identity: &'a PromptIdentity, stages: RequestStages) -> RoutingRequest<'a> {
    RoutingRequest {
        stages,
        ..ask(identity, &[])
    }
}

#[test]
fn every_request_goes_to_a_pair_or_none() {
    for disaggregate in [Disaggregate::Off, Disaggregate::Auto, Disaggregate::Always] {
        let bench = meeting(&[PREFILL, DECODE], disaggregate);
        let short = bench.identify("hello");
        let by = |stages| slots(&bench, &of(&short, stages));
        assert_eq!(by(RequestStages::Disaggregatable), Ok((Some(0), 1)));
        assert_eq!(by(RequestStages::BootstrapRoom), Ok((Some(0), 1)));
        assert_eq!(
            by(RequestStages::Monolithic),
            Err(RoutingRejection::NotSeparable)
        );
        assert_eq!(by(RequestStages::Nothing), Ok((None, 1)));
        bench.assert_quiet();
    }
}

#[test]
fn a_monolithic_backend_takes_requests_not_worth_a_pair() {
    let roles = [PREFILL, DECODE, BackendRole::Both];
    let bench = meeting(&roles, Disaggregate::Auto);
    let (short, long) = (bench.identify("hello"), bench.identify(&"x".repeat(4_000)));
    let by = |identity, stages| slots(&bench, &of(identity, stages));
    assert_eq!(by(&short, RequestStages::Disaggregatable), Ok((None, 2)));
    assert_eq!(by(&long, RequestStages::Monolithic), Ok((None, 2)));
    assert_eq!(by(&long, RequestStages::Disaggregatable), Ok((Some(0), 1)));
    assert_eq!(by(&long, RequestStages::BootstrapRoom), Ok((Some(0), 1)));
    let whole = bench.explain(&of(&short, RequestStages::Disaggregatable));
    assert_eq!(whole.whole, Some(WholeReason::Short));
    let verdicts = whole.backends.iter().map(|it| it.verdict);
    let out = FilterVerdict::OtherRole;
    assert!(verdicts.eq([out, out, FilterVerdict::Candidate]));
    let off = meeting(&roles, Disaggregate::Off);
    assert_eq!(
        slots(&off, &of(&long, RequestStages::Disaggregatable)),
        Ok((None, 2))
    );
}

#[test]
fn a_missing_pair_is_explained() {
    let bench = meeting(&[PREFILL, DECODE], Disaggregate::Auto);
    let identity = bench.identify("hello");
    let tried = |slot: &[Slot]| bench.decide(&identity, slot).unwrap_err();
    assert_eq!(tried(&[Slot(0)]), RoutingRejection::AllTried);
    assert_eq!(tried(&[Slot(1)]), RoutingRejection::AllTried);
    let none = meeting(&[DECODE, DECODE], Disaggregate::Auto);
    let refused = none.decide(&identity, &[]).unwrap_err();
    assert_eq!(refused, RoutingRejection::NoPrefill);
    let none = meeting(&[PREFILL, PREFILL], Disaggregate::Auto);
    let refused = none.decide(&identity, &[]).unwrap_err();
    assert_eq!(refused, RoutingRejection::NoneHealthy);
}

#[test]
fn a_request_waits_for_places_at_both_backends() {
    let bench = meeting(&[PREFILL, DECODE, DECODE], Disaggregate::Auto);
    bench.admin(Command::PutAdmission(AdmissionSettings {
        concurrency: Concurrency::Fixed(2),
        ..AdmissionSettings::default()
    }));
    let shares = bench.router.shares();
    shares.turn(Instant::now(), &[]);
    let identity = bench.identify("hello");
    let asked = ask(&identity, &[]);
    let decider = bench.router.decider();
    let now = Instant::now();
    let placed: Vec<_> = (0..2)
        .map(|_| shares.place(decider, &asked, now).unwrap())
        .collect();
    assert!(placed.iter().all(|it| it.prefill.is_some()));
    let refused = shares.place(decider, &asked, now).unwrap_err();
    assert_eq!(refused, AT_LIMIT);
    let wanted = decider.wanted_backends(&asked, now);
    let mut wanted: Vec<u16> = wanted.iter().map(|backend| backend.slot.0).collect();
    wanted.sort_unstable();
    assert_eq!(
        wanted,
        [0, 1, 2],
        "places are wanted of the one that computes, too"
    );
    drop(placed);
    assert!(shares.place(decider, &asked, now).is_ok());
}
