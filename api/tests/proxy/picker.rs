//! The endpoint picker, message by message: the protocol of each kind of gateway, the charges, and
//! gateways that violate the protocol.

use api::proxy::RequestOutcome;
use api::proxy::picker::ext_proc::body_mutation::Mutation;
use api::proxy::picker::ext_proc::processing_request::Request as ProcessingMessage;
use api::proxy::picker::ext_proc::processing_response::Response as Heard;
use api::proxy::picker::ext_proc::{BodySendMode, HttpTrailers, ProcessingRequest};
use api::proxy::picker::{PickedOutcome, ServedBy};
use state::command::Charge;
use tonic::Code;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::engine::{DONE, delta, usage_chunk};
use super::fleet::eventually;
use super::picking::{
    CHAT, ConnectedPicker, EVENTS, Listening, body_of, engines, head, head_of, header, modes, only,
    plain, reply, start, start_with, upload,
};

#[tokio::test]
async fn a_picked_request_is_charged_its_usage() {
    let engines = engines().await;
    let (fleet, picking) = start(&engines).await;
    let mut talk = picking.ask(CHAT, 10, plain()).await;
    let (endpoints, changed) = talk.picked().await;
    let [first, second] = endpoints.split(',').collect::<Vec<_>>()[..] else {
        panic!("{endpoints}");
    };
    let known = engines.each_ref().map(|it| it.address.to_string());
    assert!(first != second && known.iter().all(|it| endpoints.contains(it)));
    let sent = talk.streamed().await;
    assert!(sent.contains("\"include_usage\":true"), "{sent}");
    assert_eq!(
        header(&changed, "content-length"),
        Some(sent.len().to_string())
    );
    assert!(
        changed
            .remove_headers
            .contains(&"accept-encoding".to_owned())
    );
    assert_eq!(fleet.running(), 1);

    let head = talk.begin(EVENTS, Some(first)).await;
    let name = header(&head, "x-quorate-backend").unwrap();
    assert_eq!(first == known[1], name == "e1");
    let (one, two) = (delta("a", 1), delta("b", 5));
    talk.answer(&[&one, &two, usage_chunk(), DONE]).await;
    let answer = talk.streamed().await;
    assert!(answer.ends_with(DONE) && answer.contains("\"content\":\"b\""));
    assert!(
        !answer.contains("usage"),
        "its client did not ask: {answer}"
    );
    talk.is_over().await;
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::Finished, 200), 1);
    eventually("it is counted", || {
        picking.metrics.requests(PickedOutcome::Picked) == 1
    })
    .await;
    assert_eq!(picking.metrics.answers(ServedBy::First), 1);
    let charge = fleet.charged().await;
    assert_eq!((charge.started, charge.ended, charge.output), (1, 1, 5));
}

#[tokio::test]
async fn a_disconnected_client_is_charged_the_engines_count() {
    let engines = engines().await;
    let (fleet, picking) = start(&engines).await;
    let mut talk = picking.ask(CHAT, 1000, plain()).await;
    talk.answering().await;
    for text in [delta("a", 1), delta("b", 5)] {
        talk.say(reply(&text, false)).await;
        body_of(talk.next().await);
    }
    drop(talk);
    fleet.is_idle().await;
    let Charge {
        input_uncached,
        output,
        ..
    } = fleet.charged().await;
    assert_eq!((input_uncached, output), (7, 5));
}

#[tokio::test]
async fn a_request_cancelled_before_dispatch_costs_nothing() {
    let engines = engines().await;
    let (fleet, picking) = start(&engines).await;
    for said in [vec![head(), upload("{\"model\"", false)], Vec::new()] {
        let talk = picking.open();
        for said in said {
            talk.say(said).await;
        }
        eventually("it is open", || picking.metrics.streams.get() == 1).await;
        drop(talk);
        eventually("it is over", || picking.metrics.streams.get() == 0).await;
    }
    assert_eq!(picking.metrics.requests(PickedOutcome::Left), 2);
    fleet.is_idle().await;
    assert_eq!(fleet.charged().await, Charge::default());
}

#[tokio::test]
async fn only_endpoints_offered_by_the_gateway_are_picked() {
    let engines = engines().await;
    let (fleet, picking) = start(&engines).await;
    let known = engines.each_ref().map(|it| it.address.to_string());
    for _ in 0..4 {
        let mut talk = picking.ask(CHAT, 1000, only(&known[1..])).await;
        assert_eq!(talk.picked().await.0, known[1]);
    }
    for none in [&[][..], &["10.9.9.9:1".to_owned(), "what".to_owned()][..]] {
        let mut talk = picking.ask(CHAT, 1000, only(none)).await;
        let (status, body) = talk.refused().await;
        assert_eq!(status, 503, "{body}");
        assert!(body.contains("no_endpoint_offered"), "{body}");
        talk.is_over().await;
    }
    fleet.is_idle().await;
}

#[tokio::test]
async fn local_answers_and_refusals_are_sent_by_the_gateway() {
    let engines = engines().await;
    let (fleet, picking) = start(&engines).await;
    for (body, status, code) in [
        ("{", 400, "invalid_request"),
        (r#"{"model":5}"#, 400, "invalid_request"),
        (r#"{"model":"other","prompt":"x"}"#, 404, "model_not_found"),
    ] {
        let mut talk = picking.ask(body, 5, plain()).await;
        let (told, text) = talk.refused().await;
        assert_eq!(told, status, "{text}");
        assert!(text.contains(code), "{text}");
    }
    for (method, path, status) in [
        ("GET", "/v1/models", 200),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/sleep", 404),
        ("GET", "/v1/responses/resp_1", 501),
    ] {
        let mut talk = picking.open();
        talk.say(ProcessingMessage::RequestHeaders(head_of(
            method, path, true,
        )))
        .await;
        assert_eq!(talk.refused().await.0, status, "{path}");
        talk.is_over().await;
    }
    let (large, picking) =
        start_with(&engines, |settings| settings.limits.body_bytes_max = 8).await;
    let mut talk = picking.ask(CHAT, 7, plain()).await;
    assert_eq!(talk.refused().await.0, 413);
    fleet.is_idle().await;
    large.is_idle().await;
}

#[tokio::test]
async fn buffered_bodies_are_answered_after_the_head() {
    let engines = engines().await;
    let (fleet, picking) = start(&engines).await;
    let buffered = BodySendMode::Buffered;
    let overriding = ConnectedPicker::overriding(&fleet).await;
    for (picking, requests) in [(&picking, buffered), (&overriding, BodySendMode::Streamed)] {
        let mut talk = picking.open();
        talk.say_with(head(), modes(requests, buffered, false))
            .await;
        let passes = talk.next().await;
        assert!(matches!(passes.response, Some(Heard::RequestHeaders(_))));
        assert_eq!(passes.mode_override.is_some(), requests != buffered);
        talk.say(upload(CHAT, true)).await;
        let (_, changed) = talk.picked().await;
        assert!(header(&changed, "content-length").is_some());
        talk.begin("application/json", None).await;
        let answer = r#"{"usage":{"prompt_tokens":7,"completion_tokens":3}}"#;
        talk.answer(&[answer]).await;
        let passes = body_of(talk.next().await);
        assert!(
            passes.body_mutation.is_none(),
            "an unchanged body need not come back"
        );
        talk.is_over().await;
    }
    fleet.is_idle().await;
    assert_eq!(fleet.charged().await.output, 6);
}

#[tokio::test]
async fn streamed_body_pieces_are_answered_individually() {
    let engines = engines().await;
    let (fleet, picking) = start(&engines).await;
    let streamed = BodySendMode::Streamed;
    let mut talk = picking.ask(CHAT, 30, modes(streamed, streamed, true)).await;
    talk.picked().await;
    let pieces = CHAT.len().div_ceil(30);
    for nth in 0..pieces {
        let piece = body_of(talk.next().await).body_mutation.unwrap().mutation;
        let is_whole = matches!(&piece, Some(Mutation::Body(it)) if it.ends_with(b"}"));
        assert_eq!(is_whole, nth == 0, "{piece:?}");
    }
    talk.begin(EVENTS, None).await;
    let one = delta("a", 4);
    for (data, end) in [(one.as_str(), false), (usage_chunk(), false), (DONE, true)] {
        talk.say(reply(data, end)).await;
        let piece = body_of(talk.next().await).body_mutation;
        let piece = piece.and_then(|it| it.mutation);
        let is_cleared = matches!(piece, Some(Mutation::ClearBody(true)));
        assert_eq!(is_cleared, data == usage_chunk(), "{piece:?}");
        assert_eq!(
            piece.is_none(),
            data == DONE,
            "only what is unchanged passes: {piece:?}"
        );
    }
    talk.is_over().await;
    fleet.is_idle().await;
}

#[tokio::test]
async fn the_second_endpoint_is_charged_if_the_gateway_used_it() {
    let engines = engines().await;
    let (fleet, picking) = start(&engines).await;
    let mut talk = picking.ask(CHAT, 1000, plain()).await;
    let (endpoints, _) = talk.picked().await;
    let second = endpoints.split(',').nth(1).unwrap().to_owned();
    talk.streamed().await;
    let head = talk.begin(EVENTS, Some(&second)).await;
    let is_last = second == engines[1].address.to_string();
    let name = if is_last { "e1" } else { "e0" };
    assert_eq!(header(&head, "x-quorate-backend").unwrap(), name);
    assert_eq!(fleet.running(), 1);
    let one = delta("a", 3);
    talk.answer(&[&one, DONE]).await;
    talk.streamed().await;
    fleet.is_idle().await;
    assert_eq!(picking.metrics.answers(ServedBy::Further), 1);
    let charge = fleet.charged().await;
    assert_eq!((charge.started, charge.ended, charge.output), (2, 2, 3));
}

#[tokio::test]
async fn trailers_pass_in_both_directions() {
    let engines = engines().await;
    let (fleet, picking) = start(&engines).await;
    let mut talk = picking.open();
    talk.say(head()).await;
    talk.say(upload(CHAT, false)).await;
    talk.say(ProcessingMessage::RequestTrailers(HttpTrailers::default()))
        .await;
    talk.picked().await;
    loop {
        match talk.next().await.response {
            Some(Heard::RequestBody(_)) => {}
            Some(Heard::RequestTrailers(_)) => break,
            other => panic!("{other:?}"),
        }
    }
    talk.begin(EVENTS, None).await;
    talk.say(reply(DONE, false)).await;
    talk.say(ProcessingMessage::ResponseTrailers(HttpTrailers::default()))
        .await;
    body_of(talk.next().await);
    loop {
        match talk.next().await.response {
            Some(Heard::ResponseBody(_)) => {}
            Some(Heard::ResponseTrailers(_)) => break,
            other => panic!("{other:?}"),
        }
    }
    talk.is_over().await;
    fleet.is_idle().await;
}

#[tokio::test]
async fn gateways_that_send_no_bodies_get_a_configuration_hint() {
    let engines = engines().await;
    let (fleet, picking) = start(&engines).await;
    let duplex = BodySendMode::FullDuplexStreamed;
    for (requests, answers) in [
        (BodySendMode::None, duplex),
        (duplex, BodySendMode::None),
        (BodySendMode::BufferedPartial, duplex),
    ] {
        let more = modes(requests, answers, false);
        let mut talk = picking.ask(CHAT, 1000, more).await;
        assert_eq!(talk.fails().await.code(), Code::FailedPrecondition);
    }
    let observing = ProcessingRequest {
        observability_mode: true,
        ..plain()
    };
    let mut talk = picking.ask(CHAT, 1000, observing).await;
    assert_eq!(talk.fails().await.code(), Code::FailedPrecondition);
    fleet.is_idle().await;
}

#[tokio::test]
async fn messages_out_of_order_end_the_stream_with_an_error() {
    let engines = engines().await;
    let (fleet, picking) = start(&engines).await;
    let piece = || reply("x", false);
    let mut talk = picking.open();
    talk.say(piece()).await;
    assert_eq!(talk.fails().await.code(), Code::FailedPrecondition);
    for said in [piece(), head(), upload("x", true)] {
        let mut talk = picking.ask(CHAT, 1000, plain()).await;
        talk.picked().await;
        talk.streamed().await;
        talk.say(said).await;
        assert_eq!(talk.fails().await.code(), Code::FailedPrecondition);
    }
    let mut talk = picking.ask(CHAT, 1000, plain()).await;
    talk.answering().await;
    talk.say(head()).await;
    assert_eq!(talk.fails().await.code(), Code::FailedPrecondition);
    fleet.is_idle().await;
    assert_eq!(picking.metrics.requests(PickedOutcome::Broken), 5);
}

#[tokio::test]
async fn health_watchers_do_not_delay_shutdown() {
    let engines = engines().await;
    let (fleet, _) = start(&engines).await;
    let listening = Listening::of(&fleet).await;
    let gateway = Channel::from_shared(format!("http://{}", listening.address)).unwrap();
    let mut client = HealthClient::new(gateway.connect().await.unwrap());
    let ask = |service: &str| HealthCheckRequest {
        service: service.to_owned(),
    };
    let unknown = client.check(ask("another")).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
    let mut watched = Vec::new();
    for (service, status) in [
        ("", ServingStatus::Serving),
        ("another", ServingStatus::ServiceUnknown),
    ] {
        let mut told = client.watch(ask(service)).await.unwrap().into_inner();
        let first = told.message().await.unwrap().unwrap();
        assert_eq!(first.status(), status, "{service:?}");
        watched.push(told);
    }
    listening.drain.cancel();
    for mut told in watched {
        assert_eq!(told.message().await.unwrap(), None);
    }
    assert_eq!(listening.server.await.unwrap().cut, 0);
}
