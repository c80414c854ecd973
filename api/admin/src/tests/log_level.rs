//! Reading and changing the log level.

use std::sync::{Arc, Mutex};

use serde_json::json;

use super::*;
use crate::LogLevelControl;

/// Creates a log level control that accepts two levels.
pub(super) fn log_level() -> LogLevelControl {
    let level = Arc::new(Mutex::new("info".to_owned()));
    let set = Arc::clone(&level);
    let show = move || level.lock().unwrap().clone();
    LogLevelControl::new(show, move |level| match level {
        "info" | "debug" => {
            level.clone_into(&mut set.lock().unwrap());
            Ok(())
        }
        _ => Err("a level".to_owned()),
    })
}

#[tokio::test]
async fn setting_the_log_level_is_audited() {
    let bench = Bench::new();
    let told = bench
        .call("PUT", "/admin/v1/log", r#"{"level":"debug"}"#)
        .await;
    assert_eq!(
        (told.status, told.body.as_str()),
        (StatusCode::OK, r#"{"level":"debug"}"#)
    );
    assert_eq!(bench.get("/admin/v1/log").await["level"], "debug");
    let wrong = ("PUT", "/admin/v1/log", r#"{"level":"loud"}"#);
    let problem = bench.problem(wrong, 400, "invalid").await;
    assert_eq!(problem["field"], json!("level"));
    let audit = bench.get("/admin/v1/audit").await;
    assert_eq!(audit["calls"][0]["path"], "/admin/v1/log", "{audit}");
}

#[tokio::test]
async fn the_log_level_is_local_and_needs_no_quorum() {
    let bench = Bench::new();
    bench.set_fate(Fate::Unavailable);
    let read = bench.call("GET", "/admin/v1/log", "").await;
    let version = read.headers["etag"].to_str().unwrap();
    let debug = r#"{"level":"debug"}"#;
    let put = bench.put_if("/admin/v1/log", version, debug).await;
    assert_eq!(put.status, StatusCode::OK, "{}", put.body);
    let late = bench.put_if("/admin/v1/log", version, debug).await;
    assert_eq!(late.status, StatusCode::PRECONDITION_FAILED);
}
