//! A few greedy clients cannot shut out the others.

use std::time::Duration;

use api::base::clock::Clock;
use api::proxy::{ApiKeys, ProxySettings};
use state::budgets::Budget;
use state::command::{Charge, Command, Item, UserSettings};
use state::ids::{AttemptId, ReplicaId};
use state::prefix::user_key;
use state::quotas::{UserLimits, WINDOW_MS_MAX};

use super::client::{Answer, Client, chat, post};
use super::engine::{Engine, Step, json};
use super::fleet::{Fleet, eventually};

/// Headers of a chat whose body never arrives.
const HEAD: &str =
    "POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\ncontent-length: 9\r\n\r\n";

async fn start(change: impl FnOnce(&mut ProxySettings)) -> (Engine, Fleet) {
    let engine = Engine::always(vec![json("200 OK", "{}")]).await;
    let fleet = Fleet::start_with(&[&engine], Duration::ZERO, change).await;
    (engine, fleet)
}

/// Opens this many clients that send headers and no body.
async fn heads(fleet: &Fleet, count: usize) -> Vec<Client> {
    let mut clients = Vec::new();
    for _ in 0..count {
        let mut client = fleet.client().await;
        client.send(HEAD).await;
        clients.push(client);
    }
    clients
}

#[tokio::test]
async fn requests_without_a_body_take_no_reading_place() {
    let (_engine, fleet) = start(|settings| {
        settings.limits.requests_max = 1;
        settings.limits.reading_max = Some(16);
    })
    .await;
    let _heads = heads(&fleet, 5).await;
    eventually("all are here", || fleet.metrics.reading.get() == 5).await;
    for _ in 0..3 {
        assert_eq!(fleet.client().await.ask(chat("")).await.status, 200);
    }
    assert_eq!(fleet.metrics.in_flight.get(), 0);
}

#[tokio::test]
async fn body_timeouts_shorten_when_many_bodies_are_pending() {
    let (_engine, fleet) = start(|settings| {
        settings.limits.reading_max = Some(4);
        settings.timeouts.body_idle_crowded = Duration::from_millis(20);
    })
    .await;
    let _patient = heads(&fleet, 2).await;
    eventually("half of the places are taken", || {
        fleet.metrics.reading.get() == 2
    })
    .await;
    let mut hurried = heads(&fleet, 2).await;
    let mut late = fleet.client().await;
    // The fifth client finds no room until those beyond half of the places are rejected.
    while late.ask(chat("")).await.status != 200 {}
    for head in &mut hurried {
        assert_eq!(head.answer().await.status, 408);
    }
    assert_eq!(fleet.metrics.reading.get(), 2, "the first ones have time");
}

#[tokio::test]
async fn clients_without_a_key_take_no_reading_place() {
    let (engine, fleet) = start(|settings| {
        let mut keys = ApiKeys::default();
        keys.add("sk-right", None);
        settings.api_keys = Some(keys);
        settings.limits.requests_max = 1;
        settings.limits.reading_max = Some(1);
        settings.timeouts.refused_body = Duration::from_secs(60);
    })
    .await;
    let mut without = heads(&fleet, 5).await;
    let right = chat("").replace("host: ", "authorization: Bearer sk-right\r\nhost: ");
    for _ in 0..3 {
        assert_eq!(fleet.client().await.ask(&right).await.status, 200);
    }
    assert_eq!(engine.requests().len(), 3);
    for client in &mut without {
        client.send("123456789").await;
        assert_eq!(client.answer().await.status, 401);
        assert!(client.is_closed().await);
    }
}

#[tokio::test]
async fn the_longest_idle_connection_is_closed_for_a_new_one() {
    let (_engine, fleet) = start(|settings| settings.limits.connections_max = 2).await;
    let mut idle = fleet.client().await;
    assert_eq!(idle.ask(chat("")).await.status, 200);
    let mut busy = fleet.client().await;
    busy.send(HEAD).await;
    eventually("it is here", || fleet.metrics.reading.get() == 1).await;
    let mut third = fleet.client().await;
    assert_eq!(third.ask(chat("")).await.status, 200);
    assert!(idle.is_closed().await);
    assert_eq!(fleet.metrics.connections_evicted.get(), 1);
    busy.send("123456789").await;
    assert_eq!(busy.answer().await.status, 400, "who had a request kept it");
}

#[tokio::test]
async fn a_connection_with_a_partial_head_is_closed_for_a_new_one() {
    let (_engine, fleet) = start(|settings| settings.limits.connections_max = 1).await;
    let mut half = fleet.client().await;
    half.send("POST / HTTP/1.1\r\nx-a: ").await;
    eventually("it is open", || fleet.metrics.connections.get() == 1).await;
    assert_eq!(fleet.client().await.ask(chat("")).await.status, 200);
    assert!(half.is_closed().await);
}

#[tokio::test]
async fn connections_per_address_are_bounded() {
    let (_engine, fleet) = start(|settings| {
        settings.trusted_proxies.clear();
        settings.limits.connections_per_address_max = Some(1);
    })
    .await;
    let mut first = fleet.client().await;
    assert_eq!(first.ask(chat("")).await.status, 200);
    assert!(fleet.client().await.is_closed().await);
    assert_eq!(fleet.metrics.connections_refused.get(), 1);
    assert_eq!(first.ask(chat("")).await.status, 200);
    drop(first);
    eventually("it is gone", || fleet.metrics.connections.get() == 0).await;
    assert_eq!(fleet.client().await.ask(chat("")).await.status, 200);
}

#[tokio::test]
async fn requests_per_address_are_bounded_except_for_proxies() {
    for (is_trusted, status) in [(false, 429), (true, 200)] {
        let (_engine, fleet) = start(|settings| {
            settings.limits.requests_per_address_max = Some(1);
            if !is_trusted {
                settings.trusted_proxies.clear();
            }
        })
        .await;
        let _first = heads(&fleet, 1).await;
        eventually("it is here", || fleet.metrics.reading.get() == 1).await;
        let answer = fleet.client().await.ask(chat("")).await;
        assert_eq!(answer.status, status);
        if !is_trusted {
            assert_eq!(answer.error_code(), "too_many_requests_at_once");
            assert_eq!(answer.header("retry-after"), Some("1"));
        }
    }
}

#[tokio::test]
async fn requests_per_user_are_bounded() {
    let engine = Engine::start(|number| match number {
        0 => vec![Step::Hang],
        _ => vec![json("200 OK", "{}")],
    })
    .await;
    let fleet = Fleet::start_with(&[&engine], Duration::ZERO, |settings| {
        settings.limits.requests_per_user_max = Some(1);
    })
    .await;
    let of = |user: &str| chat("").replace("host: ", &format!("x-quorate-user: {user}\r\nhost: "));
    let mut first = fleet.client().await;
    first.send(of("ada")).await;
    eventually("it is under way", || fleet.running() == 1).await;
    let answer = fleet.client().await.ask(of("ada")).await;
    answer.refuses(429, "too_many_requests_at_once");
    assert_eq!(fleet.client().await.ask(of("bob")).await.status, 200);
    drop(first);
    fleet.is_idle().await;
    assert_eq!(fleet.client().await.ask(of("ada")).await.status, 200);
}

#[tokio::test]
async fn an_unserved_path_is_refused_before_its_body() {
    let (_engine, fleet) = start(|settings| {
        settings.limits.requests_max = 1;
        settings.limits.reading_max = Some(1);
        settings.timeouts.refused_body = Duration::from_secs(60);
    })
    .await;
    let mut unserved = fleet.client().await;
    let request = post("/sleep", "", "{}").replace("length: 2", "length: 9");
    unserved.send(request).await;
    assert_eq!(fleet.client().await.ask(chat("")).await.status, 200);
    unserved.send("1234567").await;
    assert_eq!(unserved.answer().await.status, 404);
}

#[tokio::test]
async fn an_answer_reports_the_users_remaining_limits() {
    let (_engine, fleet) = start(|_| {}).await;
    let limits = UserLimits {
        requests: Some(2),
        tokens: Some(1_000_000),
        window_ms: Some(WINDOW_MS_MAX),
        ..UserLimits::default()
    };
    let settings = UserSettings {
        limits: Some(limits),
        ..UserSettings::default()
    };
    fleet.apply(Command::configure_user("ada", settings));
    let ask = async |user: &str| {
        let headers = format!("content-type: application/json\r\nx-quorate-user: {user}\r\n");
        let body = r#"{"model":"m","prompt":"hello"}"#;
        let request = post("/v1/completions", &headers, body);
        fleet.client().await.ask(request).await
    };
    for (status, left) in [(200, "1"), (200, "0"), (429, "0")] {
        let answer = ask("ada").await;
        assert_eq!(answer.status, status, "{}", answer.body);
        assert_eq!(answer.header("x-ratelimit-limit-requests"), Some("2"));
        assert_eq!(answer.header("x-ratelimit-remaining-requests"), Some(left));
        assert!(answer.header("x-ratelimit-reset-requests").is_some());
        assert_eq!(answer.header("x-ratelimit-limit-tokens"), Some("1000000"));
    }
    let unlimited = ask("bob").await;
    let is_told = |(name, _): &(String, String)| name.starts_with("x-ratelimit");
    assert!(!unlimited.headers.iter().any(is_told), "{unlimited:?}");
}

/// Requests a completion as this user.
async fn complete(fleet: &Fleet, user: &str) -> Answer {
    let headers = format!("content-type: application/json\r\nx-quorate-user: {user}\r\n");
    let body = r#"{"model":"m","prompt":"hello"}"#;
    let request = post("/v1/completions", &headers, body);
    fleet.client().await.ask(request).await
}

#[tokio::test]
async fn an_exhausted_budget_holds_on_all_replicas_until_period_end() {
    let engine = Engine::always(vec![json("200 OK", "{}")]).await;
    let settings = [1, 2].map(|id| ProxySettings::new(ReplicaId(id)));
    let fleets = Fleet::replicas(&[&engine], settings.into()).await;
    let budget = Budget {
        day: Some(5000),
        month: Some(1_000_000),
    };
    let settings = UserSettings {
        budget: Some(budget),
        ..UserSettings::default()
    };
    fleets[0].apply(Command::configure_user("ada", settings));
    let used = Charge {
        user: user_key(fleets[0].hash_seed(), "ada"),
        input_uncached: 3000,
        input_cached: 1500,
        output: 400,
        ..Charge::default()
    };
    let used = || Command::Batch {
        base_attempt: AttemptId(0),
        items: vec![Item::Charge(used)],
    };
    let now_ms = || Clock::default().unix_ms();
    fleets[0].apply_at(now_ms(), used());
    let answer = complete(&fleets[1], "ada").await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(answer.header("x-ratelimit-limit-tokens"), Some("5000"));
    fleets[0].apply_at(now_ms(), used());
    for fleet in &fleets {
        let answer = complete(fleet, "ada").await;
        answer.refuses(429, "insufficient_quota");
        assert!(
            answer.body.contains(r#""type":"insufficient_quota""#),
            "{}",
            answer.body
        );
        assert_eq!(answer.header("x-ratelimit-remaining-tokens"), Some("0"));
        let wait_s: u64 = answer.header("retry-after").unwrap().parse().unwrap();
        assert!((1..=24 * 3600).contains(&wait_s), "{wait_s}");
        assert_eq!(complete(fleet, "bob").await.status, 200);
    }
    // Usage of the previous day counts for that day.
    let name = || "ada".to_owned();
    fleets[0].apply(Command::ForgiveUser { name: name() });
    fleets[0].apply_at(now_ms() - 24 * 3600 * 1000, used());
    fleets[0].apply_at(now_ms() - 24 * 3600 * 1000, used());
    assert_eq!(complete(&fleets[1], "ada").await.status, 200);
}

#[tokio::test]
async fn a_users_models_apply_to_all_its_keys() {
    let (_engine, fleet) = start(|_| {}).await;
    assert_eq!(complete(&fleet, "ada").await.status, 200);
    let settings = UserSettings {
        models: vec!["other*".to_owned()],
        ..UserSettings::default()
    };
    fleet.apply(Command::configure_user("ada", settings));
    let answer = complete(&fleet, "ada").await;
    answer.refuses(403, "model_not_allowed");
    assert!(answer.body.contains("`other*`"), "{}", answer.body);
    assert_eq!(complete(&fleet, "bob").await.status, 200);
}
