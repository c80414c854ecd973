//! Recordings and what-if questions of a replica that has decided nothing.

use super::*;

#[tokio::test]
async fn a_recording_is_started_fetched_stopped_and_removed() {
    let bench = Bench::with_backends();
    let list = bench.get("/admin/v1/recordings").await;
    assert_eq!(list, json!({ "recordings": [] }));
    let body = r#"{"seconds":30,"requests":5,"salt":"today"}"#;
    let begun = bench.call("POST", "/admin/v1/recordings", body).await;
    assert_eq!(begun.status, StatusCode::OK, "{}", begun.body);
    assert_eq!(
        begun.json(),
        json!({
            "id": 1, "replica": 1, "is_running": true, "ended_by": null, "from_ms": 1_000_000,
            "until_ms": 1_030_000, "requests": 0, "requests_max": 5, "bytes": 0,
            "bytes_max": 64 << 20, "salt": "today", "path": "/admin/v1/recordings/1",
        })
    );
    let again = ("POST", "/admin/v1/recordings", "");
    let problem = bench.problem(again, 409, "recording-under-way").await;
    assert!(problem["detail"].as_str().unwrap().contains("recording 1"));

    let file = bench.call("GET", "/admin/v1/recordings/1", "").await;
    assert_eq!(file.headers["content-type"], "application/jsonl");
    let read = api::files::recording::read(&file.body).unwrap();
    assert_eq!(
        (&*read.head.ended_by, &*read.head.salt),
        ("running", "today")
    );
    assert_eq!(read.head.backends.len(), 2);
    assert_eq!(read.requests, []);

    let stop = "/admin/v1/recordings/1/stop";
    let stopped = bench.call("POST", stop, "").await.json();
    assert_eq!(
        (&stopped["ended_by"], &stopped["until_ms"]),
        (&json!("stopped"), &json!(1_000_000))
    );
    let dropped = bench.call("DELETE", "/admin/v1/recordings/1", "").await;
    assert_eq!(dropped.status, StatusCode::OK);
    for call in [
        ("GET", "/admin/v1/recordings/1", ""),
        ("POST", stop, ""),
        ("DELETE", "/admin/v1/recordings/1", ""),
    ] {
        bench.problem(call, 404, "not-found").await;
    }
    let last = bench
        .call("GET", "/admin/v1/recordings/last?limit=7", "")
        .await;
    let read = api::files::recording::read(&last.body).unwrap();
    assert_eq!(read.head.ended_by, "decisions");
}

#[tokio::test]
async fn recordings_out_of_bounds_are_refused() {
    let bench = Bench::new();
    for (body, field) in [
        (r#"{"seconds":0}"#, "seconds"),
        (r#"{"seconds":86401}"#, "seconds"),
        (r#"{"requests":0}"#, "requests"),
        (r#"{"bytes":1023}"#, "bytes"),
        (r#"{"bytes":100663297}"#, "bytes"),
        (r#"{"salt":""}"#, "salt"),
        (r#"{"salt":"a b"}"#, "salt"),
        (r#"{"text":true}"#, "text"),
    ] {
        let call = ("POST", "/admin/v1/recordings", body);
        let problem = bench.problem(call, 400, "invalid").await;
        assert_eq!(problem["field"], field, "{body}");
    }
    for query in ["limit=0", "salt=%20"] {
        let path = format!("/admin/v1/recordings/last?{query}");
        bench.problem(("GET", &path, ""), 400, "invalid").await;
    }
    assert_eq!(
        bench.get("/admin/v1/recordings").await["recordings"],
        json!([])
    );
}

#[tokio::test]
async fn what_if_requests_are_validated() {
    let bench = Bench::with_backends();
    let path = "/admin/v1/policy/what-if";
    let answer = bench.call("POST", path, "").await.json();
    assert_eq!(
        (&answer["decisions"], &answer["from_ms"]),
        (&json!(0), &Value::Null)
    );
    let policies = answer["policies"].as_array().unwrap();
    assert_eq!(policies.len(), state::policy::POLICY_NAMES.len());
    assert_eq!(policies[0]["config"]["policy"], "least-request");
    assert_eq!(
        (&policies[0]["is_live"], &policies[1]["is_live"]),
        (&json!(true), &json!(false))
    );
    for (body, field) in [
        (r#"{"decisions":0}"#, "decisions"),
        (r#"{"decisions":10001}"#, "decisions"),
        (r#"{"policies":[]}"#, "policies"),
        (
            r#"{"policies":[{"policy":"random"},{"policy":"epp","kv_weight":2000}]}"#,
            "policies[1].kv_weight",
        ),
    ] {
        let problem = bench.problem(("POST", path, body), 400, "invalid").await;
        assert_eq!(problem["field"], field, "{body}");
    }
}
