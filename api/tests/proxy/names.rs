//! Names of models: aliases, fallbacks and splits, as clients, engines and operators see them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use api::engines::backends::{Backends, Fault, Health, ProbeSettings};
use api::model_names::{ModelNames, ModelSplit, SplitBy};
use api::proxy::ProxySettings;
use serde_json::{Value, json};
use state::command::{BackendSpec, Command, UserSettings};

use super::client::{Answer, post};
use super::engine::{Engine, json as answer_json};
use super::fleet::{Fleet, HEALTHY, PATIENT, eventually};
use super::picking::{InProcessPicker, plain};

const CHAT: &str = "/v1/chat/completions";

fn names() -> ModelNames {
    let owned = |name: &str, model: &str| (name.to_owned(), model.to_owned());
    let split = |name: &str, by| {
        let targets = [("large".to_owned(), 1), ("small".to_owned(), 1)];
        (name.to_owned(), ModelSplit::new(name, by, &targets))
    };
    ModelNames {
        aliases: [owned("best", "large")].into(),
        fallbacks: [owned("large", "small")].into(),
        splits: [
            split("by-user", SplitBy::User),
            split("by-session", SplitBy::Session),
            split("by-request", SplitBy::Request),
        ]
        .into(),
    }
}

async fn engine() -> Engine {
    Engine::always(vec![answer_json("200 OK", "{}")]).await
}

/// Registers the first engine with the model `large` and the second one with `small`.
fn register(fleet: &Fleet, engines: &[Engine; 2]) {
    serve_models(fleet, engines);
    fleet.assume_healthy();
}

fn serve_models(fleet: &Fleet, engines: &[Engine; 2]) {
    for (number, model) in ["large", "small"].into_iter().enumerate() {
        fleet.apply(Command::PutBackend(BackendSpec {
            models: vec![model.to_owned()],
            ..engines[number].spec(number)
        }));
    }
}

async fn start(change: impl FnOnce(&mut ProxySettings)) -> (Fleet, [Engine; 2]) {
    let engines = [engine().await, engine().await];
    let all: Vec<_> = engines.iter().collect();
    let fleet = Fleet::start_with(&all, PATIENT, |settings| {
        settings.names = names();
        change(settings);
    });
    let fleet = fleet.await;
    register(&fleet, &engines);
    (fleet, engines)
}

fn body(model: &str) -> String {
    let text = "x".repeat(100);
    format!(r#"{{"messages":[{{"role":"user","content":"{text}"}}], "model" : "{model}" ,"n":1}}"#)
}

async fn ask(fleet: &Fleet, model: &str, headers: &str) -> Answer {
    let request = post(CHAT, headers, &body(model));
    let answer = fleet.client().await.ask(request).await;
    fleet.is_idle().await;
    answer
}

/// Returns the body of the last request that the engine received.
fn received(engine: &Engine) -> String {
    let request = engine.requests().pop().unwrap();
    request.split_once("\r\n\r\n").unwrap().1.to_owned()
}

fn set_up(fleet: &Fleet, number: usize, is_healthy: bool) {
    let health = Health {
        is_healthy,
        ..HEALTHY
    };
    fleet.backends.assume(fleet.backend(number).slot, &health);
}

async fn explained(fleet: &Fleet, model: &str, headers: &Value) -> Value {
    let body: Value = serde_json::from_str(&body(model)).unwrap();
    let asked = json!({"path": CHAT, "headers": headers, "body": body});
    let (status, answer) = fleet.call("POST", "/admin/v1/explain", &asked).await;
    assert_eq!(status, 200, "{answer}");
    answer
}

#[tokio::test]
async fn a_request_for_an_alias_is_a_request_for_the_model() {
    let (fleet, engines) = start(|_| {}).await;
    let as_itself = ask(&fleet, "large", "").await;
    assert_eq!(as_itself.header("x-quorate-model"), None);
    assert_eq!(received(&engines[0]), body("large"));
    let prefix = |answer: &Answer| {
        let told = answer.header("x-quorate-prefix").unwrap();
        let (matched, total) = told.split_once('/').unwrap();
        (matched.to_owned(), total.to_owned())
    };
    let renamed = ask(&fleet, "best", "x-request-id: renamed\r\n").await;
    assert_eq!(renamed.status, 200, "{}", renamed.body);
    assert_eq!(renamed.header("x-quorate-model"), Some("large"));
    assert_eq!(received(&engines[0]), body("large"), "byte for byte");
    let ((before, total), (matched, of)) = (prefix(&as_itself), prefix(&renamed));
    assert_eq!((&*before, &total), ("0", &of));
    assert_ne!(matched, "0", "the prompt is in the cache of the same model");
    let (_, record) = fleet
        .call("GET", "/admin/v1/decisions/renamed", &json!({}))
        .await;
    assert_eq!(record["model"], "large");
    assert_eq!(record["requested_model"], "best");
    let (by_name, by_alias) = (
        explained(&fleet, "large", &json!({})).await,
        explained(&fleet, "best", &json!({})).await,
    );
    assert_eq!(by_name["blocks"], by_alias["blocks"]);
    assert_eq!(by_name["resolved"], Value::Null);
    assert_eq!(by_alias["resolved"]["model"], "large");
}

#[tokio::test]
async fn a_form_names_the_model_by_an_alias() {
    let (fleet, engines) = start(|_| {}).await;
    let form = |model: &str| {
        format!(
            "--b\r\ncontent-disposition: form-data; name=\"file\"\r\n\r\nmodel\r\n--b\r\n\
             content-disposition: form-data; name=\"model\"\r\n\r\n{model}\r\n--b--\r\n"
        )
    };
    let head = "content-type: multipart/form-data; boundary=b\r\n";
    let request = post("/v1/audio/transcriptions", head, &form("best"));
    let answer = fleet.client().await.ask(request).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(received(&engines[0]), form("large"));
}

#[tokio::test]
async fn a_fallback_serves_while_no_engine_of_the_model_can() {
    let (fleet, engines) = start(|_| {}).await;
    for name in ["large", "best"] {
        set_up(&fleet, 0, false);
        let answer = ask(&fleet, name, "").await;
        assert_eq!(answer.header("x-quorate-model"), Some("small"), "{name}");
        assert_eq!(received(&engines[1]), body("small"), "{name}");
        let explained = explained(&fleet, name, &json!({})).await;
        assert_eq!(explained["choice"], "e1");
        assert_eq!(explained["resolved"]["is_fallback"], true);
        set_up(&fleet, 0, true);
        ask(&fleet, name, "").await;
        assert_eq!(received(&engines[0]), body("large"), "{name} is back");
    }
    // Draining counts; a fallback that is down as well does not help.
    fleet.apply(Command::SetDraining {
        name: "e0".to_owned(),
        draining: true,
        moves_streams: false,
    });
    assert_eq!(
        ask(&fleet, "large", "").await.header("x-quorate-model"),
        Some("small")
    );
    set_up(&fleet, 1, false);
    assert_eq!(ask(&fleet, "large", "").await.status, 503);
}

#[tokio::test]
async fn a_fallback_serves_while_the_engine_hangs_or_is_unwell() {
    let is_well = Arc::new(AtomicBool::new(true));
    let well = Arc::clone(&is_well);
    let large = Engine::answering(move |request: &str| {
        let is_answered = request.starts_with("POST") || well.load(Ordering::SeqCst);
        let status = if is_answered { "200 OK" } else { "503 No" };
        vec![answer_json(status, "{}")]
    });
    let engines = [large.await, engine().await];
    let probes = ProbeSettings {
        interval: Duration::from_millis(5),
        registry_interval: Duration::from_millis(5),
        ..ProbeSettings::default()
    };
    let all: Vec<_> = engines.iter().collect();
    let fleet = Fleet::start_probed_with(&all, Backends::new(probes), |it| it.names = names());
    let fleet = fleet.await;
    serve_models(&fleet, &engines);
    let until = async |number: usize, is_healthy, fault| {
        let record = || fleet.backends.record(fleet.backend(number).slot).unwrap();
        let is_so = || (record().is_healthy, record().fault) == (is_healthy, fault);
        eventually("the probes agree", is_so).await;
    };
    until(0, true, None).await;
    until(1, true, None).await;
    let served = async || {
        let answer = ask(&fleet, "best", "").await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.header("x-quorate-model").unwrap().to_owned()
    };
    assert_eq!(served().await, "large");
    is_well.store(false, Ordering::SeqCst);
    until(0, false, Some(Fault::Unwell)).await;
    assert_eq!(served().await, "small");
    // The engine that may be well is better than none.
    engines[1].kill();
    until(1, false, Some(Fault::Unreachable)).await;
    assert_eq!(served().await, "large");
    fleet.is_idle().await;
}

#[tokio::test]
async fn users_get_no_model_that_they_are_not_allowed() {
    let (fleet, engines) = start(|_| {}).await;
    for (user, model) in [("ada", "large"), ("bob", "small")] {
        let settings = UserSettings {
            models: vec![model.to_owned()],
            ..UserSettings::default()
        };
        fleet.apply(Command::configure_user(user, settings));
    }
    let (ada, bob) = ("x-quorate-user: ada\r\n", "x-quorate-user: bob\r\n");
    assert_eq!(ask(&fleet, "best", ada).await.status, 200);
    ask(&fleet, "best", bob)
        .await
        .refuses(403, "model_not_allowed");
    set_up(&fleet, 0, false);
    assert_eq!(ask(&fleet, "best", ada).await.status, 503, "no fallback");
    // A fallback gives no access to the model that it stands in for.
    ask(&fleet, "best", bob)
        .await
        .refuses(403, "model_not_allowed");
    assert!(engines[1].requests().is_empty());
}

/// Returns the models of a name for many values of a header, as served.
async fn served(fleet: &Fleet, name: &str, head: &dyn Fn(usize) -> String) -> Vec<String> {
    let mut models = Vec::new();
    for nth in 0..24 {
        let answer = ask(fleet, name, &head(nth)).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        models.push(answer.header("x-quorate-model").unwrap().to_owned());
    }
    models
}

#[tokio::test]
async fn a_split_keeps_users_and_sessions_with_their_model_at_every_replica() {
    let engines = [engine().await, engine().await];
    let all: Vec<_> = engines.iter().collect();
    let settings = [1, 2].map(|id| ProxySettings {
        names: names(),
        ..ProxySettings::new(state::ids::ReplicaId(id))
    });
    let fleets = Fleet::replicas(&all, settings.into()).await;
    register(&fleets[0], &engines);
    fleets[1].assume_healthy();
    for (name, key) in [
        ("by-user", "x-quorate-user"),
        ("by-session", "x-claude-code-session-id"),
        // Without a session, by the user.
        ("by-session", "x-quorate-user"),
        ("by-user", "x-request-id"),
        ("by-request", "x-request-id"),
    ] {
        let head = |nth: usize| format!("{key}: k{nth}\r\n");
        let first = served(&fleets[0], name, &head).await;
        assert_eq!(
            first,
            served(&fleets[1], name, &head).await,
            "{name} by {key}"
        );
        assert_eq!(
            BTreeSet::from_iter(&first).len(),
            2,
            "{name} by {key}: {first:?}"
        );
        for (nth, model) in first.iter().enumerate() {
            let headers = json!({ key: format!("k{nth}") });
            let explained = explained(&fleets[1], name, &headers).await;
            assert_eq!(explained["resolved"]["model"], **model, "{name} by {key}");
        }
    }
    let alone = |nth: usize| format!("x-quorate-user: ada\r\nx-request-id: k{nth}\r\n");
    let of_one = served(&fleets[0], "by-user", &alone).await;
    assert_eq!(BTreeSet::from_iter(of_one).len(), 1);
}

#[tokio::test]
async fn the_model_list_has_all_names_that_the_caller_may_use() {
    let (fleet, _engines) = start(|_| {}).await;
    let listed = async |path: &str| {
        let request = format!("GET {path} HTTP/1.1\r\nhost: router\r\n\r\n");
        let answer = fleet.client().await.ask(request).await;
        serde_json::from_str::<Value>(&answer.body).unwrap()
    };
    let ids = |list: &Value| -> Vec<String> {
        let data = list["data"].as_array().unwrap().iter();
        data.map(|it| it["id"].as_str().unwrap().to_owned())
            .collect()
    };
    let all = [
        "best",
        "by-request",
        "by-session",
        "by-user",
        "large",
        "small",
    ];
    assert_eq!(ids(&listed("/v1/models").await), all);
    assert_eq!(listed("/v1/models/best").await["id"], "best");
    // The fallback serves the name and its alias.
    set_up(&fleet, 0, false);
    assert_eq!(ids(&listed("/v1/models").await), all);
    set_up(&fleet, 0, true);
    set_up(&fleet, 1, false);
    assert_eq!(ids(&listed("/v1/models").await), all[..5]);
    set_up(&fleet, 0, false);
    let answer = listed("/v1/models/best").await;
    assert_eq!(answer["error"]["code"], "no_healthy_backend", "{answer}");
}

#[tokio::test]
async fn a_gateway_gets_the_body_with_the_models_name() {
    let (fleet, engines) = start(|_| {}).await;
    let picking = InProcessPicker::of(&fleet);
    let mut talk = picking.open().unwrap();
    talk.ask(&body("best"), 1000, plain()).await;
    let (endpoints, _) = talk.picked().await;
    assert_eq!(endpoints, engines[0].address.to_string());
    assert_eq!(talk.streamed().await, body("large"));
    drop(talk);
    fleet.is_idle().await;
}
