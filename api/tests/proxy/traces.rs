//! Spans that an OTLP collector receives: a real tonic server with the official protos.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use api::proxy::ProxySettings;
use api::traces::{SpanExport, Tracer, TracingMetrics, TracingSettings};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use state::admission::{AdmissionSettings, Concurrency};
use state::command::Command;
use state::ids::ReplicaId;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::client::chat;
use super::engine::{DONE, Engine, Step, chunk, delta, json, last_chunk, stream_head, usage_chunk};
use super::fleet::{Fleet, PATIENT, eventually};

pub(super) const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
pub(super) const SPAN: &str = "00f067aa0ba902b7";

/// A collector and the spans it received.
#[derive(Clone, Default)]
pub(super) struct Collector {
    spans: Arc<Mutex<Vec<Span>>>,
    /// Whether it accepts calls and never responds.
    is_stuck: bool,
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let told = request.into_inner().resource_spans;
        let scopes = told.into_iter().flat_map(|it| it.scope_spans);
        let spans = scopes.flat_map(|it| it.spans);
        self.spans.lock().unwrap().extend(spans);
        if self.is_stuck {
            std::future::pending::<()>().await;
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    /// Starts a collector and a tracer that samples `sample_ppm` of a million requests.
    pub(super) async fn start(self, sample_ppm: u32) -> (Self, Tracer, TracingMetrics) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tonic::transport::Server::builder()
            .add_service(TraceServiceServer::new(self.clone()))
            .serve_with_incoming(TcpListenerStream::new(listener));
        tokio::spawn(serving);
        let metrics = TracingMetrics::default();
        let settings = TracingSettings {
            endpoint: format!("http://{address}"),
            sample_ppm,
            replica: ReplicaId(1),
            cluster: "test".to_owned(),
        };
        let (tracer, export) = SpanExport::new(&settings, metrics.clone()).unwrap();
        tokio::spawn(export.run(CancellationToken::new()));
        (self, tracer, metrics)
    }

    /// Returns all spans, once there are `count` of them.
    pub(super) async fn spans(&self, count: usize) -> Vec<Span> {
        let is_told = || self.spans.lock().unwrap().len() >= count;
        eventually("the collector was told", is_told).await;
        let mut spans = self.spans.lock().unwrap().clone();
        spans.sort_by_key(|span| span.start_time_unix_nano);
        spans
    }
}

pub(super) fn traced(tracer: Tracer) -> impl FnOnce(&mut ProxySettings) {
    move |settings| settings.tracer = Some(tracer)
}

pub(super) fn named<'a>(spans: &'a [Span], name: &str) -> Vec<&'a Span> {
    spans.iter().filter(|span| span.name == name).collect()
}

pub(super) fn attribute(span: &Span, key: &str) -> Option<String> {
    let found = span.attributes.iter().find(|it| it.key == key)?;
    Some(match found.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => text.clone(),
        Value::IntValue(number) => number.to_string(),
        Value::BoolValue(flag) => flag.to_string(),
        other => format!("{other:?}"),
    })
}

#[track_caller]
pub(super) fn has(span: &Span, attributes: &[(&str, &str)]) {
    for (key, value) in attributes {
        assert_eq!(
            attribute(span, key).as_deref(),
            Some(*value),
            "{key} of {span:?}"
        );
    }
}

pub(super) fn events(span: &Span) -> Vec<&str> {
    span.events
        .iter()
        .map(|event| event.name.as_str())
        .collect()
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the `traceparent` that an engine received.
fn parent(request: &str) -> &str {
    let line = request
        .lines()
        .find_map(|line| line.strip_prefix("traceparent: "));
    line.expect(request)
}

fn streams() -> Vec<Step> {
    vec![
        stream_head(),
        chunk(&delta("hi", 1)),
        chunk(usage_chunk()),
        chunk(DONE),
        last_chunk(),
    ]
}

/// Returns a chat that is part of a client's trace.
fn part_of_a_trace(fields: &str, flags: &str) -> String {
    let head = format!(
        "host: router\r\ntraceparent: 00-{TRACE}-{SPAN}-{flags}\r\ntracestate: vendor=1\r\n"
    );
    chat(fields).replacen("host: router\r\n", &head, 1)
}

/// Asserts that this is the span of the whole request, a child of the client's.
pub(super) fn is_the_clients(request: &Span) {
    assert_eq!(request.kind, SpanKind::Server as i32);
    assert_eq!(
        (hex(&request.trace_id), hex(&request.parent_span_id)),
        (TRACE.into(), SPAN.into())
    );
    assert_eq!(request.trace_state, "vendor=1");
    has(
        request,
        &[
            ("gen_ai.operation.name", "chat"),
            ("gen_ai.request.model", "m"),
            ("http.request.method", "POST"),
            ("url.path", "/v1/chat/completions"),
            ("http.response.status_code", "200"),
            ("quorate.outcome", "finished"),
        ],
    );
    assert_eq!(events(request), ["first_byte", "last_byte"]);
}

#[tokio::test]
async fn a_retried_request_is_one_trace_with_attempt_spans() {
    let (collector, tracer, metrics) = Collector::default().start(0).await;
    // The engine that is tried first refuses.
    let asked = Arc::new(AtomicUsize::new(0));
    let script = || {
        let asked = Arc::clone(&asked);
        move |_| match asked.fetch_add(1, Ordering::SeqCst) {
            0 => vec![json("503 Service Unavailable", "{}")],
            _ => streams(),
        }
    };
    let engines = [Engine::start(script()).await, Engine::start(script()).await];
    let both: Vec<&Engine> = engines.iter().collect();
    let fleet = Fleet::start_with(&both, PATIENT, traced(tracer)).await;
    let mut client = fleet.client().await;
    // The client's sampling decision counts, whatever part of the others is traced.
    let answer = client.ask(part_of_a_trace(r#","stream":true"#, "01")).await;
    assert_eq!(answer.status, 200);
    let spans = collector.spans(7).await;
    let attempts = named(&spans, "attempt");
    let request = named(&spans, "chat m")[0];
    is_the_clients(request);
    let names: Vec<&str> = spans[1..].iter().map(|span| span.name.as_str()).collect();
    let each = ["admission", "decide", "attempt"];
    assert_eq!(names, [each, each].concat());
    for span in &spans[1..] {
        assert_eq!(span.parent_span_id, request.span_id, "{span:?}");
        assert_eq!(hex(&span.trace_id), TRACE);
        assert!(
            span.start_time_unix_nano >= request.start_time_unix_nano,
            "{span:?}"
        );
        assert!(
            span.end_time_unix_nano <= request.end_time_unix_nano,
            "{span:?}"
        );
    }
    let (first, last) = (attempts[0], attempts[1]);
    assert_eq!(last.kind, SpanKind::Client as i32);
    let refused = [
        ("quorate.outcome", "not-run"),
        ("http.response.status_code", "503"),
    ];
    has(first, &refused);
    has(
        last,
        &[
            ("quorate.stage", "answer"),
            ("quorate.outcome", "finished"),
            ("http.response.status_code", "200"),
            ("gen_ai.usage.input_tokens", "7"),
            ("gen_ai.usage.output_tokens", "2"),
        ],
    );
    assert_eq!(events(last), ["first_byte", "last_byte"]);
    for span in attempts {
        let number = match attribute(span, "quorate.backend").as_deref() {
            Some("e0") => 0,
            _ => 1,
        };
        let got = engines[number].requests();
        assert_eq!(
            parent(&got[0]),
            format!("00-{TRACE}-{}-01", hex(&span.span_id))
        );
        assert!(got[0].contains("tracestate: vendor=1"), "{got:?}");
    }
    let is_counted = || metrics.exported.get() >= spans.len() as u64;
    eventually("spans are counted", is_counted).await;
}

#[tokio::test]
async fn queue_wait_is_in_the_admission_span() {
    let (collector, tracer, _) = Collector::default().start(1_000_000).await;
    let gate = Arc::new(Semaphore::new(0));
    let steps = [vec![Step::Await(Arc::clone(&gate))], streams()].concat();
    let engine = Engine::always(steps).await;
    let fleet = Fleet::start_with(&[&engine], PATIENT, traced(tracer)).await;
    fleet.apply(Command::PutAdmission(AdmissionSettings {
        concurrency: Concurrency::Fixed(1),
        ..AdmissionSettings::default()
    }));
    let mut first = fleet.client().await;
    first.send(&chat(r#","stream":true"#)).await;
    eventually("the engine has the first", || engine.requests().len() == 1).await;
    let mut second = fleet.client().await;
    second.send(&chat(r#","stream":true"#)).await;
    eventually("the second waits", || {
        fleet.admission.all_waiting().requests == 1
    })
    .await;
    let waited_from = std::time::SystemTime::now();
    gate.add_permits(2);
    assert_eq!(second.answer().await.status, 200);
    assert_eq!(first.answer().await.status, 200);
    let spans = collector.spans(8).await;
    let waits = named(&spans, "admission");
    assert_eq!(waits.len(), 2, "{spans:?}");
    let waited = waits[1];
    has(waited, &[("quorate.outcome", "admitted")]);
    let from = waited_from
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_nanos();
    assert!(
        u128::from(waited.start_time_unix_nano) <= from,
        "{waited:?}"
    );
    let decided = named(&spans, "decide");
    let decided = decided
        .iter()
        .find(|span| span.parent_span_id == waited.parent_span_id)
        .unwrap();
    assert!(
        decided.start_time_unix_nano >= waited.end_time_unix_nano,
        "{spans:?}"
    );
    has(decided, &[("quorate.backend", "e0")]);
    assert_ne!(waits[0].trace_id, waits[1].trace_id);
}

#[tokio::test]
async fn a_disconnect_ends_all_spans() {
    let (collector, tracer, _) = Collector::default().start(1_000_000).await;
    let engine = Engine::always(vec![stream_head(), chunk(&delta("hi", 1)), Step::Hang]).await;
    let fleet = Fleet::start_with(&[&engine], PATIENT, traced(tracer)).await;
    let mut client = fleet.client().await;
    client.send(&chat(r#","stream":true"#)).await;
    eventually("the engine has it", || engine.requests().len() == 1).await;
    drop(client);
    let spans = collector.spans(4).await;
    let request = named(&spans, "chat m")[0];
    has(request, &[("quorate.outcome", "client-left")]);
    let attempt = named(&spans, "attempt")[0];
    has(attempt, &[("quorate.outcome", "client-left")]);
    assert_eq!(attempt.parent_span_id, request.span_id);
    assert!(!events(attempt).contains(&"last_byte"), "{attempt:?}");
}

#[tokio::test]
async fn unsampled_requests_are_not_exported_and_engines_know() {
    let (collector, tracer, _) = Collector::default().start(1_000_000).await;
    let engine = Engine::always(streams()).await;
    let fleet = Fleet::start_with(&[&engine], PATIENT, traced(tracer)).await;
    let mut client = fleet.client().await;
    let stream = r#","stream":true"#;
    assert_eq!(client.ask(part_of_a_trace(stream, "00")).await.status, 200);
    assert_eq!(client.ask(chat(stream)).await.status, 200);
    let spans = collector.spans(4).await;
    assert!(
        spans.iter().all(|span| hex(&span.trace_id) != TRACE),
        "{spans:?}"
    );
    let got = engine.requests();
    let unsampled = parent(&got[0]);
    assert!(
        unsampled.starts_with(&format!("00-{TRACE}-")),
        "{unsampled}"
    );
    assert!(
        unsampled.ends_with("-00") && !unsampled.contains(SPAN),
        "{unsampled}"
    );
    assert!(parent(&got[1]).ends_with("-01"), "{got:?}");
}

#[tokio::test]
async fn an_unresponsive_collector_delays_no_request() {
    let stuck = Collector {
        is_stuck: true,
        ..Collector::default()
    };
    let (collector, tracer, metrics) = stuck.start(1_000_000).await;
    let engine = Engine::always(streams()).await;
    let fleet = Fleet::start_with(&[&engine], PATIENT, traced(tracer.clone())).await;
    let mut client = fleet.client().await;
    assert_eq!(client.ask(chat(r#","stream":true"#)).await.status, 200);
    collector.spans(1).await;
    // The call is in flight and blocks the queue until it times out, so the queue fills.
    let headers = http::HeaderMap::new();
    for _ in 0..10_000 {
        drop(tracer.begin(&headers, (&http::Method::POST, "/v1/completions"), "r"));
    }
    let mut page = String::new();
    let mut registry = prometheus_client::registry::Registry::default();
    metrics.register(&mut registry);
    prometheus_client::encoding::text::encode(&mut page, &registry).unwrap();
    let name = "quorate_tracing_spans_dropped_total{reason=\"queue-full\"} ";
    let dropped = page.lines().find_map(|line| line.strip_prefix(name));
    let dropped: u64 = dropped.expect(&page).parse().unwrap();
    assert!(dropped > 0, "{page}");
    for _ in 0..20 {
        assert_eq!(client.ask(chat(r#","stream":true"#)).await.status, 200);
    }
}
