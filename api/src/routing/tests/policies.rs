//! Tests the inputs of policies that need more than blocks and load, and the choice of the policy.

use super::super::POLICY;
use super::*;

#[test]
fn a_session_keeps_its_backend_independently_of_others() {
    let bench = Bench::new(3);
    bench.admin(Command::PutPolicy(
        PolicyConfig::Session(Default::default()),
    ));
    let identity = bench.identify("hello");
    let mut seen = std::collections::BTreeSet::new();
    for name in 0..32 {
        let mut headers = http::HeaderMap::new();
        headers.insert("x-quorate-session", http::HeaderValue::from(name));
        let decide = |request_id| {
            let ask = RoutingRequest {
                headers: Some(&headers),
                request_id,
                ..ask(&identity, &[])
            };
            bench.decide_on(&ask).unwrap()
        };
        let home = decide("r-1");
        assert_eq!(home.reason, Reason::Session);
        assert_eq!(decide("r-2").backend, home.backend);
        seen.insert(home.backend);
    }
    assert_eq!(seen.len(), 3);
    let explanation = bench.explain(&ask(&identity, &[]));
    assert_eq!(explanation.request.session, None);
    assert_eq!(explanation.reason, Some(Reason::Jitter));
}

#[test]
fn explain_does_not_advance_round_robin() {
    let bench = Bench::new(3);
    bench.admin(Command::PutPolicy(PolicyConfig::RoundRobin));
    let identity = bench.identify("hello");
    let mut turns = Vec::new();
    for _ in 0..6 {
        let explained = bench.explain(&ask(&identity, &[]));
        let decision = bench.decide(&identity, &[]).unwrap();
        assert_eq!(explained.choice.as_deref(), Some(&*decision.name));
        assert_eq!(decision.reason, Reason::Turn);
        turns.push(decision.backend.slot.0);
    }
    assert_eq!(turns[..3], turns[3..]);
    turns.sort_unstable();
    assert_eq!(turns, [0, 0, 1, 1, 2, 2]);
}

#[test]
fn vtc_basic_reads_recent_usage_only_while_selected() {
    let bench = Bench::new(4);
    let identity = bench.identify(&"a".repeat(64));
    bench.admin(Command::PutPolicy(PolicyConfig::VtcBasic(
        Default::default(),
    )));
    let (_, mut attempt) = bench.start(&identity);
    attempt.usage(usage(3000, Some(1000), 500), Instant::now());
    attempt.end(AttemptEnd::Finished, Instant::now());
    bench.flush();
    let of = |user: &str| {
        let ask = RoutingRequest {
            user: &UserName::bounded(user),
            ..ask(&identity, &[])
        };
        bench.explain(&ask)
    };
    // Cached prompt tokens count, output counts twice.
    let ada = of("ada");
    let tokens = ada.request.user_tokens.unwrap();
    assert_eq!(tokens.own_milli, 4_000_000);
    assert_eq!(tokens.most_milli, Some(4_000_000));
    assert_eq!(
        (ada.choice.as_deref(), ada.reason),
        (Some("b1"), Some(Reason::UserShare))
    );
    let bob = of("bob");
    assert_eq!(bob.request.user_tokens.unwrap().own_milli, 0);
    assert_eq!(bob.choice.as_deref(), Some("b0"));
    bench.admin(Command::PutPolicy(PolicyConfig::Cost(Default::default())));
    assert_eq!(of("ada").request.user_tokens, None);
}

#[test]
fn a_request_may_select_another_policy() {
    let bench = Bench::new(2);
    let identity = bench.identify("hello");
    let headers = |name: &'static str| {
        let value = http::HeaderValue::from_static(name);
        http::HeaderMap::from_iter([(POLICY, value)])
    };
    for policy in PolicyConfig::defaults() {
        let headers = headers(policy.name());
        let preferred = bench.preferences(&headers).unwrap();
        assert_eq!(preferred.policy.as_deref(), Some(&policy));
        let ask = RoutingRequest {
            headers: Some(&headers),
            policy: preferred.policy.as_ref(),
            ..ask(&identity, &[])
        };
        assert_eq!(bench.decide_on(&ask).unwrap().policy, policy.name());
        let explanation = bench.explain(&ask);
        assert_eq!(explanation.policy, policy);
        assert!(explanation.backends.iter().all(|it| it.would_be.is_some()));
    }
    assert_eq!(
        bench.preferences(&headers("magic")),
        Err(PreferenceRejection::Policy)
    );
    let none = bench.preferences(&http::HeaderMap::new());
    assert_eq!(none, Ok(RoutingPreferences::default()));
}

#[test]
fn preble_e2_and_epp_get_their_own_inputs() {
    let port = Port::new(Log::new(&[Some(100), Some(100)]));
    let router = router(&port, OutboxSettings::default());
    let bench = Bench { port, router };
    let identity = bench.identify(&"a".repeat(640));
    bench.admin(Command::PutPolicy(PolicyConfig::PrebleE2(
        Default::default(),
    )));
    let (decision, attempt) = bench.start(&identity);
    attempt.end(AttemptEnd::Finished, Instant::now());
    bench.flush();
    let explanation = bench.explain(&ask(&identity, &[]));
    let at = usize::from(decision.backend.slot.0);
    let free: Vec<_> = explanation
        .backends
        .iter()
        .map(|it| it.free_blocks.unwrap())
        .collect();
    assert_eq!(free[1 - at] - free[at], 40, "{free:?}");
    assert_eq!(explanation.reason, Some(Reason::Exploit));
    bench.admin(Command::PutPolicy(PolicyConfig::Epp(Default::default())));
    let explanation = bench.explain(&ask(&identity, &[]));
    assert!(
        explanation
            .backends
            .iter()
            .all(|it| it.is_model_listed == Some(false))
    );
    assert_eq!(explanation.matched, Some(39));
}
