//! Settings, which are written as in a config file, and whose faults are named.

use super::*;

const ADMISSION: &str = "/admin/v1/admission";

#[tokio::test]
async fn admission_is_read_and_written_in_config_syntax() {
    let bench = Bench::new();
    let first = bench.get(ADMISSION).await;
    assert_eq!(first["config"]["concurrency"], "adaptive");
    assert_eq!(first["config"]["max_queue"], 4096);
    assert_eq!(first["config"]["max_wait"], "10s");
    assert_eq!(first["config"]["inter_token"], "0s");
    let body = r#"{"concurrency": 3, "max_wait": "2days", "inter_token": "25ms 500us",
                   "bin_max_age": "0s"}"#;
    let put = bench.call("PUT", ADMISSION, body).await;
    assert_eq!(put.status, StatusCode::OK, "{}", put.body);
    let read = bench.get(ADMISSION).await;
    assert_eq!(read["config"]["concurrency"], 3);
    assert_eq!(read["config"]["max_wait"], "2days");
    assert_eq!(read["config"]["inter_token"], "25ms 500us");
    let again = read["config"].to_string();
    let put = bench.call("PUT", ADMISSION, &again).await;
    assert_eq!(put.status, StatusCode::OK, "{}", put.body);
    assert_eq!(bench.get(ADMISSION).await["config"], read["config"]);
}

#[tokio::test]
async fn user_limits_are_read_and_written_in_config_syntax() {
    let bench = Bench::new();
    let user = "/admin/v1/users/ada";
    let body = r#"{"limits": {"requests": 5, "window": "1m"}}"#;
    let put = bench.call("PUT", user, body).await;
    assert_eq!(put.status, StatusCode::OK, "{}", put.body);
    let limits = bench.get(user).await["config"]["limits"].clone();
    assert_eq!(limits["window"], "1m");
    let again = json!({ "limits": limits }).to_string();
    let put = bench.call("PUT", user, &again).await;
    assert_eq!(put.status, StatusCode::OK, "{}", put.body);
    assert_eq!(bench.get(user).await["config"]["limits"], limits);

    for (limits, field, detail) in [
        (
            r#"{"window": 60}"#,
            "limits.window",
            "limits.window is 60 (expected a duration from 1ms to 1day, such as \"20ms\" or \"1m 30s\")",
        ),
        (
            r#"{"window_ms": 1000}"#,
            "limits.window_ms",
            "limits.window_ms is an unknown key (expected one of concurrent, concurrent_per_tree, requests, tokens, tokens_per_tree, window)",
        ),
        (
            r#"{"requests": 0}"#,
            "limits.requests",
            "limits.requests is 0 (expected an integer from 1 to 4294967295)",
        ),
    ] {
        let body = format!("{{\"limits\": {limits}}}");
        let problem = bench.problem(("PUT", user, &*body), 400, "invalid").await;
        assert_eq!(problem["field"], field, "{problem}");
        assert_eq!(problem["detail"], detail, "{problem}");
    }
}

#[tokio::test]
async fn an_invalid_setting_names_key_value_and_expectation() {
    let bench = Bench::new();
    let before = bench.get(ADMISSION).await;
    for (body, field, detail) in [
        (
            r#"{"max_wait": "soon"}"#,
            "max_wait",
            "max_wait is \"soon\" (expected a duration from 1ms to 49days, such as \"20ms\" or \"1m 30s\")",
        ),
        (
            r#"{"concurrency": 0, "bins": 65}"#,
            "concurrency",
            "concurrency is 0 (expected an integer from 1 to 65536, \"adaptive\" or \"unlimited\"); \
             bins is 65 (expected an integer from 1 to 64)",
        ),
        ("[]", "body", "body is a list (expected an object)"),
    ] {
        let problem = bench
            .problem(("PUT", ADMISSION, body), 400, "invalid")
            .await;
        assert_eq!(problem["field"], field, "{problem}");
        assert_eq!(problem["detail"], detail, "{problem}");
    }
    assert_eq!(bench.get(ADMISSION).await, before);
}

#[tokio::test]
async fn config_separates_file_and_cluster_values() {
    let bench = Bench::with_backends();
    let config = bench.get("/admin/v1/config").await;
    assert_eq!(config["index"], 3);
    assert_eq!(
        config["differences"],
        json!(["admission.order", "routing.policy"])
    );
    let of = |key: &str| config["keys"][key].clone();
    let detail = |scope, file, cluster, in_effect| json!({ "scope": scope, "file": file, "cluster": cluster, "in_effect": in_effect });
    let policy = detail(
        "cluster",
        json!("cost"),
        json!("least-request"),
        json!("least-request"),
    );
    assert_eq!(of("routing.policy"), policy);
    let order = detail("cluster", json!("fcfs"), json!("vtc"), json!("vtc"));
    assert_eq!(of("admission.order"), order);
    let url = json!("http://gpu-1:8000");
    let url = detail("cluster", Value::Null, url.clone(), url);
    assert_eq!(of("backends.gpu-1.url"), url);
    let listen = detail("replica", Value::Null, Value::Null, json!("127.0.0.1:8080"));
    assert_eq!(of("listen.data"), listen);
    let put = bench.call("PUT", ADMISSION, r#"{"order": "fcfs"}"#).await;
    assert_eq!(put.status, StatusCode::OK, "{}", put.body);
    let config = bench.get("/admin/v1/config").await;
    assert_eq!(config["differences"], json!(["routing.policy"]));
    assert_eq!(config["keys"]["admission.order"]["cluster"], "fcfs");
}

#[tokio::test]
async fn writing_back_what_was_read_changes_nothing() {
    let bench = Bench::with_backends();
    let limited = r#"{"weight_milli": 2500, "limits": {"requests": 5, "window": "1m"}}"#;
    let put = bench.call("PUT", "/admin/v1/users/ada", limited).await;
    assert_eq!(put.status, StatusCode::OK, "{}", put.body);
    let planned = r#"{"budget": {"day": 1000, "month": 20000}, "models": ["llama-*"]}"#;
    let put = bench.call("PUT", "/admin/v1/users/bob", planned).await;
    assert_eq!(put.status, StatusCode::OK, "{}", put.body);
    bench
        .call(
            "PUT",
            "/admin/v1/policy?model=own",
            r#"{"policy":"session"}"#,
        )
        .await;
    let mut resources = 0;
    for route in ROUTES {
        let has = |method| route.calls.iter().any(|call| call.method == method);
        if !has("GET") || !has("PUT") {
            continue;
        }
        let queries = match route.path {
            "/admin/v1/policy" => vec!["", "?model=own", "?model=none"],
            "/admin/v1/users/{name}" => vec!["ada", "bob"],
            _ => vec![""],
        };
        for query in queries {
            let path = match route.path.strip_suffix("{name}") {
                Some(folder) => format!("{folder}{query}"),
                None => format!("{}{query}", route.path),
            };
            let path = path.replace("{id}", "gpu-1");
            assert!(!path.contains('{'), "which one of {path} is there?");
            let answer = bench.call("GET", &path, "").await;
            let (read, version) = (answer.json(), answer.headers["etag"].to_str().unwrap());
            for (wanted, status) in [("\"0\"", 412), ("x", 400), (version, 200), ("*", 200)] {
                let put = bench.put_if(&path, wanted, &read.to_string()).await;
                assert_eq!(put.status, status, "{path} {wanted}: {}", put.body);
            }
            let without_index = |mut answer: Value| {
                answer["index"] = Value::Null;
                answer
            };
            let again = bench.get(&path).await;
            assert_eq!(without_index(again), without_index(read), "{path}");
            resources += 1;
        }
    }
    assert!(resources >= 8, "{resources}");
}

#[tokio::test]
async fn only_writable_fields_may_be_edited() {
    let bench = Bench::with_backends();
    let mut backend = bench.get("/admin/v1/backends/gpu-1").await;
    backend["labels"]["zone"] = json!("b");
    backend["capacity_blocks"] = json!(7);
    let path = "/admin/v1/backends/gpu-1";
    let put = bench.call("PUT", path, &backend.to_string()).await;
    assert_eq!(put.status, StatusCode::OK, "{}", put.body);
    let read = bench.get(path).await;
    assert_eq!(read["labels"]["zone"], "b");
    assert_eq!(read["capacity"]["configured_blocks"], 7);
    assert_eq!(read["incarnation"], backend["incarnation"]);
    backend["colour"] = json!("red");
    let call = ("PUT", path, &*backend.to_string());
    let problem = bench.problem(call, 400, "invalid").await;
    assert!(
        problem["detail"].as_str().unwrap().contains("colour"),
        "{problem}"
    );
    let other = r#"{"name": "bob", "weight_milli": 2000}"#;
    let call = ("PUT", "/admin/v1/users/ada", other);
    assert_eq!(bench.problem(call, 400, "invalid").await["field"], "name");
    let around = r#"{"index": 3, "config": {"policy": "cost", "waiting_ns_per_request": "x"}}"#;
    let call = ("PUT", "/admin/v1/policy", around);
    let problem = bench.problem(call, 400, "invalid").await;
    assert_eq!(problem["field"], "waiting_ns_per_request", "{problem}");
}
