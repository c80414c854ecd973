//! Tools to try, measure and compare the router.
//!
//! [`engine`] emulates vLLM, [`replay`] generates load, [`simulate`] runs a cluster with its
//! engines and clients in simulated time. The `quorate` binary has a command for each. This crate
//! uses the router's parts (`state`, `api`). It starts whole replicas through the trait
//! [`replay::ClusterUnderTest`].

pub mod agents;
pub mod connector;
pub mod engine;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod ports;
mod recorded;
pub mod replay;
pub mod rng;
pub mod simulate;
pub mod terminal;
