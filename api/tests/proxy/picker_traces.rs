//! Spans that an OTLP collector receives for requests of a gateway.

use api::proxy::picker::ext_proc::HttpHeaders;
use api::proxy::picker::ext_proc::processing_request::Request as ProcessingMessage;
use opentelemetry_proto::tonic::trace::v1::Span;
use state::admission::{AdmissionSettings, Concurrency};
use state::command::Command;

use super::engine::{DONE, delta, usage_chunk};
use super::fleet::{Fleet, PATIENT, eventually};
use super::picking::{CHAT, ConnectedPicker, EVENTS, Talk, engines, header, headers, piece_of};
use super::traces::{
    Collector, SPAN, TRACE, attribute, events, has, hex, is_the_clients, named, traced,
};

/// Opens a stream and sends a chat request that is part of a client's trace.
async fn asked(picking: &ConnectedPicker) -> Talk {
    let parent = format!("00-{TRACE}-{SPAN}-01");
    let fields = [
        (":method", "POST"),
        (":path", "/v1/chat/completions"),
        ("content-type", "application/json"),
        ("traceparent", &parent),
        ("tracestate", "vendor=1"),
    ];
    let head = HttpHeaders {
        headers: Some(headers(&fields)),
        end_of_stream: false,
    };
    let talk = picking.open();
    talk.say(ProcessingMessage::RequestHeaders(head)).await;
    let body = piece_of(CHAT.as_bytes(), true);
    talk.say(ProcessingMessage::RequestBody(body)).await;
    talk
}

/// Completes the stream as if the gateway had forwarded the request, and the engine `served` had
/// answered it.
async fn answered(talk: &mut Talk, served: Option<&str>) {
    talk.streamed().await;
    talk.begin(EVENTS, served).await;
    talk.answer(&[&delta("hi", 1), usage_chunk(), DONE]).await;
    talk.streamed().await;
}

fn names(spans: &[Span]) -> Vec<&str> {
    spans.iter().map(|span| span.name.as_str()).collect()
}

#[track_caller]
fn are_below(request: &Span, spans: &[Span]) {
    for span in spans.iter().filter(|it| it.span_id != request.span_id) {
        assert_eq!(span.parent_span_id, request.span_id, "{span:?}");
        assert_eq!(hex(&span.trace_id), TRACE);
    }
}

#[tokio::test]
async fn a_picked_request_has_the_same_spans_as_others() {
    let (collector, tracer, _) = Collector::default().start(0).await;
    let [first, second] = engines().await;
    let fleet = Fleet::start_with(&[&first, &second], PATIENT, traced(tracer)).await;
    let picking = ConnectedPicker::of(&fleet).await;
    let mut talk = asked(&picking).await;
    let (_, changes) = talk.picked().await;
    answered(&mut talk, None).await;
    let spans = collector.spans(4).await;
    let request = named(&spans, "chat m")[0];
    is_the_clients(request);
    are_below(request, &spans);
    assert_eq!(names(&spans), ["chat m", "admission", "decide", "attempt"]);
    has(&spans[1], &[("quorate.outcome", "admitted")]);
    let attempt = &spans[3];
    let of_attempt = [
        ("quorate.stage", "answer"),
        ("quorate.outcome", "finished"),
        ("http.response.status_code", "200"),
        ("gen_ai.usage.input_tokens", "7"),
        ("gen_ai.usage.output_tokens", "2"),
    ];
    has(attempt, &of_attempt);
    assert_eq!(events(attempt), ["first_byte", "last_byte"]);
    // The engine's spans must be children of the attempt's.
    let parent = format!("00-{TRACE}-{}-01", hex(&attempt.span_id));
    assert_eq!(header(&changes, "traceparent"), Some(parent));
    assert!(!changes.remove_headers.contains(&"tracestate".to_owned()));
}

#[tokio::test]
async fn the_second_endpoint_is_a_separate_attempt_span() {
    let (collector, tracer, _) = Collector::default().start(0).await;
    let [first, second] = engines().await;
    let fleet = Fleet::start_with(&[&first, &second], PATIENT, traced(tracer)).await;
    let picking = ConnectedPicker::of(&fleet).await;
    let mut talk = asked(&picking).await;
    let (endpoints, _) = talk.picked().await;
    let further = endpoints.split(',').nth(1).unwrap().to_owned();
    answered(&mut talk, Some(&further)).await;
    let spans = collector.spans(5).await;
    let request = named(&spans, "chat m")[0];
    is_the_clients(request);
    are_below(request, &spans);
    let attempts = named(&spans, "attempt");
    let missed = [
        ("quorate.outcome", "not-run"),
        ("error.type", "unreachable"),
    ];
    has(attempts[0], &missed);
    let name = match further == second.address.to_string() {
        true => "e1",
        false => "e0",
    };
    let served = [
        ("quorate.backend", name),
        ("quorate.outcome", "finished"),
        ("gen_ai.usage.output_tokens", "2"),
    ];
    has(attempts[1], &served);
}

#[tokio::test]
async fn a_gateway_disconnect_while_waiting_ends_its_spans() {
    let (collector, tracer, _) = Collector::default().start(0).await;
    let [first, second] = engines().await;
    let fleet = Fleet::start_with(&[&first, &second], PATIENT, traced(tracer)).await;
    let picking = ConnectedPicker::of(&fleet).await;
    fleet.apply(Command::PutAdmission(AdmissionSettings {
        concurrency: Concurrency::Fixed(1),
        ..AdmissionSettings::default()
    }));
    let mut served = [asked(&picking).await, asked(&picking).await];
    for talk in &mut served {
        talk.picked().await;
    }
    let waiting = asked(&picking).await;
    let waits = || fleet.admission.all_waiting().requests == 1;
    eventually("the third waits", waits).await;
    drop(waiting);
    let has_left = || fleet.admission.all_waiting().requests == 0;
    eventually("it waits no more", has_left).await;
    drop(served);
    // Its own two spans, and those of the others.
    let spans = collector.spans(2 + 2 * 4).await;
    let admissions = named(&spans, "admission");
    let left = [("quorate.outcome", "client-left")];
    let is_left = |span: &&&Span| attribute(span, left[0].0).as_deref() == Some(left[0].1);
    let waits: Vec<_> = admissions.iter().filter(is_left).collect();
    assert_eq!(waits.len(), 1, "{admissions:?}");
    let request = spans
        .iter()
        .find(|it| it.span_id == waits[0].parent_span_id);
    has(request.expect("it is told too"), &left);
    for attempt in named(&spans, "attempt") {
        has(attempt, &left);
    }
}
