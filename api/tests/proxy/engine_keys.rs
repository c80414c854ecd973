//! Which key an engine receives (I62).

use std::time::Duration;

use api::engines::backends::{EngineHeaders, EngineKeys};
use api::proxy::ApiKeys;
use http::HeaderValue;
use tokio::time::Instant;

use super::client::chat;
use super::engine::{Engine, json};
use super::fleet::{Fleet, PATIENT};

/// Returns the header lines of a request that carry a key, sorted.
fn keys_in(request: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = request
        .lines()
        .filter(|line| line.contains("key"))
        .collect();
    lines.sort_unstable();
    lines
}

fn keyed() -> String {
    let ours = "authorization: Bearer client-key\r\nx-api-key: client-key\r\napi-key: client-key\r\nhost: ";
    chat("").replacen("host: ", ours, 1)
}

async fn seen(fleet: &Fleet, engine: &Engine) -> Vec<String> {
    assert_eq!(fleet.client().await.ask(keyed()).await.status, 200);
    fleet.is_idle().await;
    let request = engine.requests().pop().unwrap();
    keys_in(&request).into_iter().map(str::to_owned).collect()
}

#[tokio::test]
async fn an_engine_gets_its_own_key_instead_of_a_clients() {
    let engine = Engine::always(vec![json("200 OK", "{}")]).await;
    let mut keys = EngineKeys::default();
    let url = format!("http://{}", engine.address);
    keys.add("e0", &url, HeaderValue::from_static("Bearer engine-key"));
    let fleet = Fleet::start_keyed(&[&engine], keys, Duration::ZERO, |_| {}).await;
    let own = ["authorization: Bearer engine-key"];
    assert_eq!(seen(&fleet, &engine).await, own);
}

#[tokio::test]
async fn an_engines_own_headers_replace_a_clients() {
    let engine = Engine::always(vec![json("200 OK", "{}")]).await;
    let mut keys = EngineKeys::default();
    let url = format!("http://{}", engine.address);
    let headers = EngineHeaders::read("x-team-key: of-engine\nx-gateway-key: of-gateway\n");
    keys.add("e0", &url, headers.unwrap());
    let fleet = Fleet::start_keyed(&[&engine], keys, Duration::ZERO, |_| {}).await;
    let request = keyed().replacen("host: ", "x-team-key: of-client\r\nhost: ", 1);
    assert_eq!(fleet.client().await.ask(request).await.status, 200);
    fleet.is_idle().await;
    let request = engine.requests().pop().unwrap();
    let own = ["x-gateway-key: of-gateway", "x-team-key: of-engine"];
    assert_eq!(keys_in(&request), own);
}

#[tokio::test]
async fn an_engine_key_is_not_sent_to_another_url() {
    let engine = Engine::always(vec![json("200 OK", "{}")]).await;
    let mut keys = EngineKeys::default();
    // From the config; the registry has another one.
    keys.add(
        "e0",
        "http://10.0.0.1:8000",
        HeaderValue::from_static("Bearer engine-key"),
    );
    let fleet = Fleet::start_keyed(&[&engine], keys, Duration::ZERO, |_| {}).await;
    let clients = [
        "api-key: client-key",
        "authorization: Bearer client-key",
        "x-api-key: client-key",
    ];
    assert_eq!(seen(&fleet, &engine).await, clients);
}

/// Starts an engine that accepts only this key.
async fn locked(key: &'static str) -> Engine {
    Engine::answering(move |request| match request.contains(key) {
        true => vec![json("200 OK", "{}")],
        false => vec![json("401 Unauthorized", r#"{"error":"Unauthorized"}"#)],
    })
    .await
}

/// Returns the routers' keys for engines.
fn keys_of(engines: &[(&Engine, &'static str)]) -> EngineKeys {
    let mut keys = EngineKeys::default();
    for (number, (engine, key)) in engines.iter().enumerate() {
        let url = format!("http://{}", engine.address);
        keys.add(&format!("e{number}"), &url, HeaderValue::from_static(key));
    }
    keys
}

#[tokio::test]
async fn an_engine_that_refuses_the_routers_key_is_at_fault() {
    let (rotated, well) = (locked("Bearer new").await, locked("Bearer old").await);
    let keys = || keys_of(&[(&rotated, "Bearer old"), (&well, "Bearer old")]);
    let fleet = Fleet::start_keyed(&[&rotated, &well], keys(), PATIENT, |_| {}).await;
    for _ in 0..24 {
        let answer = fleet.client().await.ask(keyed()).await;
        assert_eq!(
            (answer.status, answer.header("x-quorate-backend")),
            (200, Some("e1"))
        );
    }
    fleet.is_idle().await;
    let circuit = fleet.backends.circuit(fleet.backend(0), Instant::now());
    assert!(circuit.is_open, "{circuit:?}");
    let asked = rotated.requests().len();
    assert!((1..24).contains(&asked), "{asked}");

    let fleet = Fleet::start_keyed(&[&rotated], keys(), PATIENT, |_| {}).await;
    let answer = fleet.client().await.ask(keyed()).await;
    answer.refuses(502, "backend_refuses_credentials");
}

#[tokio::test]
async fn an_engine_without_a_key_is_at_fault_if_clients_keys_end_here() {
    let engine = locked("Bearer new").await;
    let fleet = Fleet::start_with(&[&engine], PATIENT, |settings| {
        let mut keys = ApiKeys::default();
        keys.add("client-key", None);
        settings.api_keys = Some(keys);
    })
    .await;
    let answer = fleet.client().await.ask(keyed()).await;
    answer.refuses(502, "backend_refuses_credentials");
}

#[tokio::test]
async fn a_clients_own_key_that_an_engine_refuses_is_the_clients() {
    let (one, two) = (locked("Bearer new").await, locked("Bearer new").await);
    let fleet = Fleet::start(&[&one, &two]).await;
    for _ in 0..12 {
        let answer = fleet.client().await.ask(keyed()).await;
        assert_eq!(
            (answer.status, &*answer.body),
            (401, r#"{"error":"Unauthorized"}"#)
        );
    }
    fleet.is_idle().await;
    assert_eq!(one.requests().len() + two.requests().len(), 12);
    for number in 0..2 {
        let circuit = fleet
            .backends
            .circuit(fleet.backend(number), Instant::now());
        assert_eq!(circuit.recent_failures, 0);
    }
}

#[tokio::test]
async fn locally_checked_keys_are_not_forwarded() {
    let engine = Engine::always(vec![json("200 OK", "{}")]).await;
    let fleet = Fleet::start_with(&[&engine], Duration::ZERO, |settings| {
        let mut keys = ApiKeys::default();
        keys.add("client-key", None);
        settings.api_keys = Some(keys);
    })
    .await;
    assert!(seen(&fleet, &engine).await.is_empty());
}
