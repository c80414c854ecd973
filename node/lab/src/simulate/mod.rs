//! `quorate simulate`: a seeded discrete-event simulation of a cluster, its engines and its
//! clients.
//!
//! Production code makes the decisions: the router with its filters, decisions, dispatches and
//! charges, the replicated state with its log commands, the admission queue, and the block pool and
//! scheduler of the emulated engine. Only reference policies and engines with static batching have
//! code of their own. Everything around it is simulated: time, order and lag of the log, the
//! network between replicas, and the clients. No thread, clock or unseeded draw affects a result,
//! so a run repeats bit for bit.
//!
//! docs/guide/simulator.md describes the model, its omissions, and the results of the experiments.

mod args;
mod argument_error;
pub mod clock;
pub mod compare;
pub mod day;
mod demand_args;
mod disaggregation_args;
pub mod engine;
mod engine_args;
pub mod events;
#[cfg(test)]
mod exact_tests;
pub mod experiment;
pub mod ideal;
pub mod literal_policies;
pub mod loads;
mod lone_agent;
pub mod matrix;
pub mod overload;
pub mod page;
mod parse;
pub mod plan;
pub mod policies;
pub mod print;
pub mod recorded;
mod recorded_args;
mod recorded_speed;
pub mod replica;
pub mod report;
mod scaling_args;
pub mod service;
pub mod sim_queue;
pub mod tally;
#[cfg(test)]
mod tests;
mod times;
pub mod workload;
pub mod world;

pub use args::{SimulateArgs, run};
pub use argument_error::SimulateArgsError;
