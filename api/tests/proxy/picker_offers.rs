//! Endpoints offered to a gateway: how often each is first, and which are left out.

use api::engines::backends::EngineKeys;
use http::HeaderValue;
use state::command::Command;
use state::policy::PolicyConfig;

use super::engine::Engine;
use super::fleet::{Fleet, PATIENT};
use super::picking::{CHAT, InProcessPicker, plain};

async fn dead(count: usize) -> Vec<Engine> {
    let mut engines = Vec::new();
    for _ in 0..count {
        engines.push(Engine::dead().await);
    }
    engines
}

/// Returns the endpoints offered for a request, whose stream is then closed.
async fn told(fleet: &Fleet, picking: &InProcessPicker) -> Vec<String> {
    let mut talk = picking.open().unwrap();
    talk.ask(CHAT, 1000, plain()).await;
    let (endpoints, _) = talk.picked().await;
    drop(talk);
    fleet.is_idle().await;
    endpoints.split(',').map(str::to_owned).collect()
}

#[tokio::test]
async fn the_second_endpoint_does_not_advance_round_robin() {
    const ENGINES: usize = 4;
    const ROUNDS: usize = 3;
    let engines = dead(ENGINES).await;
    let fleet = Fleet::start(&engines.iter().collect::<Vec<_>>()).await;
    fleet.apply(Command::PutPolicy(PolicyConfig::RoundRobin));
    let picking = InProcessPicker::of(&fleet);
    let mut firsts = [0; ENGINES];
    for _ in 0..ENGINES * ROUNDS {
        let endpoints = told(&fleet, &picking).await;
        assert_eq!(endpoints.len(), 2);
        assert_ne!(endpoints[0], endpoints[1]);
        let is_first = |engine: &Engine| engine.address.to_string() == endpoints[0];
        firsts[engines.iter().position(is_first).unwrap()] += 1;
    }
    assert_eq!(firsts, [ROUNDS; ENGINES]);
}

#[tokio::test]
async fn the_search_for_an_equal_second_endpoint_is_bounded() {
    // The first request goes to the second engine; the fourth and those after it are next.
    const FIRST: usize = 1;
    const NEXT: usize = 3;
    for (unlike, expected) in [(7, 2), (8, 1)] {
        let engines = dead(NEXT + unlike + 1).await;
        let last = engines.len() - 1;
        let mut keys = EngineKeys::default();
        for (number, engine) in engines.iter().enumerate() {
            if number == FIRST || number == last {
                continue;
            }
            let key = HeaderValue::from_str(&format!("Bearer key-{number}")).unwrap();
            let url = format!("http://{}", engine.address);
            keys.add(&format!("e{number}"), &url, key);
        }
        let all: Vec<_> = engines.iter().collect();
        let fleet = Fleet::start_keyed(&all, keys, PATIENT, |_| {}).await;
        fleet.apply(Command::PutPolicy(PolicyConfig::RoundRobin));
        let picking = InProcessPicker::of(&fleet);
        let endpoints = told(&fleet, &picking).await;
        assert_eq!(endpoints[0], engines[FIRST].address.to_string());
        assert_eq!(endpoints.len(), expected, "{unlike}");
    }
}
