//! Which key an engine receives (I62).

use std::time::Duration;

use api::engines::backends::{EngineHeaders, EngineKeys};
use api::proxy::ApiKeys;
use http::HeaderValue;

use super::client::chat;
use super::engine::{Engine, json};
use super::fleet::Fleet;

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
