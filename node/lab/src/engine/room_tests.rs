//! Tests of engines that use rooms, over real sockets.

use std::time::Duration;

use http::StatusCode;
use serde_json::{Value, json};

use super::tests::ask;
use super::{EmulatedEngine, EngineHandle, EngineOptions, RoomMode, RoomOptions, TransferOptions};

async fn engine(rooms: RoomOptions) -> EngineHandle {
    let options = EngineOptions {
        speed: 1000.0,
        rooms: Some(rooms),
        ..EngineOptions::default()
    };
    EmulatedEngine::start(options).await.unwrap()
}

async fn pair(lost_every: u32) -> (EngineHandle, EngineHandle) {
    let transfer = TransferOptions {
        lost_every,
        ..TransferOptions::default()
    };
    let prefill = RoomOptions {
        transfer,
        ..RoomOptions::of(RoomMode::Prefill)
    };
    let decode = RoomOptions::of(RoomMode::Decode);
    (engine(prefill).await, engine(decode).await)
}

fn asked(prefill: &EngineHandle, room: u64, stream: bool) -> Value {
    let port = prefill.bootstrap().unwrap().port();
    json!({
        "model": "emulated", "prompt": "x".repeat(4_000), "max_tokens": 9, "stream": stream,
        "bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room,
    })
}

async fn both(
    prefill: &EngineHandle,
    decode: &EngineHandle,
    body: Value,
) -> [(StatusCode, Value); 2] {
    let path = "/v1/completions";
    let answers = tokio::join!(
        ask(prefill, "POST", path, body.clone()),
        ask(decode, "POST", path, body)
    );
    answers.into()
}

#[tokio::test]
async fn prefill_computes_the_prompt_and_decode_answers() {
    let (prefill, decode) = pair(0).await;
    for room in [0, 1 << 62] {
        let [computed, answered] = both(&prefill, &decode, asked(&prefill, room, false)).await;
        assert_eq!((computed.0, answered.0), (StatusCode::OK, StatusCode::OK));
        assert_eq!(computed.1["usage"]["completion_tokens"], 1);
        assert_eq!(answered.1["usage"]["completion_tokens"], 9);
        assert_eq!(answered.1["usage"]["prompt_tokens"], 1000);
    }
    assert_eq!(decode.stats().generation_tokens, 18);
    assert_eq!(decode.bootstrap(), None);
    prefill.stop().await;
    decode.stop().await;
}

#[tokio::test]
async fn both_engines_refuse_requests_without_a_room() {
    let (prefill, decode) = pair(0).await;
    let body = json!({ "model": "emulated", "prompt": "x" });
    for engine in [&prefill, &decode] {
        let (status, told) = ask(engine, "POST", "/v1/completions", body.clone()).await;
        assert_eq!(status, StatusCode::BAD_REQUEST);
        let message = told["error"]["message"].as_str().unwrap();
        assert!(
            message.contains("received without bootstrap room id"),
            "{message}"
        );
        let (_, models) = ask(engine, "GET", "/v1/models", Value::Null).await;
        assert_eq!(models["data"][0]["owned_by"], "sglang");
    }
    let (_, info) = ask(&prefill, "GET", "/server_info", Value::Null).await;
    let port = prefill.bootstrap().unwrap().port();
    assert_eq!(info["disaggregation_mode"], "prefill");
    assert_eq!(info["disaggregation_bootstrap_port"], port);
    prefill.stop().await;
    decode.stop().await;
}

#[tokio::test]
async fn a_lost_transfer_fails_both_requests() {
    let (prefill, decode) = pair(2).await;
    for (room, status) in [(1, StatusCode::OK), (2, StatusCode::INTERNAL_SERVER_ERROR)] {
        let [computed, answered] = both(&prefill, &decode, asked(&prefill, room, true)).await;
        assert_eq!((computed.0, answered.0), (status, status));
    }
    prefill.stop().await;
    decode.stop().await;
}

#[tokio::test]
async fn an_unused_room_expires() {
    let patience = Duration::from_millis(50);
    let with = |mode| RoomOptions {
        patience,
        ..RoomOptions::of(mode)
    };
    let (prefill, decode) = (
        engine(with(RoomMode::Prefill)).await,
        engine(with(RoomMode::Decode)).await,
    );
    for engine in [&prefill, &decode] {
        let body = asked(&prefill, 7, false);
        let (status, told) = ask(engine, "POST", "/v1/completions", body).await;
        assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR, "{told}");
    }
    // A stopped engine ends the wait at once.
    let gone = asked(&prefill, 8, false);
    prefill.stop().await;
    let (status, _) = ask(&decode, "POST", "/v1/completions", gone).await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    decode.stop().await;
}
