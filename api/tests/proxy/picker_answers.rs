//! Engines' responses through a picker, where the relay or the gateway ends them early.

use api::proxy::RequestOutcome;
use api::proxy::picker::ext_proc::BodySendMode;
use api::proxy::picker::ext_proc::body_mutation::Mutation;
use api::proxy::picker::ext_proc::processing_request::Request as ProcessingMessage;
use api::proxy::picker::ext_proc::processing_response::Response as Heard;
use tonic::Code;

use super::engine::delta;
use super::fleet::Fleet;
use super::picker_modes::{BUFFERED, STREAMED, passed};
use super::picking::{
    CHAT, InProcessPicker, Talk, answer_of, body_of, engines, head, modes, plain, reply, start,
};

/// Sends the head of an engine's error, whose body is of this length.
async fn fails(talk: &mut Talk, length: usize) {
    talk.picked().await;
    talk.streamed().await;
    let length = length.to_string();
    let fields = [(":status", "400"), ("content-length", &*length)];
    let head = answer_of(&fields, false);
    talk.say(ProcessingMessage::ResponseHeaders(head)).await;
    let Some(Heard::ResponseHeaders(it)) = talk.next().await.response else {
        panic!("the head is answered");
    };
    let changed = it.response.unwrap().header_mutation.unwrap();
    let is_cut = changed
        .remove_headers
        .contains(&"content-length".to_owned());
    assert!(is_cut, "{changed:?}");
}

#[tokio::test]
async fn a_long_error_ends_at_its_limit_in_every_mode() {
    let engines = engines().await;
    let (fleet, picking) = start(&engines).await;
    let pieces = ["a", "b", "c", "d"].map(|letter| letter.repeat(400_000));
    let whole = pieces.concat();
    let duplex = BodySendMode::FullDuplexStreamed;
    for mode in [duplex, STREAMED, BUFFERED] {
        let mut talk = picking.ask(CHAT, 1000, modes(duplex, mode, false)).await;
        fails(&mut talk, whole.len()).await;
        let told = match mode {
            BUFFERED => passed(&mut talk, reply(&whole, true)).await,
            STREAMED => {
                let mut told = String::new();
                for (nth, piece) in pieces.iter().enumerate() {
                    told += &passed(&mut talk, reply(piece, nth == 3)).await;
                }
                told
            }
            _ => {
                let pieces = pieces.each_ref().map(String::as_str);
                talk.answer(&pieces).await;
                talk.streamed().await
            }
        };
        let is_start = whole.starts_with(&told);
        assert!(
            is_start && told.len() == 1 << 20,
            "{mode:?}: {}",
            told.len()
        );
        talk.is_over().await;
    }
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::EngineError, 400), 3);
}

#[tokio::test]
async fn a_piece_before_an_unexpected_message_passes() {
    let engines = engines().await;
    let fleet = Fleet::start(&[&engines[0]]).await;
    let picking = InProcessPicker::of(&fleet);
    let mut talk = picking.open().unwrap();
    talk.ask(CHAT, 1000, plain()).await;
    talk.answering().await;
    // Both are there when the picker reads.
    talk.say(reply(&delta("a", 3), false)).await;
    talk.say(head()).await;
    let piece = body_of(talk.next().await).body_mutation.unwrap().mutation;
    let Some(Mutation::StreamedResponse(piece)) = piece else {
        panic!("a body that streams is answered so");
    };
    let text = String::from_utf8(piece.body.to_vec()).unwrap();
    assert!(text.contains("\"content\":\"a\""), "{text}");
    assert_eq!(talk.fails().await.code(), Code::FailedPrecondition);
    fleet.is_idle().await;
    assert_eq!(fleet.charged().await.output, 3);
}
