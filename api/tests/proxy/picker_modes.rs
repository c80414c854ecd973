//! Body modes of gateways: what a picker requests, gateways that ignore it, and bodies that are too
//! long or cannot be read.

use api::proxy::picker::PickedOutcome;
use api::proxy::picker::ext_proc::body_mutation::Mutation;
use api::proxy::picker::ext_proc::processing_request::Request as ProcessingMessage;
use api::proxy::picker::ext_proc::processing_response::Response as Heard;
use api::proxy::picker::ext_proc::{BodySendMode, HttpTrailers, ProcessingMode, ProcessingRequest};
use api::proxy::{Charges, ProxySettings, RequestOutcome};
use bytes::Bytes;
use prost::Message as _;
use tonic::Code;

use super::engine::{DONE, delta};
use super::fleet::Fleet;
use super::picking::{
    CHAT, ConnectedPicker, InProcessPicker, Talk, body_of, engines, head, head_of, headers, modes,
    plain, reply, start, start_with, upload,
};

pub(super) const STREAMED: BodySendMode = BodySendMode::Streamed;
pub(super) const BUFFERED: BodySendMode = BodySendMode::Buffered;

/// Starts a picker for gateways that let it override the mode of request bodies.
async fn overriding() -> (Fleet, ConnectedPicker) {
    let engines = engines().await;
    let fleet = Fleet::start(&[&engines[0], &engines[1]]).await;
    let picking = ConnectedPicker::overriding(&fleet).await;
    (fleet, picking)
}

#[tokio::test]
async fn the_response_body_mode_is_sent_again() {
    let (fleet, picking) = overriding().await;
    for answers in [STREAMED, BUFFERED] {
        let mut talk = picking.open();
        talk.say_with(head(), modes(STREAMED, answers, false)).await;
        let asked = talk.next().await.mode_override;
        let expected = ProcessingMode {
            request_body_mode: BUFFERED.into(),
            response_body_mode: answers.into(),
        };
        assert_eq!(asked, Some(expected));
    }
    fleet.is_idle().await;
}

#[tokio::test]
async fn a_gateway_that_ignores_modes_gets_a_configuration_hint() {
    let (fleet, picking) = overriding().await;
    let (half, rest) = CHAT.split_at(30);
    for pieces in [[half, rest], [CHAT, ""]] {
        let mut talk = picking.open();
        talk.say_with(head(), modes(STREAMED, STREAMED, false))
            .await;
        for (piece, end) in pieces.into_iter().zip([false, true]) {
            talk.say(upload(piece, end)).await;
        }
        let why = talk.fails().await;
        assert_eq!(why.code(), Code::FailedPrecondition, "{why}");
        assert!(why.message().contains("allow_mode_override"), "{why}");
    }
    fleet.is_idle().await;
    assert_eq!(picking.metrics.requests(PickedOutcome::Broken), 2);
}

#[tokio::test]
async fn streamed_requests_are_refused_unless_overrides_are_allowed() {
    let engines = engines().await;
    let (fleet, picking) = start(&engines).await;
    let mut talk = picking.open();
    talk.say_with(head(), modes(STREAMED, STREAMED, false))
        .await;
    let why = talk.fails().await;
    assert_eq!(why.code(), Code::FailedPrecondition, "{why}");
    for setting in ["send_body_without_waiting", "picker.bodies"] {
        assert!(why.message().contains(setting), "{why}");
    }
    // A request without a body needs no override.
    let mut talk = picking.open();
    let models = ProcessingMessage::RequestHeaders(head_of("GET", "/v1/models", true));
    talk.say_with(models, modes(STREAMED, STREAMED, false))
        .await;
    assert_eq!(talk.refused().await.0, 200);
    fleet.is_idle().await;
}

#[tokio::test]
async fn no_override_is_requested_beside_responses_in_full_duplex() {
    let (fleet, picking) = overriding().await;
    let mut talk = picking.open();
    talk.say_with(
        head(),
        modes(STREAMED, BodySendMode::FullDuplexStreamed, false),
    )
    .await;
    let why = talk.fails().await;
    assert_eq!(why.code(), Code::FailedPrecondition, "{why}");
    fleet.is_idle().await;
}

#[tokio::test]
async fn a_waiting_head_keeps_no_destination_and_no_key_of_the_client() {
    let (fleet, picking) = overriding().await;
    let secret = api::users::api_keys::NewSecret::draw();
    for mode in [STREAMED, BUFFERED] {
        let mut told = head_of("POST", "/v1/chat/completions", false);
        let bearer = format!("Bearer {}", secret.text());
        let more = [
            ("x-gateway-destination-endpoint", "10.9.9.9:80"),
            ("api-key", "sk-engine"),
            ("authorization", &*bearer),
        ];
        let fields = &mut told.headers.as_mut().unwrap().headers;
        fields.extend(headers(&more).headers);
        let mut talk = picking.open();
        let first = ProcessingMessage::RequestHeaders(told);
        talk.say_with(first, modes(mode, BUFFERED, false)).await;
        let Some(Heard::RequestHeaders(it)) = talk.next().await.response else {
            panic!("the head waits");
        };
        let changed = it.response.unwrap().header_mutation.unwrap();
        let expected = ["x-gateway-destination-endpoint", "authorization"];
        assert_eq!(changed.remove_headers, expected);
        assert!(changed.set_headers.is_empty());
    }
    fleet.is_idle().await;
}

/// Sends a piece of the response's body and returns what the client gets for it.
pub(super) async fn passed(talk: &mut Talk, piece: ProcessingMessage) -> String {
    talk.say(piece.clone()).await;
    let mutation = body_of(talk.next().await).body_mutation;
    match mutation.and_then(|it| it.mutation) {
        None => match piece {
            ProcessingMessage::ResponseBody(sent) => String::from_utf8(sent.body.to_vec()).unwrap(),
            other => panic!("{other:?}"),
        },
        Some(Mutation::Body(body)) => String::from_utf8(body.to_vec()).unwrap(),
        Some(Mutation::ClearBody(true)) => String::new(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn the_withheld_end_of_an_answer_precedes_its_trailers() {
    let engines = engines().await;
    for mode in [STREAMED, BUFFERED] {
        let durable = |settings: &mut ProxySettings| settings.charges = Charges::Durable;
        let (fleet, picking) = start_with(&engines, durable).await;
        fleet.keep_flushing();
        let duplex = BodySendMode::FullDuplexStreamed;
        let mut talk = picking.ask(CHAT, 1000, modes(duplex, mode, false)).await;
        talk.answering().await;
        let text = delta("a", 1);
        let pieces = match mode == BUFFERED {
            true => vec![format!("{text}{DONE}")],
            false => vec![text.clone(), DONE.to_owned()],
        };
        let mut whole = String::new();
        for piece in &pieces {
            whole += &passed(&mut talk, reply(piece, false)).await;
        }
        assert!(whole.contains("\"content\":\"a\""), "{mode:?}: {whole}");
        assert!(whole.ends_with(DONE), "{mode:?}: {whole}");
        let trailers = ProcessingMessage::ResponseTrailers(HttpTrailers::default());
        talk.say(trailers).await;
        let last = talk.next().await.response;
        assert!(matches!(last, Some(Heard::ResponseTrailers(_))), "{last:?}");
        talk.is_over().await;
        fleet.is_idle().await;
        assert_eq!(fleet.count(RequestOutcome::Finished, 200), 1);
        assert_eq!(fleet.metrics.charges_unconfirmed.get(), 0);
    }
}

#[tokio::test]
async fn an_oversize_picker_message_is_refused() {
    let engines = engines().await;
    let (fleet, picking) = start_with(&engines, |settings| {
        settings.limits.body_bytes_max = 200;
    })
    .await;
    let long = "x".repeat(3 << 20);
    let mut talk = picking.open();
    talk.say_with(head(), modes(BUFFERED, BUFFERED, false))
        .await;
    talk.next().await;
    talk.say(upload(&long, true)).await;
    let (status, body) = talk.refused().await;
    assert_eq!(status, 413, "{body}");
    talk.is_over().await;
    // Too late for another response.
    let duplex = BodySendMode::FullDuplexStreamed;
    let mut talk = picking
        .ask(CHAT, 1000, modes(duplex, BUFFERED, false))
        .await;
    talk.answering().await;
    talk.say(reply(&long, true)).await;
    let why = talk.fails().await;
    assert_eq!(why.code(), Code::ResourceExhausted, "{why}");
    assert!(why.message().contains("limits.max_body"), "{why}");
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::Refused, 413), 1);
}

#[tokio::test]
async fn an_unreadable_message_ends_the_stream_with_an_error() {
    let engines = engines().await;
    let fleet = Fleet::start(&[&engines[0]]).await;
    let picking = InProcessPicker::of(&fleet);
    let first = ProcessingRequest {
        request: Some(head()),
        ..plain()
    };
    // The length of a field is more than what follows.
    let unread = Bytes::from_static(&[0x12, 5, 1]);
    for messages in [
        vec![unread.clone()],
        vec![first.encode_to_vec().into(), unread],
    ] {
        let why = picking.hear_out(messages).unwrap().fails().await;
        assert_eq!(why.code(), Code::InvalidArgument);
        assert!(why.message().contains("malformed"), "{why}");
    }
    fleet.is_idle().await;
    assert_eq!(picking.metrics.requests(PickedOutcome::Broken), 2);
    // A gateway whose connection is gone receives nothing.
    let mut gone = picking.open().unwrap();
    gone.say = None;
    gone.is_over().await;
    assert_eq!(picking.metrics.requests(PickedOutcome::Broken), 2);
}

#[tokio::test]
async fn a_body_with_a_hole_is_refused() {
    let engines = engines().await;
    let (fleet, picking) = start(&engines).await;
    // It is a whole JSON value without the part that is missing.
    let (begin, end) = CHAT.split_once("hello").unwrap();
    let mut talk = picking.open();
    talk.say(head()).await;
    talk.say(upload(begin, false)).await;
    talk.say(upload(end, true)).await;
    let (status, body) = talk.refused().await;
    assert_eq!(status, 400);
    assert!(body.contains("content-length"), "{body}");
    fleet.is_idle().await;
}
