//! `/livez`, `/readyz`, `/metrics` and the list of paths.

use state::command::{Charge, Item};
use state::ids::UserKey;
use tokio::time::Instant;

use super::*;
use api::engines::backends::{Fault, SlotTable, prometheus_text};

async fn readiness(bench: &Bench) -> (u16, Value) {
    let answer = bench.call("GET", "/readyz", "").await;
    let mut body = answer.json();
    body.as_object_mut().unwrap().remove("applied_index");
    (answer.status.as_u16(), body)
}

#[tokio::test]
async fn a_replica_without_reasons_against_it_is_ready() {
    let bench = Bench::with_backends();
    assert_eq!(bench.get("/livez").await, json!({"status": "alive"}));
    let ready = json!({"status": "ready", "reasons": []});
    assert_eq!(readiness(&bench).await, (200, ready));
}

#[tokio::test]
async fn a_replica_without_a_quorum_is_ready_and_degraded() {
    let bench = Bench::with_backends();
    {
        let mut status = bench.cluster.status.lock().unwrap();
        status.has_quorum = false;
        status.members.get_mut(&ReplicaId(2)).unwrap().silent_ms = Some(24_900);
    }
    let degraded = json!({
        "status": "degraded",
        "reasons": ["no quorum"],
        "consequence": "requests go on, and changes are refused until a quorum answers",
        "warnings": ["replica 2 has not answered for 24 s"],
    });
    assert_eq!(readiness(&bench).await, (200, degraded));
    // The refusal of a change and the page of the console say the same.
    *bench.cluster.fate.lock().unwrap() = Fate::Unavailable;
    let refused = bench.call("PUT", "/admin/v1/users/ada", "{}").await;
    assert_eq!(
        refused.json()["detail"],
        "no leader; replica 2 has not answered for 24 s"
    );
    let shown = bench.get("/admin/v1/replicas").await;
    assert_eq!(shown["readiness"]["reasons"], json!(["no quorum"]));
}

#[tokio::test]
async fn a_silent_member_is_a_warning_with_what_another_failure_means() {
    let bench = Bench::with_backends();
    {
        let mut status = bench.cluster.status.lock().unwrap();
        let member = status.members[&ReplicaId(2)].clone();
        let silent = MemberStatus {
            is_connected: false,
            is_refusing: true,
            silent_ms: Some(3_000),
            ..member
        };
        status.members.insert(ReplicaId(3), silent);
    }
    let warnings = [
        "replica 3 has stopped: no answer for 3 s",
        "the failure of one more voter loses the quorum",
    ];
    let ready = json!({"status": "ready", "reasons": [], "warnings": warnings});
    assert_eq!(readiness(&bench).await, (200, ready));
}

#[tokio::test]
async fn a_replica_outside_a_cluster_says_what_requests_get() {
    let bench = Bench::new();
    let unfounded = RouterState::new();
    let readiness = ReadinessCheck {
        cluster: Arc::clone(&bench.admin.cluster),
        view: unfounded.view(),
        backends: Arc::clone(&bench.admin.backends),
        digests: Arc::clone(&bench.admin.digests),
        outbox: Arc::clone(&bench.admin.outbox),
        lifecycle: Lifecycle::default(),
        keys: KeyRules::default(),
        is_insecure: false,
    };
    let shown = serde_json::to_value(readiness.readiness()).unwrap();
    assert_eq!(shown["status"], "not-ready");
    assert_eq!(
        shown["consequence"],
        "this replica answers every request with 503"
    );
}

#[tokio::test]
async fn a_clock_that_differs_is_a_warning() {
    let bench = Bench::with_backends();
    {
        let mut status = bench.cluster.status.lock().unwrap();
        let member = status.members.get_mut(&ReplicaId(2)).unwrap();
        member.clock_skew_ms = Some(-1500);
    }
    let warning = "the clock of replica 2 differs from this one's by -1500 ms";
    let ready = json!({"status": "ready", "reasons": [], "warnings": [warning]});
    assert_eq!(readiness(&bench).await, (200, ready));
}

#[tokio::test]
async fn panic_mode_keeps_a_replica_ready_with_a_warning() {
    let bench = Bench::with_backends();
    let mut roster = SlotTable::new(Arc::clone(&bench.admin.backends));
    let registry = bench.admin.view.registry();
    roster.follow(Arc::clone(&registry), |stay, _| stay);
    for (_, stay) in roster.watchers() {
        stay.failed(Fault::Unwell, "no response within 2s".to_owned());
    }
    let not_ready = json!({
        "status": "not-ready",
        "reasons": ["no healthy backend"],
        "consequence": "requests get 503 until a backend is healthy",
    });
    assert_eq!(readiness(&bench).await, (503, not_ready));
    let handle = registry.backends[0].handle;
    bench
        .admin
        .backends
        .report_answer(handle, UserKey(1), Instant::now());
    let warning = "panic mode for model *: probes fail while requests succeed";
    let ready = json!({"status": "ready", "reasons": [], "warnings": [warning]});
    assert_eq!(readiness(&bench).await, (200, ready));
}

#[tokio::test]
async fn every_reason_against_readiness_is_named() {
    let bench = Bench::with_backends();
    {
        let mut status = bench.cluster.status.lock().unwrap();
        status.fault = Some("input/output error".to_owned());
        status.waiting = Some("5 KiB free, 16384 KiB wanted".to_owned());
        status.is_removed = true;
        status.caught_up = false;
    }
    for peer in [2, 3] {
        let peer = ReplicaId(peer);
        let mut claim = vec![1];
        claim.extend(256_u64.to_le_bytes());
        claim.extend(8_u128.to_le_bytes());
        bench.admin.digests.receive(peer, &claim).unwrap();
    }
    bench.admin.digests.record(256, 7);
    bench
        .admin
        .digests
        .judge(&[1, 2, 3].map(ReplicaId))
        .unwrap();
    bench.admin.readiness.lifecycle.drain();
    bench.apply(Command::SetDraining {
        name: "gpu-1".to_owned(),
        draining: true,
        moves_streams: false,
    });
    let reasons = [
        "draining",
        "removed from the cluster",
        "storage fault: input/output error",
        "storage: waiting for disk space: 5 KiB free, 16384 KiB wanted",
        "state differs from that of 2 other replicas at log index 256 and is being replaced",
        "no healthy backend",
        "not caught up with the cluster",
    ];
    let not_ready = json!({
        "status": "not-ready",
        "reasons": reasons,
        "consequence": "requests get 503 until a backend is healthy",
    });
    assert_eq!(readiness(&bench).await, (503, not_ready));
}

#[tokio::test]
async fn a_restart_without_a_quorum_serves_the_restored_state() {
    let bench = Bench::with_backends();
    {
        let mut status = bench.cluster.status.lock().unwrap();
        status.caught_up = false;
        status.has_quorum = false;
    }
    let reasons = [
        "no quorum",
        "not known to be caught up: serving the state it was stopped with",
    ];
    let degraded = json!({
        "status": "degraded",
        "reasons": reasons,
        "consequence": "requests go on, and changes are refused until a quorum answers",
    });
    assert_eq!(readiness(&bench).await, (200, degraded));
    // A replica that hears a quorum soon learns how far behind it is; others should serve until
    // then.
    bench.cluster.status.lock().unwrap().has_quorum = true;
    let behind = json!({"status": "not-ready", "reasons": ["not caught up with the cluster"]});
    assert_eq!(readiness(&bench).await, (503, behind));
    let why = "replica 1 is a member with another store";
    bench.cluster.status.lock().unwrap().unjoined = Some(why.to_owned());
    let reasons = [format!("not in a cluster: {why}")];
    let refused = json!({"status": "not-ready", "reasons": reasons});
    assert_eq!(readiness(&bench).await, (503, refused));
}

#[tokio::test]
async fn metrics_follow_the_text_format_and_name_the_replica() {
    let bench = Bench::with_backends();
    let asked = Request::get("/metrics").header("accept", "application/openmetrics-text");
    let open = bench.send(asked.body(Body::empty()).unwrap()).await;
    assert_eq!(
        open.headers["content-type"],
        "application/openmetrics-text; version=1.0.0; charset=utf-8"
    );
    assert!(open.body.ends_with("# EOF\n"));
    assert!(
        open.body
            .contains("# TYPE quorate_state_digest_mismatch counter\n")
    );
    let answer = bench.call("GET", "/metrics", "").await;
    assert_eq!(
        answer.headers["content-type"],
        "text/plain; version=0.0.4; charset=utf-8"
    );
    assert!(
        answer
            .body
            .contains("# TYPE quorate_state_digest_mismatch_total counter\n")
    );
    assert!(!answer.body.contains("# EOF"));
    let samples_of = |page: &str| {
        let lines = page.lines().filter(|line| !line.starts_with('#'));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(samples_of(&open.body), samples_of(&answer.body));
    let mut samples = BTreeMap::new();
    prometheus_text::read(answer.body.as_bytes(), |sample| {
        let labels: Vec<String> = sample
            .labels
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        samples.insert(
            format!("{} {}", sample.name, labels.join(",")),
            sample.value,
        );
    })
    .unwrap();
    let version = env!("CARGO_PKG_VERSION");
    for (name, value) in [
        (
            format!("quorate_build_info version={version}").as_str(),
            1.0,
        ),
        ("quorate_raft_term ", 3.0),
        ("quorate_raft_is_leader ", 1.0),
        ("quorate_raft_committed_index ", 9.0),
        ("quorate_raft_applied_index ", 3.0),
        ("quorate_raft_lag_entries ", 6.0),
        ("quorate_raft_member_lag_entries replica=2", 4.0),
        ("quorate_raft_clock_skew_seconds replica=2", -0.5),
        ("quorate_state_backends ", 2.0),
        ("quorate_state_digest_mismatch_total ", 0.0),
        ("quorate_state_is_minority ", 0.0),
        ("quorate_backend_healthy backend=gpu-1", 1.0),
        ("quorate_backend_healthy backend=gpu-2", 0.0),
        ("quorate_backend_engine_kv_usage_ratio backend=gpu-1", 0.25),
        ("quorate_backend_capacity_blocks backend=gpu-2", 100.0),
        ("quorate_backend_probes_total backend=gpu-1", 0.0),
    ] {
        assert_eq!(samples.get(name), Some(&value), "{name} in {samples:#?}");
    }
}

#[tokio::test]
async fn metrics_carry_no_users() {
    let bench = Bench::with_backends();
    let put = bench
        .call(
            "PUT",
            "/admin/v1/users/secret-name",
            r#"{"weight_milli":1}"#,
        )
        .await;
    assert_eq!(put.status, StatusCode::OK);
    let answer = bench.call("GET", "/metrics", "").await;
    assert!(answer.body.contains("quorate_users_known 1"));
    assert!(!answer.body.contains("secret-name"));
}

#[tokio::test]
async fn user_metrics_are_sums() {
    let bench = Bench::new();
    for (name, requests) in [("ada", 1), ("bob", 2)] {
        let body = format!("{{\"limits\":{{\"requests\":{requests},\"window\":\"1h\"}}}}");
        let path = format!("/admin/v1/users/{name}");
        let put = bench.call("PUT", &path, &body).await;
        assert_eq!(put.status, StatusCode::OK, "{}", put.body);
        let user = state::prefix::user_key(1, name);
        let charge = Charge {
            user,
            input_uncached: 10,
            output: 5,
            started: 1,
            ..Charge::default()
        };
        super::reads::batch(&bench, vec![Item::Charge(charge)]);
    }
    let over = async |users: usize| {
        let body = bench.call("GET", "/metrics", "").await.body;
        let line = format!("quorate_users_over_limits {users}");
        assert!(body.contains(&format!("\n{line}\n")), "{line} in {body}");
    };
    let put = async |path: &str, body: &str| {
        let put = bench.call("PUT", path, body).await;
        assert_eq!(put.status, StatusCode::OK, "{}", put.body);
    };
    over(1).await;
    // A budget that is used up, of a user within its limits.
    put("/admin/v1/users/bob", r#"{"budget":{"day":15}}"#).await;
    over(1).await;
    let charge = Charge {
        user: state::prefix::user_key(1, "bob"),
        input_cached: 15,
        ..Charge::default()
    };
    super::reads::batch(&bench, vec![Item::Charge(charge)]);
    over(2).await;
    put("/admin/v1/users/bob", r#"{"budget":{"day":16}}"#).await;
    let body = bench.call("GET", "/metrics", "").await.body;
    for line in [
        "quorate_users_known 2",
        "quorate_users_backlogged 2",
        "quorate_users_waiting_cluster 0",
        "quorate_users_over_limits 1",
        "quorate_users_charged_tokens_total 40",
    ] {
        assert!(body.contains(&format!("\n{line}\n")), "{line} in {body}");
    }
}

#[tokio::test]
async fn areas_can_register_their_own_metrics() {
    use prometheus_client::metrics::counter::Counter;
    let bench = Bench::new();
    let counter: Counter = Counter::default();
    let registered = counter.clone();
    bench.admin.metrics.register(|registry| {
        registry.register("quorate_test_things", "Things", registered);
    });
    counter.inc_by(3);
    let answer = bench.call("GET", "/metrics", "").await;
    assert!(answer.body.contains("quorate_test_things_total 3\n"));
}

#[tokio::test]
async fn the_index_lists_every_path() {
    let bench = Bench::new();
    let answer = bench.call("GET", "/admin/v1", "").await;
    assert_eq!(answer.headers["content-type"], "text/html; charset=utf-8");
    for route in ROUTES {
        assert!(answer.body.contains(route.path), "{}", route.path);
    }
    assert!(!answer.body.contains("http://") && !answer.body.contains("https://"));
}
