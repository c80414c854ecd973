//! Requests on two engines at once, as in SGLang: both receive the request, with the bootstrap room
//! in which they meet.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use api::engines::backends::BOOTSTRAP_PORT_LABEL;
use api::proxy::RequestOutcome;
use serde_json::{Value, json};
use state::command::{BackendRole, BackendSpec, Command};
use tokio::sync::Semaphore;

use super::client::post;
use super::disaggregated::{ANSWERED, answered_by, body, long, tokens};
use super::engine::{DONE, Engine, Step, chunk, delta, json as whole, last_chunk, stream_head};
use super::fleet::{Fleet, eventually};

const COMPUTED: &str = r#"{"id":"p","choices":[{"index":0,"text":"y"}],"usage":{"prompt_tokens":1010,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":400}}}"#;
const BOTH: BackendRole = BackendRole::Both;
const PREFILL: BackendRole = BackendRole::Prefill;
const DECODE: BackendRole = BackendRole::Decode;

fn put(fleet: &Fleet, number: usize, engine: &Engine, role: BackendRole, port: Option<&str>) {
    let label = port.map(|port| (BOOTSTRAP_PORT_LABEL.to_owned(), port.to_owned()));
    fleet.apply(Command::PutBackend(BackendSpec {
        id: format!("e{number}"),
        url: format!("http://{}", engine.address),
        models: vec!["m".to_owned()],
        labels: label.into_iter().collect(),
        capacity_blocks: Some(100_000),
        kv_events: None,
        kv_replay: None,
        role,
    }));
}

/// Starts a fleet of engines with these roles. Those with the role `Prefill` or `Decode` work in
/// pairs that meet in rooms.
async fn meeting(engines: &[(&Engine, BackendRole)]) -> Fleet {
    let all: Vec<&Engine> = engines.iter().map(|(engine, _)| *engine).collect();
    let fleet = Fleet::start(&all).await;
    for (number, (engine, role)) in engines.iter().enumerate() {
        put(&fleet, number, engine, *role, Some("9001"));
    }
    fleet
}

fn asking(path: &str, body: &str) -> String {
    post(path, "content-type: application/json\r\n", body)
}

/// Waits until both engines of a pair have received a request.
async fn both_have_it(computing: &Engine, answering: &Engine) {
    eventually("both have it", || {
        computing.requests().len() + answering.requests().len() == 2
    })
    .await;
}

#[tokio::test]
async fn both_engines_get_the_request_with_a_room_at_once() {
    let gate = Arc::new(Semaphore::new(0));
    let steps = vec![Step::Await(Arc::clone(&gate)), whole("200 OK", COMPUTED)];
    let computing = Engine::always(steps).await;
    let answering = Engine::always(vec![whole("200 OK", ANSWERED)]).await;
    let fleet = meeting(&[(&computing, PREFILL), (&answering, DECODE)]).await;
    let mut client = fleet.client().await;
    client.send(long("")).await;
    both_have_it(&computing, &answering).await;
    gate.add_permits(1);
    let answer = client.answer().await;
    assert_eq!(answered_by(&answer), (200, Some("e0"), Some("e1")));
    assert_eq!(answer.body, ANSWERED);
    let [asked, got] = [&computing, &answering].map(|engine| body(&engine.requests()[0]));
    assert_eq!(asked, got, "the same to the byte's meaning");
    assert_eq!(got["bootstrap_host"], "127.0.0.1");
    assert_eq!(got["bootstrap_port"], 9001);
    assert!(
        got["bootstrap_room"].is_u64() && got["max_tokens"] == 30,
        "{got}"
    );
    fleet.is_idle().await;
    // The tokens that the prefill engine found cached count as cached.
    assert_eq!(tokens(&fleet.charged().await), [610, 400, 30]);
}

#[tokio::test]
async fn streams_come_from_decode_and_each_attempt_has_its_room() {
    let usage = r#"data: {"choices":[],"usage":{"prompt_tokens":1010,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":10}}}"#;
    let steps = vec![
        stream_head(),
        chunk(&format!("{usage}\n\n")),
        chunk(DONE),
        last_chunk(),
    ];
    let computing = Engine::always(steps).await;
    let steps = vec![
        stream_head(),
        chunk(&delta("a", 1)),
        chunk(DONE),
        last_chunk(),
    ];
    let answering = Engine::always(steps).await;
    let fleet = meeting(&[(&computing, PREFILL), (&answering, DECODE)]).await;
    for _ in 0..2 {
        let answer = fleet.client().await.ask(long(",\"stream\":true")).await;
        assert_eq!(answered_by(&answer), (200, Some("e0"), Some("e1")));
        assert!(answer.body.contains("[DONE]") && answer.is_complete);
        assert!(
            answer.body.contains("\"a\"") && !answer.body.contains("1010"),
            "{}",
            answer.body
        );
    }
    let rooms = answering.requests();
    let [first, second] = [0, 1].map(|nth| body(&rooms[nth])["bootstrap_room"].clone());
    assert_ne!(first, second);
    fleet.is_idle().await;
}

#[tokio::test]
async fn a_failed_prefill_engine_is_replaced_with_its_pair() {
    let error = "data: {\"error\":{\"message\":\"KV transfer failed\",\"code\":500}}\n\n";
    for (failure, is_stream) in [
        (vec![whole("500 Internal Server Error", "{}")], false),
        (vec![whole("503 Service Unavailable", "{}")], false),
        (vec![Step::Close], false),
        (
            vec![
                Step::Send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{".to_vec()),
                Step::Close,
            ],
            false,
        ),
        (vec![stream_head(), chunk(error), last_chunk()], true),
    ] {
        // The engine that is called first fails, once the other one has the request.
        let gate = Arc::new(Semaphore::new(0));
        let asked = Arc::new(AtomicUsize::new(0));
        let prefill = || {
            let (gate, asked) = (Arc::clone(&gate), Arc::clone(&asked));
            let failure = failure.clone();
            Engine::start(move |_| match asked.fetch_add(1, Ordering::SeqCst) {
                0 => [vec![Step::Await(Arc::clone(&gate))], failure.clone()].concat(),
                _ => vec![whole("200 OK", COMPUTED)],
            })
        };
        let (one, two) = (prefill().await, prefill().await);
        let answering = Engine::start(|number| match number {
            0 => vec![Step::Hang],
            _ => vec![whole("200 OK", ANSWERED)],
        })
        .await;
        let engines = [(&one, PREFILL), (&two, PREFILL), (&answering, DECODE)];
        let fleet = meeting(&engines).await;
        let mut client = fleet.client().await;
        let fields = if is_stream { ",\"stream\":true" } else { "" };
        client.send(long(fields)).await;
        eventually("it was asked", || answering.requests().len() == 1).await;
        gate.add_permits(1);
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.body.as_str()), (200, ANSWERED));
        assert_eq!((one.requests().len(), two.requests().len()), (1, 1));
        eventually("the first room is left", || answering.abandoned() == 1).await;
        let rooms = answering.requests();
        let [first, second] = [0, 1].map(|nth| body(&rooms[nth])["bootstrap_room"].clone());
        assert_ne!(first, second);
        fleet.is_idle().await;
        assert_eq!(tokens(&fleet.charged().await), [610, 400, 30]);
    }
}

#[tokio::test]
async fn without_another_prefill_engine_the_client_gets_the_cause() {
    for (steps, status, code) in [
        (vec![whole("500 Internal Server Error", "{}")], 500, None),
        (vec![Step::Close], 502, Some("backend_broke")),
    ] {
        let computing = Engine::always(steps).await;
        let answering = Engine::always(vec![Step::Hang]).await;
        let fleet = meeting(&[(&computing, PREFILL), (&answering, DECODE)]).await;
        let answer = fleet.client().await.ask(long("")).await;
        assert_eq!(answer.status, status, "{}", answer.body);
        let body: Value = serde_json::from_str(&answer.body).unwrap();
        assert_eq!(body["error"]["code"].as_str(), code);
        fleet.is_idle().await;
        assert_eq!(tokens(&fleet.charged().await), [0; 3]);
    }
    let (dead, answering) = (Engine::dead().await, Engine::always(vec![Step::Hang]).await);
    let fleet = meeting(&[(&dead, PREFILL), (&answering, DECODE)]).await;
    let answer = fleet.client().await.ask(long("")).await;
    assert_eq!(answer.status, 503, "{}", answer.body);
    fleet.is_idle().await;
}

#[tokio::test]
async fn a_client_error_is_not_retried() {
    let refusal = r#"{"object":"error","message":"max_tokens is too large","code":400}"#;
    let computing = Engine::always(vec![whole("400 Bad Request", refusal)]).await;
    let other = Engine::always(vec![whole("400 Bad Request", refusal)]).await;
    let answering = Engine::always(vec![Step::Hang]).await;
    let engines = [
        (&computing, PREFILL),
        (&other, PREFILL),
        (&answering, DECODE),
    ];
    let fleet = meeting(&engines).await;
    let answer = fleet.client().await.ask(long("")).await;
    assert_eq!((answer.status, answer.body.as_str()), (400, refusal));
    assert_eq!(computing.requests().len() + other.requests().len(), 1);
    fleet.is_idle().await;
}

#[tokio::test]
async fn a_failed_decode_engine_is_replaced_before_the_first_byte() {
    let computing = Engine::always(vec![whole("200 OK", COMPUTED)]).await;
    let (dead, alive) = (
        Engine::dead().await,
        Engine::always(vec![whole("200 OK", ANSWERED)]).await,
    );
    let fleet = meeting(&[(&computing, PREFILL), (&dead, DECODE), (&alive, DECODE)]).await;
    for _ in 0..4 {
        let answer = fleet.client().await.ask(long("")).await;
        assert_eq!(answered_by(&answer), (200, Some("e0"), Some("e2")));
    }
    fleet.is_idle().await;

    // A server error of an engine that has the prompt, as after a failed transfer.
    let asked = Arc::new(AtomicUsize::new(0));
    let answering = || {
        let asked = Arc::clone(&asked);
        Engine::start(move |_| match asked.fetch_add(1, Ordering::SeqCst) {
            0 => vec![whole("500 Internal Server Error", "{}")],
            _ => vec![whole("200 OK", ANSWERED)],
        })
    };
    let (one, two) = (answering().await, answering().await);
    let (first, second) = (
        Engine::always(vec![whole("200 OK", COMPUTED)]).await,
        Engine::always(vec![whole("200 OK", COMPUTED)]).await,
    );
    let engines = [
        (&first, PREFILL),
        (&second, PREFILL),
        (&one, DECODE),
        (&two, DECODE),
    ];
    let fleet = meeting(&engines).await;
    let answer = fleet.client().await.ask(long("")).await;
    assert_eq!((answer.status, answer.body.as_str()), (200, ANSWERED));
    fleet.is_idle().await;
}

#[tokio::test]
async fn a_broken_answer_is_reported_like_any_other() {
    let computing = Engine::always(vec![whole("200 OK", COMPUTED)]).await;
    let steps = vec![stream_head(), chunk(&delta("a", 1)), Step::Close];
    let answering = Engine::always(steps).await;
    let fleet = meeting(&[(&computing, PREFILL), (&answering, DECODE)]).await;
    let answer = fleet.client().await.ask(long(",\"stream\":true")).await;
    assert!(answer.body.contains("\"error\""), "{}", answer.body);
    assert_eq!(computing.requests().len(), 1, "nothing is tried again");
    fleet.is_idle().await;
}

#[tokio::test]
async fn a_disconnect_closes_both_connections_and_is_charged() {
    let computing = Engine::always(vec![Step::Hang]).await;
    let answering = Engine::always(vec![Step::Hang]).await;
    let fleet = meeting(&[(&computing, PREFILL), (&answering, DECODE)]).await;
    let mut client = fleet.client().await;
    client.send(long("")).await;
    both_have_it(&computing, &answering).await;
    assert_eq!(fleet.running(), 2, "each has a place for it");
    drop(client);
    eventually("both are closed", || {
        computing.abandoned() + answering.abandoned() == 2
    })
    .await;
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::ClientLeft, 0), 1);
    let [uncached, _, output] = tokens(&fleet.charged().await);
    assert!(uncached > 900 && output == 0, "{uncached} {output}");
}

#[tokio::test]
async fn no_request_goes_to_half_of_a_pair() {
    let computing = Engine::always(vec![whole("200 OK", COMPUTED)]).await;
    let answering = Engine::always(vec![whole("200 OK", ANSWERED)]).await;
    let fleet = meeting(&[(&computing, PREFILL), (&answering, DECODE)]).await;
    let short = || asking("/v1/completions", r#"{"model":"m","prompt":"short"}"#);
    let chat = r#"{"model":"m","messages":[{"role":"user","content":"a"}],"n":2}"#;
    let requests = [
        (short(), json!(null)),
        (long(",\"prompt_logprobs\":1"), json!(null)),
        (asking("/v1/chat/completions", chat), json!(2)),
        (
            asking("/v1/completions", r#"{"model":"m","prompt":["a","b","c"]}"#),
            json!(3),
        ),
    ];
    for (number, (request, rooms)) in requests.into_iter().enumerate() {
        let answer = fleet.client().await.ask(request).await;
        assert_eq!(
            answered_by(&answer),
            (200, Some("e0"), Some("e1")),
            "{number}"
        );
        let told = body(&computing.requests()[number])["bootstrap_room"].clone();
        assert_eq!(json!(told.as_array().map(Vec::len)), rooms);
    }
    let embed = asking("/v1/embeddings", r#"{"model":"m","input":"a"}"#);
    for request in [
        embed.clone(),
        asking("/v1/responses", r#"{"model":"m","input":"a"}"#),
    ] {
        let answer = fleet.client().await.ask(request).await;
        answer.refuses(400, "needs_whole_backend");
    }
    // Either engine can answer requests that compute nothing.
    let told = asking("/tokenize", r#"{"model":"m","prompt":"a"}"#);
    let answer = fleet.client().await.ask(told).await;
    assert_eq!(answered_by(&answer), (200, None, Some("e1")));
    assert_eq!(
        (computing.requests().len(), answering.requests().len()),
        (4, 5)
    );

    // With another engine that serves whole requests, short or inseparable requests go there.
    let all = Engine::always(vec![whole("200 OK", ANSWERED)]).await;
    put(&fleet, 2, &all, BOTH, None);
    fleet.assume_healthy();
    for request in [short(), embed] {
        let answer = fleet.client().await.ask(request).await;
        assert_eq!(answered_by(&answer), (200, None, Some("e2")));
    }
    let answer = fleet.client().await.ask(long("")).await;
    assert_eq!(answered_by(&answer), (200, Some("e0"), Some("e1")));
    fleet.is_idle().await;
}

#[tokio::test]
async fn engines_of_different_kinds_make_no_pair() {
    let computing = Engine::always(vec![whole("200 OK", COMPUTED)]).await;
    let answering = Engine::always(vec![whole("200 OK", ANSWERED)]).await;
    let fleet = meeting(&[(&computing, PREFILL), (&answering, DECODE)]).await;
    // Without the label it counts as a vLLM engine.
    put(&fleet, 0, &computing, PREFILL, None);
    let answer = fleet.client().await.ask(long("")).await;
    answer.refuses(503, "no_prefill_backend");
    assert!(computing.requests().is_empty() && answering.requests().is_empty());
    put(&fleet, 0, &computing, PREFILL, Some("9001"));
    put(&fleet, 1, &answering, DECODE, None);
    let answer = fleet.client().await.ask(long("")).await;
    assert_eq!(answered_by(&answer), (200, None, Some("e1")));
    fleet.is_idle().await;
}

#[tokio::test]
async fn decode_engines_get_no_requests_without_a_prefill_engine() {
    let answering = Engine::always(vec![whole("200 OK", ANSWERED)]).await;
    let fleet = meeting(&[(&answering, DECODE)]).await;
    let answer = fleet.client().await.ask(long("")).await;
    answer.refuses(503, "no_prefill_backend");
    put(&fleet, 0, &answering, PREFILL, Some("9001"));
    let answer = fleet.client().await.ask(long("")).await;
    assert_eq!(answer.status, 503);
    assert!(answering.requests().is_empty());
}
