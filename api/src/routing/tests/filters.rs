//! Tests the filters: each excludes the right backends, in order, and is counted.

use std::collections::BTreeMap;

use http::{HeaderMap, HeaderValue};
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use state::admission::{AdmissionSettings, Concurrency};
use state::ids::UserKey;
use state::policy::RoutingSettings;

use super::super::fixture::spec;
use super::super::{PolicySource, SELECT, SelectRejection, SelectSettings};
use super::*;

impl Bench {
    /// Returns the routing preferences in `headers`.
    pub(super) fn preferences(
        &self,
        headers: &HeaderMap,
    ) -> Result<RoutingPreferences, PreferenceRejection> {
        self.router.decider().preferences(headers)
    }

    pub(super) fn verdicts(&self, ask: &RoutingRequest<'_>) -> Vec<FilterVerdict> {
        let explained = self.explain(ask);
        explained.backends.iter().map(|it| it.verdict).collect()
    }

    fn fail(&self, slot: u16, times: usize) {
        let handle = self.port.log.lock().unwrap().handle(slot);
        for _ in 0..times {
            self.router
                .decider()
                .backends
                .report_no_answer(handle, None, Instant::now());
        }
    }

    fn lists(&self, slot: u16, models: &[&str]) {
        let handle = self.port.log.lock().unwrap().handle(slot);
        let facts = EngineFacts {
            models: Some(models.iter().map(ToString::to_string).collect()),
            ..EngineFacts::default()
        };
        self.router.outbox().observe(handle, facts);
        self.flush();
    }

    /// Creates a bench of three labelled backends with these label settings: `b0` and `b2` are in
    /// zone a, `b1` in zone b; `b2` has tier x, the others tier y.
    fn labelled(select: SelectSettings) -> Self {
        let mut bench = Self::new(3);
        for (at, zone) in ["a", "b", "a"].into_iter().enumerate() {
            let labels = [("zone", zone), ("tier", if at == 2 { "x" } else { "y" })];
            let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned()));
            bench.admin(Command::PutBackend(state::command::BackendSpec {
                labels: BTreeMap::from(labels),
                ..spec(at, None)
            }));
        }
        bench.router = router_selecting(&bench.port, select);
        bench
    }
}

fn select(value: &'static str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.append(SELECT, HeaderValue::from_static(value));
    headers
}

#[test]
fn an_open_circuit_excludes_a_backend_until_one_answer() {
    let bench = Bench::new(2);
    let identity = bench.identify("hello");
    bench.fail(0, 4);
    assert_eq!(
        bench.verdicts(&ask(&identity, &[])),
        [FilterVerdict::Candidate; 2]
    );
    bench.fail(0, 1);
    let open = [FilterVerdict::CircuitOpen, FilterVerdict::Candidate];
    assert_eq!(bench.verdicts(&ask(&identity, &[])), open);
    for _ in 0..20 {
        assert_eq!(bench.decide(&identity, &[]).unwrap().backend.slot, Slot(1));
    }
    let handle = bench.port.log.lock().unwrap().handle(0);
    bench
        .router
        .decider()
        .backends
        .report_answer(handle, UserKey(1), Instant::now());
    assert_eq!(
        bench.verdicts(&ask(&identity, &[])),
        [FilterVerdict::Candidate; 2]
    );
}

#[test]
fn with_every_circuit_open_the_first_opened_stay_excluded() {
    let bench = Bench::new(2);
    let identity = bench.identify("hello");
    bench.fail(0, 5);
    bench.fail(1, 5);
    assert!(bench.decide(&identity, &[]).is_ok());
    let first = [FilterVerdict::CircuitOpen, FilterVerdict::Candidate];
    assert_eq!(bench.verdicts(&ask(&identity, &[])), first);
    // A request that cannot go elsewhere still finds no untried backend.
    let tried = bench.decide(&identity, &[Slot(0), Slot(1)]);
    assert_eq!(tried.unwrap_err(), RoutingRejection::AllTried);
}

#[test]
fn circuits_exclude_at_most_half_of_a_models_backends() {
    let bench = Bench::new(4);
    let identity = bench.identify("hello");
    for slot in [2, 0, 3] {
        bench.fail(slot, 5);
    }
    let verdicts = bench.verdicts(&ask(&identity, &[]));
    let out = verdicts
        .iter()
        .filter(|it| **it == FilterVerdict::CircuitOpen);
    assert_eq!(out.count(), 2);
    assert_eq!(verdicts[1], FilterVerdict::Candidate);
    for _ in 0..20 {
        assert!(bench.decide(&identity, &[]).is_ok());
    }
}

#[test]
fn circuits_are_ignored_if_all_selected_backends_are_open() {
    let bench = Bench::labelled(SelectSettings {
        allow: true,
        models: Vec::new(),
    });
    let identity = bench.identify("hello");
    let preferred = bench.preferences(&select("zone=b")).unwrap();
    let asked = RoutingRequest {
        labels: &preferred.labels,
        ..ask(&identity, &[])
    };
    bench.fail(1, 5);
    assert_eq!(
        bench.decide_on(&asked).unwrap().backend.slot,
        Slot(1),
        "nobody else may take it"
    );
    let preferred = bench.preferences(&select("zone=a")).unwrap();
    let asked = RoutingRequest {
        labels: &preferred.labels,
        ..ask(&identity, &[])
    };
    bench.fail(0, 5);
    for _ in 0..20 {
        assert_eq!(bench.decide_on(&asked).unwrap().backend.slot, Slot(2));
    }
}

#[test]
fn attempts_report_their_outcome_to_the_circuit() {
    let bench = Bench::new(1);
    let identity = bench.identify("hello");
    let handle = bench.port.log.lock().unwrap().handle(0);
    for _ in 0..5 {
        let (_, attempt) = bench.start(&identity);
        attempt.end(AttemptEnd::Broken, Instant::now());
    }
    assert!(
        bench
            .router
            .decider()
            .backends
            .circuit(handle, Instant::now())
            .is_open
    );
    for end in [AttemptEnd::ClientLeft, AttemptEnd::NotRun] {
        let (_, attempt) = bench.start(&identity);
        attempt.end(end, Instant::now());
        assert!(
            bench
                .router
                .decider()
                .backends
                .circuit(handle, Instant::now())
                .is_open,
            "no verdict"
        );
    }
    let (_, mut attempt) = bench.start(&identity);
    attempt.first_byte(Instant::now());
    let circuit = |now| bench.router.decider().backends.circuit(handle, now);
    assert!(circuit(Instant::now()).is_open, "it has no output yet");
    attempt.first_token(Instant::now());
    assert!(
        !bench
            .router
            .decider()
            .backends
            .circuit(handle, Instant::now())
            .is_open
    );
    attempt.end(AttemptEnd::Broken, Instant::now());
    assert_eq!(
        bench
            .router
            .decider()
            .backends
            .circuit(handle, Instant::now())
            .recent_failures,
        0
    );
    bench.assert_quiet();
}

/// Ends requests at backend 0 whose clients leave after `waits_ms` without output. With `others_ms`,
/// the backend with the given number has output so many milliseconds after each request's start.
/// Returns whether the circuit of backend 0 opened.
fn leaving(waits_ms: u64, others_ms: Option<(usize, u64)>) -> bool {
    let bench = Bench::new(2);
    let identity = bench.identify("hello");
    let handles = [0, 1].map(|number| bench.port.log.lock().unwrap().handle(number));
    let attempt_at = |number: usize| {
        let excluded = [handles[1 - number].slot];
        let decision = bench.decide(&identity, &excluded).unwrap();
        bench.dispatch(&decision, &ask(&identity, &excluded))
    };
    for _ in 0..5 {
        let (mut other, attempt) = (attempt_at(others_ms.map_or(1, |it| it.0)), attempt_at(0));
        let start = Instant::now();
        if let Some((_, ms)) = others_ms {
            other.first_token(start + Duration::from_millis(ms));
        }
        attempt.end(
            AttemptEnd::ClientLeft,
            start + Duration::from_millis(waits_ms),
        );
        other.end(AttemptEnd::NotRun, start);
    }
    let backends = &bench.router.decider().backends;
    backends.circuit(handles[0], Instant::now()).is_open
}

#[test]
fn clients_that_leave_count_only_if_their_backend_is_outdone() {
    assert!(leaving(1_500, Some((1, 500))), "another backend has output");
    assert!(!leaving(900, Some((1, 500))), "they hardly waited");
    assert!(!leaving(1_500, None), "no backend has output");
    assert!(!leaving(1_500, Some((0, 500))), "it serves others");
}

#[test]
fn an_error_after_output_counts_as_a_failure_and_no_success() {
    let bench = Bench::new(1);
    let identity = bench.identify("hello");
    let handle = bench.port.log.lock().unwrap().handle(0);
    let circuit = || {
        bench
            .router
            .decider()
            .backends
            .circuit(handle, Instant::now())
    };
    for (is_fault, failures) in [(true, 1), (false, 1), (true, 2)] {
        let (_, mut attempt) = bench.start(&identity);
        attempt.first_token(Instant::now());
        attempt.reports_error(is_fault, Instant::now());
        attempt.end(AttemptEnd::Broken, Instant::now());
        assert_eq!(circuit().recent_failures, failures);
    }
    for _ in 0..3 {
        let (_, mut attempt) = bench.start(&identity);
        attempt.first_token(Instant::now());
        attempt.reports_error(true, Instant::now());
    }
    // Five of six attempts failed; their successes do not count.
    assert!(circuit().is_open);
}

#[test]
fn a_model_goes_to_backends_that_have_it_loaded() {
    let bench = Bench::new(3);
    let identity = bench.identify("hello");
    assert_eq!(
        bench.verdicts(&ask(&identity, &[])),
        [FilterVerdict::Candidate; 3]
    );
    bench.lists(0, &["base"]);
    assert_eq!(
        bench.verdicts(&ask(&identity, &[])),
        [FilterVerdict::Candidate; 3]
    );
    bench.lists(1, &["base", "m"]);
    let loaded = [
        FilterVerdict::NotLoaded,
        FilterVerdict::Candidate,
        FilterVerdict::NotLoaded,
    ];
    assert_eq!(bench.verdicts(&ask(&identity, &[])), loaded);
    assert_eq!(bench.decide(&identity, &[]).unwrap().backend.slot, Slot(1));
    // The engine that has the adapter was tried, so the others may load it.
    let elsewhere = bench.decide(&identity, &[Slot(1)]).unwrap();
    assert_ne!(elsewhere.backend.slot, Slot(1));
}

#[test]
fn labels_of_request_and_model_must_all_match() {
    let labels = vec![("zone".to_owned(), "a".to_owned())];
    let bench = Bench::labelled(SelectSettings {
        allow: true,
        models: vec![("m".to_owned(), labels), ("*".to_owned(), Vec::new())],
    });
    let identity = bench.identify("hello");
    let only = |verdicts: [bool; 3]| {
        verdicts.map(|is_in| {
            if is_in {
                FilterVerdict::Candidate
            } else {
                FilterVerdict::OtherLabels
            }
        })
    };
    assert_eq!(
        bench.verdicts(&ask(&identity, &[])),
        only([true, false, true])
    );
    let preferred = bench.preferences(&select("tier=x")).unwrap();
    let asked = RoutingRequest {
        labels: &preferred.labels,
        ..ask(&identity, &[])
    };
    assert_eq!(bench.verdicts(&asked), only([false, false, true]));
    let preferred = bench.preferences(&select("tier=x, zone = b")).unwrap();
    let none = RoutingRequest {
        labels: &preferred.labels,
        ..ask(&identity, &[])
    };
    assert_eq!(
        bench.decide_on(&none).unwrap_err(),
        RoutingRejection::NoneSelected
    );
    for bad in [
        "",
        "zone",
        "=a",
        "zone=a,,",
        "a=1,b=2,c=3,d=4,e=5,f=6,g=7,h=8,i=9,j=1,k=2,l=3,m=4,n=5,o=6,p=7,q=8",
    ] {
        assert_eq!(
            bench.preferences(&select(bad)),
            Err(PreferenceRejection::Select(SelectRejection)),
            "{bad}"
        );
    }
    assert!(bench.preferences(&select("zone=")).is_ok());
}

#[test]
fn selection_headers_are_ignored_unless_allowed() {
    let bench = Bench::labelled(SelectSettings::default());
    let identity = bench.identify("hello");
    let headers = select("zone=c,nonsense");
    let preferred = bench.preferences(&headers).unwrap();
    assert_eq!(preferred, RoutingPreferences::default());
    let asked = RoutingRequest {
        headers: Some(&headers),
        labels: &preferred.labels,
        ..ask(&identity, &[])
    };
    assert_eq!(bench.verdicts(&asked), [FilterVerdict::Candidate; 3]);
}

#[test]
fn a_backend_at_its_limit_is_excluded_until_it_has_room() {
    let bench = Bench::new(2);
    bench.admin(Command::PutAdmission(AdmissionSettings {
        concurrency: Concurrency::Fixed(2),
        ..AdmissionSettings::default()
    }));
    let identity = bench.identify("hello");
    let mut attempts: Vec<_> = (0..4).map(|_| bench.start(&identity)).collect();
    assert_eq!(
        bench.decide(&identity, &[]).unwrap_err(),
        RoutingRejection::AtLimit
    );
    assert_eq!(
        bench.verdicts(&ask(&identity, &[])),
        [FilterVerdict::AtLimit; 2]
    );
    let (decision, attempt) = attempts.pop().unwrap();
    attempt.end(AttemptEnd::Finished, Instant::now());
    let freed = bench.decide(&identity, &[]).unwrap();
    assert_eq!(freed.backend, decision.backend);
    // One backend was tried and one is at its limit, so waiting makes sense.
    let other = Slot(1 - freed.backend.slot.0);
    let tried = bench.decide(&identity, &[freed.backend.slot]).unwrap_err();
    assert_eq!(
        tried,
        RoutingRejection::AtLimit,
        "{other:?} may have room later"
    );
    drop(attempts);
    bench.assert_quiet();
}

#[test]
fn a_prompt_goes_only_to_backends_it_fits() {
    let bench = Bench::new(2);
    let capacity = |at, blocks| bench.admin(Command::PutBackend(spec(at, Some(blocks))));
    // 20 blocks of 16 bytes, whose tokens are estimated.
    let identity = bench.identify(&"x".repeat(20 * 16));
    let blocks = u32::try_from(identity.chain.len()).unwrap();
    capacity(0, blocks / 2 - 1);
    capacity(1, blocks / 2);
    let chosen = bench.decide(&identity, &[]).unwrap();
    assert_eq!(chosen.backend.slot, Slot(1), "half, rounded up");
    capacity(1, blocks / 2 - 1);
    let refused = bench.decide(&identity, &[]).unwrap_err();
    assert_eq!(refused, RoutingRejection::TooLarge);
    assert_eq!(
        bench.verdicts(&ask(&identity, &[])),
        [FilterVerdict::TooSmall; 2]
    );
    bench.decide(&bench.identify("hello"), &[]).unwrap();
}

#[test]
fn filters_are_counted_by_name() {
    let bench = Bench::new(3);
    let identity = bench.identify("hello");
    bench.admin(Command::SetDraining {
        name: "b0".to_owned(),
        draining: true,
        moves_streams: false,
    });
    bench.fail(1, 5);
    bench.decide(&identity, &[]).unwrap();
    let explained = bench.explain(&ask(&identity, &[]));
    assert_eq!(explained.choice.as_deref(), Some("b2"));
    let mut registry = Registry::default();
    bench.router.metrics().register(&mut registry);
    let mut page = String::new();
    encode(&mut page, &registry).unwrap();
    for line in [
        "quorate_route_filtered_total{filter=\"draining\"} 1",
        "quorate_route_filtered_total{filter=\"circuit-open\"} 1",
        "quorate_route_filtered_total{filter=\"at-limit\"} 0",
    ] {
        assert!(page.contains(line), "{line} not in\n{page}");
    }
}

#[test]
fn a_model_has_its_own_policy_unless_the_request_names_one() {
    let bench = Bench::new(2);
    let identity = bench.identify("hello");
    let of = |ask: &RoutingRequest<'_>| {
        let explained = bench.explain(ask);
        (explained.policy.name(), explained.policy_source)
    };
    assert_eq!(of(&ask(&identity, &[])), ("cost", PolicySource::Cluster));
    let models = [("m".to_owned(), PolicyConfig::RoundRobin)];
    bench.admin(Command::PutRouting(RoutingSettings {
        models: models.into(),
        ..RoutingSettings::default()
    }));
    assert_eq!(
        of(&ask(&identity, &[])),
        ("round-robin", PolicySource::Model)
    );
    assert_eq!(bench.decide(&identity, &[]).unwrap().policy, "round-robin");
    let live = PolicyConfig::Cost(state::policy::CostSettings {
        waiting_ns_per_request: 77,
        ..Default::default()
    });
    bench.admin(Command::PutPolicy(live.clone()));
    let mut headers = HeaderMap::new();
    headers.insert("x-quorate-policy", HeaderValue::from_static("cost"));
    let preferred = bench.preferences(&headers).unwrap();
    let asked = RoutingRequest {
        policy: preferred.policy.as_ref(),
        ..ask(&identity, &[])
    };
    let explained = bench.explain(&asked);
    assert_eq!(
        explained.policy, live,
        "the live one with its live settings"
    );
    assert_eq!(explained.policy_source, PolicySource::Request);
}

#[test]
fn backends_of_named_models_are_cached_per_registry_version() {
    let bench = Bench::new(2);
    bench.admin(Command::PutBackend(state::command::BackendSpec {
        models: vec!["*".to_owned()],
        ..spec(1, None)
    }));
    let identity = bench.identify("hello");
    let verdicts = |bench: &Bench, model| {
        bench.verdicts(&RoutingRequest {
            model,
            ..ask(&identity, &[])
        })
    };
    let remembered = |bench: &Bench| bench.router.decider().fleet.table().remembered();
    let (candidate, other) = (FilterVerdict::Candidate, FilterVerdict::OtherModel);
    // An engine that has not listed its models may serve any, under names that clients make up.
    for model in ["x", "y", "z"] {
        assert_eq!(verdicts(&bench, model), [other, candidate]);
    }
    assert_eq!(remembered(&bench), [""; 0]);
    assert_eq!(verdicts(&bench, "m"), [candidate, candidate]);
    assert_eq!(remembered(&bench), ["m"]);
    bench.lists(1, &["x"]);
    assert_eq!(verdicts(&bench, "m"), [candidate, other]);
    assert_eq!(verdicts(&bench, "x"), [other, candidate]);
    assert_eq!(remembered(&bench), ["m", "x"]);
}
