//! What reaches the engine and the client when nothing fails.

use std::sync::Arc;

use api::proxy::{RequestOutcome, UsageRequest};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use super::client::{chat, post};
use super::engine::{DONE, Engine, Step, chunk, delta, json, last_chunk, stream_head, usage_chunk};
use super::fleet::Fleet;

const ANSWER: &str = r#"{"id":"c","choices":[{"index":0,"message":{"role":"assistant","content":"hi"}}],"usage":{"prompt_tokens":3,"completion_tokens":1}}"#;

fn streamed() -> Vec<Step> {
    vec![
        stream_head(),
        chunk(&delta("a", 1)),
        chunk(&delta("b", 2)),
        chunk(usage_chunk()),
        chunk(DONE),
        last_chunk(),
    ]
}

#[tokio::test]
async fn request_and_answer_bodies_pass_byte_for_byte() {
    let engine = Engine::always(vec![json("200 OK", ANSWER)]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    let body = "{ \"model\":\"m\",\n \"messages\" : [{\"content\":\"\\u00e9é\",\"role\":\"user\"}], \"x\":1.50 }";
    let headers = "content-type: application/json\r\nx-request-id: abc\r\naccept-encoding: gzip\r\n\
                   traceparent: 00-1-2-01\r\nauthorization: Bearer k\r\nconnection: x-mine\r\nx-mine: 1\r\n";
    let answer = client
        .ask(post("/v1/chat/completions?a=b", headers, body))
        .await;
    assert_eq!((answer.status, answer.body.as_str()), (200, ANSWER));
    assert_eq!(answer.header("x-request-id"), Some("abc"));
    assert_eq!(answer.header("x-quorate-replica"), Some("1"));
    assert_eq!(answer.header("x-quorate-backend"), Some("e0"));
    assert_eq!(answer.header("x-quorate-policy"), Some("least-request"));
    assert!(
        answer
            .header("x-quorate-prefix")
            .is_some_and(|prefix| prefix.starts_with("0/"))
    );
    assert_eq!(answer.header("x-quorate-index"), Some("2"));

    let request = &engine.requests()[0];
    let (head, sent) = request.split_once("\r\n\r\n").unwrap();
    assert_eq!(sent, body);
    assert!(
        head.starts_with("POST /v1/chat/completions?a=b HTTP/1.1\r\n"),
        "{head}"
    );
    for line in [
        format!("host: {}", engine.address),
        "x-request-id: abc".to_owned(),
        "traceparent: 00-1-2-01".to_owned(),
        "authorization: Bearer k".to_owned(),
        "x-forwarded-for: 127.0.0.1".to_owned(),
    ] {
        assert!(head.contains(&format!("\r\n{line}")), "{line} in {head}");
    }
    assert!(
        !head.contains("x-mine") && !head.contains("accept-encoding"),
        "{head}"
    );
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::Finished, 200), 1);
}

#[tokio::test]
async fn a_stream_passes_while_it_is_generated() {
    let gate = Arc::new(Semaphore::new(0));
    let mut steps = vec![
        stream_head(),
        chunk(&delta("first", 1)),
        Step::Await(gate.clone()),
    ];
    steps.extend([chunk(&delta("second", 2)), chunk(DONE), last_chunk()]);
    let engine = Engine::always(steps).await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    client.send(chat(",\"stream\":true")).await;
    // The engine continues only after the client has received what was sent so far.
    client.read_until("first").await;
    assert_eq!(fleet.running(), 1);
    gate.add_permits(1);
    let answer = client.answer().await;
    assert!(answer.is_complete && answer.body.contains("second"));
    fleet.is_idle().await;
}

#[tokio::test]
async fn usage_is_requested_and_hidden_from_clients_that_did_not() {
    let engine = Engine::always(streamed()).await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    let answer = client.ask(chat(",\"stream\":true")).await;
    let without = |text: String| {
        let start = text.find(",\"usage\"").unwrap();
        format!("{}}}\n\n", &text[..start])
    };
    assert_eq!(
        answer.body,
        without(delta("a", 1)) + &without(delta("b", 2)) + DONE
    );
    let both = r#"{"stream_options":{"include_usage":true,"continuous_usage_stats":true},"#;
    assert!(engine.requests()[0].contains(both));

    let fields = ",\"stream\":true,\"stream_options\":{\"include_usage\":true}";
    let answer = client.ask(chat(fields)).await;
    let all = without(delta("a", 1)) + &without(delta("b", 2)) + usage_chunk() + DONE;
    assert_eq!(answer.body, all);

    let fields = ",\"stream\":true,\"stream_options\":{\"include_usage\":true,\"continuous_usage_stats\":true}";
    let answer = client.ask(chat(fields)).await;
    assert_eq!(
        answer.body,
        delta("a", 1) + &delta("b", 2) + usage_chunk() + DONE
    );
    assert!(engine.requests()[2].ends_with(chat(fields).split_once("\r\n\r\n").unwrap().1));
}

#[tokio::test]
async fn bodies_are_unchanged_with_splicing_off() {
    let engine = Engine::always(streamed()).await;
    let fleet = Fleet::start_with(&[&engine], std::time::Duration::ZERO, |settings| {
        settings.usage_splice = UsageRequest::Off;
    })
    .await;
    let answer = fleet.client().await.ask(chat(",\"stream\":true")).await;
    assert_eq!(
        answer.body,
        delta("a", 1) + &delta("b", 2) + usage_chunk() + DONE
    );
    assert!(!engine.requests()[0].contains("stream_options"));
}

#[tokio::test]
async fn a_stream_in_single_bytes_is_the_same_stream() {
    let whole: Vec<u8> = streamed()
        .into_iter()
        .flat_map(|step| match step {
            Step::Send(bytes) => bytes,
            _ => Vec::new(),
        })
        .collect();
    let engine = Engine::always(vec![Step::Trickle(whole)]).await;
    let swift = Engine::always(streamed()).await;
    let fleet = Fleet::start(&[&engine]).await;
    let swift_fleet = Fleet::start(&[&swift]).await;
    let slow = fleet.client().await.ask(chat(",\"stream\":true")).await;
    let fast = swift_fleet
        .client()
        .await
        .ask(chat(",\"stream\":true"))
        .await;
    assert!(slow.is_complete);
    assert_eq!(slow.body, fast.body);
}

#[tokio::test]
async fn engine_connections_are_reused() {
    let engine = Engine::always(vec![json("200 OK", ANSWER)]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    for _ in 0..5 {
        assert_eq!(client.ask(chat("")).await.status, 200);
    }
    let streaming = fleet.client().await.ask(chat(",\"max_tokens\":1")).await;
    assert_eq!(streaming.status, 200);
    assert_eq!((engine.requests().len(), engine.connections()), (6, 1));
    assert_eq!(fleet.metrics.pool.reused.get(), 5);
}

#[tokio::test]
async fn expired_idle_connections_are_not_reused() {
    let engine = Engine::always(vec![json("200 OK", ANSWER)]).await;
    let fleet = Fleet::start_with(&[&engine], std::time::Duration::ZERO, |settings| {
        settings.pool.idle_timeout = std::time::Duration::ZERO;
    })
    .await;
    let mut client = fleet.client().await;
    for _ in 0..3 {
        assert_eq!(client.ask(chat("")).await.status, 200);
    }
    assert_eq!((engine.requests().len(), engine.connections()), (3, 3));
}

#[tokio::test]
async fn answers_are_read_at_the_clients_pace() {
    const MIB: usize = 1024 * 1024;
    let long = format!("data: {}\n\n", "x".repeat(MIB));
    let engine = Engine::start(move |number| {
        if number > 0 {
            return vec![json("200 OK", ANSWER)];
        }
        let mut steps = vec![stream_head()];
        steps.extend((0..64).map(|_| chunk(&long)));
        steps.extend([chunk(DONE), last_chunk()]);
        steps
    })
    .await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut slow = fleet.client().await;
    slow.send(chat(",\"stream\":true")).await;
    slow.read_until("data: x").await;
    // Meanwhile other clients are served, and the slow one's response waits at the engine, apart
    // from the contents of socket buffers.
    let mut swift = fleet.client().await;
    for _ in 0..50 {
        assert_eq!(swift.ask(chat("")).await.status, 200);
    }
    assert!(fleet.metrics.answer_bytes.get() < 32 * MIB as u64);
    let answer = slow.answer().await;
    assert!(answer.is_complete && answer.body.len() > 64 * MIB);
    fleet.is_idle().await;
}

#[tokio::test]
async fn an_engines_own_error_passes_untouched() {
    let body = "{\"object\":\"error\",\"message\":\"bad  spaces\",\"code\":400}";
    let engine = Engine::always(vec![json("400 Bad Request", body)]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let answer = fleet.client().await.ask(chat("")).await;
    assert_eq!((answer.status, answer.body.as_str()), (400, body));
    fleet.is_idle().await;
    assert_eq!(fleet.count(RequestOutcome::EngineError, 400), 1);
}

#[tokio::test]
async fn a_client_that_waits_for_100_continue_gets_it() {
    let engine = Engine::always(vec![json("200 OK", ANSWER)]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    let request = chat("").replace("host: router", "host: router\r\nexpect: 100-continue");
    let (head, body) = request.split_once("\r\n\r\n").unwrap();
    client.send(format!("{head}\r\n\r\n")).await;
    client.read_until("100 Continue").await;
    let answer = client.ask(body).await;
    assert_eq!(answer.status, 200);
    assert!(!engine.requests()[0].contains("expect"));
}

#[tokio::test]
async fn the_model_list_is_the_union_of_the_healthy_backends() {
    let engine = Engine::dead().await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    let list = client
        .ask("GET /v1/models HTTP/1.1\r\nhost: r\r\n\r\n")
        .await;
    assert_eq!(
        list.body,
        r#"{"object":"list","data":[{"id":"m","object":"model","created":0,"owned_by":"quorate","root":null,"parent":null,"max_model_len":null,"permission":[]}]}"#
    );
    let one = client
        .ask("GET /v1/models/m HTTP/1.1\r\nhost: r\r\n\r\n")
        .await;
    assert_eq!(
        one.body,
        r#"{"id":"m","object":"model","created":0,"owned_by":"quorate","root":null,"parent":null,"max_model_len":null,"permission":[]}"#
    );
    let none = client
        .ask("GET /v1/models/x HTTP/1.1\r\nhost: r\r\n\r\n")
        .await;
    none.refuses(404, "model_not_found");
}

#[tokio::test]
async fn http2_without_tls_is_served_on_the_same_port() {
    let engine = Engine::start(|n| {
        if n == 0 {
            streamed()
        } else {
            vec![json("200 OK", ANSWER)]
        }
    })
    .await;
    let fleet = Fleet::start(&[&engine]).await;
    let stream = TokioIo::new(TcpStream::connect(fleet.address).await.unwrap());
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), stream)
            .await
            .unwrap();
    tokio::spawn(connection);
    for (fields, expected) in [(",\"stream\":true", DONE), ("", ANSWER)] {
        let body = chat(fields).split_once("\r\n\r\n").unwrap().1.to_owned();
        let request = http::Request::post("http://router/v1/chat/completions")
            .body(Full::new(bytes::Bytes::from(body)))
            .unwrap();
        let response = sender.send_request(request).await.unwrap();
        assert_eq!(response.status(), 200);
        let body = response.collect().await.unwrap().to_bytes();
        assert!(body.ends_with(expected.as_bytes()));
    }
    assert!(engine.requests()[0].contains("via: 2 quorate"));
    fleet.is_idle().await;
}

#[tokio::test]
async fn a_header_selects_the_policy_if_allowed() {
    let engine = Engine::always(vec![json("200 OK", ANSWER), json("200 OK", ANSWER)]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    let body = r#"{"model":"m","messages":[]}"#;
    let ask = |policy: &str| {
        let headers = format!("content-type: application/json\r\nx-quorate-policy: {policy}\r\n");
        post("/v1/chat/completions", &headers, body)
    };
    let answer = client.ask(ask("chwbl")).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("x-quorate-policy"), Some("chwbl"));
    let answer = client.ask(ask("magic")).await;
    assert_eq!(answer.status, 400);
    assert!(answer.body.contains("x-quorate-policy"), "{}", answer.body);
    assert!(answer.body.contains("vllm-cache-aware"), "{}", answer.body);
}
