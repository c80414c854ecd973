//! Messages of a gateway in random order: the first unexpected one ends the stream with an error
//! that names it, and nothing is left behind in any case.

use api::proxy::picker::ext_proc::processing_request::Request as Message;
use api::proxy::picker::ext_proc::{
    BodySendMode, HeaderMap, HttpHeaders, HttpTrailers, ProcessingRequest,
};
use proptest::prelude::*;
use tonic::{Code, Status};

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

/// What follows a message: the next turn, or the end of the stream, with an error if there is one.
type Next = Result<Turn, Option<Fault>>;

/// Returns the first error; `None` if the stream ends before one is read. Derived from the protocol
/// alone: a request body that arrives whole is one message.
fn fault(upload: Upload, messages: &[Said]) -> Option<Fault> {
    let mut turn = Turn::Head;
    for said in messages {
        let next = match turn {
            Turn::Head => at_head(upload, said),
            Turn::Upload { body } => within_upload(upload, body, said),
            Turn::Answer { may_end, may_go_on } => before_answer((may_end, may_go_on), said),
            turn @ (Turn::Pieces | Turn::Own) => within_answer(turn, said),
        };
        turn = match next {
            Ok(turn) => turn,
            Err(end) => return end,
        };
    }
    None
}

fn at_head(upload: Upload, (said, ..): &Said) -> Next {
    match said {
        Message::RequestHeaders(head) => {
            let posts = head_of("POST", "/v1/chat/completions", false).headers;
            let told = head.headers.as_ref().ok_or(None)?;
            let is_post = told.headers[0] == posts.ok_or(None)?.headers[0];
            if upload == Upload::Refused && !head.end_of_stream && names_method(told) {
                return Err(Some(Fault::OverrideNotAllowed));
            }
            match head.end_of_stream || !is_post {
                true => Err(None),
                false => Ok(Turn::Upload { body: Vec::new() }),
            }
        }
        Message::ResponseHeaders(head) => begins(head, Turn::Own),
        said => Err(Some(Fault::OutOfTurn(name(said)))),
    }
}

fn within_upload(upload: Upload, mut body: Vec<u8>, (said, ..): &Said) -> Next {
    let is_whole = upload != Upload::Pieces;
    match said {
        Message::RequestBody(piece) => {
            body.extend_from_slice(&piece.body);
            let may_go_on = upload == Upload::AskedWhole && !piece.end_of_stream;
            match piece.end_of_stream || is_whole {
                true if body != CHAT.as_bytes() => Err(may_go_on.then_some(Fault::OverrideIgnored)),
                true => Ok(Turn::Answer {
                    may_end: is_whole,
                    may_go_on,
                }),
                false => Ok(Turn::Upload { body }),
            }
        }
        Message::RequestTrailers(_) if body == CHAT.as_bytes() => Ok(Turn::Answer {
            may_end: false,
            may_go_on: false,
        }),
        Message::RequestTrailers(_) => Err(None),
        Message::ResponseHeaders(head) => begins(head, Turn::Own),
        said => Err(Some(Fault::OutOfTurn(name(said)))),
    }
}

fn before_answer((may_end, may_go_on): (bool, bool), (said, _, whose): &Said) -> Next {
    match (said, whose) {
        (Message::ResponseHeaders(head), Whose::Engines) => begins(head, Turn::Pieces),
        (Message::ResponseHeaders(head), Whose::Gateways) => begins(head, Turn::Own),
        (Message::ResponseHeaders(_), Whose::Redirection) => Err(None),
        (Message::RequestTrailers(_), _) if may_end => Ok(Turn::Answer {
            may_end: false,
            may_go_on,
        }),
        (Message::RequestBody(_), _) if may_go_on => Err(Some(Fault::OverrideIgnored)),
        (said, _) => Err(Some(Fault::OutOfTurn(name(said)))),
    }
}

fn within_answer(turn: Turn, (said, ..): &Said) -> Next {
    match said {
        Message::ResponseBody(piece) if !piece.end_of_stream => Ok(turn),
        Message::ResponseBody(_) | Message::ResponseTrailers(_) => Err(None),
        said => Err(Some(Fault::OutOfTurn(name(said)))),
    }
}

fn begins(head: &HttpHeaders, turn: Turn) -> Next {
    match head.end_of_stream {
        true => Err(None),
        false => Ok(turn),
    }
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

/// Sends all messages, the first with `first`, and returns how the stream ends.
async fn told(
    picking: &ConnectedPicker,
    first: ProcessingRequest,
    messages: Vec<Said>,
) -> Result<(), Status> {
    let mut talk = picking.open();
    let mut first = Some(first);
    for (said, details, _) in messages {
        let more = ProcessingRequest {
            attributes: details.map_or_else(plain, because).attributes,
            ..first.take().unwrap_or_default()
        };
        talk.say_with(said, more).await;
    }
    talk.say = None;
    while talk.hear().await?.is_some() {}
    Ok(())
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
            BodySendMode::Streamed if !early && may_override && answers != BodySendMode::FullDuplexStreamed => {
                Upload::AskedWhole
            }
            BodySendMode::Streamed if !early => Upload::Refused,
            BodySendMode::Buffered => Upload::Whole,
            _ => Upload::Pieces,
        };
        let expected = fault(upload, &messages);
        let picking = if may_override { &overriding } else { &picking };
        let ended = runtime.block_on(async {
            let ended = told(picking, modes(requests, answers, early), messages).await;
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
