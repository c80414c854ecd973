//! Decisions on disk: they are shown like those in memory, outlive it, and are filtered alike.

use std::path::Path;

use api::files::ring::RingSettings;
use api::proxy::ProxySettings;
use serde_json::{Value, json};

use super::client::chat;
use super::engine::{Engine, Step, json as answer_json};
use super::fleet::{Archiving, Fleet, PATIENT, eventually};

const USAGE: &str = r#"{"choices":[{"index":0,"message":{"role":"assistant","content":"yes"}}],"usage":{"prompt_tokens":70,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":16}}}"#;

/// Starts a replica that keeps one request in memory and archives in `folder`.
async fn archiving(engines: &[&Engine], folder: &Path) -> (Fleet, Archiving) {
    let archive = |settings: &mut ProxySettings| {
        settings.decisions_max = 1;
        settings.archive = Some(RingSettings {
            folder: folder.to_owned(),
            bytes_max: 16 << 20,
        });
    };
    let fleet = Fleet::start_with(engines, PATIENT, archive).await;
    let archiving = fleet.keep_archiving();
    (fleet, archiving)
}

async fn ask(fleet: &Fleet, id: &str, user: &str) -> u16 {
    let head = format!("x-request-id: {id}\r\nx-quorate-user: {user}\r\nhost:");
    let mut client = fleet.client().await;
    let status = client.ask(chat("").replace("host:", &head)).await.status;
    fleet.is_idle().await;
    status
}

async fn listed(fleet: &Fleet, query: &str) -> (Vec<String>, Value) {
    let path = format!("/admin/v1/decisions?{query}");
    let (status, page) = fleet.call("GET", &path, &Value::Null).await;
    assert_eq!(status, 200, "{page}");
    let ids = page["decisions"].as_array().unwrap().iter();
    let ids = ids.map(|it| it["request_id"].as_str().unwrap().to_owned());
    (ids.collect(), page)
}

async fn shown(fleet: &Fleet, id: &str) -> (u16, Value) {
    let path = format!("/admin/v1/decisions/{id}");
    fleet.call("GET", &path, &Value::Null).await
}

#[tokio::test]
async fn an_archived_decision_is_shown_like_the_original_and_after_a_restart() {
    let broken = Engine::always(vec![answer_json("503 Service Unavailable", "{}")]).await;
    let engine = Engine::always(vec![answer_json("200 OK", USAGE)]).await;
    let folder = tempfile::tempdir().unwrap();
    let (fleet, archive) = archiving(&[&broken, &engine], folder.path()).await;
    assert_eq!(ask(&fleet, "first", "ada").await, 200);
    let (_, original) = shown(&fleet, "first").await;
    assert_eq!(original["decisions"][0]["status"], 503);
    assert_eq!(
        original["decisions"][1]["outcome"]["usage"]["cached_tokens"],
        16
    );
    ask(&fleet, "second", "bo").await;
    archive.stop().await;
    assert_eq!(shown(&fleet, "first").await, (200, original.clone()));
    let (all, page) = listed(&fleet, "").await;
    assert_eq!(all, ["second", "first"]);
    assert!(page["disk"]["bytes"].as_u64().unwrap() > 0, "{page}");
    drop(fleet);
    let (again, _) = archiving(&[&broken, &engine], folder.path()).await;
    assert_eq!(shown(&again, "first").await, (200, original));
    assert_eq!(listed(&again, "user=bo").await.0, ["second"]);
}

#[tokio::test]
async fn past_decisions_are_filtered_by_failure_status_and_time() {
    let engine = Engine::answering(|request| match request.contains("x-quorate-user: bad") {
        true => vec![answer_json("500 Internal Server Error", "{}")],
        false => vec![answer_json("200 OK", USAGE)],
    });
    let engine = engine.await;
    let folder = tempfile::tempdir().unwrap();
    let (fleet, archive) = archiving(&[&engine], folder.path()).await;
    for (id, user) in [("a", "ada"), ("b", "bad"), ("c", "ada"), ("d", "bad")] {
        let status = ask(&fleet, id, user).await;
        assert_eq!(status, if user == "bad" { 500 } else { 200 });
    }
    archive.stop().await;
    for (query, expected) in [
        ("", &["d", "c", "b", "a"][..]),
        ("failed=true", &["d", "b"]),
        ("status=500", &["d", "b"]),
        ("status=200&user=ada", &["c", "a"]),
        ("status=404", &[]),
        ("slower_than=0s", &["d", "c", "b", "a"]),
        ("slower_than=1h", &[]),
    ] {
        assert_eq!(listed(&fleet, query).await.0, expected, "{query}");
    }
    let (first, page) = listed(&fleet, "limit=3").await;
    let cursor = page["next_cursor"].as_str().unwrap();
    let (rest, page) = listed(&fleet, &format!("limit=3&cursor={cursor}")).await;
    assert_eq!([first, rest].concat(), ["d", "c", "b", "a"]);
    assert_eq!(page.get("next_cursor"), None);
    let (status, wrong) = fleet
        .call("GET", "/admin/v1/decisions?slower_than=soon", &Value::Null)
        .await;
    assert_eq!((status, &wrong["field"]), (400, &json!("slower_than")));
}

#[tokio::test]
async fn requests_are_served_while_the_archive_cannot_be_written() {
    let engine = Engine::always(vec![answer_json("200 OK", USAGE)]).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let (fleet, archive) = archiving(&[&engine], &file.join("decisions")).await;
    assert_eq!(ask(&fleet, "only", "ada").await, 200);
    archive.stop().await;
    let (all, page) = listed(&fleet, "").await;
    assert_eq!(all, ["only"]);
    assert!(page["disk"]["fault"].is_string(), "{page}");
    let lost = fleet
        .metrics
        .decisions_lost
        .get_or_create(&[("reason", "disk")])
        .get();
    assert_eq!(lost, 1);
    assert_eq!(shown(&fleet, "only").await.0, 200);
}

#[tokio::test]
async fn a_request_in_flight_is_listed_before_those_on_disk() {
    let engine = Engine::answering(
        |request| match request.starts_with("POST /v1/completions") {
            true => vec![Step::Hang],
            false => vec![answer_json("200 OK", USAGE)],
        },
    );
    let engine = engine.await;
    let folder = tempfile::tempdir().unwrap();
    let (fleet, archive) = archiving(&[&engine], folder.path()).await;
    ask(&fleet, "ended", "ada").await;
    let mut client = fleet.client().await;
    let body = r#"{"model":"m","prompt":"p"}"#;
    let hanging = super::client::post("/v1/completions", "x-request-id: hangs\r\n", body);
    client.send(hanging).await;
    eventually("the engine has it", || engine.requests().len() == 2).await;
    archive.stop().await;
    let (all, page) = listed(&fleet, "").await;
    assert_eq!(all, ["hangs", "ended"]);
    assert_eq!(page["decisions"][0]["end"], Value::Null);
}
