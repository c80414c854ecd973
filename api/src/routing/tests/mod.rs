//! Tests requests through a whole router over the real state, and that attempts leave nothing behind.

mod adapters;
mod answers;
mod asked;
mod dropped;
mod filters;
mod pairs;
mod panic;
mod policies;
mod rooms;
mod samples;
mod saturated;
mod shares;
mod stories;
mod tiers;
mod tokens;
mod turns;
mod usage;

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;
use proptest::prelude::*;
use serde_json::{Value, json};
use state::command::{Command, EngineFacts};
use state::ids::{ReplicaId, Slot};
use state::policy::{PolicyConfig, Reason};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::fixture::{HEALTHY, Log, Port, router, router_selecting};
use super::{
    Attempt, AttemptEnd, Decision, DispatchTerms, Explanation, FilterVerdict, Load, OutboxSettings,
    OutboxStatus, PlaceRejection, PreferenceRejection, RequestStages, Router, RoutingPreferences,
    RoutingRejection, RoutingRequest, Usage, UserName,
};
use crate::engines::backends::Health;
use crate::prompt::{ParsedBody, PromptIdentity, parse};

/// User who sends the requests.
static ADA: LazyLock<UserName> = LazyLock::new(|| UserName::bounded("ada"));

struct Bench {
    port: Port,
    router: Arc<Router>,
}

impl Bench {
    fn new(backends: usize) -> Self {
        let port = Port::new(Log::new(&vec![None; backends]));
        let router = router(&port, OutboxSettings::default());
        Self { port, router }
    }

    fn identify(&self, text: &str) -> PromptIdentity {
        self.router.reader().identify(&completion(text))
    }

    fn decide(
        &self,
        identity: &PromptIdentity,
        excluded: &[Slot],
    ) -> Result<Decision, RoutingRejection> {
        self.decide_on(&ask(identity, excluded))
    }

    fn decide_on(&self, ask: &RoutingRequest<'_>) -> Result<Decision, RoutingRejection> {
        self.router.decider().decide(ask, Instant::now())
    }

    fn refresh_metrics(&self) {
        let outbox = self.router.outbox().status();
        self.router.decider().refresh_metrics(&outbox);
    }

    fn explain(&self, ask: &RoutingRequest<'_>) -> Explanation {
        let outbox = self.router.outbox().status();
        self.router.decider().explain(ask, outbox, Instant::now())
    }

    fn start(&self, identity: &PromptIdentity) -> (Decision, Attempt) {
        let decision = self.decide(identity, &[]).unwrap();
        let attempt = self.dispatch(&decision, &ask(identity, &[]));
        (decision, attempt)
    }

    fn dispatch(&self, decision: &Decision, ask: &RoutingRequest<'_>) -> Attempt {
        let dispatcher = self.router.dispatcher();
        dispatcher.dispatch(decision, ask, DispatchTerms::default(), Instant::now())
    }

    /// Flushes the outbox to the log.
    fn flush(&self) {
        let stop = CancellationToken::new();
        stop.cancel();
        let port = Arc::new(self.port.clone());
        let run = self.router.run_outbox(port, stop, Duration::from_secs(60));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        assert_eq!(runtime.block_on(run).queued_items, 0);
    }

    fn admin(&self, command: Command) {
        self.port.log.lock().unwrap().admin(command);
    }

    /// Asserts that nothing is in flight, here or in the state.
    fn assert_quiet(&self) {
        self.flush();
        let log = self.port.log.lock().unwrap();
        for backend in &log.state.view().registry().backends {
            assert!(self.router.load.here(backend.handle).running == 0);
        }
        assert_eq!(log.state.open_leases(), 0);
        assert_eq!(log.state.check(), Ok(()));
        assert!(self.router.dispatcher().overlay.is_empty());
        assert!(
            log.state
                .user_named("ada")
                .is_none_or(|user| user.in_flight == 0)
        );
    }

    fn charged(&self) -> [u64; 3] {
        self.flush();
        let log = self.port.log.lock().unwrap();
        let total = log.state.user_named("ada").unwrap().total;
        [total.input_uncached, total.input_cached, total.output]
    }
}

/// Rejection of a request while every backend is at its limit.
const AT_LIMIT: PlaceRejection = PlaceRejection::Refused(RoutingRejection::AtLimit);

fn ask<'a>(identity: &'a PromptIdentity, excluded: &'a [Slot]) -> RoutingRequest<'a> {
    RoutingRequest {
        model: "m",
        identity,
        request_id: "r-1",
        user: &ADA,
        session: None,
        headers: None,
        policy: None,
        labels: &[],
        excluded,
        waiting_here: 0,
        client: None,
        endpoints: None,
        stages: RequestStages::Disaggregatable,
        room: Default::default(),
    }
}

fn completion(text: &str) -> ParsedBody {
    body("/v1/completions", &json!({"model": "m", "prompt": text}))
}

fn body(path: &str, body: &Value) -> ParsedBody {
    parse(path, &Bytes::from(body.to_string())).unwrap()
}

fn usage(prompt_tokens: u64, cached_tokens: Option<u64>, completion_tokens: u64) -> Usage {
    Usage {
        prompt_tokens,
        cached_tokens,
        completion_tokens,
    }
}

#[test]
fn an_identity_is_scoped_and_counts_matchable_blocks() {
    let bench = Bench::new(1);
    let long = bench.identify(&"x".repeat(16 * 4));
    assert_eq!((long.chain.len(), long.matchable, long.tokens), (4, 3, 16));
    assert_eq!(long.tail.tokens_per_block, 4);
    let longer = bench.identify(&"x".repeat(16 * 4 + 5));
    assert_eq!(
        (longer.chain.len(), longer.matchable, longer.tokens),
        (4, 4, 18)
    );
    assert_eq!(longer.chain, long.chain);
    assert_eq!(longer.tail.bytes, b"xxxxx");
    let mut salted = completion(&"x".repeat(64));
    salted.cache_salt = Some("s".to_owned());
    assert_ne!(
        bench.router.reader().identify(&salted).chain[0],
        long.chain[0]
    );
    let root = |body: &Value| {
        let parsed = self::body("/v1/completions", body);
        bench.router.reader().identify(&parsed).root
    };
    for prompt in [json!("x"), json!([1, 2, 3])] {
        let with =
            |adapter: Value| root(&json!({"model": "m", "prompt": prompt, "lora_path": adapter}));
        let none = root(&json!({"model": "m", "prompt": prompt}));
        assert_eq!(with(Value::Null), none);
        assert_ne!(with(json!("a")), none, "adapters share no block");
        assert_ne!(with(json!("a")), with(json!("b")));
        assert_eq!(with(json!(["a", null])), with(json!(["a", null])));
    }
    let empty = bench.identify("");
    assert_eq!(
        (empty.chain.len(), empty.matchable, empty.tokens),
        (0, 0, 0)
    );
    let ids = body(
        "/v1/completions",
        &json!({"model": "m", "prompt": [1, 2, 3, 4, 5, 6, 7, 8, 9]}),
    );
    let ids = bench.router.reader().identify(&ids);
    assert_eq!((ids.chain.len(), ids.matchable, ids.tokens), (2, 2, 9));
    assert_eq!((ids.tail.tokens_per_block, ids.tail.block_bytes), (4, 0));
    assert!((bench.router.reader().tokens_per_block("m") - 4.0).abs() < 1e-9);
}

#[test]
fn a_decision_changes_no_state() {
    let bench = Bench::new(2);
    let identity = bench.identify(&"x".repeat(16 * 4));
    for _ in 0..3 {
        let decision = bench.decide(&identity, &[]).unwrap();
        assert_eq!(decision.matched, 0);
        assert_eq!(bench.router.load().here(decision.backend), Load::default());
    }
    assert!(bench.router.is_overlay_empty());
    assert_eq!(bench.router.outbox().status(), OutboxStatus::default());
}

#[test]
fn each_excluded_backend_has_the_right_verdict() {
    let bench = Bench::new(2);
    let identity = bench.identify("hello");
    let other = RoutingRequest {
        model: "other",
        ..ask(&identity, &[])
    };
    assert_eq!(
        bench.decide_on(&other).unwrap_err(),
        RoutingRejection::UnknownModel
    );
    let both = [Slot(0), Slot(1)];
    assert_eq!(
        bench.decide(&identity, &both).unwrap_err(),
        RoutingRejection::AllTried
    );
    assert_eq!(
        bench.decide(&identity, &both[..1]).unwrap().backend.slot,
        Slot(1)
    );
    let sick = Health {
        is_healthy: false,
        ..HEALTHY
    };
    bench.router.decider().backends.assume(Slot(0), &sick);
    let only = bench.decide(&identity, &[]).unwrap();
    assert_eq!(
        (only.backend.slot, only.reason, &*only.name),
        (Slot(1), Reason::OnlyCandidate, "b1")
    );
    bench.admin(Command::SetDraining {
        name: "b1".to_owned(),
        draining: true,
        moves_streams: false,
    });
    assert_eq!(
        bench.decide(&identity, &[]).unwrap_err(),
        RoutingRejection::NoneHealthy
    );
    assert_eq!(
        bench.decide(&identity, &both[1..]).unwrap_err(),
        RoutingRejection::AllTried
    );
    let verdicts: Vec<_> = bench
        .explain(&ask(&identity, &[]))
        .backends
        .iter()
        .map(|it| it.verdict)
        .collect();
    assert_eq!(
        verdicts,
        [FilterVerdict::Unhealthy, FilterVerdict::Draining]
    );
}

#[test]
fn a_star_model_means_the_models_the_engine_lists() {
    let bench = Bench::new(0);
    let mut spec = super::fixture::spec(0, None);
    spec.models = vec!["*".to_owned()];
    bench.admin(Command::PutBackend(spec));
    bench.router.decider().backends.assume(Slot(0), &HEALTHY);
    let identity = bench.identify("hello");
    assert!(bench.decide(&identity, &[]).is_ok(), "it was not asked yet");
    let handle = bench.port.log.lock().unwrap().handle(0);
    let models = Some(vec!["n".to_owned()]);
    let facts = EngineFacts {
        models,
        ..EngineFacts::default()
    };
    bench.router.outbox().observe(handle, facts);
    bench.flush();
    assert_eq!(
        bench.decide(&identity, &[]).unwrap_err(),
        RoutingRejection::UnknownModel
    );
    assert!(
        bench
            .decide_on(&RoutingRequest {
                model: "n",
                ..ask(&identity, &[])
            })
            .is_ok()
    );
}

#[test]
fn a_routed_prefix_matches_before_and_after_commit() {
    let bench = Bench::new(4);
    let first = bench.identify(&"a".repeat(1000));
    let (chosen, attempt) = bench.start(&first);
    assert_eq!((chosen.matched, chosen.total), (0, 62));
    attempt.end(AttemptEnd::Finished, Instant::now());
    let again = bench.decide(&first, &[]).unwrap();
    assert_eq!((again.backend, again.matched), (chosen.backend, 62));
    assert_eq!(again.index, chosen.index, "nothing was applied meanwhile");
    let explained = bench.explain(&ask(&first, &[]));
    let row = &explained.backends[usize::from(chosen.backend.slot.0)];
    assert_eq!((row.matched_applied, row.matched), (0, 62));
    assert_eq!(
        (explained.overlay_runs, explained.outbox.queued_items),
        (1, 5)
    );
    bench.flush();
    let applied = bench.decide(&first, &[]).unwrap();
    assert_eq!((applied.backend, applied.matched), (chosen.backend, 62));
    assert!(applied.index > chosen.index);
    let row = &bench.explain(&ask(&first, &[])).backends[usize::from(chosen.backend.slot.0)];
    assert_eq!((row.matched_applied, row.matched), (62, 62));
    let tried = [chosen.backend.slot];
    let row = &bench.explain(&ask(&first, &tried)).backends[usize::from(chosen.backend.slot.0)];
    assert_eq!(row.verdict, FilterVerdict::Tried);
    assert_eq!(
        (row.matched_applied, row.matched),
        (62, 62),
        "also of others"
    );
    bench.assert_quiet();
}

#[test]
fn a_failed_attempt_returns_its_blocks() {
    let bench = Bench::new(1);
    let identity = bench.identify(&"a".repeat(100));
    let (_, attempt) = bench.start(&identity);
    bench.flush();
    assert_eq!(bench.decide(&identity, &[]).unwrap().matched, 6);
    attempt.end(AttemptEnd::NotRun, Instant::now());
    bench.flush();
    assert_eq!(bench.decide(&identity, &[]).unwrap().matched, 0);
    assert_eq!(bench.charged(), [0, 0, 0]);
    bench.assert_quiet();
}

#[test]
fn local_and_remote_load_change_the_choice() {
    let bench = Bench::new(2);
    let identity = bench.identify(&"a".repeat(4000));
    let (first, _attempt) = bench.start(&identity);
    let stranger = bench.identify(&"b".repeat(4000));
    let (second, _other) = bench.start(&stranger);
    assert_ne!(first.backend, second.backend, "pending prefill counts");
    let third = bench.identify(&"c".repeat(40));
    bench.admin(Command::PutPolicy(PolicyConfig::LeastRequest));
    let peer = Bench::new(2);
    let busy: Vec<_> = (0..5)
        .map(|_| peer.router.load.begin(first.backend, 1))
        .collect();
    let report = peer.router.load.local_report();
    bench
        .router
        .load
        .merge_report(ReplicaId(2), &report, Instant::now())
        .unwrap();
    let decision = bench.decide(&third, &[]).unwrap();
    assert_eq!(
        (decision.backend, decision.policy),
        (second.backend, "least-request")
    );
    drop(busy);
}

#[test]
fn explain_equals_the_decision_and_changes_nothing() {
    let bench = Bench::new(3);
    let identity = bench.identify(&"a".repeat(500));
    let (_, attempt) = bench.start(&identity);
    attempt.end(AttemptEnd::Finished, Instant::now());
    let before = bench.router.outbox().status();
    let explanation = bench.explain(&ask(&identity, &[]));
    assert_eq!(explanation, bench.explain(&ask(&identity, &[])));
    assert_eq!(
        bench.router.outbox().status().queued_items,
        before.queued_items
    );
    let decision = bench.decide(&identity, &[]).unwrap();
    assert_eq!(explanation.choice.as_deref(), Some(&*decision.name));
    assert_eq!(explanation.matched, Some(decision.matched));
    assert_eq!(explanation.reason, Some(decision.reason));
    assert_eq!(explanation.blocks.len(), 31);
    assert_eq!(explanation.blocks[0], identity.chain[0].to_string());
    assert!(explanation.backends.iter().all(|it| it.score.is_some()));
    let text = serde_json::to_value(&explanation).unwrap();
    assert_eq!(text["policy"]["policy"], "cost");
    assert_eq!(text["backends"][0]["verdict"], "candidate");
    let refused = bench.explain(&RoutingRequest {
        model: "x",
        ..ask(&identity, &[])
    });
    assert_eq!(
        (refused.no_choice, refused.choice),
        (Some(RoutingRejection::UnknownModel), None)
    );
}

#[test]
fn a_reply_is_recorded_as_the_next_turn_has_it() {
    let bench = Bench::new(1);
    let turn = |messages: &Value| {
        body(
            "/v1/chat/completions",
            &json!({"model": "m", "messages": messages}),
        )
    };
    let question = json!({"role": "user", "content": "q".repeat(50)});
    let reply = "answer ".repeat(20);
    let identity = bench.router.reader().identify(&turn(&json!([question])));
    let (_, mut attempt) = bench.start(&identity);
    reply
        .as_bytes()
        .chunks(3)
        .for_each(|part| attempt.output(std::str::from_utf8(part).unwrap(), Instant::now()));
    attempt.end(AttemptEnd::Finished, Instant::now());
    let next = json!([question, {"role": "assistant", "content": reply},
        {"role": "user", "content": "go on, and say more than one block of text"}]);
    let next = bench.router.reader().identify(&turn(&next));
    let known = (9 + 50 + 1 + 14 + reply.len() + 1) / 16;
    assert_eq!(bench.decide(&next, &[]).unwrap().matched as usize, known);
    bench.flush();
    assert_eq!(bench.decide(&next, &[]).unwrap().matched as usize, known);
}

#[test]
fn tokens_are_charged_as_they_are_reported() {
    let bench = Bench::new(1);
    let identity = bench.identify(&"a".repeat(400));
    let (_, mut attempt) = bench.start(&identity);
    attempt.first_byte(Instant::now());
    attempt.usage(usage(100, Some(30), 1), Instant::now());
    assert_eq!(
        bench.charged(),
        [70, 30, 1],
        "the engine told its cache: input is due"
    );
    (2..30).for_each(|made| attempt.usage(usage(100, Some(30), made), Instant::now()));
    assert_eq!(bench.charged(), [70, 30, 1]);
    attempt.usage(usage(100, None, 40), Instant::now());
    attempt.usage(usage(0, None, 35), Instant::now());
    assert_eq!(bench.charged(), [70, 30, 40]);
    drop(attempt);
    assert_eq!(bench.charged(), [70, 30, 40]);
    bench.assert_quiet();
}

#[test]
fn input_is_charged_as_predicted_without_cache_reports() {
    let bench = Bench::new(1);
    let identity = bench.identify(&"a".repeat(400));
    bench
        .start(&identity)
        .1
        .end(AttemptEnd::Finished, Instant::now());
    assert_eq!(
        bench.charged(),
        [100, 0, 0],
        "estimated: nothing was reported"
    );
    let (decision, mut attempt) = bench.start(&identity);
    assert_eq!(decision.matched, 24);
    attempt.usage(usage(100, None, 50), Instant::now());
    assert_eq!(bench.charged(), [100, 0, 50]);
    attempt.usage(usage(100, None, 60), Instant::now());
    attempt.end(AttemptEnd::Finished, Instant::now());
    assert_eq!(bench.charged(), [104, 96, 60]);
}

#[test]
fn uncounted_output_is_estimated() {
    let bench = Bench::new(1);
    let identity = bench.identify("");
    let (_, mut attempt) = bench.start(&identity);
    attempt.output("four", Instant::now());
    attempt.output("five5", Instant::now());
    attempt.other_output(8, Instant::now());
    drop(attempt);
    assert_eq!(bench.charged(), [0, 0, 5]);
    bench.assert_quiet();
}

#[test]
fn a_panicking_request_releases_everything() {
    let bench = Bench::new(1);
    let identity = bench.identify(&"a".repeat(100));
    let router = Arc::clone(&bench.router);
    let decision = bench.decide(&identity, &[]).unwrap();
    let panicked = std::thread::spawn(move || {
        let _attempt = router.dispatcher().dispatch(
            &decision,
            &ask(&identity, &[]),
            DispatchTerms::default(),
            Instant::now(),
        );
        panic!("on purpose");
    });
    assert!(panicked.join().is_err());
    bench.assert_quiet();
}

#[test]
fn metrics_count_predictions_and_attempt_ends() {
    let bench = Bench::new(1);
    let identity = bench.identify(&"a".repeat(400));
    for _ in 0..2 {
        let (_, mut attempt) = bench.start(&identity);
        attempt.usage(usage(100, Some(90), 5), Instant::now());
        attempt.end(AttemptEnd::Finished, Instant::now());
    }
    assert!(bench.decide(&identity, &[Slot(0)]).is_err());
    let mut registry = prometheus_client::registry::Registry::default();
    bench.router.metrics().register(&mut registry);
    bench.refresh_metrics();
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    for line in [
        "quorate_route_decisions_total{policy=\"cost\",outcome=\"chosen\"} 2",
        "quorate_route_decisions_total{policy=\"cost\",outcome=\"all-tried\"} 1",
        "quorate_route_attempts_total{backend=\"b0\",outcome=\"finished\"} 2",
        "quorate_prefix_prompt_tokens_total{backend=\"b0\"} 200",
        "quorate_prefix_predicted_tokens_total{backend=\"b0\",learnt=\"here\"} 96",
        "quorate_prefix_cached_tokens_total{backend=\"b0\"} 180",
        "quorate_state_outbox_items 7",
        "quorate_state_outbox_dropped_total 0",
    ] {
        assert!(text.lines().any(|shown| shown == line), "{line} in\n{text}");
    }
}

#[test]
fn series_disappear_and_return_with_their_backend() {
    let bench = Bench::new(2);
    let shown = || {
        let mut registry = prometheus_client::registry::Registry::default();
        bench.router.metrics().register(&mut registry);
        bench.refresh_metrics();
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let of = |id: &str| text.lines().filter(|line| line.contains(id)).count();
        [of("backend=\"b0\""), of("backend=\"b1\"")]
    };
    let identity = bench.identify("hello");
    let decision = bench.decide(&identity, &[Slot(1)]).unwrap();
    let attempt = bench.dispatch(&decision, &ask(&identity, &[]));
    let [first, second] = shown();
    assert!(first > 0 && first == second);
    bench.admin(Command::DeleteBackend {
        name: "b0".to_owned(),
    });
    assert_eq!(shown(), [0, second]);
    let late = bench.dispatch(&decision, &ask(&identity, &[]));
    drop((attempt, late));
    assert_eq!(shown(), [0, second]);
    bench.admin(Command::PutBackend(super::fixture::spec(0, None)));
    bench.router.decider().backends.assume(Slot(0), &HEALTHY);
    let (_, attempt) = bench.start(&identity);
    attempt.end(AttemptEnd::Finished, Instant::now());
    assert_eq!(shown(), [first, second]);
    bench.assert_quiet();
}
