//! Engines with several data-parallel ranks: the rank of a request, and what is tried if its engine
//! cannot be reached.

use std::collections::BTreeSet;

use serde_json::json;
use state::command::Command;
use state::policy::PolicyConfig;

use super::client::chat;
use super::engine::{Engine, json as answer};
use super::fleet::Fleet;

const RANK: &str = "x-data-parallel-rank: ";

fn give_ranks(fleet: &Fleet, number: usize, ranks: u16) {
    let backend = fleet.backend(number);
    fleet.apply(Command::SetRanks { backend, ranks });
    fleet.assume_healthy();
}

/// Returns the rank of an engine's last request.
fn asked(engine: &Engine) -> Option<String> {
    let requests = engine.requests();
    let mut lines = requests.last().unwrap().lines();
    let named = lines.find_map(|line| line.strip_prefix(RANK));
    named.map(str::to_owned)
}

#[tokio::test]
async fn a_forwarded_request_names_its_rank() {
    let engine = Engine::always(vec![answer("200 OK", "{}")]).await;
    let fleet = Fleet::start(&[&engine]).await;
    let mut client = fleet.client().await;
    client.ask(chat("")).await;
    assert_eq!(asked(&engine), None, "an engine of one rank");

    give_ranks(&fleet, 0, 3);
    fleet.apply(Command::PutPolicy(PolicyConfig::RoundRobin));
    let mut seen = BTreeSet::new();
    for number in 0..24 {
        let answer = client.ask(chat(&format!(",\"user\":\"{number}\""))).await;
        let backend = answer.header("x-quorate-backend").unwrap();
        let rank = backend.strip_prefix("e0@").unwrap_or("0");
        assert_eq!(asked(&engine).as_deref(), Some(rank), "{backend}");
        seen.insert(rank.to_owned());
    }
    assert_eq!(seen.len(), 3, "{seen:?}");
    give_ranks(&fleet, 0, 1);
    client.ask(chat("")).await;
    assert_eq!(asked(&engine), None);
    fleet.is_idle().await;
}

#[tokio::test]
async fn no_other_rank_of_an_unreachable_engine_is_tried() {
    let alive = Engine::always(vec![answer("200 OK", "{}")]).await;
    for _ in 0..4 {
        let dead = Engine::dead().await;
        let fleet = Fleet::start(&[&dead]).await;
        // More than the attempts of a request.
        give_ranks(&fleet, 0, 16);
        let url = format!("http://{}", alive.address);
        let spec = json!({ "id": "late", "url": url, "models": ["m"] });
        fleet.apply(Command::PutBackend(serde_json::from_value(spec).unwrap()));
        fleet.assume_healthy();
        let answer = fleet.client().await.ask(chat("")).await;
        let backend = answer.header("x-quorate-backend");
        assert_eq!((answer.status, backend), (200, Some("late")));
        fleet.is_idle().await;
    }
}
