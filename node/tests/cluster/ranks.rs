//! An engine of several data-parallel ranks behind one port: each rank is a backend, and a
//! request goes to the rank that holds its prefix.

use api::prompt::{ModelSettings, Tokenizer, TokenizerSpec};
use futures_util::future::join_all;

use super::backups::done;
use super::blocks::publishing;
use super::*;

const RANKS: usize = 3;
const BLOCK_TOKENS: u64 = 16;
const CONVERSATIONS: usize = 6;

/// Rank that responded, blocks predicted to be cached, and cached tokens.
#[derive(Debug)]
struct Turn {
    rank: usize,
    matched: u64,
    cached_tokens: u64,
    prompt_tokens: u64,
}

/// Returns the prompt of turn `turn`, which begins with that of the previous turn.
fn prompt(conversation: usize, turn: usize) -> String {
    let line = |number| format!("Conversation {conversation}, line {number}: what follows? ");
    (0..=turn * 8 + 8).map(line).collect()
}

async fn say(http: &Http, at: &Addresses, conversation: usize, turn: usize) -> Turn {
    let prompt = prompt(conversation, turn);
    let body = json!({ "model": "emulated", "prompt": prompt, "max_tokens": 4 });
    let url = format!("http://{}/v1/completions", at.data);
    let (status, headers, answer) = http.send(Method::POST, &url, &body).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    let backend = headers["x-quorate-backend"].to_str().unwrap();
    let rank = match backend.split_once('@') {
        Some(("engine-0", rank)) => rank.parse().unwrap(),
        _ => 0,
    };
    let usage = &answer["usage"];
    Turn {
        rank,
        matched: matched(&headers).into(),
        cached_tokens: usage["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap(),
        prompt_tokens: usage["prompt_tokens"].as_u64().unwrap(),
    }
}

/// Starts a replica and an engine of three ranks, which reports where each publishes.
async fn replica(http: &Http, dir: &TempDir, events: bool) -> (Replica, EngineHandle) {
    let mut options = publishing();
    options.shape.block_size = BLOCK_TOKENS as u32;
    options.data_parallel_size = RANKS as u16;
    let engines = [EmulatedEngine::start(options).await.unwrap()];
    let replica = lone_replica(&engines, dir, |config| {
        config.models = vec![ModelSettings {
            name: "*".to_owned(),
            tokenizer: Tokenizer::load(TokenizerSpec::Engine, None).unwrap(),
            block_size: None,
            pairs: Default::default(),
        }];
        // The cost policy may leave a short prompt's holder for a rank that looks less busy.
        config.policy = PolicyConfig::PrefixCache(Default::default());
        config.backends[0].kv_events = events.then(|| "auto".to_owned());
    });
    http.ready(&[replica.addresses]).await;
    let [engine] = engines;
    (replica, engine)
}

/// Waits until each rank is known, with ownership in `mode`.
async fn known(http: &Http, at: &Addresses, mode: &str) {
    let url = format!("http://{}/admin/v1/backends", at.admin);
    let is_known = async || {
        let (_, answer) = http.get(&url).await;
        let backends = answer["backends"].as_array().unwrap();
        let is_rank = |(rank, backend): (usize, &Value)| {
            let info = &backend["engine_info"];
            info["rank"] == rank
                && info["ranks"] == RANKS
                && backend["ownership"]["mode"] == mode
                && backend["state"]["name"] == "healthy"
        };
        backends.len() == RANKS && backends.iter().enumerate().all(is_rank)
    };
    until("each rank is known", is_known).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conversations_keep_their_rank_with_exact_predictions() {
    let (dir, http) = (TempDir::new().unwrap(), Http::new());
    let (replica, engine) = replica(&http, &dir, true).await;
    let at = replica.addresses;
    known(&http, &at, "exact").await;

    // Concurrently, so that they spread.
    let first = (0..CONVERSATIONS).map(|number| say(&http, &at, number, 0));
    let first = join_all(first).await;
    let mut asked = [0; RANKS];
    for turn in &first {
        asked[turn.rank] += turn.prompt_tokens;
        assert_eq!((turn.matched, turn.cached_tokens), (0, 0), "{turn:?}");
    }
    assert!(asked.iter().all(|tokens| *tokens > 0), "{first:?}");
    for turn in 1..4 {
        for (number, first) in first.iter().enumerate() {
            known(&http, &at, "exact").await;
            let next = say(&http, &at, number, turn).await;
            asked[next.rank] += next.prompt_tokens;
            assert_eq!(next.rank, first.rank, "{number}: {next:?}");
            assert_eq!(next.cached_tokens, next.matched * BLOCK_TOKENS, "{next:?}");
            assert!(next.matched > 0, "{next:?}");
        }
    }
    // Each rank computed the prompts sent to it.
    let computed = engine.rank_stats().into_iter().map(|it| it.prompt_tokens);
    assert_eq!(computed.collect::<Vec<_>>(), asked);

    let listed = done(&at, &["backend"]).await;
    assert!(listed.contains("engine-0@2"), "{listed}");
    let page = http.metrics(at.admin).await;
    assert!(
        page.contains("quorate_backend_healthy{backend=\"engine-0@1\"} 1"),
        "{page}"
    );
    replica.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_determine_the_rank_without_events() {
    let (dir, http) = (TempDir::new().unwrap(), Http::new());
    let (replica, engine) = replica(&http, &dir, false).await;
    let at = replica.addresses;
    known(&http, &at, "lease").await;
    let first = (0..CONVERSATIONS).map(|number| say(&http, &at, number, 0));
    let first = join_all(first).await;
    for (number, first) in first.iter().enumerate() {
        let next = say(&http, &at, number, 1).await;
        assert_eq!(next.rank, first.rank, "{number}: {next:?}");
        assert_eq!(next.cached_tokens, next.matched * BLOCK_TOKENS, "{next:?}");
        assert!(next.matched > 0, "{next:?}");
    }

    // A rank drains only together with its engine.
    let (_, listed) = http.admin(at.admin, "backends/engine-0@1").await;
    assert_eq!(listed["engine_info"]["rank"], 1, "{listed}");
    let drain = |id: &str| format!("http://{}/admin/v1/backends/{id}/drain", at.admin);
    let (status, _, answer) = http
        .send(Method::POST, &drain("engine-0@1"), &json!({}))
        .await;
    assert_eq!(status, StatusCode::NOT_FOUND, "{answer}");
    let (status, _, answer) = http
        .send(Method::POST, &drain("engine-0"), &json!({}))
        .await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    let (_, listed) = http.admin(at.admin, "backends").await;
    let states = listed["backends"].as_array().unwrap().iter();
    assert!(
        states
            .map(|it| &it["state"]["name"])
            .all(|it| it == "draining"),
        "{listed}"
    );
    // Ranks are not settings: cluster and file do not differ.
    let (_, config) = http.admin(at.admin, "config").await;
    assert!(!config.to_string().contains("engine-0@"), "{config}");
    drop(engine);
    replica.leave().await;
}
