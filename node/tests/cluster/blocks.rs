//! A model has the block size of its engine; no config sets it.

use api::prompt::{ModelSettings, Tokenizer, TokenizerSpec};
use lab::engine::{EventEncoding, EventsOptions, PublisherFaults};

use super::*;

/// The engine's block size, in tokens. Differs from the defaults of router and emulated engine.
const BLOCK_TOKENS: u32 = 64;

/// Returns options of an engine that publishes its blocks.
pub(super) fn publishing() -> EngineOptions {
    let any: std::net::SocketAddr = "127.0.0.1:0".parse().unwrap();
    EngineOptions {
        speed: 50.0,
        events: Some(EventsOptions {
            events: any,
            replay: Some(any),
            form: EventEncoding::Map,
            faults: PublisherFaults::default(),
        }),
        ..EngineOptions::default()
    }
}

/// Starts a replica and an engine that publishes its blocks.
pub(super) async fn exact_replica(
    http: &Http,
    block_size: u32,
    dir: &TempDir,
) -> (Replica, EngineHandle) {
    let mut options = publishing();
    options.shape.block_size = block_size;
    let engine = EmulatedEngine::start(options).await.unwrap();
    let engines = [engine];
    let replica = lone_replica(&engines, dir, |config| {
        config.models = vec![ModelSettings {
            name: "*".to_owned(),
            tokenizer: Tokenizer::load(TokenizerSpec::Engine, None).unwrap(),
            block_size: None,
            pairs: Default::default(),
        }];
        config.backends[0].kv_events = engines[0].kv_events();
        config.backends[0].kv_replay = engines[0].kv_replay();
    });
    http.ready(&[replica.addresses]).await;
    let [engine] = engines;
    (replica, engine)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_with_another_block_size_is_exact_without_config() {
    let (dir, http) = (TempDir::new().unwrap(), Http::new());
    let (replica, _engine) = exact_replica(&http, BLOCK_TOKENS, &dir).await;
    let at = replica.addresses;

    let explain = async || {
        let body = json!({ "model": "emulated", "prompt": SYSTEM });
        let would_be = json!({ "path": "/v1/completions", "headers": {}, "body": body });
        let url = format!("http://{}/admin/v1/explain", at.admin);
        http.send(Method::POST, &url, &would_be).await.2
    };
    let is_exact = async || {
        let url = format!("http://{}/admin/v1/backends", at.admin);
        let (_, answer) = http.get(&url).await;
        let mode = &answer["backends"][0]["ownership"]["mode"];
        mode == "exact" && explain().await["tokens_per_block"] == BLOCK_TOKENS
    };
    until("the engine's own blocks are exact", is_exact).await;

    let body = json!({ "model": "emulated", "prompt": SYSTEM, "max_tokens": 4 });
    let url = format!("http://{}/v1/completions", at.data);
    let (status, _, answer) = http.send(Method::POST, &url, &body).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    let page = http.metrics(at.admin).await;
    for line in [
        "quorate_backend_block_size_tokens{backend=\"engine-0\"} 64",
        "quorate_backend_block_size_unfit{backend=\"engine-0\"} 0",
    ] {
        assert!(page.contains(line), "{page}");
    }
    let explained = explain().await;
    let matchable = &explained["blocks_matchable"];
    assert!(matchable.as_u64().unwrap() >= 1, "{explained}");
    assert_eq!(explained["backends"][0]["matched"], *matchable);
    replica.leave().await;
}
