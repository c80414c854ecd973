//! `quorate engine-check` against the emulated engine, whose abilities are known.

use api::engines::backends::EngineKind;
use api::engines::kv_transport::endpoint::KvEndpoint;
use node::engine_check::{CheckOutcome, EngineCheckOptions, check};

use super::blocks::publishing;
use super::*;

fn options(url: String) -> EngineCheckOptions {
    EngineCheckOptions {
        url,
        model: None,
        authorization: None,
        tokenizer: None,
        kv_events: None,
        patience: PATIENCE,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_check_finds_the_emulated_engines_features() {
    let engine = EmulatedEngine::start(publishing()).await.unwrap();
    let report = check(&options(engine.url())).await.unwrap();
    assert_eq!(report.kind, Some(EngineKind::Vllm));
    assert_eq!(report.model.as_deref(), Some("emulated"));
    assert!(report.is_usable());
    let outcomes: Vec<_> = report
        .checks
        .iter()
        .map(|it| (it.name, it.outcome))
        .collect();
    let all = [
        "health",
        "models",
        "metrics",
        "chat",
        "usage",
        "cached tokens",
        "streams",
        "continuation",
        "tokenizer",
        "KV events",
        "hang-up",
    ];
    let expected = all.map(|name| (name, CheckOutcome::Yes));
    assert_eq!(outcomes, expected, "{report:#?}");
    let found = |name: &str| {
        let check = report.checks.iter().find(|check| check.name == name);
        check.unwrap().found.clone()
    };
    assert!(found("KV events").contains("blocks of 32 tokens"));
    assert!(found("streams").contains("in a chunk of its own"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_check_follows_the_named_event_endpoint() {
    let publisher = EmulatedEngine::start(publishing()).await.unwrap();
    let silent = EmulatedEngine::start(EngineOptions::default());
    let silent = silent.await.unwrap();
    let endpoint = |text: Option<String>| text.unwrap().parse::<KvEndpoint>().unwrap();
    let events = endpoint(publisher.kv_events());
    let replay = endpoint(publisher.kv_replay());
    let found = async |url: String, replay: Option<KvEndpoint>, patience| {
        let asked = EngineCheckOptions {
            kv_events: Some((events.clone(), replay)),
            patience,
            ..options(url)
        };
        let report = check(&asked).await.unwrap();
        let check = report.checks.into_iter().find(|it| it.name == "KV events");
        check.unwrap()
    };
    let whole = found(publisher.url(), Some(replay), PATIENCE).await;
    assert_eq!(whole.outcome, CheckOutcome::Yes, "{whole:?}");
    let therefore = "kv_events = that endpoint gives exact ownership, with a tokenizer";
    assert_eq!(whole.therefore, therefore);
    let unreplayed = found(publisher.url(), None, PATIENCE).await;
    assert_eq!(unreplayed.outcome, CheckOutcome::Partly, "{unreplayed:?}");
    // That endpoint belongs to another engine and publishes nothing about these requests.
    let other = found(silent.url(), None, Duration::from_secs(2)).await;
    assert_eq!(other.outcome, CheckOutcome::No, "{other:?}");
    assert!(other.found.contains("nothing was published"), "{other:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_check_names_missing_features_and_consequences() {
    let engine = EmulatedEngine::start(EngineOptions {
        speed: 50.0,
        ..EngineOptions::default()
    });
    let engine = engine.await.unwrap();
    let report = check(&options(engine.url())).await.unwrap();
    let events = report.checks.iter().find(|check| check.name == "KV events");
    let events = events.unwrap();
    assert_eq!(events.outcome, CheckOutcome::No);
    assert!(events.therefore.contains("leases"), "{}", events.therefore);
    let url = engine.url();
    engine.stop().await;
    let refused = check(&options(url)).await.unwrap_err();
    let refused = format!("{refused:#}");
    assert!(
        refused.contains("refused") && !refused.contains("admin"),
        "{refused}"
    );
}
