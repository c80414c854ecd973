//! Charges, above all for responses whose client has left.

use api::proxy::{Charges, ProxySettings, RequestOutcome};
use state::command::Charge;

use super::client::{chat, post};
use super::engine::{DONE, Engine, Step, chunk, delta, json, last_chunk, stream_head, usage_chunk};
use super::fleet::{Fleet, PATIENT, eventually};

const STREAM: &str = ",\"stream\":true";

/// Returns the charge of a client that leaves after it has received all of `chunks`.
async fn left_after(request: &str, chunks: &[String]) -> Charge {
    let mut steps = vec![stream_head()];
    steps.extend(chunks.iter().map(|text| chunk(text)));
    steps.extend([chunk(": seen\n\n"), Step::Hang]);
    let engine = Engine::always(steps).await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    client.send(request).await;
    client.read_until(": seen").await;
    drop(client);
    fleet.is_idle().await;
    let charge = fleet.charged().await;
    assert_eq!((charge.started, charge.ended), (1, 1));
    charge
}

/// Returns a chunk of one of several choices, without usage.
fn silent(choice: u32, text: &str) -> String {
    format!(
        "data: {{\"choices\":[{{\"index\":{choice},\"delta\":{{\"content\":\"{text}\"}}}}]}}\n\n"
    )
}

fn counted(choice: u32, completion_tokens: u32) -> String {
    delta("abcdefgh", completion_tokens).replace("\"index\":0", &format!("\"index\":{choice}"))
}

#[tokio::test]
async fn a_disconnected_client_is_charged_the_engines_count() {
    let charge = left_after(&chat(STREAM), &[delta("a", 1), delta("b", 5)]).await;
    assert_eq!((charge.input_uncached, charge.output), (7, 5));
}

#[tokio::test]
async fn every_choice_is_charged() {
    let chunks = [counted(0, 1), counted(1, 3), counted(0, 5), counted(1, 7)];
    let charge = left_after(&chat(",\"stream\":true,\"n\":2"), &chunks).await;
    assert_eq!((charge.input_uncached, charge.output), (7, 12));
}

#[tokio::test]
async fn a_disconnected_client_is_charged_an_estimate_without_counts() {
    let chunks = [silent(0, "12345678"), silent(1, "1234"), silent(0, "1234")];
    let charge = left_after(&chat(STREAM), &chunks).await;
    assert_eq!(charge.output, 4);
    assert!(charge.input_uncached > 0);
}

#[tokio::test]
async fn output_after_the_last_count_is_estimated() {
    let start = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"content\":[],\
                 \"usage\":{\"input_tokens\":9,\"output_tokens\":1}}}\n\n";
    let text = "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\
                \"delta\":{\"type\":\"text_delta\",\"text\":\"12345678\"}}\n\n";
    let body = r#"{"model":"m","stream":true,"max_tokens":9,"messages":[{"role":"user","content":"hello"}]}"#;
    let chunks = [start, text, text].map(str::to_owned);
    let charge = left_after(&post("/v1/messages", "", body), &chunks).await;
    assert_eq!((charge.input_uncached, charge.output), (9, 5));

    let delta = "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\
                 \"delta\":\"12345678\"}\n\n";
    let body = r#"{"model":"m","stream":true,"input":"hello"}"#;
    let charge = left_after(&post("/v1/responses", "", body), &[delta.to_owned()]).await;
    assert_eq!(charge.output, 2);
}

#[tokio::test]
async fn the_final_count_overrides_estimates() {
    let usage = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":20,\"completion_tokens\":3,\
                 \"prompt_tokens_details\":{\"cached_tokens\":16}}}\n\n";
    let steps = vec![
        stream_head(),
        chunk(&silent(
            0,
            "a long text that is three tokens to this engine",
        )),
        chunk(usage),
        chunk(DONE),
        last_chunk(),
    ];
    let engine = Engine::always(steps).await;
    let fleet = Fleet::start(&[&engine]).await;
    assert!(fleet.client().await.ask(chat(STREAM)).await.is_complete);
    fleet.is_idle().await;
    let charge = fleet.charged().await;
    assert_eq!(
        (charge.input_uncached, charge.input_cached, charge.output),
        (4, 16, 3)
    );
}

#[tokio::test]
async fn requests_without_generation_cost_nothing() {
    for (path, status) in [
        ("/tokenize", "200 OK"),
        ("/v1/messages/count_tokens", "200 OK"),
        ("/v1/chat/completions", "307 Temporary Redirect"),
        ("/v1/chat/completions", "400 Bad Request"),
    ] {
        let engine = Engine::always(vec![json(status, "{\"count\":5}")]).await;
        let fleet = Fleet::start(&[&engine]).await;
        let body = r#"{"model":"m","prompt":"hello","messages":[{"role":"user","content":"hello, hello, hello"}]}"#;
        let answer = fleet.client().await.ask(post(path, "", body)).await;
        // Redirects are not passed on.
        let told = status.replace("307", "502");
        assert!(told.starts_with(&answer.status.to_string()));
        let charge = fleet.charged().await;
        let only_counted = Charge {
            started: 1,
            ended: 1,
            ..Charge::default()
        };
        assert_eq!(charge, only_counted, "{path} {status}");
    }
}

#[tokio::test]
async fn a_client_that_disconnects_before_dispatch_is_not_charged() {
    // A listener with a full backlog: the kernel answers no further connection.
    let full = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    let any: std::net::SocketAddr = ([127, 0, 0, 1], 0).into();
    full.bind(&any.into()).unwrap();
    full.listen(0).unwrap();
    let address = full.local_addr().unwrap().as_socket().unwrap();
    let mut filling = Vec::new();
    loop {
        let connect = tokio::net::TcpStream::connect(address);
        let wait = std::time::Duration::from_millis(200);
        match tokio::time::timeout(wait, connect).await {
            Ok(connected) => filling.push(connected.unwrap()),
            Err(_) => break,
        }
    }
    let fleet = Fleet::start(&[&Engine::at(address)]).await;
    let mut client = fleet.client().await;
    client.send(chat("")).await;
    eventually("it is dispatched", || fleet.running() == 1).await;
    drop(client);
    fleet.is_idle().await;
    let charge = fleet.charged().await;
    assert_eq!((charge.started, charge.ended), (1, 1));
    assert_eq!((charge.input_uncached, charge.output), (0, 0));
}

#[tokio::test]
async fn usage_before_a_long_tail_is_charged() {
    let logprobs = r#"{"1":{"logprob":-0.5}},"#.repeat(30_000);
    let body = format!(
        "{{\"choices\":[{{\"index\":0,\"message\":{{\"content\":\"x\"}}}}],\
         \"usage\":{{\"prompt_tokens\":20000,\"completion_tokens\":4000}},\
         \"prompt_logprobs\":[{logprobs}null]}}"
    );
    let engine = Engine::always(vec![json("200 OK", &body)]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let request = chat(",\"prompt_logprobs\":1");
    assert_eq!(fleet.client().await.ask(request).await.body, body);
    fleet.is_idle().await;
    let charge = fleet.charged().await;
    assert_eq!((charge.input_uncached, charge.output), (20_000, 4_000));
}

#[tokio::test]
async fn usage_in_an_event_of_any_length_is_charged() {
    let head = "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"output\":[{\"text\":\"";
    let tail = "\"}],\"usage\":{\"input_tokens\":5000,\"output_tokens\":777}}}\n\n";
    let body = r#"{"model":"m","stream":true,"input":"hello"}"#;
    for bytes in [1_000, 300_000, 2_000_000] {
        let event = format!("{head}{}{tail}", "x".repeat(bytes));
        let mut steps = vec![stream_head()];
        steps.extend(event.as_bytes().chunks(16 * 1024).map(|piece| {
            let piece = std::str::from_utf8(piece).unwrap();
            chunk(piece)
        }));
        // The client has everything, although the engine does not end.
        steps.push(Step::Hang);
        let engine = Engine::always(steps).await;
        let fleet = Fleet::start(&[&engine]).await;
        let mut client = fleet.client().await;
        client.send(post("/v1/responses", "", body)).await;
        client.read_until("777}}}\n\n").await;
        drop(client);
        fleet.is_idle().await;
        assert_eq!(fleet.count(RequestOutcome::Finished, 200), 1, "{bytes}");
        let charge = fleet.charged().await;
        assert_eq!(
            (charge.input_uncached, charge.output),
            (5000, 777),
            "{bytes}"
        );
    }
}

#[tokio::test]
async fn unrequested_usage_is_removed_from_events_of_any_length() {
    let long = "x".repeat(600_000);
    let sent = format!(
        "data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{long}\"}}}}],\"usage\":{{\"prompt_tokens\":7,\"completion_tokens\":9}},\"id\":\"c\"}}\n\n"
    );
    let usage = ",\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":9}";
    let engine = Engine::always(vec![stream_head(), chunk(&sent), chunk(DONE), last_chunk()]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let answer = fleet.client().await.ask(chat(STREAM)).await;
    assert!(answer.body == format!("{}{DONE}", sent.replace(usage, "")));
    fleet.is_idle().await;
    let charge = fleet.charged().await;
    assert_eq!((charge.input_uncached, charge.output), (7, 9));
}

#[tokio::test]
async fn only_what_the_routers_usage_request_caused_is_removed() {
    let usage = ",\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":2}";
    let alone = "data: {\"id\":\"c\",\"choices\":[]";
    for (further, is_kept) in [
        ("", false),
        (",\"timings\":null", false),
        (",\"timings\":{\"predicted_n\":2}", true),
    ] {
        let last = format!("{alone}{usage}{further}}}\n\n");
        let steps = vec![
            stream_head(),
            chunk(&delta("a", 1)),
            chunk(&last),
            chunk(DONE),
            last_chunk(),
        ];
        let engine = Engine::always(steps).await;
        let fleet = Fleet::start(&[&engine]).await;
        let answer = fleet.client().await.ask(chat(STREAM)).await;
        let expected = match is_kept {
            true => format!("{alone}{further}}}\n\n{DONE}"),
            false => DONE.to_owned(),
        };
        assert!(
            answer.body.ends_with(&format!("}}\n\n{expected}")),
            "{}",
            answer.body
        );
        assert!(!answer.body.contains("usage"));
        let asked = fleet
            .client()
            .await
            .ask(chat(
                ",\"stream\":true,\"stream_options\":{\"include_usage\":true}",
            ))
            .await;
        assert!(
            asked.body.ends_with(&format!("{last}{DONE}")),
            "it was asked for"
        );
        fleet.is_idle().await;
    }
}

/// Returns the charge of a client that leaves before it has received anything, when the engine has
/// had time for the whole response.
async fn left_unseen(fields: &str, steps: Vec<Step>) -> Charge {
    let engine = Engine::always(steps).await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    client.send(chat(fields)).await;
    eventually("it is running", || engine.requests().len() == 1).await;
    let since = std::time::Instant::now();
    let enough = std::time::Duration::from_millis(150);
    eventually("time passes", || since.elapsed() > enough).await;
    drop(client);
    fleet.is_idle().await;
    fleet.charged().await
}

#[tokio::test]
async fn an_unseen_answer_is_charged_by_elapsed_time() {
    let charge = left_unseen(",\"max_tokens\":3", vec![Step::Hang]).await;
    assert_eq!(charge.output, 3);
    let charge = left_unseen(",\"max_tokens\":3,\"n\":4", vec![Step::Hang]).await;
    assert_eq!(charge.output, 12);
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: br\r\n\
                transfer-encoding: chunked\r\n\r\n";
    let steps = vec![
        Step::Send(head.as_bytes().to_vec()),
        chunk("unreadable"),
        Step::Hang,
    ];
    let charge = left_unseen(",\"stream\":true,\"max_tokens\":3", steps).await;
    assert_eq!(charge.output, 3);
    let charge = left_unseen(STREAM, vec![Step::Hang]).await;
    assert_eq!(charge.output, 0, "a stream shows what is made of it");
}

#[tokio::test]
async fn a_failed_answer_is_charged_as_far_as_it_may_have_run() {
    for (steps, status) in [
        (vec![Step::Close], 502),
        (vec![stream_head(), Step::Close], 502),
        (vec![json("500 Internal Server Error", "{}")], 500),
    ] {
        let engine = Engine::always(steps).await;
        let fleet = Fleet::start(&[&engine]).await;
        let answer = fleet.client().await.ask(chat("")).await;
        assert_eq!(answer.status, status);
        fleet.is_idle().await;
        let charge = fleet.charged().await;
        assert_eq!((charge.started, charge.ended), (1, 1));
        assert!(charge.input_uncached > 0, "{status}");
    }
}

#[tokio::test]
async fn the_last_event_waits_only_for_its_charge() {
    let events = [delta("a", 1), DONE.to_owned()].concat();
    let engine = Engine::always(vec![stream_head(), chunk(&events), Step::Hang]).await;
    let is_durable = |settings: &mut ProxySettings| settings.charges = Charges::Durable;
    let fleet = Fleet::start_with(&[&engine], PATIENT, is_durable).await;
    let mut client = fleet.client().await;
    client.send(chat(STREAM)).await;
    eventually("the answer is charged", || {
        !engine.requests().is_empty() && fleet.running() == 0
    })
    .await;
    assert!(fleet.charged().await.output > 0);
    client.read_until("[DONE]").await;
    drop(client);
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::Finished, 200), 1);
}

#[tokio::test]
async fn durable_charges_commit_before_the_answer_ends() {
    let stream = vec![
        stream_head(),
        chunk(&delta("a", 1)),
        chunk(usage_chunk()),
        chunk(DONE),
        last_chunk(),
    ];
    let document = r#"{"choices":[],"usage":{"prompt_tokens":20,"completion_tokens":3}}"#;
    for (steps, request) in [
        (stream, chat(STREAM)),
        (vec![json("200 OK", document)], chat("")),
    ] {
        let engine = Engine::always(steps).await;
        let is_durable = |settings: &mut ProxySettings| settings.charges = Charges::Durable;
        let fleet = Fleet::start_with(&[&engine], PATIENT, is_durable).await;
        let mut client = fleet.client().await;
        client.send(&request).await;
        eventually("the engine is done", || {
            !engine.requests().is_empty() && fleet.running() == 0
        })
        .await;
        let waiting = fleet.metrics.in_flight.get();
        assert_eq!(waiting, 1, "the answer has not ended");
        let charge = fleet.charged().await;
        assert_eq!((charge.started, charge.ended), (1, 1));
        assert!(charge.output > 0);
        assert!(client.answer().await.is_complete);
        fleet.is_idle().await;
        assert_eq!(fleet.metrics.charges_unconfirmed.get(), 0);
    }
}
