//! Rules that hold for every path: query keys, methods, versions, pages, retry times.

use super::*;

#[tokio::test]
async fn an_unknown_query_key_is_refused_with_the_known_ones() {
    let bench = Bench::with_backends();
    for (method, path, key, known) in [
        (
            "GET",
            "/admin/v1/backends?limits=3",
            "limits",
            json!(["read", "limit", "cursor"]),
        ),
        (
            "GET",
            "/admin/v1/backends?limit=1&x",
            "x",
            json!(["read", "limit", "cursor"]),
        ),
        (
            "GET",
            "/admin/v1/events?follow=1",
            "follow",
            json!(["last"]),
        ),
        ("GET", "/livez?full=1", "full", json!([])),
        (
            "POST",
            "/admin/v1/backends/gpu-1/drain?now=1",
            "now",
            json!(["move_streams"]),
        ),
        (
            "PUT",
            "/admin/v1/policy?models=m",
            "models",
            json!(["read", "model"]),
        ),
        (
            "DELETE",
            "/admin/v1/users/ada?force=true",
            "force",
            json!([]),
        ),
    ] {
        let problem = bench.problem((method, path, "{}"), 400, "invalid").await;
        assert_eq!(
            (&problem["field"], &problem["allowed"]),
            (&json!(key), &known),
            "{problem}"
        );
        let detail = problem["detail"].as_str().unwrap();
        assert!(detail.contains("unknown query key"), "{detail}");
    }
    let state = &bench.get("/admin/v1/backends/gpu-1").await["state"];
    assert_eq!(state["is_draining"], false);
}

#[tokio::test]
async fn an_invalid_query_value_names_its_key() {
    let bench = Bench::new();
    for (path, field) in [
        ("/admin/v1/users?limit=many", "limit"),
        ("/admin/v1/cluster?read=later", "read"),
        ("/admin/v1/users?limit=1&limit=2", "limit"),
        ("/admin/v1/digest?index=-1", "index"),
        ("/admin/v1/audit?cursor=7", "cursor"),
    ] {
        let problem = bench.problem(("GET", path, ""), 400, "invalid").await;
        assert_eq!(problem["field"], field, "{path}: {problem}");
    }
}

#[tokio::test]
async fn a_wrong_method_is_answered_with_the_allowed_ones() {
    let bench = Bench::new();
    for (method, path, allowed) in [
        ("PATCH", "/admin/v1/backends/a", "GET,HEAD,PUT,DELETE"),
        ("DELETE", "/admin/v1/cluster", "GET,HEAD"),
        ("GET", "/admin/v1/cluster/snapshot", "POST"),
        ("OPTIONS", "/admin/v1/keys", "GET,HEAD,POST"),
    ] {
        let answer = bench.call(method, path, "").await;
        assert_eq!(answer.status, 405, "{method} {path}");
        assert_eq!(answer.headers["allow"], allowed, "{method} {path}");
        assert_eq!(answer.json()["type"], "/problems/wrong-method");
    }
}

#[tokio::test]
async fn two_operators_do_not_overwrite_each_other() {
    let bench = Bench::with_backends();
    let path = "/admin/v1/backends/gpu-1";
    let read = bench.call("GET", path, "").await;
    let version = read.headers["etag"].to_str().unwrap().to_owned();
    // Changing figures and draining do not count as edits.
    bench.call("POST", &format!("{path}/drain"), "").await;
    let mut first = read.json();
    first["labels"] = json!({ "by": "ann" });
    let put = bench.put_if(path, &version, &first.to_string()).await;
    assert_eq!(put.status, 200, "{}", put.body);
    let mut second = read.json();
    second["labels"] = json!({ "by": "bob" });
    let put = bench.put_if(path, &version, &second.to_string()).await;
    assert_eq!(put.status, 412, "{}", put.body);
    let problem = put.json();
    assert_eq!(problem["outcome"], "not-committed");
    let now = bench.call("GET", path, "").await;
    assert_eq!(now.json()["labels"], json!({ "by": "ann" }));
    assert_eq!(now.headers["etag"], *problem["version"].as_str().unwrap());
    // Several versions, as HTTP allows; one of them is the current one.
    let both = format!("{version}, {}", problem["version"].as_str().unwrap());
    assert_eq!(
        bench.put_if(path, &both, &second.to_string()).await.status,
        200
    );
}

#[tokio::test]
async fn a_missing_resource_has_no_version() {
    let bench = Bench::new();
    let spec = r#"{"url": "http://a:1"}"#;
    for wanted in ["*", "\"1\""] {
        let put = bench.put_if("/admin/v1/backends/a", wanted, spec).await;
        assert_eq!(put.status, 412, "{wanted}: {}", put.body);
    }
    assert_eq!(
        bench.call("PUT", "/admin/v1/backends/a", spec).await.status,
        200
    );
}

#[tokio::test]
async fn version_checks_need_a_quorum() {
    let bench = Bench::with_backends();
    let read = bench.call("GET", "/admin/v1/routing", "").await;
    let version = read.headers["etag"].to_str().unwrap();
    bench.set_fate(Fate::Unavailable);
    let put = bench.put_if("/admin/v1/routing", version, &read.body).await;
    assert_eq!(
        (put.status.as_u16(), &put.json()["type"]),
        (503, &json!("/problems/no-quorum"))
    );
    assert_eq!(put.headers["retry-after"], "1");
}

#[tokio::test]
async fn the_audit_pages_through_writes_and_calls() {
    let bench = Bench::new();
    for name in ["a", "b", "c", "d", "e"] {
        let path = format!("/admin/v1/users/{name}");
        let put = bench.call("PUT", &path, r#"{"weight_milli": 2000}"#).await;
        assert_eq!(put.status, 200);
    }
    // Refused: a call without a write.
    bench.call("DELETE", "/admin/v1/users/nobody", "").await;
    let whole = bench.get("/admin/v1/audit").await;
    assert!(whole.get("next_cursor").is_none());
    let (mut writes, mut calls, mut cursor) = (Vec::new(), Vec::new(), String::new());
    loop {
        let page = bench.get(&format!("/admin/v1/audit?limit=2{cursor}")).await;
        writes.extend(page["writes"].as_array().unwrap().iter().cloned());
        calls.extend(page["calls"].as_array().unwrap().iter().cloned());
        match page["next_cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }
    assert_eq!(
        (json!(writes), json!(calls)),
        (whole["writes"].clone(), whole["calls"].clone())
    );
    assert_eq!(calls.len(), 6);
}

#[tokio::test]
async fn every_write_is_audited_with_its_author() {
    for route in ROUTES {
        for call in route.calls {
            let is_write = call.method != "GET" && !["explain", "whatIf"].contains(&call.id);
            assert_eq!(
                call.permission.is_audited(),
                is_write || call.id == "getBackup",
                "{}",
                call.id
            );
        }
    }
}
