//! LoRA adapters with emulated engines that load them: every engine lists all, and no engine loads
//! an adapter that another has in memory, until queues are long.

use lab::engine::LoraOptions;

use super::*;

async fn lora_engines(speed: f64) -> Vec<EngineHandle> {
    let mut engines = Vec::new();
    for seed in 0..2 {
        let options = EngineOptions {
            speed,
            seed,
            lora: LoraOptions {
                names: ["clerk", "poet"].map(str::to_owned).to_vec(),
                ..LoraOptions::default()
            },
            ..EngineOptions::default()
        };
        engines.push(EmulatedEngine::start(options).await.unwrap());
    }
    engines
}

/// Starts a replica with these settings, and waits until it knows the engines' adapters.
async fn replica(
    http: &Http,
    engines: &[EngineHandle],
    dir: &TempDir,
    set: impl FnMut(&mut Config),
) -> Replica {
    let replica = lone_replica(engines, dir, set);
    http.ready(&[replica.addresses]).await;
    let url = format!("http://{}/admin/v1/backends", replica.addresses.admin);
    let is_told = async || {
        let (_, answer) = http.get(&url).await;
        let backends = answer["backends"].as_array().unwrap();
        let has_both = |backend: &Value| {
            backend["engine"]["adapters"]["max"] == 1
                && backend["facts"]["models"] == json!(["clerk", "emulated", "poet"])
        };
        backends.iter().all(has_both)
    };
    until("the engines' adapters are known", is_told).await;
    replica
}

fn question(adapter: &str, number: usize, max_tokens: u32) -> Value {
    let content = format!("{number} is the question that nobody has asked before. {SYSTEM}");
    json!({ "model": adapter, "max_tokens": max_tokens, "messages": [
        { "role": "user", "content": content },
    ] })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adapter_requests_go_to_engines_that_have_it_loaded() {
    let (dir, engines) = (TempDir::new().unwrap(), lora_engines(50.0).await);
    let http = Http::new();
    let replica = replica(&http, &engines, &dir, |_| ()).await;
    let url = format!("http://{}/v1/chat/completions", replica.addresses.data);
    let mut went = [BTreeSet::new(), BTreeSet::new()];
    for number in 0..20 {
        let nth = number % 2;
        let body = question(["clerk", "poet"][nth], number, 4);
        let (status, headers, answer) = http.send(Method::POST, &url, &body).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        went[nth].insert(headers["x-quorate-backend"].to_str().unwrap().to_owned());
    }
    assert!(
        went.iter().all(|backends| backends.len() == 1),
        "each stays at one engine: {went:?}"
    );
    assert_ne!(went[0], went[1], "there is room for one at each");
    let loads = engines.iter().map(|engine| engine.stats().adapter_loads);
    assert_eq!(loads.collect::<Vec<_>>(), [1, 1]);
    replica.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_engine_loads_the_adapter_beyond_the_threshold() {
    let (dir, engines) = (TempDir::new().unwrap(), lora_engines(1.0).await);
    let http = Http::new();
    let replica = replica(&http, &engines, &dir, |config| {
        config.sections.routing.queueing_threshold_lora = 2;
        config.admission.founding.concurrency = state::admission::Concurrency::Fixed(1);
    })
    .await;
    let url = &format!("http://{}/v1/chat/completions", replica.addresses.data);
    let loads = || engines.iter().map(|engine| engine.stats().adapter_loads);
    let ask = async |number: usize| {
        let (status, _, answer) = http
            .send(Method::POST, url, &question("poet", number, 40))
            .await;
        assert_eq!(status, StatusCode::OK, "{answer}");
    };
    // With two concurrent first requests, both could find no engine that has the adapter.
    ask(7).await;
    // One request runs and two wait, as many as the threshold allows.
    futures_util::future::join_all((0..3).map(ask)).await;
    assert_eq!(loads().sum::<u64>(), 1, "{:?}", loads().collect::<Vec<_>>());
    // One runs and three wait.
    futures_util::future::join_all((3..7).map(ask)).await;
    assert_eq!(loads().collect::<Vec<_>>(), [1, 1]);
    replica.leave().await;
}
