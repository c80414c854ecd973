//! Engines that fail, hang or send nonsense.

use std::sync::Arc;
use std::time::Duration;

use api::proxy::RequestOutcome;
use tokio::sync::Semaphore;

use super::client::chat;
use super::engine::{DONE, Engine, Step, chunk, delta, json, last_chunk, stream_head};
use super::fleet::{Fleet, eventually};

const STREAM: &str = ",\"stream\":true";

/// Returns the `code` of the error event at the end of `body`.
fn last_event_code(body: &str) -> String {
    let event = body.trim_end().rsplit("\n\n").next().unwrap();
    let json = event
        .lines()
        .find_map(|line| line.strip_prefix("data: "))
        .unwrap();
    let value: serde_json::Value = serde_json::from_str(json).unwrap();
    value["error"]["code"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_stream_broken_by_the_engine_ends_with_an_error_event() {
    let half = "data: {\"choices\":[{\"ind";
    let engine = Engine::always(vec![
        stream_head(),
        chunk(&delta("a", 1)),
        chunk(half),
        Step::Close,
    ])
    .await;
    let fleet = Fleet::start(&[&engine]).await;
    let answer = fleet.client().await.ask(chat(STREAM)).await;
    assert!(answer.is_complete);
    assert!(answer.body.contains("\"content\":\"a\"") && !answer.body.contains(half));
    assert!(!answer.body.contains("[DONE]"));
    assert_eq!(last_event_code(&answer.body), "backend_broke");
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::BrokenOff, 200), 1);
}

#[tokio::test]
async fn an_unframed_stream_needs_its_done_event() {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";
    for (last, is_whole) in [("", false), ("data: [DONE]\n\n", true)] {
        let text = format!("{head}{}{last}", delta("a", 1));
        let engine = Engine::always(vec![Step::Send(text.into_bytes()), Step::Close]).await;
        let fleet = Fleet::start(&[&engine]).await;
        let answer = fleet.client().await.ask(chat(STREAM)).await;
        assert_eq!(answer.body.ends_with("[DONE]\n\n"), is_whole);
        assert_eq!(answer.body.contains("backend_broke"), !is_whole);
        fleet.is_idle().await;
    }
}

#[tokio::test]
async fn a_stream_broken_after_its_last_event_is_complete() {
    let engine = Engine::always(vec![
        stream_head(),
        chunk(&delta("a", 1)),
        chunk("data: [DONE]\n\n"),
        Step::Close,
    ])
    .await;
    let fleet = Fleet::start(&[&engine]).await;
    let answer = fleet.client().await.ask(chat(STREAM)).await;
    assert!(answer.is_complete && answer.body.ends_with("[DONE]\n\n"));
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::Finished, 200), 1);
}

#[tokio::test]
async fn an_unframed_document_must_be_complete_json() {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n";
    for (body, is_whole) in [("{\"a\":{\"b\":1}", false), ("{\"a\":{\"b\":1}}", true)] {
        let text = format!("{head}{body}");
        let engine = Engine::always(vec![Step::Send(text.into_bytes()), Step::Close]).await;
        let fleet = Fleet::start(&[&engine]).await;
        let answer = fleet.client().await.ask(chat("")).await;
        assert_eq!(answer.is_complete, is_whole, "{body}");
        fleet.is_idle().await;
    }
}

#[tokio::test]
async fn a_document_broken_by_the_engine_never_looks_complete() {
    let long = "x".repeat(1000);
    for head in [
        format!("content-length: 2000\r\n\r\n{{\"a\":\"{long}"),
        format!("transfer-encoding: chunked\r\n\r\n3ea\r\n\"{long}\"\r\n"),
    ] {
        let text = format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n{head}");
        let engine = Engine::always(vec![Step::Send(text.into_bytes()), Step::Close]).await;
        let fleet = Fleet::start(&[&engine]).await;
        let mut client = fleet.client().await;
        let answer = client.ask(chat("")).await;
        // The headers may or may not have been in flight when the connection was cut.
        assert!(!answer.is_complete, "{head}");
        fleet.is_idle().await;
        assert_eq!(fleet.count(RequestOutcome::BrokenOff, 200), 1);
    }
}

#[tokio::test]
async fn an_answer_that_breaks_before_its_first_byte_is_a_502() {
    let json = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n";
    let events = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n";
    let error = "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n";
    for (head, body) in [
        (json, "content-length: 100\r\n\r\n"),
        (json, "transfer-encoding: chunked\r\n\r\n"),
        (json, "transfer-encoding: chunked\r\n\r\nxyz\r\n"),
        // Too little to tell an answer from an error.
        (json, "content-length: 100\r\n\r\n{\"a\":"),
        (json, "transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"),
        (json, "\r\n"),
        (events, "transfer-encoding: chunked\r\n\r\n"),
        (events, "\r\n"),
        (error, "content-length: 100\r\n\r\n"),
    ] {
        let text = format!("{head}{body}");
        let engine = Engine::always(vec![Step::Send(text.clone().into()), Step::Close]).await;
        let fleet = Fleet::start(&[&engine]).await;
        let mut client = fleet.client().await;
        let answer = client.ask(chat("")).await;
        assert_eq!(
            (answer.status, answer.error_code().as_str()),
            (502, "backend_broke"),
            "{text}"
        );
        assert_eq!(answer.header("x-should-retry"), Some("false"), "{text}");
        assert_eq!(engine.requests().len(), 1, "{text}");
        fleet.is_idle().await;
        assert_eq!(fleet.count(RequestOutcome::Failed, 502), 1, "{text}");
    }
}

#[tokio::test]
async fn an_answer_without_a_body_is_complete() {
    for head in [
        "HTTP/1.1 204 No Content\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ] {
        let engine = Engine::always(vec![Step::Send(head.into())]).await;
        let fleet = Fleet::start(&[&engine]).await;
        let answer = fleet.client().await.ask(chat("")).await;
        assert_eq!(
            (answer.is_complete, answer.body.as_str()),
            (true, ""),
            "{head}"
        );
        assert!(head.contains(&answer.status.to_string()), "{head}");
        fleet.is_idle().await;
    }
}

#[tokio::test]
async fn a_head_does_not_wait_for_a_slow_first_token() {
    let token = Arc::new(Semaphore::new(0));
    let engine = Engine::always(vec![
        stream_head(),
        Step::Await(Arc::clone(&token)),
        chunk(&delta("a", 1)),
        chunk(DONE),
        last_chunk(),
    ])
    .await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    client.send(chat(STREAM)).await;
    client.read_until("text/event-stream").await;
    token.add_permits(1);
    let answer = client.answer().await;
    assert!(answer.is_complete && answer.body.ends_with(DONE));
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::Finished, 200), 1);
}

#[tokio::test]
async fn an_engine_that_does_not_speak_http_is_a_502() {
    let bomb = format!("HTTP/1.1 200 OK\r\nx-a: {}\r\n\r\n", "b".repeat(1_000_000));
    let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "x-a: b\r\n".repeat(1000));
    for text in ["SSH-2.0-OpenSSH\r\n\r\n", "\0\0\0\0\r\n\r\n", &bomb, &many] {
        let engine = Engine::always(vec![Step::Send(text.into()), Step::Hang]).await;
        let fleet = Fleet::start(&[&engine]).await;
        let answer = fleet.client().await.ask(chat("")).await;
        let start = &text[..text.len().min(20)];
        assert_eq!(
            (answer.status, answer.error_code().as_str()),
            (502, "backend_broke"),
            "{start}"
        );
        fleet.is_idle().await;
    }
}

#[tokio::test]
async fn an_engine_that_switches_protocols_is_a_502() {
    let switch = "HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n";
    let engine = Engine::always(vec![Step::Send(switch.into()), Step::Hang]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let answer = fleet.client().await.ask(chat("")).await;
    assert_eq!(answer.status, 502);
    fleet.is_idle().await;
}

#[tokio::test]
async fn an_old_engines_stream_is_framed_for_the_client() {
    let head = "HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";
    let text = format!("{head}{}data: [DONE]\n\n", delta("a", 1));
    let engine = Engine::always(vec![Step::Send(text.into_bytes()), Step::Close]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    for _ in 0..2 {
        let answer = client.ask(chat(STREAM)).await;
        assert!(answer.is_complete && answer.body.ends_with("[DONE]\n\n"));
        assert_eq!(answer.header("transfer-encoding"), Some("chunked"));
    }
}

#[tokio::test]
async fn an_engine_that_never_answers_is_a_504() {
    let engine = Engine::always(vec![Step::Hang]).await;
    let fleet = Fleet::start_with(&[&engine], Duration::ZERO, |settings| {
        settings.timeouts.first_byte = Duration::from_millis(20);
    })
    .await;
    let answer = fleet.client().await.ask(chat("")).await;
    answer.refuses(504, "backend_timeout");
    assert_eq!(answer.header("x-should-retry"), Some("false"));
    super::fleet::eventually("the engine is left", || engine.abandoned() == 1).await;
    fleet.is_idle().await;
}

#[tokio::test]
async fn a_silent_engine_is_abandoned_with_an_error() {
    for (before, first_byte) in [(None, 20), (Some(chunk(&delta("a", 1))), 60_000)] {
        let steps = [Some(stream_head()), before, Some(Step::Hang)];
        let engine = Engine::always(steps.into_iter().flatten().collect()).await;
        let fleet = Fleet::start_with(&[&engine], Duration::ZERO, |settings| {
            settings.timeouts.first_byte = Duration::from_millis(first_byte);
            settings.timeouts.answer_idle = Duration::from_millis(20);
        })
        .await;
        let answer = fleet.client().await.ask(chat(STREAM)).await;
        assert!(answer.is_complete);
        assert_eq!(last_event_code(&answer.body), "backend_timeout");
        super::fleet::eventually("the engine is left", || engine.abandoned() == 1).await;
        fleet.is_idle().await;
    }
}

#[tokio::test]
async fn an_engine_fault_affects_one_request_only() {
    let engine = Engine::start(|number| match number % 2 {
        0 => vec![Step::Send(b"garbage\r\n\r\n".to_vec()), Step::Close],
        _ => vec![super::engine::json("200 OK", "{}")],
    })
    .await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    assert_eq!(client.ask(chat("")).await.status, 502);
    assert_eq!(client.ask(chat("")).await.status, 200);
    fleet.is_idle().await;
}

#[tokio::test]
async fn informational_answers_are_bounded() {
    let informational = |count: usize| {
        let kinds = ["100 Continue", "102 Processing", "103 Early Hints"];
        let answers = kinds.iter().cycle().take(count);
        let answers = answers.map(|kind| format!("HTTP/1.1 {kind}\r\n\r\n"));
        Step::Send(answers.collect::<String>().into_bytes())
    };
    let engine = Engine::always(vec![informational(8), json("200 OK", "{}")]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    for _ in 0..3 {
        // Each request has its own limit.
        assert_eq!(client.ask(chat("")).await.status, 200);
    }
    assert_eq!(engine.connections(), 1);

    let engine = Engine::always(vec![informational(9), Step::Hang]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let answer = fleet.client().await.ask(chat("")).await;
    answer.refuses(502, "backend_broke");
    fleet.is_idle().await;
    eventually("its connection is closed", || engine.abandoned() == 1).await;
    assert_eq!(engine.requests().len(), 1, "it may have run the request");
}
