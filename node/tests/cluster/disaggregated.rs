//! Disaggregated prefill and decode with emulated engines, which transfer blocks or meet in rooms:
//! which engine computes and which responds, lost transfers and engines, clients that disconnect.

use futures_util::future::join_all;
use lab::engine::{LoadError, RoomMode, RoomOptions, TransferOptions};
use state::command::BackendRole;
use tokio::sync::watch;

use super::backups::done;
use super::*;

async fn engine(options: EngineOptions) -> EngineHandle {
    let options = EngineOptions {
        speed: 50.0,
        ..options
    };
    EmulatedEngine::start(options).await.unwrap()
}

/// Starts an engine that hands over blocks as vLLM's connector does.
async fn connected(transfer: TransferOptions) -> EngineHandle {
    engine(EngineOptions {
        transfer: Some(transfer),
        ..EngineOptions::default()
    })
    .await
}

/// Starts an engine that meets its partner in a room, as SGLang does.
async fn meeting(mode: RoomMode, lost_every: u32) -> EngineHandle {
    let transfer = TransferOptions {
        lost_every,
        ..TransferOptions::default()
    };
    let rooms = RoomOptions {
        transfer,
        ..RoomOptions::of(mode)
    };
    engine(EngineOptions {
        rooms: Some(rooms),
        ..EngineOptions::default()
    })
    .await
}

/// Starts replicas in front of engines, of which the first half computes prompts and the others
/// answer. Waits until all know each other.
async fn replicas(http: &Http, count: usize, engines: &[EngineHandle]) -> (Vec<Replica>, TempDir) {
    let dir = TempDir::new().unwrap();
    let replicas = cluster_with(count, engines, &dir, |config| {
        for (number, backend) in config.backends.iter_mut().enumerate() {
            backend.role = match number < engines.len() / 2 {
                true => BackendRole::Prefill,
                false => BackendRole::Decode,
            };
        }
    });
    http.ready(&addresses(&replicas)).await;
    for at in addresses(&replicas) {
        let are_known = async || {
            let (_, answer) = http.admin(at.admin, "backends").await;
            let backends = answer["backends"].as_array().unwrap();
            let is_healthy = |backend: &Value| backend["state"]["name"] == "healthy";
            backends.len() == engines.len() && backends.iter().all(is_healthy)
        };
        until("the engines are known", are_known).await;
    }
    (replicas, dir)
}

/// Starts two prefill engines with rooms, of which one loses transfers, and two decode engines.
async fn two_pairs(lost_every: u32) -> Vec<EngineHandle> {
    vec![
        meeting(RoomMode::Prefill, lost_every).await,
        meeting(RoomMode::Prefill, 0).await,
        meeting(RoomMode::Decode, 0).await,
        meeting(RoomMode::Decode, 0).await,
    ]
}

/// Returns a prompt of its own.
fn question(number: usize, words: usize) -> Value {
    let content = format!("Question {number}. ").repeat(words);
    json!({ "model": "emulated", "max_tokens": 20, "prompt": content })
}

async fn ask(http: &Http, at: &Addresses, body: &Value) -> (StatusCode, HeaderMap, Value) {
    let url = format!("http://{}/v1/completions", at.data);
    http.send(Method::POST, &url, body).await
}

/// Sends a prompt of about 2,000 tokens, which must be answered.
async fn answered(http: &Http, at: &Addresses, number: usize) -> (HeaderMap, Value) {
    let (status, headers, answer) = ask(http, at, &question(number, 600)).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    assert_eq!(answer["usage"]["completion_tokens"], 20);
    (headers, answer)
}

/// Waits until nothing is in flight at any engine or replica.
async fn is_quiet(http: &Http, engines: &[EngineHandle], at: &[Addresses]) {
    for at in at {
        http.quiet(at).await;
    }
    for engine in engines {
        let mut open = engine.watch_open();
        let ended = open.wait_for(|open| *open == 0);
        let ended = tokio::time::timeout(PATIENCE, ended).await;
        ended.unwrap().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefill_and_decode_engines_share_a_request() {
    let transfer = TransferOptions::default();
    let engines = vec![connected(transfer).await, connected(transfer).await];
    let http = Http::new();
    let (replicas, _dir) = replicas(&http, 1, &engines).await;
    let at = replicas[0].addresses;
    let (headers, answer) = answered(&http, &at, 1).await;
    assert_eq!(headers["x-quorate-prefill"], "engine-0");
    assert_eq!(headers["x-quorate-backend"], "engine-1");
    let prompt = answer["usage"]["prompt_tokens"].as_u64().unwrap();
    let cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
    assert_eq!(*cached, prompt - 1, "it fetched all but the last token");
    let [computing, answering] = [0, 1].map(|nth| engines[nth].stats());
    let generated = (computing.generation_tokens, answering.generation_tokens);
    assert_eq!(generated, (1, 20));
    assert_eq!(computing.prompt_tokens, prompt);

    // Charged once, as computed.
    http.quiet(&at).await;
    let (_, users) = http.admin(at.admin, "users").await;
    let total = &users["users"][0]["total"];
    let charged = ["input_uncached", "input_cached", "output"].map(|it| total[it].clone());
    assert_eq!(charged, [json!(prompt), json!(0), json!(20)], "{users}");
    // The decode engine now holds the prompt.
    let (headers, _) = answered(&http, &at, 1).await;
    assert!(!headers.contains_key("x-quorate-prefill"), "{headers:?}");
    assert_eq!(headers["x-quorate-backend"], "engine-1");

    let listed = done(&at, &["backend", "--wide"]).await;
    let has_roles = listed.contains("prefill") && listed.contains("decode");
    assert!(has_roles, "{listed}");
    let prompt = question(2, 600)["prompt"].as_str().unwrap().to_owned();
    let path = ["explain", "--path", "/v1/completions"];
    let asked = [&path[..], &["--model", "emulated", "--prompt", &prompt]].concat();
    let explained = done(&at, &asked).await;
    let choice = "prefill  engine-0, by only-candidate";
    assert!(explained.contains(choice), "{explained}");
    let metrics = http.metrics(at.admin).await;
    for line in [
        r#"quorate_proxy_prefills_total{outcome="transferred"} 1"#,
        "quorate_proxy_decode_stage_seconds_count 1",
    ] {
        assert!(metrics.contains(line), "{metrics}");
    }
    leave(replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_transfers_and_engines_fail_no_request() {
    for on_failure in [LoadError::Recompute, LoadError::Fail] {
        let losing = TransferOptions {
            lost_every: 2,
            on_failure,
            ..TransferOptions::default()
        };
        let reliable = connected(TransferOptions::default()).await;
        let mut engines = vec![reliable, connected(losing).await];
        let http = Http::new();
        let (replicas, _dir) = replicas(&http, 1, &engines).await;
        let at = replicas[0].addresses;
        for number in 0..4 {
            answered(&http, &at, number).await;
        }
        engines.remove(0).stop().await;
        for number in 4..6 {
            let (headers, _) = answered(&http, &at, number).await;
            assert_eq!(headers["x-quorate-backend"], "engine-1");
        }
        http.quiet(&at).await;
        leave(replicas).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_engines_get_each_request_of_every_replica() {
    let (http, engines) = (Http::new(), two_pairs(0).await);
    let (replicas, _dir) = replicas(&http, 3, &engines).await;
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
        let tokens = engines.iter().map(|it| it.stats().generation_tokens);
        tokens.sum::<u64>()
    };
    assert_eq!((made(&engines[..2]), made(&engines[2..])), (12, 240));

    // A prompt goes where it was computed, and the tokens cached there count.
    let (first, _) = answered(&http, &at[0], 99).await;
    is_quiet(&http, &engines, &at).await;
    http.agree(&at).await;
    let (again, answer) = answered(&http, &at[1], 99).await;
    assert_eq!(again["x-quorate-prefill"], first["x-quorate-prefill"]);
    assert!(matched(&again) > 0, "{again:?}");
    prompts += 2 * answer["usage"]["prompt_tokens"].as_u64().unwrap();
    for at in &at {
        http.quiet(at).await;
    }
    http.agree(&at).await;
    let (_, users) = http.admin(at[2].admin, "users").await;
    let total = &users["users"][0]["total"];
    let [uncached, cached, output] =
        ["input_uncached", "input_cached", "output"].map(|it| total[it].as_u64().unwrap());
    assert_eq!((uncached + cached, output), (prompts, 280), "charged once");
    assert!(cached > 1_000, "{total}");
    leave(replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_transfers_fail_no_request_while_a_pair_remains() {
    let (http, mut engines) = (Http::new(), two_pairs(2).await);
    let (replicas, _dir) = replicas(&http, 3, &engines).await;
    let at = addresses(&replicas);
    for number in 0..12 {
        answered(&http, &at[number % 3], number).await;
    }
    for (lost, numbers, header, left) in [
        (0, 12..18, "x-quorate-prefill", "engine-1"),
        (1, 18..24, "x-quorate-backend", "engine-3"),
    ] {
        is_quiet(&http, &engines, &at).await;
        engines.remove(lost).stop().await;
        for number in numbers {
            let (headers, _) = answered(&http, &at[number % 3], number).await;
            assert_eq!(headers[header], left);
        }
    }
    is_quiet(&http, &engines, &at).await;
    engines.remove(0).stop().await;
    let (status, _, answer) = ask(&http, &at[0], &question(24, 600)).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{answer}");
    is_quiet(&http, &engines, &at).await;
    leave(replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_disconnects_frees_both_engines() {
    let (http, engines) = (Http::new(), two_pairs(0).await);
    let (replicas, _dir) = replicas(&http, 1, &engines).await;
    let at = addresses(&replicas);
    let mut body = question(1, 600);
    body["max_tokens"] = json!(20_000);
    let open = [&engines[..2], &engines[2..]].map(|engines| {
        let open = engines.iter().map(EngineHandle::watch_open);
        open.collect::<Vec<_>>()
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
    leave(replicas).await;
}
