//! Responses stored by an engine are found at any engine.

use api::engines::backends::EngineKeys;
use api::proxy::ProxySettings;
use http::HeaderValue;
use state::command::{Command, UserDefaults};
use state::ids::ReplicaId;
use state::quotas::UserLimits;

use super::client::post;
use super::engine::{Engine, chunk, json as answer_json, last_chunk, stream_head};
use super::fleet::{Fleet, PATIENT};

/// Starts an engine that has stored the response with this id.
async fn keeper(id: &'static str) -> Engine {
    Engine::answering(move |request| {
        let line = request.lines().next().unwrap_or_default();
        let is_here = line.contains(&format!("/v1/responses/{id}"));
        if is_here && line.contains("stream=true") {
            let event = format!("event: done\ndata: {{\"id\":\"{id}\"}}\n\n");
            return vec![stream_head(), chunk(&event), last_chunk()];
        }
        match is_here {
            true => vec![answer_json("200 OK", &format!("{{\"id\":\"{id}\"}}"))],
            false => vec![answer_json("404 Not Found", "{\"error\":{}}")],
        }
    })
    .await
}

fn bare(method: &str, path: &str) -> String {
    format!("{method} {path} HTTP/1.1\r\nhost: router\r\n\r\n")
}

#[tokio::test]
async fn the_engine_with_the_stored_response_answers() {
    let (first, second) = (keeper("resp_a").await, keeper("resp_b").await);
    let fleet = Fleet::start(&[&first, &second]).await;
    let mut client = fleet.client().await;
    for id in ["resp_a", "resp_b"] {
        let path = format!("/v1/responses/{id}");
        for request in [
            bare("GET", &path),
            bare("DELETE", &path),
            post(&format!("{path}/cancel"), "", ""),
        ] {
            let answer = client.ask(&request).await;
            assert_eq!(answer.status, 200, "{request}");
            assert_eq!(answer.body, format!("{{\"id\":\"{id}\"}}"));
        }
        let answer = client
            .ask(bare("GET", &format!("{path}?stream=true")))
            .await;
        assert!(answer.body.contains("event: done"), "{}", answer.body);
        assert!(answer.is_complete);
    }
    let seen = second.requests().pop().unwrap();
    assert!(
        seen.starts_with("GET /v1/responses/resp_b?stream=true HTTP/1.1"),
        "{seen}"
    );
    // Engines without the response keep no connection open.
    assert_eq!((first.connections(), second.connections()), (1, 1));
    fleet.is_idle().await;
    assert_eq!(fleet.charged().await.started, 0);
}

#[tokio::test]
async fn every_replica_finds_a_stored_response() {
    let (first, second) = (keeper("resp_a").await, keeper("resp_b").await);
    let engines = [&first, &second];
    let settings = [1, 2].map(|id| ProxySettings::new(ReplicaId(id)));
    let replicas = Fleet::replicas(&engines, settings.into()).await;
    // A restarted replica has forgotten all earlier requests.
    let restarted = Fleet::start(&engines).await;
    for fleet in replicas.iter().chain([&restarted]) {
        let mut client = fleet.client().await;
        for id in ["resp_b", "resp_a"] {
            for request in [
                bare("GET", &format!("/v1/responses/{id}")),
                post(&format!("/v1/responses/{id}/cancel"), "", ""),
            ] {
                let answer = client.ask(&request).await;
                assert_eq!(answer.status, 200, "{request}");
                assert_eq!(answer.body, format!("{{\"id\":\"{id}\"}}"));
            }
        }
    }
}

#[tokio::test]
async fn an_engine_that_errs_does_not_hide_the_holder() {
    for (status, alone) in [
        ("401 Unauthorized", 503),
        ("500 Internal Server Error", 503),
        ("400 Bad Request", 400),
    ] {
        let erring = Engine::always(vec![answer_json(status, "{\"error\":{}}")]).await;
        let holder = keeper("resp_a").await;
        let fleet = Fleet::start(&[&erring, &holder]).await;
        let mut client = fleet.client().await;
        let answer = client.ask(bare("GET", "/v1/responses/resp_a")).await;
        assert_eq!(answer.status, 200, "{status}");
        let answer = client.ask(bare("GET", "/v1/responses/resp_x")).await;
        assert_eq!(answer.status, alone, "{status}");
    }
}

#[tokio::test]
async fn a_missing_response_is_404_unless_an_engine_was_silent() {
    let engine = keeper("resp_a").await;
    let fleet = Fleet::start(&[&engine]).await;
    let answer = fleet
        .client()
        .await
        .ask(bare("GET", "/v1/responses/resp_x"))
        .await;
    answer.refuses(404, "response_not_found");
    assert!(answer.body.contains("resp_x"), "{}", answer.body);
    let fleet = Fleet::start(&[&engine, &Engine::dead().await]).await;
    let answer = fleet
        .client()
        .await
        .ask(bare("GET", "/v1/responses/resp_x"))
        .await;
    answer.refuses(503, "backend_unreachable");
    let answer = fleet
        .client()
        .await
        .ask(bare("GET", "/v1/responses/resp_a"))
        .await;
    assert_eq!(answer.status, 200);
}

/// Starts an engine that has stored the response with this id, and continues no other one.
async fn continuing(id: &'static str) -> Engine {
    Engine::answering(move |request| {
        let has_it = request.contains(id);
        match (request.starts_with("POST"), has_it) {
            (_, true) => vec![answer_json("200 OK", &format!("{{\"id\":\"{id}\"}}"))],
            (true, false) => vec![answer_json("404 Not Found", r#"{"error":{"message":"x"}}"#)],
            (false, false) => vec![answer_json("404 Not Found", "{}")],
        }
    })
    .await
}

fn continues(id: &str) -> String {
    let body = format!(r#"{{"model":"m","input":"go on","previous_response_id":"{id}"}}"#);
    post("/v1/responses", "", &body)
}

#[tokio::test]
async fn the_next_turn_goes_to_the_engine_that_stored_the_response() {
    let engines = [
        continuing("resp_a").await,
        continuing("resp_b").await,
        continuing("resp_c").await,
    ];
    let all = [&engines[0], &engines[1], &engines[2]];
    let settings = [1, 2].map(|id| ProxySettings::new(ReplicaId(id)));
    for fleet in Fleet::replicas(&all, settings.into()).await {
        let mut client = fleet.client().await;
        for id in ["resp_a", "resp_c", "resp_b", "resp_b", "resp_a"] {
            let answer = client.ask(continues(id)).await;
            assert_eq!(
                (answer.status, answer.body),
                (200, format!("{{\"id\":\"{id}\"}}"))
            );
        }
        // The engine says in its own words that it does not know the response.
        let answer = client.ask(continues("resp_x")).await;
        assert_eq!(
            (answer.status, &*answer.body),
            (404, r#"{"error":{"message":"x"}}"#)
        );
        fleet.is_idle().await;
    }
}

#[tokio::test]
async fn a_continued_response_counts_toward_its_users_limits() {
    let engines = [continuing("resp_a").await, continuing("resp_b").await];
    let fleet = Fleet::start(&[&engines[0], &engines[1]]).await;
    let limits = UserLimits {
        requests: Some(1),
        window_ms: Some(3_600_000),
        ..UserLimits::default()
    };
    let defaults = UserDefaults {
        limits,
        ..UserDefaults::default()
    };
    fleet.apply(Command::PutUserDefaults(Box::new(defaults)));
    let mut client = fleet.client().await;
    assert_eq!(client.ask(continues("resp_a")).await.status, 200);
    let answer = client.ask(continues("resp_b")).await;
    answer.refuses(429, "rate_limit_exceeded");
}

#[tokio::test]
async fn a_stored_response_of_a_silent_engine_is_not_given_up() {
    let engine = continuing("resp_a").await;
    let fleet = Fleet::start(&[&engine, &Engine::dead().await]).await;
    let answer = fleet.client().await.ask(continues("resp_a")).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let answer = fleet.client().await.ask(continues("resp_x")).await;
    answer.refuses(503, "backend_unreachable");
}

#[tokio::test]
async fn stored_response_lookups_use_engine_keys() {
    let engine = keeper("resp_a").await;
    let mut keys = EngineKeys::default();
    let url = format!("http://{}", engine.address);
    keys.add("e0", &url, HeaderValue::from_static("Bearer of-engine"));
    let fleet = Fleet::start_keyed(&[&engine], keys, PATIENT, |_| {}).await;
    let request = bare("GET", "/v1/responses/resp_a");
    let request = request.replacen("host: ", "authorization: Bearer of-client\r\nhost: ", 1);
    assert_eq!(fleet.client().await.ask(request).await.status, 200);
    let seen = engine.requests().remove(0);
    assert!(seen.contains("authorization: Bearer of-engine"), "{seen}");
    assert!(!seen.contains("of-client"), "{seen}");
}
