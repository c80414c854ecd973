//! Simulated clusters: real replicas without their sockets, in a world drawn from one seed.
//!
//! Each replica is production code (`node::app::replica_core::ReplicaCore`: raft, state, router, admission,
//! outbox and the loops between them) on its own tokio runtime with paused time that the [`world`]
//! steps. Its environment is simulated: [`network`], disk, clocks, engines and clients
//! ([`workload`]). One `u64` decides everything: the same seed yields the same trace bit for bit
//! (docs/adr/0045).
//!
//! [`run()`] runs one seed: the cluster forms, faults happen for a while ([`faults`]) under load,
//! then everything is repaired and the cluster must heal. [`crate::invariants`] are checked during
//! the run and at the end.

mod apply_observer;
pub mod faults;
mod fleet;
mod heal;
mod inject;
mod knobs;
mod limits;
pub mod log;
pub mod network;
pub mod node;
mod panics;
pub mod plan;
mod reach;
mod remedies;
mod rollout;
mod run;
pub mod shrink;
mod state_loss;
pub mod trace;
pub mod workload;
pub mod world;

pub use run::{SeedOptions, SeedReport, SeedResult, SubjectCounts, run};
