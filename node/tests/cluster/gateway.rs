//! Replicas as endpoint pickers behind a stand-in gateway with TLS: real streams, real engines,
//! several pickers at once.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use crate::stand_in::{
    GatewayAnswer, GatewayOptions, GatewayRequest, GatewayTls, StandInGateway, picker_channel,
};
use api::proxy::picker::BodyMode;
use api::proxy::picker::ext_proc::BodySendMode;
use tonic::Code;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::*;

/// Number of conversations, and of turns in each.
const CHATS: usize = 34;
const TURNS: usize = 4;
/// Minimum percentage of turns that stay with their conversation's engine, of those that can.
const SAME_ENGINE: usize = 99;

fn pickers(at: &[Addresses]) -> Vec<SocketAddr> {
    at.iter().map(|at| at.picker.unwrap()).collect()
}

fn gateway(at: &[Addresses]) -> StandInGateway {
    StandInGateway::new(&pickers(at), GatewayOptions::default())
}

/// Returns a turn of a conversation that differs from all others from its first block on.
fn turn(user: &str, turn: usize, stream: bool) -> GatewayRequest {
    let mut messages = vec![json!({
        "role": "system", "content": format!("{user} asks the keeper. {SYSTEM}"),
    })];
    for nth in 0..=turn {
        let question = format!("Question {nth} of {user}: {SYSTEM}");
        messages.push(json!({ "role": "user", "content": question }));
    }
    let body = json!({
        "model": "emulated", "messages": messages, "max_tokens": 4, "user": user, "stream": stream,
    });
    let mut request = GatewayRequest::post("/v1/chat/completions", user, &body);
    request.headers.remove("x-quorate-user");
    request
}

fn engine_of(answer: &GatewayAnswer) -> String {
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
    answer.headers["x-quorate-backend"]
        .to_str()
        .unwrap()
        .to_owned()
}

/// Waits until no request is in flight and all replicas have applied all updates.
async fn settle(http: &Http, at: &[Addresses]) {
    for gauge in ["proxy_in_flight_requests", "state_outbox_items"] {
        for at in at {
            let url = format!("http://{}/metrics", at.admin);
            let line = format!("\nquorate_{gauge} 0\n");
            let is_empty = async || http.text(&url).await.contains(&line);
            until("a replica has told all", is_empty).await;
        }
    }
    for at in at {
        http.quiet(at).await;
    }
    http.agree(at).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conversation_keeps_its_engine_through_any_picker() {
    let (_dir, _engines, replicas, http, at) = started(3, 3).await;
    let gateway = gateway(&at);
    let mut last = vec![String::new(); CHATS];
    let (mut same, mut all) = (0, 0);
    for nth in 0..TURNS {
        for (chat, last) in last.iter_mut().enumerate() {
            let request = turn(&format!("user-{chat}"), nth, chat % 2 == 0);
            if nth > 0 {
                // A request that a picker still counts may outweigh a short prompt's prefix.
                for at in &at {
                    http.quiet(at).await;
                }
            }
            let answer = gateway.send(&request.pinned(chat + nth)).await.unwrap();
            let engine = engine_of(&answer);
            if nth > 0 {
                all += 1;
                same += usize::from(*last == engine);
            }
            *last = engine;
        }
        settle(&http, &at).await;
    }
    assert!(same * 100 >= all * SAME_ENGINE, "{same} of {all}");
    let used: BTreeSet<_> = last.iter().collect();
    assert_eq!(used.len(), 3, "{used:?}");
    leave(replicas).await;
}

/// Returns all users' counters after the same conversations, and the number of matched blocks. With
/// `is_mixed`, pickers get every second turn. Half of the responses stream.
async fn counters(is_mixed: bool) -> (BTreeMap<String, u64>, u32) {
    let (_dir, _engines, replicas, http, at) = started(3, 2).await;
    let gateway = gateway(&at);
    let mut found = 0;
    for nth in 0..3 {
        for chat in 0..6 {
            let is_streamed = (chat + nth / 2) % 2 == 0;
            let request = turn(&format!("user-{chat}"), nth, is_streamed);
            let replica = (chat + nth) % 3;
            let headers = if is_mixed && (chat + nth) % 2 == 0 {
                let answer = gateway.send(&request.pinned(replica)).await.unwrap();
                assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
                answer.headers
            } else {
                let url = format!("http://{}/v1/chat/completions", at[replica].data);
                let body = serde_json::from_slice(&request.body).unwrap();
                let (status, headers, answer) = http.send(Method::POST, &url, &body).await;
                assert_eq!(status, StatusCode::OK, "{answer}");
                headers
            };
            found += matched(&headers);
            // Keeps the order the same in every run.
            settle(&http, &at).await;
        }
    }
    let (_, users) = http.admin(at[0].admin, "users").await;
    leave(replicas).await;
    let users = users["users"].as_array().unwrap();
    let told = users.iter().map(|user| {
        let name = user["name"].as_str().unwrap().to_owned();
        (name, user["counter_milli_tokens"].as_u64().unwrap())
    });
    (told.collect(), found)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_count_equally_through_picker_and_data_port() {
    let (alone, found_alone) = counters(false).await;
    let (mixed, found_mixed) = counters(true).await;
    assert_eq!(alone, mixed);
    assert_eq!(found_alone, found_mixed);
    assert!(found_alone > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_body_mode_gives_equal_answers() {
    let overrides = |config: &mut Config| config.picker.bodies = BodyMode::Streamed;
    let (_dir, _engines, replica, _http, at) = started_alone(1, overrides).await;
    // With waiting streamed bodies, the gateway is asked for whole bodies.
    for (bodies, waits_for_heads) in [
        (BodySendMode::FullDuplexStreamed, false),
        (BodySendMode::Streamed, false),
        (BodySendMode::Streamed, true),
        (BodySendMode::Buffered, true),
    ] {
        let options = GatewayOptions {
            bodies,
            waits_for_heads,
            allows_override: waits_for_heads,
            piece_bytes: 100,
            ..GatewayOptions::default()
        };
        let gateway = StandInGateway::new(&pickers(&[at]), options);
        let answer = gateway.send(&turn("ada", 2, false)).await.unwrap();
        let whole: Value = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!(whole["usage"]["completion_tokens"], 4, "{bodies:?}");
        let answer = gateway.send(&turn("ada", 2, true)).await.unwrap();
        let text = String::from_utf8(answer.body.to_vec()).unwrap();
        assert!(text.ends_with("data: [DONE]\n\n"), "{bodies:?}: {text}");
        assert!(!text.contains("usage"), "nobody asked: {text}");
        let slashed = GatewayRequest {
            path: "/v1/chat/completions/".to_owned(),
            ..turn("ada", 2, false)
        };
        let answer = gateway.send(&slashed).await.unwrap();
        assert_eq!(answer.status, StatusCode::OK, "{bodies:?}");
        let models = GatewayRequest {
            method: Method::GET,
            path: "/v1/models".to_owned(),
            body: Bytes::new(),
            ..turn("ada", 0, false)
        };
        let answer = gateway.send(&models).await.unwrap();
        assert_eq!((answer.status, answer.endpoint), (StatusCode::OK, None));
    }
    let options = GatewayOptions {
        bodies: BodySendMode::Streamed,
        waits_for_heads: true,
        piece_bytes: 100,
        ..GatewayOptions::default()
    };
    let gateway = StandInGateway::new(&pickers(&[at]), options);
    let why = gateway.send(&turn("ada", 2, false)).await.unwrap_err();
    let why = format!("{why:#}");
    assert!(why.contains("allow_mode_override"), "{why}");
    replica.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_users_limit_spans_picker_and_data_port() {
    let (_dir, _engines, replicas, http, at) = started(3, 1).await;
    let user = format!("http://{}/admin/v1/users/body:ada", at[0].admin);
    let limits = json!({ "limits": { "requests": 2, "window": "1h" } });
    let is_set = async || http.send(Method::PUT, &user, &limits).await.0 == StatusCode::OK;
    until("the limit is set", is_set).await;
    http.agree(&at).await;
    http.chat(&at[0], "ada", "Is the lamp lit?").await;
    settle(&http, &at).await;
    let gateway = gateway(&at);
    let answer = gateway
        .send(&turn("ada", 0, false).pinned(1))
        .await
        .unwrap();
    assert_eq!(answer.status, StatusCode::OK);
    settle(&http, &at).await;
    let answer = gateway
        .send(&turn("ada", 0, false).pinned(2))
        .await
        .unwrap();
    assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS, "{answer:?}");
    let told: Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!(told["error"]["code"], "rate_limit_exceeded");
    assert!(answer.headers.contains_key("retry-after"));
    leave(replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_wait_for_a_place_at_any_picker() {
    let (_dir, engines, replicas, http, at) = started_with(3, 1, |config| {
        config.admission.founding.concurrency = state::admission::Concurrency::Fixed(2);
    })
    .await;
    let mut open = engines[0].watch_open();
    let most = tokio::spawn(async move {
        let mut most = 0;
        while open.changed().await.is_ok() {
            most = most.max(*open.borrow_and_update());
        }
        most
    });
    let gateway = Arc::new(gateway(&at));
    let asked = (0..24).map(|nth| {
        let gateway = Arc::clone(&gateway);
        let request = turn(&format!("user-{}", nth % 3), 0, true).pinned(nth % 3);
        tokio::spawn(async move { gateway.send(&request).await.unwrap() })
    });
    for answer in asked.collect::<Vec<_>>() {
        engine_of(&answer.await.unwrap());
    }
    settle(&http, &at).await;
    leave(replicas).await;
    for engine in engines {
        engine.stop().await;
    }
    let most = most.await.unwrap();
    assert!((1..=2).contains(&most), "{most} at once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_pick_fails_when_the_leader_leaves() {
    let (_dir, _engines, mut replicas, http, at) = started(3, 2).await;
    let (_, cluster) = http.admin(at[0].admin, "cluster").await;
    let leader = usize::try_from(cluster["leader"].as_u64().unwrap()).unwrap() - 1;
    let gateway = gateway(&at);
    for nth in 0..6 {
        engine_of(&gateway.send(&turn("ada", nth % 3, true)).await.unwrap());
    }
    let leaving = tokio::spawn(replicas.remove(leader).leave());
    let mut picks = 0;
    while !leaving.is_finished() || picks < 12 {
        engine_of(&gateway.send(&turn("bo", picks % 3, true)).await.unwrap());
        picks += 1;
    }
    leaving.await.unwrap();
    let rest = addresses(&replicas);
    http.ready(&rest).await;
    settle(&http, &rest).await;
    leave(replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_client_that_disconnects_leaves_nothing_behind() {
    let (_dir, _engines, replica, http, at) = started_alone(1, |_| {}).await;
    let gateway = gateway(&[at]);
    let body = json!({
        "model": "emulated", "prompt": SYSTEM, "max_tokens": 4000, "stream": true, "user": "ada",
    });
    let request = GatewayRequest {
        leaves_after: Some(200),
        ..GatewayRequest::post("/v1/completions", "ada", &body)
    };
    let answer = gateway.send(&request).await.unwrap();
    assert!(!answer.body.ends_with(b"[DONE]\n\n"));
    http.quiet(&at).await;
    let page = http.metrics(at.admin).await;
    let line = "quorate_picker_requests_total{outcome=\"picked\"} 1\n";
    assert!(page.contains(line), "{page}");
    replica.leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_falls_back_to_the_second_endpoint() {
    let (_dir, mut engines, replica, http, at) = started_alone(2, |_| {}).await;
    let gateway = gateway(&[at]);
    let first = engine_of(&gateway.send(&turn("ada", 0, false)).await.unwrap());
    let number: usize = first.strip_prefix("engine-").unwrap().parse().unwrap();
    engines.remove(number).stop().await;
    let second = engine_of(&gateway.send(&turn("ada", 0, false)).await.unwrap());
    assert_ne!(first, second);
    http.quiet(&at).await;
    let page = http.metrics(at.admin).await;
    let line = "quorate_picker_served_total{by=\"further\"} 1\n";
    assert!(page.contains(line), "{page}");
    replica.leave().await;
}

/// Services of a picker that report readiness, not only liveness.
const READINESS: [&str; 3] = [
    "",
    "readiness",
    "envoy.service.ext_proc.v3.ExternalProcessor",
];

fn health(at: &Addresses) -> HealthClient<Channel> {
    let channel = picker_channel(at.picker.unwrap(), &GatewayTls::Anonymous);
    HealthClient::new(channel)
}

fn of(service: &str) -> HealthCheckRequest {
    HealthCheckRequest {
        service: service.to_owned(),
    }
}

/// Checks that every service of a picker has the status `expected`.
async fn assert_says(at: &Addresses, expected: ServingStatus) {
    let mut client = health(at);
    for service in READINESS {
        let told = client.check(of(service)).await.unwrap().into_inner();
        assert_eq!(told.status(), expected, "{service:?}");
    }
    let told = client.check(of("liveness")).await.unwrap().into_inner();
    assert_eq!(told.status(), ServingStatus::Serving);
    let unknown = client.check(of("readines")).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound, "{unknown}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn picker_health_checks_serve_with_and_without_a_quorum() {
    let (_dir, _engines, mut replicas, http, at) = started(3, 1).await;
    // All of them, regardless of the leader.
    for at in &at {
        assert_says(at, ServingStatus::Serving).await;
    }
    let mut watches = Vec::new();
    for service in READINESS {
        let mut told = health(&at[2])
            .watch(of(service))
            .await
            .unwrap()
            .into_inner();
        let first = told.message().await.unwrap().unwrap();
        assert_eq!(first.status(), ServingStatus::Serving, "{service:?}");
        watches.push(told);
    }
    replicas.remove(2).leave().await;
    for mut told in watches {
        let last = told.message().await.unwrap().unwrap();
        assert_eq!(last.status(), ServingStatus::NotServing);
        assert_eq!(told.message().await.unwrap(), None);
    }
    replicas.remove(1).leave().await;
    let url = format!("http://{}/readyz", at[0].admin);
    let is_degraded = async || http.get(&url).await.1["status"] == "degraded";
    until("the last one has no quorum", is_degraded).await;
    assert_says(&at[0], ServingStatus::Serving).await;
    engine_of(&gateway(&at[..1]).send(&turn("ada", 0, true)).await.unwrap());
    replicas.remove(0).leave().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unformed_replica_is_live_but_not_serving() {
    let dir = TempDir::new().unwrap();
    let engines = engines(1).await;
    let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
    let listen = ListenConfig {
        data: any,
        admin: any,
        peer: any,
        metrics: None,
        picker: Some(any),
        scaler: None,
        advertise: None,
    };
    let bind = || BoundSockets::bind(&listen).unwrap();
    let (own, absent) = (bind(), bind());
    let peers = [&own, &absent].map(|it| it.addresses().unwrap().peer.to_string());
    let replica = Replica::run(config(1, &peers, &engines, dir.path()), own);
    assert_says(&replica.addresses, ServingStatus::NotServing).await;
    // Only warm replicas respond.
    let url = format!("http://{}/readyz", replica.addresses.admin);
    let (_, told) = Http::new().get(&url).await;
    let reasons = told["reasons"].as_array().unwrap();
    assert!(!reasons.is_empty(), "{told}");
    assert!(!reasons.contains(&json!("warming up")), "{told}");
    replica.leave().await;
    drop(absent);
}
