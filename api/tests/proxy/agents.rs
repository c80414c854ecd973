//! Coding agents as they are: what Claude Code and Codex send, and what they need in return.

use std::collections::BTreeSet;

use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use serde_json::Value;

use super::client::{Answer, post};
use super::engine::{Engine, json};
use super::fleet::{Fleet, PATIENT};

/// Returns the bodies of an agent's turns.
fn turns(file: &str) -> Vec<String> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/agents/");
    let turns = std::fs::read(format!("{folder}{file}")).unwrap();
    let turns: Vec<Value> = serde_json::from_slice(&turns).unwrap();
    let turn = |mut body: Value| {
        body["model"] = "m".into();
        body.to_string()
    };
    turns.into_iter().map(turn).collect()
}

/// Returns how many of the prompt's blocks the chosen backend had, and how many there are.
fn prefix(answer: &Answer) -> (usize, usize) {
    let told = answer.header("x-quorate-prefix").unwrap();
    let (matched, total) = told.split_once('/').unwrap();
    (matched.parse().unwrap(), total.parse().unwrap())
}

#[tokio::test]
async fn each_turn_of_an_agent_finds_the_one_before() {
    for (file, path) in [
        ("claude-code.json", "/v1/messages"),
        ("claude-code-subagent.json", "/v1/messages"),
        ("codex.json", "/v1/responses"),
    ] {
        let engines = [
            Engine::always(vec![json("200 OK", "{}")]).await,
            Engine::always(vec![json("200 OK", "{}")]).await,
        ];
        let fleet = Fleet::start(&[&engines[0], &engines[1]]).await;
        let policy = "x-quorate-policy: cost\r\n";
        let mut client = fleet.client().await;
        let mut served_by = BTreeSet::new();
        let mut known = 0;
        for turn in turns(file) {
            let answer = client.ask(post(path, policy, &turn)).await;
            assert_eq!(answer.status, 200, "{}", answer.body);
            fleet.is_idle().await;
            let (matched, total) = prefix(&answer);
            assert!(matched >= known, "{file}: {matched} of {known} before");
            // The last block of a prompt is not full, or continues in the next turn.
            known = total - 1;
            served_by.insert(answer.header("x-quorate-backend").unwrap().to_owned());
        }
        assert_eq!(served_by.len(), 1, "{file}");
    }
}

fn compressed(encoding: &str, packed: &[u8]) -> Vec<u8> {
    let length = packed.len();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\n\
         content-encoding: {encoding}\r\ncontent-length: {length}\r\n\r\n"
    );
    [head.as_bytes(), packed].concat()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    compress_to_vec(bytes, CompressionLevel::Fastest)
}

#[tokio::test]
async fn a_zstd_body_reaches_the_engine_decoded() {
    let engine = Engine::always(vec![json("200 OK", "{}")]).await;
    let fleet = Fleet::start_with(&[&engine], PATIENT, |settings| {
        settings.limits.body_bytes_max = 1_000_000;
    })
    .await;
    let packed = include_bytes!("../fixtures/bodies/chat.json.zst");
    let answer = fleet.client().await.ask(compressed("zstd", packed)).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let requests = engine.requests();
    let (head, seen) = requests[0].split_once("\r\n\r\n").unwrap();
    assert!(seen.ends_with(r#"{"role":"user","content":"last words"}]}"#));
    assert!(!head.contains("content-encoding"), "{head}");
    let length = format!("content-length: {}", seen.len());
    assert!(head.contains(&length), "{head}");

    let bomb = zstd(&vec![b' '; 50_000_000]);
    assert!(bomb.len() < 100_000);
    let answer = fleet.client().await.ask(compressed("zstd", &bomb)).await;
    answer.refuses(413, "request_too_large");
    for wrong in [&packed[..packed.len() - 1], b"{}", b""] {
        let answer = fleet.client().await.ask(compressed("zstd", wrong)).await;
        answer.refuses(400, "invalid_request");
        assert!(answer.body.contains("not valid zstd"), "{}", answer.body);
    }
    assert_eq!(engine.requests().len(), 1);
    fleet.is_idle().await;
}

#[tokio::test]
async fn a_websocket_handshake_on_responses_falls_back_to_http() {
    let fleet = Fleet::start(&[&Engine::dead().await]).await;
    let handshake = |path: &str| {
        format!(
            "GET {path} HTTP/1.1\r\nhost: router\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\
             sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
    };
    let mut client = fleet.client().await;
    let answer = client.ask(handshake("/v1/responses")).await;
    answer.refuses(426, "websockets_not_supported");
    assert_eq!(answer.header("connection"), Some("upgrade, close"));
    assert!(answer.header("upgrade").is_some());
    assert!(client.is_closed().await);
    let answer = fleet.client().await.ask(handshake("/v1/realtime")).await;
    answer.refuses(501, "websockets_not_supported");
}

#[tokio::test]
async fn paths_below_responses_are_no_ids() {
    let engine = Engine::always(vec![json("200 OK", "{}")]).await;
    let body = r#"{"model":"m","input":"hi"}"#;
    let paths = ["/v1/responses/compact", "/v1/responses/input_tokens"];
    let fleet = Fleet::start(&[&engine]).await;
    for path in paths {
        let answer = fleet.client().await.ask(post(path, "", body)).await;
        answer.refuses(404, "unknown_url");
        assert!(
            answer.body.contains("requests.extra_paths"),
            "{}",
            answer.body
        );
    }
    assert!(engine.requests().is_empty());
    let fleet = Fleet::start_with(&[&engine], PATIENT, |settings| {
        settings.extra_paths = paths.map(str::to_owned).into();
    })
    .await;
    for path in paths {
        let answer = fleet.client().await.ask(post(path, "", body)).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        let seen = engine.requests().pop().unwrap();
        assert!(seen.starts_with(&format!("POST {path} HTTP/1.1")), "{seen}");
    }
}
