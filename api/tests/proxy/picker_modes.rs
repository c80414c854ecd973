//! Body modes of gateways: what a picker asks of them.

use api::proxy::picker::ext_proc::processing_request::Request as Said;
use api::proxy::picker::ext_proc::{BodySendMode, ProcessingMode};

use super::picking::{engines, head_of, modes, start};

const STREAMED: BodySendMode = BodySendMode::Streamed;
const BUFFERED: BodySendMode = BodySendMode::Buffered;

fn head() -> Said {
    Said::RequestHeaders(head_of("POST", "/v1/chat/completions", false))
}

#[tokio::test]
async fn a_gateway_is_told_the_mode_of_answers_again() {
    let engines = engines().await;
    let (fleet, picking) = start(&engines).await;
    for answers in [STREAMED, BUFFERED] {
        let mut talk = picking.open().await;
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
