//! Gateways that fall silent or read nothing: each wait has the timeout that clients and engines
//! have on the data port, and nothing of the request is left behind.

use std::time::Duration;

use api::proxy::picker::PickedOutcome;
use api::proxy::picker::ext_proc::body_mutation::Mutation;
use api::proxy::picker::ext_proc::external_processor_client::ExternalProcessorClient;
use api::proxy::picker::ext_proc::processing_response::Response as Heard;
use api::proxy::picker::ext_proc::{BodySendMode, ProcessingRequest};
use api::proxy::{Charges, ProxySettings, RequestOutcome};
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{interval, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Code;
use tonic::transport::Endpoint;

use super::engine::{DONE, delta};
use super::fleet::{Fleet, PATIENT, eventually};
use super::picking::{
    CHAT, InProcessPicker, Listening, Talk, body_of, engines, head, modes, plain, reply, upload,
};

/// Starts a picker in this process, with waits shorter than a test.
async fn here(change: impl FnOnce(&mut ProxySettings)) -> (Fleet, InProcessPicker) {
    let engines = engines().await;
    let both = [&engines[0], &engines[1]];
    let fleet = Fleet::start_with(&both, PATIENT, |settings| {
        settings.timeouts.first_byte = Duration::from_secs(45);
        settings.timeouts.answer_idle = Duration::from_secs(40);
        change(settings);
    });
    let fleet = fleet.await;
    let picking = InProcessPicker::of(&fleet);
    (fleet, picking)
}

async fn picked(picking: &InProcessPicker) -> Talk {
    let mut talk = picking.open().unwrap();
    talk.ask(CHAT, 1000, plain()).await;
    talk.picked().await;
    talk.streamed().await;
    talk
}

#[tokio::test(start_paused = true)]
async fn a_silent_picker_stream_is_ended() {
    let (fleet, picking) = here(|_| {}).await;
    let mut talk = picking.open().unwrap();
    let why = talk.fails().await;
    assert_eq!(why.code(), Code::DeadlineExceeded);
    assert_eq!(why.message(), "no request_headers came");
    fleet.is_idle().await;
    assert_eq!(picking.metrics.requests(PickedOutcome::Broken), 1);
}

#[tokio::test(start_paused = true)]
async fn a_body_stays_buffered_until_its_response_begins() {
    let held_bytes_max = CHAT.len() as u64;
    let (fleet, picking) =
        here(|settings| settings.limits.held_bytes_max = Some(held_bytes_max)).await;
    let first = picked(&picking).await;
    let mut second = picking.open().unwrap();
    second.ask(CHAT, 1000, plain()).await;
    assert_eq!(second.refused().await.0, 503);
    drop(first);
    fleet.is_idle().await;
    picked(&picking).await;
}

#[tokio::test(start_paused = true)]
async fn a_body_that_stops_halfway_is_refused() {
    let (fleet, picking) = here(|_| {}).await;
    let (duplex, buffered) = (BodySendMode::FullDuplexStreamed, BodySendMode::Buffered);
    for mode in [duplex, buffered] {
        let mut talk = picking.open().unwrap();
        talk.say_with(head(), modes(mode, mode, false)).await;
        match mode == duplex {
            true => talk.say(upload("{", false)).await,
            false => drop(talk.next().await),
        }
        let (status, body) = talk.refused().await;
        assert_eq!(status, 408, "{body}");
        talk.is_over().await;
    }
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::Refused, 408), 2);
}

#[tokio::test(start_paused = true)]
async fn a_slow_body_has_a_total_timeout() {
    let (fleet, picking) = here(|settings| {
        settings.timeouts.body = Duration::from_secs(45);
    })
    .await;
    let mut talk = picking.open().unwrap();
    talk.say(head()).await;
    let say = talk.say.clone().unwrap();
    tokio::spawn(async move {
        let mut ticks = interval(Duration::from_secs(20));
        let piece = || ProcessingRequest {
            request: Some(upload(" ", false)),
            ..plain()
        };
        while say.send(piece()).await.is_ok() {
            ticks.tick().await;
        }
    });
    assert_eq!(talk.refused().await.0, 408);
    fleet.is_idle().await;
}

#[tokio::test(start_paused = true)]
async fn a_gateway_without_an_answer_times_out() {
    let (fleet, picking) = here(|_| {}).await;
    let mut talk = picked(&picking).await;
    assert_eq!(talk.fails().await.code(), Code::DeadlineExceeded);
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::Failed, 504), 1);
    let charge = fleet.charged().await;
    assert_eq!((charge.started, charge.ended), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_stops_halfway_ends_the_stream() {
    let (fleet, picking) = here(|_| {}).await;
    let mut talk = picking.open().unwrap();
    talk.ask(CHAT, 1000, plain()).await;
    talk.answering().await;
    talk.say(reply(&delta("a", 3), false)).await;
    let told = talk.streamed().await;
    assert!(told.contains("\"error\""), "its client is told: {told}");
    talk.is_over().await;
    fleet.is_idle().await;
    let charge = fleet.charged().await;
    assert_eq!((charge.ended, charge.output), (1, 3));
}

#[tokio::test(start_paused = true)]
async fn a_complete_answer_does_not_wait_for_its_gateway() {
    let (fleet, picking) = here(|settings| settings.charges = Charges::Durable).await;
    fleet.keep_flushing();
    let (duplex, streamed) = (BodySendMode::FullDuplexStreamed, BodySendMode::Streamed);
    let mut talk = picking.open().unwrap();
    talk.ask(CHAT, 1000, modes(duplex, streamed, true)).await;
    talk.answering().await;
    // The end passes with this piece, because it may be the last one before trailers.
    let all = format!("{}{DONE}", delta("a", 1));
    talk.say(reply(&all, false)).await;
    body_of(talk.next().await);
    assert_eq!(talk.fails().await.code(), Code::DeadlineExceeded);
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::Finished, 200), 1);
}

#[tokio::test(start_paused = true)]
async fn a_gateway_that_reads_nothing_gets_a_timeout_error() {
    let (fleet, picking) = here(|settings| {
        settings.timeouts.untaken = Duration::from_secs(10);
        settings.timeouts.first_byte = Duration::from_secs(600);
    })
    .await;
    let mut talk = picking.open().unwrap();
    talk.ask(&long_request(), 60_000, plain()).await;
    eventually("it is not waited for", || {
        picking.metrics.requests(PickedOutcome::Broken) == 1
    })
    .await;
    fleet.is_idle().await;
    // After an end without an error, the gateway would forward the incomplete request.
    assert_eq!(talk.fails().await.code(), Code::DeadlineExceeded);
}

/// Returns a request that is longer than what may be queued for a gateway.
fn long_request() -> String {
    let prompt = "p".repeat(900_000);
    format!(r#"{{"model":"m","prompt":"{prompt}","stream":true,"max_tokens":9}}"#)
}

#[tokio::test(start_paused = true)]
async fn a_slowly_reading_gateway_does_not_keep_its_place() {
    let (fleet, picking) = here(|_| {}).await;
    let body = long_request();
    let mut talk = picking.open().unwrap();
    talk.ask(&body, 60_000, plain()).await;
    let mut ticks = interval(Duration::from_secs(20));
    let mut bytes = 0;
    let why = loop {
        let message = match talk.hear().await {
            Ok(message) => message.expect("it ends with an error"),
            Err(why) => break why,
        };
        if let Some(Heard::RequestBody(_)) = &message.response {
            let Some(Mutation::StreamedResponse(piece)) =
                body_of(message).body_mutation.unwrap().mutation
            else {
                panic!("a body that streams is answered so");
            };
            bytes += piece.body.len();
        }
        ticks.tick().await;
    };
    assert!(0 < bytes && bytes < body.len(), "{bytes} of {}", body.len());
    // A gateway must not send half a request to an engine, as it would if the stream just ended.
    assert_eq!(why.code(), Code::DeadlineExceeded);
    fleet.is_idle().await;
    assert_eq!(picking.metrics.requests(PickedOutcome::Broken), 1);
}

#[tokio::test(start_paused = true)]
async fn a_slowly_reading_gateway_does_not_keep_its_engine() {
    const PIECES: usize = 40;
    let (duplex, streamed) = (BodySendMode::FullDuplexStreamed, BodySendMode::Streamed);
    for mode in [duplex, streamed] {
        let (fleet, picking) = here(|_| {}).await;
        let mut talk = picking.open().unwrap();
        talk.ask(CHAT, 1000, modes(duplex, mode, true)).await;
        talk.answering().await;
        for _ in 0..PIECES {
            talk.say(reply(&delta("a", 1), false)).await;
        }
        let mut ticks = interval(Duration::from_secs(4));
        let mut heard = 0;
        let why = loop {
            match talk.hear().await {
                Ok(message) => drop(message.expect("it ends with an error")),
                Err(why) => break why,
            }
            heard += 1;
            ticks.tick().await;
        };
        assert!(heard < PIECES, "{mode:?}: {heard}");
        // The client must not take half a response for a complete one.
        assert_eq!(why.code(), Code::DeadlineExceeded, "{mode:?}");
        fleet.is_idle().await;
        assert_eq!(fleet.count(RequestOutcome::ClientLeft, 200), 1, "{mode:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn picker_streams_are_bounded_by_the_request_limit() {
    let (fleet, picking) = here(|settings| {
        settings.limits.requests_max = 1;
        settings.limits.reading_max = Some(1);
    })
    .await;
    let open = [picking.open().unwrap(), picking.open().unwrap()];
    let why = picking.open().err().unwrap();
    assert_eq!(why.code(), Code::ResourceExhausted, "{why}");
    assert_eq!(picking.metrics.requests(PickedOutcome::Refused), 1);
    drop(open);
    eventually("both are gone", || picking.metrics.streams.get() == 0).await;
    assert!(picking.open().is_ok());
    fleet.is_idle().await;
}

#[tokio::test]
async fn a_connection_without_a_handshake_is_closed() {
    let engines = engines().await;
    let one = [&engines[0]];
    let fleet = Fleet::start_with(&one, PATIENT, |settings| {
        settings.timeouts.first_request = Duration::from_millis(20);
    });
    let listening = Listening::of(&fleet.await).await;
    let mut silent = TcpStream::connect(listening.address).await.unwrap();
    let mut told = Vec::new();
    let closed = timeout(PATIENT, silent.read_to_end(&mut told)).await;
    // Closed, with or without unread bytes.
    drop(closed.expect("it is closed"));
}

#[tokio::test]
async fn a_connection_without_a_handshake_does_not_delay_shutdown() {
    let engines = engines().await;
    let one = [&engines[0]];
    let fleet = Fleet::start_with(&one, PATIENT, |settings| {
        settings.timeouts.first_request = PATIENT * 2;
    });
    let listening = Listening::of(&fleet.await).await;
    let silent = TcpStream::connect(listening.address).await.unwrap();
    let open = &listening.metrics.connections;
    eventually("it is accepted", || open.get() == 1).await;
    listening.drain.cancel();
    assert_eq!(listening.server.await.unwrap().cut, 0);
    drop(silent);
}

#[tokio::test]
async fn a_connection_pending_at_the_drain_is_served() {
    let engines = engines().await;
    let fleet = Fleet::start(&[&engines[0]]).await;
    let drain = CancellationToken::new();
    let (open, opened) = oneshot::channel::<()>();
    let opened = async { opened.await.unwrap() };
    let listening = Listening::once(&fleet, drain.clone(), opened).await;
    // The kernel accepts the connection; the application has not.
    let channel = Endpoint::from_shared(format!("http://{}", listening.address));
    let mut client = ExternalProcessorClient::connect(channel.unwrap())
        .await
        .unwrap();
    let asking = tokio::spawn(async move {
        let (say, said) = mpsc::channel::<ProcessingRequest>(1);
        drop(say);
        client.process(ReceiverStream::new(said)).await.map(drop)
    });
    drain.cancel();
    open.send(()).unwrap();
    asking.await.unwrap().expect("it is served, not reset");
    assert_eq!(listening.server.await.unwrap().cut, 0);
}
