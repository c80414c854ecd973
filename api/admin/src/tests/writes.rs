//! Administrative writes: their effects, and the responses to those without an effect or with an
//! unknown outcome.

use state::command::UserSettings;

use super::*;
use api::engines::backends::{EngineAddressRules, EngineDialer};

#[tokio::test]
async fn a_backend_can_be_put_drained_undrained_and_deleted() {
    let bench = Bench::new();
    let body = r#"{"url":"http://10.0.0.1:8000","labels":{"zone":"b"},"capacity_blocks":7}"#;
    let put = bench.call("PUT", "/admin/v1/backends/a", body).await;
    assert_eq!(put.body, r#"{"index":2,"outcome":"committed"}"#);
    let shown = bench.get("/admin/v1/backends/a").await;
    assert_eq!(shown["url"], "http://10.0.0.1:8000");
    assert_eq!(shown["models"], serde_json::json!(["*"]));
    assert_eq!(shown["capacity"]["blocks"], 7);
    assert_eq!(shown["index"], 2);

    for (call, is_draining) in [("drain", true), ("undrain", false)] {
        let path = format!("/admin/v1/backends/a/{call}");
        assert_eq!(bench.call("POST", &path, "").await.status, StatusCode::OK);
        let shown = bench.get("/admin/v1/backends/a").await;
        assert_eq!(shown["state"]["is_draining"], is_draining);
    }

    let deleted = bench.call("DELETE", "/admin/v1/backends/a", "").await;
    assert_eq!(deleted.status, StatusCode::OK);
    let gone = ("GET", "/admin/v1/backends/a", "");
    bench.problem(gone, 404, "not-found").await;
    let gone = ("DELETE", "/admin/v1/backends/a", "");
    let problem = bench.problem(gone, 404, "not-found").await;
    assert_eq!(problem["outcome"], "rejected");
}

#[tokio::test]
async fn the_last_drain_tells_whether_streams_move() {
    let bench = Bench::with_backends();
    let calls = [
        ("drain?move_streams=true", true, "drain-moving-streams"),
        ("drain", false, "drain"),
        ("drain?move_streams=true", true, "drain-moving-streams"),
        ("undrain", false, "undrain"),
    ];
    for (call, moves_streams, action) in calls {
        let path = format!("/admin/v1/backends/gpu-1/{call}");
        assert_eq!(bench.call("POST", &path, "").await.status, StatusCode::OK);
        let shown = bench.get("/admin/v1/backends/gpu-1").await;
        assert_eq!(shown["state"]["moves_streams"], moves_streams, "{call}");
        let audit = bench.get("/admin/v1/audit").await;
        assert_eq!(audit["writes"][0]["action"], action);
    }
}

#[tokio::test]
async fn a_backend_has_the_latest_role() {
    let bench = Bench::new();
    let put = async |body: &str| {
        assert_eq!(
            bench.call("PUT", BACKEND, body).await.status,
            StatusCode::OK
        );
        bench.get(BACKEND).await
    };
    let shown = put(r#"{"url":"http://a:1","role":"prefill","labels":{"zone":"x"}}"#).await;
    assert_eq!(shown["role"], "prefill");
    assert_eq!(shown["labels"], serde_json::json!({ "zone": "x" }));
    // As in the response, including all read-only fields.
    assert_eq!(put(&shown.to_string()).await["role"], "prefill");
    assert_eq!(put(r#"{"url":"http://a:1"}"#).await["role"], "both");
}

#[tokio::test]
async fn an_engine_has_one_backend_however_its_url_is_spelled() {
    let bench = Bench::new();
    let put = async |id: &str, url: &str| {
        let path = format!("/admin/v1/backends/{id}");
        let body = format!(r#"{{"url":"{url}"}}"#);
        bench.call("PUT", &path, &body).await
    };
    assert_eq!(put("gpu", "http://GPU-1:80/").await.status, StatusCode::OK);
    assert_eq!(put("gpu", "http://gpu-1").await.status, StatusCode::OK);
    let refused = put("other", "HTTP://gpu-1").await;
    assert_eq!(refused.status, 400, "{}", refused.body);
    assert_eq!(refused.json()["field"], "url");
    assert!(refused.body.contains("gpu"), "{}", refused.body);
}

const BACKEND: &str = "/admin/v1/backends/a";
const MEMBERS: &str = "/admin/v1/cluster/members";
const USER: &str = "/admin/v1/users/u";
const EXPLAIN: &str = "/admin/v1/explain";

/// Wrong requests: method, path, body, and the field that the problem names.
const WRONG: &[(&str, &str, &str, &str)] = &[
    ("PUT", BACKEND, "", "body"),
    ("PUT", BACKEND, "{", "body"),
    ("PUT", BACKEND, "[] x", "body"),
    ("PUT", BACKEND, "{}", "body"),
    ("PUT", BACKEND, r#"{"url":5}"#, "url"),
    (
        "PUT",
        BACKEND,
        r#"{"url":"http://a:1","labels":{"x":[]}}"#,
        "labels.x",
    ),
    (
        "PUT",
        BACKEND,
        r#"{"url":"http://a:1","capacity_blocks":-1}"#,
        "capacity_blocks",
    ),
    (
        "PUT",
        BACKEND,
        r#"{"url":"http://a:1","colour":"red"}"#,
        "colour",
    ),
    ("PUT", BACKEND, r#"{"url":"http://a:1","id":"b"}"#, "id"),
    (
        "PUT",
        BACKEND,
        r#"{"url":"http://a:1","role":"decoder"}"#,
        "role",
    ),
    ("PUT", BACKEND, r#"{"url":"http://a:1"} {}"#, "body"),
    ("POST", MEMBERS, r#"{"id":0,"address":"a:1"}"#, "id"),
    ("POST", MEMBERS, r#"{"id":256,"address":"a:1"}"#, "id"),
    ("POST", MEMBERS, r#"{"id":4,"address":"a"}"#, "address"),
    ("POST", MEMBERS, r#"{"id":4,"address":":1"}"#, "address"),
    ("DELETE", "/admin/v1/cluster/members/x", "", "path"),
    (
        "POST",
        "/admin/v1/cluster/transfer-leader",
        r#"{"to":0}"#,
        "to",
    ),
    ("PUT", USER, r#"{"weight_milli":"x"}"#, "weight_milli"),
    ("PUT", USER, r#"{"weight_milli":1,"name":"x"}"#, "name"),
    (
        "PUT",
        "/admin/v1/policy",
        r#"{"policy":"fastest"}"#,
        "policy",
    ),
    (
        "PUT",
        "/admin/v1/policy",
        r#"{"policy":"cost","waiting_ns_per_request":"many"}"#,
        "waiting_ns_per_request",
    ),
    (
        "PUT",
        "/admin/v1/policy",
        r#"{"policy":"cost","waiting_ns_per_request":7,"learning":1}"#,
        "learning",
    ),
    (
        "PUT",
        "/admin/v1/policy",
        r#"{"policy":"random","seed":1}"#,
        "seed",
    ),
    (
        "POST",
        EXPLAIN,
        r#"{"path":"/v1/completions","headers":{"x-quorate-policy":"magic"},"body":{"model":"m"}}"#,
        "headers.x-quorate-policy",
    ),
    (
        "POST",
        EXPLAIN,
        r#"{"path":"/v1/completions","headers":{"a b":""},"body":{"model":"m"}}"#,
        "headers.a b",
    ),
    ("POST", EXPLAIN, r#"{"path":"x","body":{}}"#, "path"),
    (
        "POST",
        EXPLAIN,
        r#"{"path":"/v1/completions","body":{}}"#,
        "body.model",
    ),
    ("GET", "/admin/v1/users?limit=0", "", "limit"),
    ("GET", "/admin/v1/users?limit=1001", "", "limit"),
    ("GET", "/admin/v1/users?cursor=zz", "", "cursor"),
    ("GET", "/admin/v1/users?page=2", "", "page"),
    ("GET", "/admin/v1/cluster?read=stale", "", "read"),
    ("GET", "/admin/v1/blocks/12", "", "hash"),
    ("GET", "/admin/v1/digest?index=-1", "", "index"),
];

#[tokio::test]
async fn an_invalid_body_names_its_field() {
    let bench = Bench::with_backends();
    for &(method, path, body, field) in WRONG {
        let problem = bench.problem((method, path, body), 400, "invalid").await;
        assert_eq!(problem["field"], field, "{method} {path} {body}: {problem}");
    }
}

#[tokio::test]
async fn a_rejection_is_a_problem_that_names_the_field() {
    let bench = Bench::new();
    let put = ("PUT", "/admin/v1/backends/a", r#"{"url":"ftp://10.0.0.1"}"#);
    let problem = bench.problem(put, 400, "invalid").await;
    assert_eq!(problem["outcome"], "rejected");
    assert_eq!(problem["field"], "url");
    let put = ("PUT", "/admin/v1/users/u", r#"{"weight_milli":0}"#);
    let problem = bench.problem(put, 400, "invalid").await;
    assert_eq!(problem["field"], "weight_milli");
    // Neither half takes effect.
    let body = r#"{"weight_milli":5,"limits":{"requests":0}}"#;
    let put = ("PUT", "/admin/v1/users/half", body);
    let problem = bench.problem(put, 400, "invalid").await;
    assert_eq!(problem["field"], "limits.requests");
    let get = ("GET", "/admin/v1/users/half", "");
    bench.problem(get, 404, "not-found").await;
    for (body, field) in [
        (r#"{"policy":"epp","kv_weight":1001}"#, "kv_weight"),
        (
            r#"{"policy":"chwbl","load_factor_milli":1}"#,
            "load_factor_milli",
        ),
        (r#"{"policy":"session","header":""}"#, "header"),
        (
            r#"{"policy":"vtc-basic","token_tracker_window_size":0}"#,
            "token_tracker_window_size",
        ),
    ] {
        let put = ("PUT", "/admin/v1/policy", body);
        let problem = bench.problem(put, 400, "invalid").await;
        assert_eq!(problem["outcome"], "rejected");
        assert_eq!(problem["field"], field);
    }
}

#[tokio::test]
async fn every_policy_can_be_put_by_its_name() {
    let bench = Bench::new();
    for policy in PolicyConfig::defaults() {
        let body = serde_json::json!({"policy": policy.name()}).to_string();
        let put = bench.call("PUT", "/admin/v1/policy", &body).await;
        assert_eq!(put.status, StatusCode::OK, "{}", put.body);
        let shown = bench.get("/admin/v1/policy").await;
        assert_eq!(shown["config"], serde_json::to_value(&policy).unwrap());
        assert_eq!(shown["index"], put.json()["index"]);
    }
}

#[tokio::test]
async fn a_write_of_unknown_outcome_is_reported_as_such() {
    let bench = Bench::with_backends();
    for (method, path, body) in [
        ("PUT", "/admin/v1/backends/a", r#"{"url":"http://a:1"}"#),
        ("DELETE", "/admin/v1/backends/gpu-1", ""),
        ("POST", "/admin/v1/backends/gpu-1/drain", ""),
        ("PUT", "/admin/v1/users/u", r#"{"weight_milli":1}"#),
        ("PUT", "/admin/v1/policy", r#"{"policy":"least-request"}"#),
        (
            "POST",
            "/admin/v1/cluster/members",
            r#"{"id":4,"address":"a:1"}"#,
        ),
        ("DELETE", "/admin/v1/cluster/members/2", ""),
        ("POST", "/admin/v1/cluster/members/2/promote", ""),
        ("POST", "/admin/v1/cluster/transfer-leader", ""),
        ("POST", "/admin/v1/cluster/snapshot", ""),
    ] {
        bench.set_fate(Fate::Unknown);
        let call = (method, path, body);
        let problem = bench.problem(call, 504, "outcome-unknown").await;
        assert_eq!(problem["outcome"], "unknown");
        bench.set_fate(Fate::Unavailable);
        let answer = bench.call(method, path, body).await;
        assert!(matches!(answer.status.as_u16(), 409 | 503), "{path}");
        assert_eq!(answer.json()["outcome"], "not-committed", "{path}");
        bench.set_fate(Fate::Stopping);
        let answer = bench.call(method, path, body).await;
        assert!(matches!(answer.status.as_u16(), 409 | 503), "{path}");
    }
}

#[tokio::test]
async fn member_leadership_and_snapshot_calls_reach_the_cluster() {
    let bench = Bench::new();
    let members = "/admin/v1/cluster/members";
    let transfer = "/admin/v1/cluster/transfer-leader";
    for (method, path, body, answer) in [
        (
            "POST",
            members,
            r#"{"id":4,"address":"h:1"}"#,
            r#"{"index":77,"outcome":"committed"}"#,
        ),
        (
            "POST",
            "/admin/v1/cluster/members/4/promote",
            "",
            r#"{"index":77,"outcome":"committed"}"#,
        ),
        (
            "DELETE",
            "/admin/v1/cluster/members/4",
            "",
            r#"{"index":77,"outcome":"committed"}"#,
        ),
        (
            "POST",
            transfer,
            "",
            r#"{"leader":2,"outcome":"committed"}"#,
        ),
        (
            "POST",
            transfer,
            "{}",
            r#"{"leader":2,"outcome":"committed"}"#,
        ),
        (
            "POST",
            transfer,
            r#"{"to":3}"#,
            r#"{"leader":3,"outcome":"committed"}"#,
        ),
        (
            "POST",
            "/admin/v1/cluster/snapshot",
            "",
            r#"{"index":77,"outcome":"committed"}"#,
        ),
    ] {
        assert_eq!(bench.call(method, path, body).await.body, answer);
    }
    assert_eq!(
        *bench.cluster.changes.lock().unwrap(),
        [
            "add 4 h:1",
            "promote 4",
            "remove 4",
            "transfer None",
            "transfer None",
            "transfer Some(ReplicaId(3))",
            "snapshot",
        ]
    );
}

#[tokio::test]
async fn user_weight_and_policy_can_be_set() {
    let bench = Bench::new();
    let put = bench
        .call(
            "PUT",
            "/admin/v1/users/team%20a%2Fb",
            r#"{"weight_milli":2500}"#,
        )
        .await;
    assert_eq!(put.status, StatusCode::OK, "{}", put.body);
    let user = bench.get("/admin/v1/users/team%20a%2Fb").await;
    assert_eq!(user["name"], "team a/b");
    assert_eq!(user["weight_milli"], 2500);
    bench
        .problem(("GET", "/admin/v1/users/nobody", ""), 404, "not-found")
        .await;

    let policy = bench.get("/admin/v1/policy").await;
    assert_eq!(
        policy["config"],
        serde_json::json!({"policy": "least-request"})
    );
    let put = bench
        .call(
            "PUT",
            "/admin/v1/policy",
            r#"{"policy":"cost","waiting_ns_per_request":7}"#,
        )
        .await;
    assert_eq!(put.status, StatusCode::OK, "{}", put.body);
    let policy = bench.get("/admin/v1/policy").await;
    assert_eq!(policy["config"]["waiting_ns_per_request"], 7);
    assert_eq!(policy["index"], put.json()["index"]);
    // A policy that was read can be written.
    let again = policy["config"].to_string();
    let put = bench.call("PUT", "/admin/v1/policy", &again).await;
    assert_eq!(put.status, StatusCode::OK, "{}", put.body);
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused() {
    let bench = Bench::new();
    let body = format!("{{\"url\":\"{}\"}}", "x".repeat(BODY_BYTES_MAX));
    let put = ("PUT", "/admin/v1/backends/a", body.as_str());
    bench.problem(put, 413, "body-too-large").await;
}

#[tokio::test]
async fn a_models_policy_can_be_set_and_removed() {
    let bench = Bench::new();
    let of = async |model: &str| {
        let policy = bench.get(&format!("/admin/v1/policy?model={model}")).await;
        (
            policy["config"]["policy"].clone(),
            policy["is_of_model"].clone(),
        )
    };
    assert_eq!(of("a").await, (json!("least-request"), json!(false)));
    for (model, policy) in [("a", "session"), ("b", "random")] {
        let path = format!("/admin/v1/policy?model={model}");
        let body = format!("{{\"policy\":\"{policy}\"}}");
        assert_eq!(bench.call("PUT", &path, &body).await.status, StatusCode::OK);
    }
    assert_eq!(of("a").await, (json!("session"), json!(true)));
    let routing = bench.get("/admin/v1/routing").await;
    assert_eq!(
        routing["config"]["models"]["b"],
        json!({"policy": "random"})
    );
    assert_eq!(
        bench.get("/admin/v1/policy").await["config"]["policy"],
        "least-request"
    );
    let remove = bench.call("DELETE", "/admin/v1/policy?model=a", "").await;
    assert_eq!(remove.status, StatusCode::OK);
    assert_eq!(of("a").await, (json!("least-request"), json!(false)));
    bench
        .problem(("DELETE", "/admin/v1/policy?model=a", ""), 404, "not-found")
        .await;
    let unfit = r#"{"models":{"m":{"policy":"epp","kv_weight":2000}}}"#;
    let problem = bench
        .problem(("PUT", "/admin/v1/routing", unfit), 400, "invalid")
        .await;
    assert_eq!(problem["field"], "models.m.kv_weight");
}

#[tokio::test]
async fn unknown_paths_and_methods_are_problems() {
    let bench = Bench::new();
    bench
        .problem(("GET", "/admin/v1/nothing", ""), 404, "unknown-path")
        .await;
    bench
        .problem(("PATCH", "/admin/v1/policy", ""), 405, "wrong-method")
        .await;
    let answer = bench.call("PATCH", "/admin/v1/policy", "").await;
    assert_eq!(answer.headers["allow"], "GET,HEAD,PUT,DELETE");
}

#[tokio::test]
async fn oversize_and_misnamed_writes_are_refused_before_proposal() {
    let bench = Bench::new();
    let before = bench.admin.view.applied();
    let long = "x".repeat(60_000);
    let body = r#"{"url":"http://gpu:8000"}"#;
    for path in [
        format!("/admin/v1/backends/{long}"),
        "/admin/v1/backends/a%1b%5d0%3bx".to_owned(),
        "/admin/v1/backends/a%c2%9b".to_owned(),
        "/admin/v1/backends/a%e2%80%aeb".to_owned(),
    ] {
        let problem = bench.problem(("PUT", &path, body), 400, "invalid").await;
        assert_eq!(problem["field"], "name", "{path}");
        let drain = format!("{path}/drain");
        bench.problem(("POST", &drain, ""), 400, "invalid").await;
    }
    let weight = r#"{"weight_milli":2000}"#;
    let user = "/admin/v1/users/a%0ab";
    bench.problem(("PUT", user, weight), 400, "invalid").await;
    for field in [
        r#""models":["a\u001b[2J"]"#,
        r#""labels":{"zone":"\u202ea"}"#,
    ] {
        let body = format!(r#"{{"url":"http://gpu:8000",{field}}}"#);
        bench
            .problem(("PUT", "/admin/v1/backends/gpu", &body), 400, "invalid")
            .await;
    }
    // Within the limit of a body, but above that of the log when encoded.
    let models = "\"\",".repeat((1 << 20) / 3 - 100);
    let body = format!(r#"{{"url":"http://gpu:8000","models":[{models}"x"]}}"#);
    let answer = bench.call("PUT", "/admin/v1/backends/gpu", &body).await;
    assert!(
        matches!(answer.status.as_u16(), 400 | 413),
        "{}",
        answer.body
    );
    let name = "x".repeat((1 << 20) - 60);
    let body = format!(r#"{{"url":"http://gpu:8000","models":["{name}"]}}"#);
    let large = bench.call("PUT", "/admin/v1/backends/gpu", &body).await;
    assert_eq!(large.status, StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(large.json()["type"], "/problems/too-large");
    assert_eq!(
        bench.admin.view.applied().0,
        before.0 + u64::from(answer.status == 400)
    );
}

#[tokio::test]
async fn a_user_with_control_characters_in_its_name_can_be_limited() {
    let bench = Bench::new();
    let settings = UserSettings::of_weight(1000);
    bench.apply(Command::configure_user("a\u{1b}b", settings));
    let limits = r#"{"limits":{"requests":1,"window":"1s"}}"#;
    let answer = bench.call("PUT", "/admin/v1/users/a%1bb", limits).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
}

#[tokio::test]
async fn backends_must_be_at_allowed_addresses() {
    let bench = Bench::new();
    let put = async |body: &str| bench.call("PUT", "/admin/v1/backends/gpu-1", body).await;
    for (field, body) in [
        ("url", r#"{"url":"http://169.254.169.254/latest"}"#),
        ("url", r#"{"url":"http://[fe80::1]:8000"}"#),
        (
            "kv_events",
            r#"{"url":"http://gpu-1:8000","kv_events":"tcp://169.254.1.1:5557"}"#,
        ),
    ] {
        let answer = put(body).await;
        assert_eq!(answer.status, 400, "{body}: {}", answer.body);
        assert_eq!(answer.json()["field"], field);
        assert!(answer.body.contains("metadata service"), "{}", answer.body);
    }
    let right = r#"{"url":"http://10.0.0.1:8000"}"#;
    assert_eq!(put(right).await.status, 200);
    // Clones share their rules.
    let dialer: EngineDialer = bench.admin.backends.dialer().clone();
    let rules = ["*.engines.internal"].map(|text| text.parse().unwrap());
    dialer.allow(EngineAddressRules::new(rules.into()));
    let refused = put(right).await;
    assert_eq!(refused.status, 400, "{}", refused.body);
    assert!(
        refused
            .body
            .contains("10.0.0.1 is not in admin.backends_allow")
    );
    let named = r#"{"url":"http://a.engines.internal:8000"}"#;
    assert_eq!(put(named).await.status, 200);
    let socket = r#"{"url":"http://a.engines.internal:8000","kv_events":"ipc:///run/kv"}"#;
    let refused = put(socket).await;
    assert_eq!(
        (refused.status.as_u16(), &refused.json()["field"]),
        (400, &"kv_events".into())
    );
    assert!(
        refused.body.contains("ipc:///run/kv is not in"),
        "{}",
        refused.body
    );
}
