//! The time to the first token is that of the first output of a stream.

use std::sync::Arc;

use serde_json::{Value, json};
use tokio::sync::Semaphore;

use super::client::{chat, post};
use super::engine::{DONE, Engine, Step, chunk, delta, json as document, last_chunk, stream_head};
use super::fleet::{Fleet, eventually};

/// Returns the number of requests counted in the histogram of times to the first token.
fn first_tokens(fleet: &Fleet) -> u64 {
    let mut registry = prometheus_client::registry::Registry::default();
    fleet.metrics.register(&mut registry);
    let mut page = String::new();
    prometheus_client::encoding::text::encode(&mut page, &registry).unwrap();
    let name = "quorate_proxy_ttft_seconds_count ";
    let line = page.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap().parse().unwrap()
}

async fn record(fleet: &Fleet) -> Value {
    let path = "/admin/v1/decisions/first";
    let (_, record) = fleet.call("GET", path, &Value::Null).await;
    record["decisions"][0]["outcome"].clone()
}

fn named(request: &str) -> String {
    request.replace("host:", "x-request-id: first\r\nhost:")
}

#[tokio::test]
async fn events_without_output_are_no_first_token() {
    let chats = chat(",\"stream\":true");
    let messages = post(
        "/v1/messages",
        "",
        r#"{"model":"m","stream":true,"max_tokens":9,"messages":[{"role":"user","content":"hello"}]}"#,
    );
    let responses = post(
        "/v1/responses",
        "",
        r#"{"model":"m","stream":true,"input":"hello"}"#,
    );
    let text = "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"a\"}}\n\n";
    let call = "event: response.function_call_arguments.delta\ndata: {\"type\":\"response.function_call_arguments.delta\",\"delta\":\"{\"}\n\n";
    for (request, structure, output) in [
        (&chats, ": wait\n\n", delta("a", 1)),
        (
            &chats,
            "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
            delta("a", 1),
        ),
        (
            &messages,
            "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":3,\"output_tokens\":1}}}\n\n",
            text.to_owned(),
        ),
        (
            &responses,
            "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"status\":\"in_progress\"}}\n\n",
            call.to_owned(),
        ),
    ] {
        let gate = Arc::new(Semaphore::new(0));
        let engine = Engine::always(vec![
            stream_head(),
            chunk(structure),
            Step::Await(Arc::clone(&gate)),
            chunk(&output),
            Step::Await(Arc::clone(&gate)),
            chunk(DONE),
            last_chunk(),
        ])
        .await;
        let fleet = Fleet::start(&[&engine]).await;
        let waiting = || fleet.router.load().here(fleet.backend(0)).waiting;
        let mut client = fleet.client().await;
        client.send(named(request)).await;
        client.read_until(structure.trim_end()).await;
        assert_eq!((first_tokens(&fleet), waiting()), (0, 1), "{structure}");
        gate.add_permits(1);
        // The usage that the client did not ask for is removed.
        let seen = output.split(",\"usage\"").next().unwrap();
        client.read_until(seen.trim_end()).await;
        assert_eq!((first_tokens(&fleet), waiting()), (1, 0), "{structure}");
        gate.add_permits(1);
        assert!(client.answer().await.is_complete);
        fleet.is_idle().await;
        let outcome = record(&fleet).await;
        assert!(outcome["ttft_ms"].as_f64() > Some(0.0), "{outcome}");
    }
}

#[tokio::test]
async fn an_unstreamed_answer_has_a_duration_and_no_first_token() {
    let body = r#"{"choices":[{"message":{"content":"a"}}],"usage":{"prompt_tokens":7,"completion_tokens":2}}"#;
    let engine = Engine::always(vec![document("200 OK", body)]).await;
    let fleet = Fleet::start(&[&engine]).await;
    assert_eq!(fleet.client().await.ask(named(&chat(""))).await.body, body);
    fleet.is_idle().await;
    assert_eq!(first_tokens(&fleet), 0);
    let outcome = record(&fleet).await;
    assert_eq!(outcome["ttft_ms"], json!(null));
    assert!(outcome["duration_ms"].as_f64() > Some(0.0));
    eventually("the engine counts as answering", || {
        fleet
            .backends
            .circuit(fleet.backend(0), tokio::time::Instant::now())
            .recent_failures
            == 0
    })
    .await;
}
