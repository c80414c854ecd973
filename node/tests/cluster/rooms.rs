//! Disaggregated prefill and decode with emulated engines that use rooms: three replicas, failing
//! engines, lost transfers, and clients that disconnect.

use futures_util::future::join_all;
use lab::engine::{RoomMode, RoomOptions, TransferOptions};
use state::command::BackendRole;
use tokio::sync::watch;

use super::*;

async fn meeting(mode: RoomMode, lost_every: u32) -> EngineHandle {
    let rooms = RoomOptions {
        transfer: TransferOptions {
            lost_every,
            ..TransferOptions::default()
        },
        ..RoomOptions::of(mode)
    };
    let options = EngineOptions {
        speed: 50.0,
        rooms: Some(rooms),
        ..EngineOptions::default()
    };
    EmulatedEngine::start(options).await.unwrap()
}

/// Starts replicas with two prefill engines, of which one loses transfers, and two decode engines.
async fn replicas(
    http: &Http,
    count: usize,
    lost_every: u32,
) -> (Vec<EngineHandle>, Vec<Replica>, TempDir) {
    let engines = vec![
        meeting(RoomMode::Prefill, lost_every).await,
        meeting(RoomMode::Prefill, 0).await,
        meeting(RoomMode::Decode, 0).await,
        meeting(RoomMode::Decode, 0).await,
    ];
    let dir = TempDir::new().unwrap();
    let replicas = cluster_with(count, &engines, &dir, |config| {
        let roles = [BackendRole::Prefill, BackendRole::Decode];
        for (number, backend) in config.backends.iter_mut().enumerate() {
            backend.role = roles[number / 2];
        }
    });
    http.ready(&addresses(&replicas)).await;
    for at in addresses(&replicas) {
        let url = format!("http://{}/admin/v1/backends", at.admin);
        let are_known = async || {
            let (_, answer) = http.get(&url).await;
            let backends = answer["backends"].as_array().unwrap();
            let is_healthy = |backend: &Value| backend["state"]["name"] == "healthy";
            backends.len() == 4 && backends.iter().all(is_healthy)
        };
        until("the engines are known", are_known).await;
    }
    (engines, replicas, dir)
}

fn question(number: usize, words: usize) -> Value {
    let content = format!("Question {number}. ").repeat(words);
    json!({ "model": "emulated", "max_tokens": 20, "prompt": content })
}

async fn ask(http: &Http, at: &Addresses, body: &Value) -> (StatusCode, HeaderMap, Value) {
    let url = format!("http://{}/v1/completions", at.data);
    http.send(Method::POST, &url, body).await
}

/// Waits until nothing is in flight at any engine or replica.
async fn is_quiet(http: &Http, engines: &[EngineHandle], at: &[Addresses]) {
    for at in at {
        http.quiet(at).await;
    }
    for engine in engines {
        let mut open = engine.watch_open();
        let ended = open.wait_for(|open| *open == 0);
        tokio::time::timeout(PATIENCE, ended)
            .await
            .unwrap()
            .unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_replica_sends_each_request_to_two_engines() {
    let http = Http::new();
    let (engines, replicas, _dir) = replicas(&http, 3, 0).await;
    let at = addresses(&replicas);
    // Even short prompts: neither engine serves a request alone.
    let asked = (0..12).map(|number| {
        let (http, at) = (&http, &at[number % 3]);
        async move { ask(http, at, &question(number, 1 + number * 60)).await }
    });
    let mut prompts = 0;
    for (status, headers, answer) in join_all(asked).await {
        assert_eq!(status, StatusCode::OK, "{answer}");
        assert_eq!(answer["usage"]["completion_tokens"], 20);
        prompts += answer["usage"]["prompt_tokens"].as_u64().unwrap();
        let by = |header: &str| headers[header].to_str().unwrap().to_owned();
        assert!(["engine-0", "engine-1"].contains(&&*by("x-quorate-prefill")));
        assert!(["engine-2", "engine-3"].contains(&&*by("x-quorate-backend")));
    }
    is_quiet(&http, &engines, &at).await;
    let made = |engines: &[EngineHandle]| {
        engines
            .iter()
            .map(|it| it.stats().generation_tokens)
            .sum::<u64>()
    };
    assert_eq!((made(&engines[..2]), made(&engines[2..])), (12, 240));

    // A prompt goes where it was computed, and the tokens cached there count.
    let (_, first, _) = ask(&http, &at[0], &question(99, 600)).await;
    is_quiet(&http, &engines, &at).await;
    http.agree(&at).await;
    let (_, again, answer) = ask(&http, &at[1], &question(99, 600)).await;
    assert_eq!(again["x-quorate-prefill"], first["x-quorate-prefill"]);
    assert!(matched(&again) > 0, "{again:?}");
    prompts += 2 * answer["usage"]["prompt_tokens"].as_u64().unwrap();
    for at in &at {
        http.quiet(at).await;
    }
    http.agree(&at).await;
    let (_, users) = http
        .get(&format!("http://{}/admin/v1/users", at[2].admin))
        .await;
    let total = &users["users"][0]["total"];
    let input = total["input_uncached"].as_u64().unwrap() + total["input_cached"].as_u64().unwrap();
    assert_eq!(
        (input, &total["output"]),
        (prompts, &json!(280)),
        "charged once"
    );
    assert!(total["input_cached"].as_u64().unwrap() > 1_000, "{total}");
    for replica in replicas {
        replica.leave().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_transfers_fail_no_request_while_a_pair_remains() {
    let http = Http::new();
    let (mut engines, replicas, _dir) = replicas(&http, 3, 2).await;
    let at = addresses(&replicas);
    for number in 0..12 {
        let (status, _, answer) = ask(&http, &at[number % 3], &question(number, 600)).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
    }
    is_quiet(&http, &engines, &at).await;
    engines.remove(0).stop().await;
    for number in 12..18 {
        let (status, headers, answer) = ask(&http, &at[number % 3], &question(number, 600)).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        assert_eq!(headers["x-quorate-prefill"], "engine-1");
    }
    engines.remove(1).stop().await;
    for number in 18..24 {
        let (status, headers, answer) = ask(&http, &at[number % 3], &question(number, 600)).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        assert_eq!(headers["x-quorate-backend"], "engine-3");
    }
    is_quiet(&http, &engines, &at).await;
    engines.remove(0).stop().await;
    let (status, _, answer) = ask(&http, &at[0], &question(24, 600)).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{answer}");
    is_quiet(&http, &engines, &at).await;
    for replica in replicas {
        replica.leave().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_disconnects_frees_both_engines() {
    let http = Http::new();
    let (engines, replicas, _dir) = replicas(&http, 1, 0).await;
    let at = addresses(&replicas);
    let mut body = question(1, 600);
    body["max_tokens"] = json!(20_000);
    let open = [0, 2].map(|first| {
        let engines = &engines[first..first + 2];
        engines
            .iter()
            .map(EngineHandle::watch_open)
            .collect::<Vec<_>>()
    });
    let is_open = |open: &[watch::Receiver<u32>]| open.iter().any(|open| *open.borrow() > 0);
    let asking = ask(&http, &at[0], &body);
    tokio::select! {
        biased;
        (status, _, answer) = asking => panic!("it is too long to end: {status} {answer}"),
        () = until("it is answered", async || is_open(&open[1])) => {}
    }
    // Dropping the future disconnects the client.
    is_quiet(&http, &engines, &at).await;
    assert!(!open.iter().any(|open| is_open(open)));
    let aborted: u64 = engines.iter().map(|engine| engine.stats().aborted).sum();
    assert_eq!(aborted, 1, "the one that answered; the prompt was computed");
    for replica in replicas {
        replica.leave().await;
    }
}
