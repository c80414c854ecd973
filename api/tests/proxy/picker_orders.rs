//! Messages of a gateway in random order: the first unexpected one ends the stream with an error
//! that names it, and nothing is left behind in any case.

use api::proxy::picker::ext_proc::processing_request::Request as Message;
use api::proxy::picker::ext_proc::{
    BodySendMode, HeaderMap, HttpHeaders, HttpTrailers, ProcessingRequest,
};
use proptest::prelude::*;
use tonic::Code;

use super::fleet::eventually;
use super::picking::{
    CHAT, ConnectedPicker, answer_of, because, engines, head, head_of, modes, piece_of, plain,
    start, upload,
};

/// Whose response a head is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Whose {
    Engines,
    /// An engine's, which is not relayed.
    Redirection,
    Gateways,
}

/// Returns the head of a response, and whose it is by the protocol: the gateway's if it says so, or
/// if a 503 or 504 has nothing but a type.
fn any_answer() -> impl Strategy<Value = (HttpHeaders, Option<&'static str>, Whose)> {
    let kind = prop::sample::select(vec![
        ("200", None, Whose::Engines),
        ("200", Some("via_upstream"), Whose::Engines),
        ("504", Some("via_upstream"), Whose::Engines),
        ("500", None, Whose::Engines),
        ("307", None, Whose::Redirection),
        ("200", Some("direct_response"), Whose::Gateways),
        (
            "403",
            Some("rbac_access_denied_matched_policy[none]"),
            Whose::Gateways,
        ),
        ("504", Some("response_timeout"), Whose::Gateways),
        ("504", None, Whose::Gateways),
        ("503", None, Whose::Gateways),
    ]);
    (kind, any::<bool>()).prop_map(|((status, details, whose), end)| {
        let fields = [(":status", status), ("content-type", "text/plain")];
        (answer_of(&fields, end), details, whose)
    })
}

/// A message, Envoy's reason if it is the head of a response, and whose response that is.
type Said = (Message, Option<&'static str>, Whose);

/// A message of any kind.
fn any_message() -> impl Strategy<Value = Said> {
    let piece = (
        prop::sample::select(vec![CHAT, "", "data: {}\n\n", "{"]),
        any::<bool>(),
    )
        .prop_map(|(data, end)| piece_of(data.as_bytes(), end));
    let head = (prop::sample::select(vec!["POST", "GET", ""]), any::<bool>())
        .prop_map(|(method, end)| head_of(method, "/v1/chat/completions", end));
    let other = prop_oneof![
        2 => head.prop_map(Message::RequestHeaders),
        3 => piece.clone().prop_map(Message::RequestBody),
        3 => piece.prop_map(Message::ResponseBody),
        1 => Just(Message::RequestTrailers(HttpTrailers::default())),
        1 => Just(Message::ResponseTrailers(HttpTrailers::default())),
    ];
    prop_oneof![
        10 => other.prop_map(|said| (said, None, Whose::Engines)),
        3 => any_answer()
            .prop_map(|(head, details, whose)| (Message::ResponseHeaders(head), details, whose)),
    ]
}

/// The modes of both bodies, and whether the request body arrives before its headers are answered.
fn any_mode() -> impl Strategy<Value = (BodySendMode, BodySendMode, bool)> {
    let mode = prop::sample::select(vec![
        BodySendMode::FullDuplexStreamed,
        BodySendMode::Streamed,
        BodySendMode::Buffered,
    ]);
    (mode.clone(), mode, any::<bool>())
}

/// State of a picker between messages.
enum Turn {
    Head,
    Upload {
        body: Vec<u8>,
    },
    Answer {
        may_end: bool,
        may_go_on: bool,
    },
    Pieces,
    /// The gateway's own response passes.
    Own,
}

/// How a request's body arrives.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Upload {
    Pieces,
    Whole,
    /// Whole, if the gateway obeys the picker's request.
    AskedWhole,
    /// In pieces that wait for the reply to the head, which the picker refuses.
    Refused,
}

/// Error that ends a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// An unexpected message of this name.
    OutOfTurn(&'static str),
    /// More pieces of a body that was requested whole.
    OverrideIgnored,
    /// A body in pieces that the picker may not request whole.
    OverrideNotAllowed,
}

/// Returns the first error; `None` if the stream ends before one is read. Derived from the protocol
/// alone: a request body that arrives whole is one message.
fn fault(upload: Upload, messages: &[Said]) -> Option<Fault> {
    let is_whole = upload != Upload::Pieces;
    let mut turn = Turn::Head;
    for (said, _, whose) in messages {
        turn = match (turn, said) {
            (Turn::Head, Message::RequestHeaders(head)) => {
                let posts = head_of("POST", "/v1/chat/completions", false).headers;
                let (told, posts) = (head.headers.as_ref()?, posts?);
                let is_post = told.headers[0] == posts.headers[0];
                if upload == Upload::Refused && !head.end_of_stream && names_method(told) {
                    return Some(Fault::OverrideNotAllowed);
                }
                if head.end_of_stream || !is_post {
                    return None;
                }
                Turn::Upload { body: Vec::new() }
            }
            (Turn::Upload { mut body }, Message::RequestBody(piece)) => {
                body.extend_from_slice(&piece.body);
                let may_go_on = upload == Upload::AskedWhole && !piece.end_of_stream;
                match piece.end_of_stream || is_whole {
                    true if body != CHAT.as_bytes() => {
                        return may_go_on.then_some(Fault::OverrideIgnored);
                    }
                    true => Turn::Answer {
                        may_end: is_whole,
                        may_go_on,
                    },
                    false => Turn::Upload { body },
                }
            }
            (Turn::Upload { body }, Message::RequestTrailers(_)) => {
                if body != CHAT.as_bytes() {
                    return None;
                }
                Turn::Answer {
                    may_end: false,
                    may_go_on: false,
                }
            }
            (Turn::Head | Turn::Upload { .. }, Message::ResponseHeaders(head))
                if !head.end_of_stream =>
            {
                Turn::Own
            }
            (Turn::Answer { .. }, Message::ResponseHeaders(head))
                if *whose == Whose::Gateways && !head.end_of_stream =>
            {
                Turn::Own
            }
            (Turn::Answer { .. }, Message::ResponseHeaders(_)) if *whose != Whose::Engines => {
                return None;
            }
            (
                Turn::Answer {
                    may_end: true,
                    may_go_on,
                },
                Message::RequestTrailers(_),
            ) => Turn::Answer {
                may_end: false,
                may_go_on,
            },
            (
                Turn::Answer {
                    may_go_on: true, ..
                },
                Message::RequestBody(_),
            ) => return Some(Fault::OverrideIgnored),
            (Turn::Answer { .. }, Message::ResponseHeaders(head)) if !head.end_of_stream => {
                Turn::Pieces
            }
            (Turn::Pieces, Message::ResponseBody(piece)) if !piece.end_of_stream => Turn::Pieces,
            (Turn::Own, Message::ResponseBody(piece)) if !piece.end_of_stream => Turn::Own,
            (
                Turn::Head | Turn::Upload { .. } | Turn::Answer { .. },
                Message::ResponseHeaders(_),
            )
            | (Turn::Pieces | Turn::Own, Message::ResponseBody(_) | Message::ResponseTrailers(_)) =>
            {
                return None;
            }
            (_, said) => return Some(Fault::OutOfTurn(name(said))),
        };
    }
    None
}

/// Whether a head has a method. Without one, the request is refused at once.
fn names_method(told: &HeaderMap) -> bool {
    told.headers
        .iter()
        .any(|it| it.key == ":method" && !it.raw_value.is_empty())
}

fn name(said: &Message) -> &'static str {
    match said {
        Message::RequestHeaders(_) => "request_headers",
        Message::ResponseHeaders(_) => "response_headers",
        Message::RequestBody(_) => "request_body",
        Message::ResponseBody(_) => "response_body",
        Message::RequestTrailers(_) => "request_trailers",
        Message::ResponseTrailers(_) => "response_trailers",
    }
}

fn begun() -> Vec<Said> {
    [head(), upload(CHAT, true)]
        .map(|said| (said, None, Whose::Engines))
        .into()
}

#[test]
fn the_first_message_out_of_order_is_named_without_leaks() {
    let runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = { runtime }.enable_all().build().unwrap();
    let (fleet, picking, overriding) = runtime.block_on(async {
        let engines = engines().await;
        let (fleet, picking) = start(&engines).await;
        let overriding = ConnectedPicker::overriding(&fleet).await;
        (fleet, picking, overriding)
    });
    let orders = (
        (any_mode(), any::<bool>()),
        any::<bool>(),
        prop::collection::vec(any_message(), 0..7),
    );
    let config = ProptestConfig::with_cases(96);
    proptest!(config, |((((requests, answers, early), may_override), is_begun, messages) in orders)| {
        let start = if is_begun { begun() } else { Vec::new() };
        let messages: Vec<_> = start.into_iter().chain(messages).collect();
        let upload = match requests {
            BodySendMode::Streamed if !early && may_override => Upload::AskedWhole,
            BodySendMode::Streamed if !early => Upload::Refused,
            BodySendMode::Buffered => Upload::Whole,
            _ => Upload::Pieces,
        };
        let expected = fault(upload, &messages);
        let picking = if may_override { &overriding } else { &picking };
        let ended = runtime.block_on(async {
            let mut talk = picking.open();
            for (nth, (said, details, _)) in messages.into_iter().enumerate() {
                let first = match nth {
                    0 => modes(requests, answers, early),
                    _ => plain(),
                };
                let more = ProcessingRequest {
                    attributes: details.map_or_else(plain, because).attributes,
                    ..first
                };
                talk.say_with(said, more).await;
            }
            talk.say = None;
            let ended = loop {
                match talk.hear().await {
                    Ok(Some(_)) => {}
                    Ok(None) => break Ok(()),
                    Err(status) => break Err(status),
                }
            };
            fleet.is_idle().await;
            eventually("no stream is open", || picking.metrics.streams.get() == 0).await;
            ended
        });
        match (expected, ended) {
            // A whole response is read to its end at once.
            (Some(_), Err(why)) if answers == BodySendMode::Buffered && why.code() == Code::Aborted => {}
            (Some(Fault::OverrideIgnored), Err(why)) => {
                prop_assert_eq!(why.code(), Code::FailedPrecondition);
                prop_assert!(why.message().contains("allow_mode_override"), "{}", why);
            }
            (Some(Fault::OverrideNotAllowed), Err(why)) => {
                prop_assert!(why.message().contains("picker.bodies"), "{}", why);
            }
            (Some(Fault::OutOfTurn(name)), Err(why)) => {
                prop_assert_eq!(why.code(), Code::FailedPrecondition);
                let told = why.message();
                prop_assert!(told.starts_with(&format!("{name} arrived ")), "{}: {}", name, told);
                prop_assert!(told.ends_with(", which no body mode allows"), "{}", told);
            }
            (None, Ok(())) => {}
            // A response that ends before it is complete.
            (None, Err(why)) => prop_assert_eq!(why.code(), Code::Aborted, "{}", why),
            (Some(fault), Ok(())) => prop_assert!(false, "{fault:?} was taken"),
        }
    });
    runtime.block_on(async {
        let charge = fleet.charged().await;
        assert_eq!(charge.started, charge.ended);
    });
}
