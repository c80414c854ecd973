//! Disaggregated prefill and decode with emulated engines: which engine computes and which
//! responds, and that no request fails with a lost engine or transfer.

use lab::engine::{LoadError, TransferOptions};
use state::command::BackendRole;

use super::backups::done;
use super::*;

async fn connected(transfer: TransferOptions) -> EngineHandle {
    let options = EngineOptions {
        speed: 50.0,
        transfer: Some(transfer),
        ..EngineOptions::default()
    };
    EmulatedEngine::start(options).await.unwrap()
}

/// Starts a replica with a prefill and a decode engine.
async fn replica(http: &Http, engines: &[EngineHandle], dir: &TempDir) -> Replica {
    let replica = lone_replica(engines, dir, |config| {
        config.backends[0].role = BackendRole::Prefill;
        config.backends[1].role = BackendRole::Decode;
    });
    http.ready(&[replica.addresses]).await;
    let url = format!("http://{}/admin/v1/backends", replica.addresses.admin);
    let are_known = async || {
        let (_, answer) = http.get(&url).await;
        let backends = answer["backends"].as_array().unwrap();
        let is_healthy = |backend: &Value| backend["state"]["name"] == "healthy";
        backends.len() == 2 && backends.iter().all(is_healthy)
    };
    until("both engines are known", are_known).await;
    replica
}

/// Returns a new prompt of about 2,000 tokens.
fn question(number: usize) -> Value {
    let content = format!("Question {number}. ").repeat(600);
    json!({ "model": "emulated", "max_tokens": 20, "prompt": content })
}

async fn ask(http: &Http, replica: &Replica, body: &Value) -> (HeaderMap, Value) {
    let url = format!("http://{}/v1/completions", replica.addresses.data);
    let (status, headers, answer) = http.send(Method::POST, &url, body).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    assert_eq!(answer["usage"]["completion_tokens"], 20);
    (headers, answer)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefill_and_decode_engines_share_a_request() {
    let transfer = TransferOptions::default();
    let engines = vec![connected(transfer).await, connected(transfer).await];
    let (dir, http) = (TempDir::new().unwrap(), Http::new());
    let replica = replica(&http, &engines, &dir).await;
    let (headers, answer) = ask(&http, &replica, &question(1)).await;
    assert_eq!(headers["x-quorate-prefill"], "engine-0");
    assert_eq!(headers["x-quorate-backend"], "engine-1");
    let prompt = answer["usage"]["prompt_tokens"].as_u64().unwrap();
    let cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
    assert_eq!(*cached, prompt - 1, "it fetched all but the last token");
    let [computing, answering] = [0, 1].map(|nth| engines[nth].stats());
    assert_eq!(
        (computing.generation_tokens, answering.generation_tokens),
        (1, 20)
    );
    assert_eq!(computing.prompt_tokens, prompt);

    // Charged once, as computed.
    let users = format!("http://{}/admin/v1/users", replica.addresses.admin);
    http.quiet(&replica.addresses).await;
    let (_, answer) = http.get(&users).await;
    let total = &answer["users"][0]["total"];
    assert_eq!(
        (
            &total["input_uncached"],
            &total["input_cached"],
            &total["output"]
        ),
        (&json!(prompt), &json!(0), &json!(20)),
        "{answer}"
    );
    // The decode engine now holds the prompt.
    let (headers, _) = ask(&http, &replica, &question(1)).await;
    assert!(!headers.contains_key("x-quorate-prefill"), "{headers:?}");
    assert_eq!(headers["x-quorate-backend"], "engine-1");

    let at = replica.addresses;
    let listed = done(&at, &["backends", "--wide"]).await;
    assert!(
        listed.contains("prefill") && listed.contains("decode"),
        "{listed}"
    );
    let prompt = question(2)["prompt"].as_str().unwrap().to_owned();
    let asked = [
        "explain",
        "--path",
        "/v1/completions",
        "--model",
        "emulated",
        "--prompt",
    ];
    let explained = done(&at, &[&asked[..], &[&prompt]].concat()).await;
    assert!(
        explained.contains("prefill  engine-0, by only-candidate"),
        "{explained}"
    );
    let metrics = http.text(&format!("http://{}/metrics", at.admin)).await;
    let transferred = r#"quorate_proxy_prefills_total{outcome="transferred"} 1"#;
    assert!(metrics.contains(transferred), "{metrics}");
    assert!(
        metrics.contains("quorate_proxy_decode_stage_seconds_count 1"),
        "{metrics}"
    );
    replica.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_transfers_and_engines_fail_no_request() {
    for on_failure in [LoadError::Recompute, LoadError::Fail] {
        let losing = TransferOptions {
            lost_every: 2,
            on_failure,
            ..TransferOptions::default()
        };
        let engines = vec![
            connected(TransferOptions::default()).await,
            connected(losing).await,
        ];
        let (dir, http) = (TempDir::new().unwrap(), Http::new());
        let replica = replica(&http, &engines, &dir).await;
        for number in 0..4 {
            ask(&http, &replica, &question(number)).await;
        }
        let mut engines = engines;
        engines.remove(0).stop().await;
        for number in 4..6 {
            let (headers, _) = ask(&http, &replica, &question(number)).await;
            assert_eq!(headers["x-quorate-backend"], "engine-1");
        }
        http.quiet(&replica.addresses).await;
        replica.leave().await;
    }
}
