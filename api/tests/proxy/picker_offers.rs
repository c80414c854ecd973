//! The endpoints that a gateway is told: who is first how often.

use state::command::Command;
use state::policy::PolicyConfig;

use super::engine::Engine;
use super::fleet::Fleet;
use super::picking::{CHAT, PickingHere, plain};

async fn dead(count: usize) -> Vec<Engine> {
    let mut engines = Vec::new();
    for _ in 0..count {
        engines.push(Engine::dead().await);
    }
    engines
}

/// The endpoints that a request is told, whose gateway then leaves.
async fn told(fleet: &Fleet, picking: &PickingHere) -> Vec<String> {
    let mut talk = picking.open().unwrap();
    talk.ask(CHAT, 1000, plain()).await;
    let (endpoints, _) = talk.picked().await;
    drop(talk);
    fleet.is_idle().await;
    endpoints.split(',').map(str::to_owned).collect()
}

#[tokio::test]
async fn the_second_endpoint_takes_no_turn_of_round_robins() {
    const ENGINES: usize = 4;
    const ROUNDS: usize = 3;
    let engines = dead(ENGINES).await;
    let fleet = Fleet::start(&engines.iter().collect::<Vec<_>>()).await;
    fleet.apply(Command::PutPolicy(PolicyConfig::RoundRobin));
    let picking = PickingHere::of(&fleet);
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
