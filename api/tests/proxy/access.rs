//! Access log lines of requests.

use std::io::Write;
use std::sync::{Arc, Mutex, OnceLock};

use api::proxy::{ACCESS_TARGET, ApiKeys, LoggedRequests, ProxySettings};
use serde_json::Value;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use super::client::{chat, post};
use super::engine::{
    DONE, Engine, Step, chunk, delta, json as answer_json, last_chunk, stream_head, usage_chunk,
};
use super::fleet::{Fleet, PATIENT, eventually};
use super::traces::{Collector, hex};

/// All lines of all tests of this process.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Lines {
    /// Captures the lines of the access log from here on, for the whole process.
    fn kept() -> Self {
        static LINES: OnceLock<Lines> = OnceLock::new();
        let keep = || {
            let lines = Lines::default();
            let writer = lines.clone();
            let format = tracing_subscriber::fmt::layer().json().flatten_event(true);
            let format = format.with_writer(move || writer.clone());
            let only = Targets::new().with_target(ACCESS_TARGET, tracing::Level::INFO);
            tracing_subscriber::registry()
                .with(format.with_filter(only))
                .init();
            lines
        };
        LINES.get_or_init(keep).clone()
    }

    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    /// Returns the lines of the request with this id.
    fn of(&self, id: &str) -> Vec<Value> {
        let text = self.text();
        let lines = text
            .lines()
            .map(|line| serde_json::from_str(line).expect(line));
        lines
            .filter(|line: &Value| line["request_id"] == id)
            .collect()
    }

    /// Returns the request's only line, once it exists.
    async fn line(&self, id: &str) -> Value {
        eventually("the request has its line", || !self.of(id).is_empty()).await;
        let mut lines = self.of(id);
        assert_eq!(lines.len(), 1, "{lines:?}");
        lines.remove(0)
    }
}

async fn fleet(engines: &[&Engine], logged: LoggedRequests) -> Fleet {
    Fleet::start_with(engines, PATIENT, |settings| {
        settings.logged_requests = logged;
    })
    .await
}

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

/// Returns a chat with an id, a trace context, a unique user, key and prompt.
fn named(id: &str, fields: &str) -> String {
    let head = format!(
        "host: router\r\nx-request-id: {id}\r\nx-quorate-user: ada\r\nx-secret: sk-{id}\r\n\
         traceparent: 00-{TRACE}-00f067aa0ba902b7-00\r\n"
    );
    let fields = format!(r#","metadata":{{"x":"prompt-of-{id}"}}{fields}"#);
    chat(&fields).replacen("host: router\r\n", &head, 1)
}

#[tokio::test]
async fn an_answer_is_logged_in_one_line_with_its_timings() {
    let lines = Lines::kept();
    let engine = Engine::always(vec![
        stream_head(),
        chunk(&delta("hi", 1)),
        chunk(usage_chunk()),
        chunk(DONE),
        last_chunk(),
    ])
    .await;
    let fleet = fleet(&[&engine], LoggedRequests::All).await;
    let mut client = fleet.client().await;
    let answer = client.ask(named("access-1", r#","stream":true"#)).await;
    assert_eq!(answer.status, 200);
    let line = lines.line("access-1").await;
    for (field, value) in [
        ("level", "INFO".into()),
        ("target", ACCESS_TARGET.into()),
        ("method", "POST".into()),
        ("path", "/v1/chat/completions".into()),
        ("status", 200.into()),
        ("outcome", "finished".into()),
        ("trace_id", TRACE.into()),
        ("user", "ada".into()),
        ("model", "m".into()),
        ("stream", true.into()),
        ("backend", "e0".into()),
        ("policy", "least-request".into()),
        ("reason", "only-candidate".into()),
        ("prompt_tokens", 7.into()),
        ("cached_tokens", 0.into()),
        ("completion_tokens", 2.into()),
        ("attempts", Value::from(1)),
    ] {
        assert_eq!(line[field], value, "{field} of {line}");
    }
    for field in ["ttft_ms", "duration_ms", "waited_ms"] {
        assert!(line[field].as_f64().is_some(), "{field} of {line}");
    }
    assert_eq!(line.get("cause"), None, "{line}");
    let text = lines.text();
    assert!(
        !text.contains("prompt-of-") && !text.contains("sk-access"),
        "{text}"
    );
}

#[tokio::test]
async fn a_failure_is_logged_as_a_warning_with_cause_and_attempts() {
    let lines = Lines::kept();
    let (dead, broken) = (
        Engine::dead().await,
        Engine::always(vec![Step::Close]).await,
    );
    let failing = Engine::always(vec![answer_json("500 Oops", "{}")]).await;
    for (nth, (engines, attempts, status, cause)) in [
        (vec![&dead, &dead], 2, 503, "unreachable: connect: "),
        (vec![&broken], 1, 502, "broke: exchange: "),
        (vec![&failing], 1, 500, "the engine answered 500"),
    ]
    .into_iter()
    .enumerate()
    {
        let fleet = fleet(&engines, LoggedRequests::Errors).await;
        let id = format!("access-failed-{nth}");
        let answer = fleet.client().await.ask(named(&id, "")).await;
        assert_eq!(answer.status, status);
        let line = lines.line(&id).await;
        assert_eq!(line["level"], "WARN", "{line}");
        assert_eq!(line["status"], status);
        assert_eq!(line["attempts"], attempts, "{line}");
        assert!(line["backend"].is_string(), "{line}");
        let told = line["cause"].as_str().unwrap();
        assert!(told.starts_with(cause), "{line}");
    }
}

#[tokio::test]
async fn a_broken_answer_is_logged_as_a_warning_despite_status_200() {
    let lines = Lines::kept();
    let error = chunk("data: {\"error\":{\"message\":\"no more\",\"code\":500}}\n\n");
    for (id, last, outcome) in [
        ("access-broken", Step::Close, "broken-off"),
        ("access-spoiled", error, "engine-error"),
    ] {
        let steps = vec![stream_head(), chunk(&delta("hi", 1)), last, last_chunk()];
        let engine = Engine::always(steps).await;
        let fleet = fleet(&[&engine], LoggedRequests::Errors).await;
        let mut client = fleet.client().await;
        client.ask(named(id, r#","stream":true"#)).await;
        let line = lines.line(id).await;
        assert_eq!(line["level"], "WARN", "{line}");
        assert_eq!(line["status"], 200, "{line}");
        assert_eq!(line["outcome"], outcome, "{line}");
        assert!(line["cause"].is_string(), "{line}");
    }
}

#[tokio::test]
async fn only_the_configured_requests_are_logged() {
    let lines = Lines::kept();
    let engine = Engine::always(vec![answer_json("200 OK", "{}")]).await;
    let unknown = |id: &str| {
        let head = format!("x-request-id: {id}\r\n");
        post("/v1/nothing", &head, "{}")
    };
    for (logged, name, count) in [
        (LoggedRequests::Off, "off", [0, 0]),
        (LoggedRequests::Errors, "errors", [0, 1]),
        (LoggedRequests::All, "all", [1, 1]),
    ] {
        // Lines do not depend on the request log of the admin API.
        let change = |settings: &mut ProxySettings| {
            settings.logged_requests = logged;
            settings.decisions_max = 0;
        };
        let fleet = Fleet::start_with(&[&engine], PATIENT, change).await;
        let mut client = fleet.client().await;
        let (good, bad) = (format!("access-{name}-200"), format!("access-{name}-404"));
        assert_eq!(client.ask(named(&good, "")).await.status, 200);
        assert_eq!(client.ask(unknown(&bad)).await.status, 404);
        fleet.is_idle().await;
        // The line has the record's fields, although the record is not kept.
        if logged == LoggedRequests::All {
            assert_eq!(lines.line(&good).await["user"], "ada");
        }
        if logged != LoggedRequests::Off {
            let line = lines.line(&bad).await;
            assert_eq!(line["level"], "INFO", "{line}");
            assert_eq!(line["code"], "unknown_url", "{line}");
            assert_eq!(line["path"], "/v1/nothing", "{line}");
        }
        assert_eq!([lines.of(&good).len(), lines.of(&bad).len()], count);
    }
}

#[tokio::test]
async fn a_wrong_key_is_not_logged() {
    let lines = Lines::kept();
    let engine = Engine::always(vec![answer_json("200 OK", "{}")]).await;
    let change = |settings: &mut ProxySettings| {
        let mut keys = ApiKeys::default();
        keys.add("sk-right", None);
        settings.api_keys = Some(keys);
    };
    let fleet = Fleet::start_with(&[&engine], PATIENT, change).await;
    let head = "host: router\r\nx-request-id: access-401\r\nauthorization: Bearer sk-wrong\r\n";
    let request = chat("").replacen("host: router\r\n", head, 1);
    assert_eq!(fleet.client().await.ask(request).await.status, 401);
    let line = lines.line("access-401").await;
    assert_eq!(line["code"], "invalid_api_key", "{line}");
    assert!(!lines.text().contains("sk-wrong"));
}

#[tokio::test]
async fn a_line_names_a_trace_only_where_one_exists() {
    let lines = Lines::kept();
    let engine = Engine::always(vec![answer_json("200 OK", "{}")]).await;
    for (sample_ppm, id) in [(0, "traced-never"), (1_000_000, "traced-always")] {
        let (collector, tracer, _) = Collector::default().start(sample_ppm).await;
        let engines = [&engine];
        let fleet = Fleet::start_with(&engines, PATIENT, |settings| {
            settings.logged_requests = LoggedRequests::All;
            settings.tracer = Some(tracer);
        });
        let fleet = fleet.await;
        let mut client = fleet.client().await;
        let head = format!("host: router\r\nx-request-id: {id}\r\n");
        client
            .ask(chat("").replacen("host: router\r\n", &head, 1))
            .await;
        let line = lines.line(id).await;
        match sample_ppm {
            0 => assert_eq!(line.get("trace_id"), None, "{line}"),
            _ => {
                let spans = collector.spans(4).await;
                assert_eq!(line["trace_id"], hex(&spans[0].trace_id), "{line}");
            }
        }
    }
}
