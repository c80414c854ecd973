//! Responses that a gateway makes itself, at each stage of a request and in each body mode: they pass
//! unchanged, cost nothing that no engine did, and are blamed on no engine.

use api::proxy::RequestOutcome;
use api::proxy::picker::ext_proc::body_mutation::Mutation;
use api::proxy::picker::ext_proc::processing_request::Request as ProcessingMessage;
use api::proxy::picker::ext_proc::processing_response::Response as Heard;
use api::proxy::picker::ext_proc::{BodySendMode, HttpTrailers, ProcessingRequest};
use api::proxy::picker::{PickedOutcome, ServedBy};
use proptest::prelude::*;
use prost_types::value::Kind;
use state::command::Charge;
use tokio::time::Instant;

use super::fleet::{Fleet, eventually};
use super::picking::{
    CHAT, ConnectedPicker, Talk, answer_of, because, engines, head, modes, plain, reply, start,
    told, upload,
};

const DUPLEX: BodySendMode = BodySendMode::FullDuplexStreamed;
const STREAMED: BodySendMode = BodySendMode::Streamed;
const BUFFERED: BodySendMode = BodySendMode::Buffered;

/// Stage of a request at which the gateway responds itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// A filter before the picker's responds.
    First,
    /// The request's body is arriving.
    Upload,
    /// The gateway has the endpoints for the request.
    Picked,
}

/// A response of the gateway: its pieces, and whether trailers end it.
#[derive(Debug, Clone)]
struct OwnReply {
    pieces: Vec<&'static str>,
    has_trailers: bool,
}

/// Modes of both bodies, and whether those of requests arrive before their head is answered.
fn any_mode() -> impl Strategy<Value = (BodySendMode, BodySendMode)> {
    let mode = prop::sample::select(vec![DUPLEX, STREAMED, BUFFERED]);
    (mode.clone(), mode)
}

fn any_reply() -> impl Strategy<Value = OwnReply> {
    let piece = prop::sample::select(vec!["upstream ", "request timeout", ""]);
    (prop::collection::vec(piece, 0..4), any::<bool>()).prop_map(|(pieces, has_trailers)| {
        OwnReply {
            pieces,
            has_trailers,
        }
    })
}

fn any_stage() -> impl Strategy<Value = Stage> {
    prop::sample::select(vec![Stage::First, Stage::Upload, Stage::Picked])
}

/// Opens a stream and brings its request to this stage.
async fn brought(
    picking: &ConnectedPicker,
    stage: Stage,
    (requests, more): (BodySendMode, &ProcessingRequest),
) -> Talk {
    let mut talk = picking.open();
    if stage == Stage::First {
        return talk;
    }
    talk.say_with(head(), more.clone()).await;
    if requests == BUFFERED {
        let passes = talk.next().await.response;
        assert!(matches!(passes, Some(Heard::RequestHeaders(_))));
    }
    if stage == Stage::Upload {
        if requests != BUFFERED {
            talk.say(upload("{", false)).await;
        }
        return talk;
    }
    talk.say(upload(CHAT, true)).await;
    talk.picked().await;
    match requests {
        DUPLEX => drop(talk.streamed().await),
        STREAMED => drop(talk.next().await),
        _ => {}
    }
    talk
}

/// Sends a response in the mode of its body, and returns its body as the gateway gets it back.
async fn passed(
    talk: &mut Talk,
    (status, details): (&str, Option<&str>),
    own: &OwnReply,
    (mode, first): (BodySendMode, Option<ProcessingRequest>),
) -> String {
    let is_bodiless = own.pieces.is_empty() && !own.has_trailers;
    let fields = [(":status", status), ("content-type", "text/plain")];
    let told = ProcessingMessage::ResponseHeaders(answer_of(&fields, is_bodiless));
    let more = ProcessingRequest {
        attributes: details.map(because).unwrap_or_default().attributes,
        ..first.unwrap_or_default()
    };
    talk.say_with(told, more).await;
    match talk.next().await.response {
        Some(Heard::ResponseHeaders(it)) => assert_eq!(it.response, None),
        other => panic!("{other:?}"),
    }
    let pieces = match mode {
        BUFFERED if !own.pieces.is_empty() => vec![own.pieces.concat()],
        _ => own.pieces.iter().map(|it| (*it).to_owned()).collect(),
    };
    let mut back = String::new();
    for (nth, piece) in pieces.iter().enumerate() {
        let end = nth + 1 == pieces.len() && !own.has_trailers;
        talk.say(reply(piece, end)).await;
        if mode == DUPLEX && piece.is_empty() && !end {
            continue;
        }
        let Some(Heard::ResponseBody(it)) = talk.next().await.response else {
            panic!("a piece is answered");
        };
        match (mode, it.response.and_then(|it| it.body_mutation)) {
            (DUPLEX, Some(changed)) => {
                let Some(Mutation::StreamedResponse(it)) = changed.mutation else {
                    panic!("{changed:?}");
                };
                assert_eq!(it.end_of_stream, end);
                back += std::str::from_utf8(&it.body).unwrap();
            }
            (STREAMED | BUFFERED, None) => back += piece,
            (_, changed) => panic!("{changed:?}"),
        }
    }
    if own.has_trailers {
        let trailers = ProcessingMessage::ResponseTrailers(HttpTrailers::default());
        talk.say(trailers).await;
        let last = talk.next().await.response;
        assert!(matches!(last, Some(Heard::ResponseTrailers(_))), "{last:?}");
    }
    talk.is_over().await;
    back
}

/// Numbers of failures in the circuit breakers of both backends.
fn failures(fleet: &Fleet) -> [u32; 2] {
    let of = |number| {
        let backend = fleet.backend(number);
        let circuit = fleet.backends.circuit(backend, Instant::now());
        circuit.recent_failures
    };
    [of(0), of(1)]
}

#[test]
fn a_gateways_own_response_passes_unchanged_in_every_mode_and_stage() {
    let runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = { runtime }.enable_all().build().unwrap();
    let (fleet, picking) = runtime.block_on(async {
        let engines = engines().await;
        start(&engines).await
    });
    let requests = |outcome| picking.metrics.requests(outcome);
    let cases = (any_mode(), any_stage(), any_reply(), any::<bool>());
    let config = ProptestConfig::with_cases(96);
    proptest!(config, |(((uploads, answers), stage, own, is_told) in cases)| {
        let before = (requests(PickedOutcome::Passed), picking.metrics.answers(ServedBy::Gateway));
        let details = is_told.then_some("response_timeout");
        runtime.block_on(async {
            let more = modes(uploads, answers, true);
            let mut talk = brought(&picking, stage, (uploads, &more)).await;
            let first = (stage == Stage::First).then_some(more);
            let back = passed(&mut talk, ("504", details), &own, (answers, first)).await;
            assert_eq!(back, own.pieces.concat());
            fleet.is_idle().await;
            let (passed, served) = match stage {
                Stage::Picked => (0, 1),
                Stage::First | Stage::Upload => (1, 0),
            };
            eventually("it is counted", || {
                requests(PickedOutcome::Passed) == before.0 + passed
                    && picking.metrics.answers(ServedBy::Gateway) == before.1 + served
            })
            .await;
        });
    });
    assert_eq!(failures(&fleet), [0, 0]);
    assert_eq!(requests(PickedOutcome::Broken), 0);
    assert_eq!(requests(PickedOutcome::Left), 0);
}

#[tokio::test]
async fn a_refusal_before_the_picker_is_no_request() {
    let engines = engines().await;
    let (fleet, picking) = start(&engines).await;
    let own = OwnReply {
        pieces: vec!["RBAC: access denied"],
        has_trailers: false,
    };
    let mut talk = picking.open();
    let first = Some(modes(DUPLEX, DUPLEX, false));
    passed(&mut talk, ("403", None), &own, (DUPLEX, first)).await;
    fleet.is_idle().await;
    for outcome in [RequestOutcome::GatewayReply, RequestOutcome::ClientLeft] {
        assert_eq!(fleet.count(outcome, 403) + fleet.count(outcome, 0), 0);
    }
    assert_eq!(fleet.charged().await, Charge::default());
}

#[tokio::test]
async fn a_timeout_of_the_gateway_within_an_upload_keeps_its_status_and_body() {
    let engines = engines().await;
    let (fleet, picking) = start(&engines).await;
    let own = OwnReply {
        pieces: vec!["request timeout"],
        has_trailers: false,
    };
    let more = modes(DUPLEX, DUPLEX, false);
    let mut talk = brought(&picking, Stage::Upload, (DUPLEX, &more)).await;
    let back = passed(&mut talk, ("408", None), &own, (DUPLEX, None)).await;
    assert_eq!(back, "request timeout");
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::GatewayReply, 408), 1);
    assert_eq!(fleet.charged().await, Charge::default());
}

#[tokio::test]
async fn only_responses_that_tell_of_an_engine_count_against_it() {
    const RESET: &str = "upstream_reset_before_response_started";
    let unreachable = format!("{RESET}{{remote_connection_failure|connect_error}}");
    let broke = format!("{RESET}{{connection_termination}}");
    let overflow = format!("{RESET}{{overflow}}");
    use RequestOutcome::{EngineError, Failed, GatewayReply};
    for (status, details, outcome, failed, is_charged) in [
        ("504", Some("response_timeout"), GatewayReply, 0, true),
        ("503", Some("no_healthy_upstream"), GatewayReply, 0, false),
        ("503", Some(&*overflow), GatewayReply, 0, false),
        ("504", None, GatewayReply, 0, true),
        ("503", None, GatewayReply, 0, false),
        ("429", Some("request_rate_limited"), GatewayReply, 0, false),
        ("503", Some(&*unreachable), Failed, 1, false),
        ("503", Some(&*broke), Failed, 1, true),
        ("503", Some("via_upstream"), EngineError, 1, false),
        ("500", None, EngineError, 1, true),
    ] {
        let engines = engines().await;
        let (fleet, picking) = start(&engines).await;
        let more = modes(DUPLEX, DUPLEX, false);
        let mut talk = brought(&picking, Stage::Picked, (DUPLEX, &more)).await;
        let fields = [(":status", status), ("content-type", "text/plain")];
        let own = ProcessingMessage::ResponseHeaders(answer_of(&fields, true));
        let more = details.map_or_else(plain, because);
        talk.say_with(own, more).await;
        talk.next().await;
        talk.is_over().await;
        fleet.is_idle().await;
        let said = format!("{status} {details:?}");
        let counted = fleet.count(outcome, status.parse().unwrap());
        let failures: u32 = failures(&fleet).iter().sum();
        assert_eq!((counted, failures), (1, failed), "{said}");
        let charge = fleet.charged().await;
        assert_eq!((charge.started, charge.ended), (1, 1), "{said}");
        let input = charge.input_uncached + charge.input_cached;
        assert_eq!(input > 0, is_charged, "{said}: {charge:?}");
    }
}

#[tokio::test]
async fn a_request_that_breaks_two_engines_behind_a_gateway_is_refused() {
    let engines = engines().await;
    let (fleet, picking) = start(&engines).await;
    let modes = modes(DUPLEX, DUPLEX, false);
    for _ in 0..2 {
        let mut talk = brought(&picking, Stage::Picked, (DUPLEX, &modes)).await;
        let fields = [(":status", "503"), ("content-type", "text/plain")];
        let lost = ProcessingMessage::ResponseHeaders(answer_of(&fields, true));
        let why = because("upstream_reset_before_response_started{connection_termination}");
        talk.say_with(lost, why).await;
        talk.next().await;
        talk.is_over().await;
        fleet.is_idle().await;
    }
    let mut talk = picking.ask(CHAT, 1000, modes).await;
    let (status, body) = talk.refused().await;
    assert_eq!(status, 422, "{body}");
    assert!(body.contains("request_breaks_backends"), "{body}");
}

#[tokio::test]
async fn a_lost_connection_to_a_further_endpoint_counts_against_that_one() {
    let engines = engines().await;
    let (fleet, picking) = start(&engines).await;
    let mut talk = picking.open();
    talk.say_with(head(), modes(DUPLEX, DUPLEX, false)).await;
    talk.say(upload(CHAT, true)).await;
    let (endpoints, _) = talk.picked().await;
    talk.streamed().await;
    let further = endpoints.split(',').nth(1).unwrap().to_owned();
    let fields = [(":status", "503"), ("content-type", "text/plain")];
    let lost = ProcessingMessage::ResponseHeaders(answer_of(&fields, true));
    let served = Kind::StringValue(further);
    let more = ProcessingRequest {
        metadata_context: Some(told(
            "envoy.lb",
            "x-gateway-destination-endpoint-served",
            served,
        )),
        ..because("upstream_reset_before_response_started{connection_termination}")
    };
    talk.say_with(lost, more).await;
    talk.next().await;
    talk.is_over().await;
    fleet.is_idle().await;
    // The first one was unreachable.
    assert_eq!(failures(&fleet), [1, 1]);
    let charge = fleet.charged().await;
    assert_eq!((charge.started, charge.ended), (2, 2), "{charge:?}");
}
