//! Headers and fields that would control an engine or the router, in both directions.

use std::time::Duration;

use api::engines::backends::ProbeSettings;
use api::proxy::FieldRules;

use super::client::{chat, post};
use super::engine::{Engine, Step, json};
use super::fleet::{Fleet, eventually};

#[tokio::test]
async fn engine_commands_in_a_body_are_not_forwarded() {
    let engine = Engine::always(vec![json("200 OK", "{}")]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let fields = r#","priority":-9,"pr\u0069ority":-8,"stream":true"#;
    let headers = "x-data-parallel-rank: 1\r\nx-override-model: x\r\nx-vllm-priority: -9\r\nhost: ";
    let request = chat(fields).replacen("host: ", headers, 1);
    assert_eq!(fleet.client().await.ask(request).await.status, 200);
    let seen = engine.requests().pop().unwrap();
    assert!(!seen.contains("ority") && !seen.contains("-9"), "{seen}");
    assert!(
        !seen.contains("x-override") && !seen.contains("x-data"),
        "{seen}"
    );
    // The router adds its request for usage to the remaining fields.
    assert!(
        seen.contains(r#"{"stream_options":{"include_usage":true"#),
        "{seen}"
    );
    assert!(
        seen.ends_with(r#"],"stream":true}"#) || seen.contains(r#""stream":true}"#),
        "{seen}"
    );

    let refused = chat(r#","kv_transfer_params":{"remote_host":"10.0.0.9"}"#);
    let answer = fleet.client().await.ask(refused).await;
    assert_eq!(answer.status, 400);
    assert!(
        answer.body.contains(r#""param":"kv_transfer_params""#),
        "{}",
        answer.body
    );
    assert_eq!(engine.requests().len(), 1);
    fleet.is_idle().await;
}

#[tokio::test]
async fn everything_is_forwarded_without_field_rules() {
    let engine = Engine::always(vec![json("200 OK", "{}")]).await;
    let fleet = Fleet::start_with(&[&engine], Duration::ZERO, |settings| {
        settings.fields = FieldRules::new(Vec::new(), Vec::new());
        settings.extra_paths = vec!["/generate".to_owned()];
    })
    .await;
    let body = r#"{ "model":"m","priority":-9,"kv_transfer_params":{} }"#;
    let answer = fleet.client().await.ask(post("/generate", "", body)).await;
    assert_eq!(answer.status, 200);
    assert!(engine.requests()[0].ends_with(body));
    let answer = fleet
        .client()
        .await
        .ask(post("/v1/model/load", "", body))
        .await;
    assert_eq!(answer.status, 404);
    fleet.is_idle().await;
}

#[tokio::test]
async fn redirects_of_engines_are_not_followed_or_exposed() {
    // A server that would answer if the redirect were followed.
    let elsewhere = Engine::always(vec![json("200 OK", "{}")]).await;
    let there = elsewhere.address;
    let redirect = format!(
        "HTTP/1.1 307 Temporary Redirect\r\nlocation: http://{there}/v1\r\n\
         content-length: 0\r\n\r\n"
    );
    let lost = Engine::always(vec![Step::Send(redirect.into())]).await;
    let fleet = Fleet::start(&[&lost]).await;
    let answer = fleet.client().await.ask(chat("")).await;
    answer.refuses(502, "backend_redirects");
    let address = there.to_string();
    assert!(answer.header("location").is_none() && !answer.body.contains(&address));
    fleet.is_idle().await;
    let probes = ProbeSettings {
        interval: Duration::from_millis(50),
        ..ProbeSettings::default()
    };
    let _probed = Fleet::start_probed(&[&lost], probes).await;
    let is_probe = |it: &&String| it.starts_with("GET");
    let probes = || lost.requests().iter().filter(is_probe).count();
    eventually("probes go on", || probes() > 5).await;
    assert_eq!(elsewhere.connections(), 0, "{:?}", elsewhere.requests());

    let head = "HTTP/1.1 200 OK\r\nserver: uvicorn\r\nset-cookie: a=b\r\nlocation: /x\r\n\
                content-length: 2\r\n\r\n{}";
    let chatty = Engine::always(vec![Step::Send(head.into())]).await;
    // An engine that redirects did not run the request, so the other one is tried.
    let fleet = Fleet::start(&[&lost, &chatty]).await;
    for _ in 0..4 {
        let answer = fleet.client().await.ask(chat("")).await;
        assert_eq!(answer.status, 200);
        for name in ["server", "set-cookie", "location"] {
            assert_eq!(answer.header(name), None, "{name}");
        }
    }
    fleet.is_idle().await;
}
