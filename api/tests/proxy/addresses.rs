//! Addresses of engines: below a path, and at names whose address may change.

use std::time::Duration;

use api::engines::backends::{
    Backends, EngineAddressRules, EngineDialer, EngineKeys, ProbeSettings,
};
use api::proxy::ProxySettings;
use http::HeaderValue;
use state::command::{BackendSpec, Command};

use super::client::chat;
use super::engine::{Engine, json as answer_json};
use super::fleet::{Fleet, PATIENT, eventually};

fn at(url: String) -> Command {
    Command::PutBackend(BackendSpec {
        url,
        ..Engine::at(([127, 0, 0, 1], 1).into()).spec(0)
    })
}

async fn engine() -> Engine {
    Engine::always(vec![answer_json("200 OK", "{}")]).await
}

#[tokio::test]
async fn requests_and_probes_are_sent_below_the_urls_path() {
    let engine = engine().await;
    let url = format!("http://{}/team/a", engine.address);
    let mut keys = EngineKeys::default();
    keys.add("e0", &url, HeaderValue::from_static("Bearer of-engine"));
    let probes = ProbeSettings {
        interval: Duration::from_millis(50),
        ..ProbeSettings::default()
    };
    let backends = Backends::new(probes).dialing(keys, EngineDialer::default());
    let fleet = Fleet::start_probed_by(&[&engine], backends).await;
    fleet.apply(at(url));
    let asked = |what: &str| {
        let seen = engine.requests();
        let line = format!("{what} HTTP/1.1\r\n");
        let mut seen = seen.iter().filter(|it| it.starts_with(&line));
        seen.any(|it| it.contains("authorization: Bearer of-engine\r\n"))
    };
    eventually("probes go below the path", || {
        asked("GET /team/a/ready") && asked("GET /team/a/metrics") && asked("GET /team/a/v1/models")
    })
    .await;
    let backend = fleet.backend(0);
    let is_healthy = || {
        fleet
            .backends
            .health_flags(backend.slot)
            .is_some_and(|it| it.is_healthy)
    };
    eventually("it is healthy", is_healthy).await;
    let request = chat("").replacen("/completions ", "/completions?x=1 ", 1);
    assert_eq!(fleet.client().await.ask(request).await.status, 200);
    assert!(asked("POST /team/a/v1/chat/completions?x=1"));
}

#[tokio::test]
async fn host_names_are_resolved_again_and_addresses_are_not() {
    let engine = engine().await;
    let port = engine.address.port();
    let never_holds = |settings: &mut ProxySettings| settings.pool.name_holds_for = Duration::ZERO;
    for (host, connections) in [("localhost", 3), ("127.0.0.1", 1)] {
        let fleet = Fleet::start_with(&[&engine], PATIENT, never_holds).await;
        fleet.apply(at(format!("http://{host}:{port}")));
        let slot = fleet.backend(0).slot;
        fleet.backends.assume(slot, &super::fleet::HEALTHY);
        let before = engine.connections();
        let mut client = fleet.client().await;
        for _ in 0..3 {
            assert_eq!(client.ask(chat("")).await.status, 200);
            fleet.is_idle().await;
        }
        assert_eq!(engine.connections() - before, connections, "{host}");
    }
}

#[tokio::test]
async fn no_request_is_sent_to_a_disallowed_address() {
    let engine = engine().await;
    let dialer = EngineDialer::default();
    let probes = ProbeSettings {
        interval: Duration::from_millis(50),
        ..ProbeSettings::default()
    };
    let backends = Backends::new(probes).dialing(EngineKeys::default(), dialer.clone());
    let fleet = Fleet::start_probed_by(&[&engine], backends).await;
    // By its host name, which the registry cannot check.
    let port = engine.address.port();
    fleet.apply(at(format!("http://localhost:{port}")));
    let slot = fleet.backend(0).slot;
    let is_healthy = |expected: bool| {
        let flags = fleet.backends.health_flags(slot);
        flags.is_some_and(|it| it.is_healthy == expected)
    };
    let by_name = format!("host: localhost:{port}\r\n");
    let is_probed = || engine.requests().iter().any(|it| it.contains(&by_name));
    eventually("it is healthy", || is_probed() && is_healthy(true)).await;
    assert_eq!(fleet.client().await.ask(chat("")).await.status, 200);
    fleet.is_idle().await;

    let elsewhere = vec!["10.0.0.0/8".parse().unwrap()];
    dialer.allow(EngineAddressRules::new(elsewhere));
    // A kept connection serves no further request.
    let posts = || {
        let seen = engine.requests();
        seen.iter().filter(|it| it.starts_with("POST")).count()
    };
    let before = posts();
    assert_ne!(fleet.client().await.ask(chat("")).await.status, 200);
    assert_eq!(posts(), before);
    eventually("probes are not sent either", || is_healthy(false)).await;
    dialer.allow(EngineAddressRules::default());
    eventually("it is healthy again", || is_healthy(true)).await;
}
