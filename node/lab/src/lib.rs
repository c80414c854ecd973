//! The laboratory: what the router is tried, measured and compared with.
//!
//! [`engine`] emulates vLLM, [`replay`] generates load, [`simulate`] runs a cluster with its
//! engines and clients in simulated time, [`gateway`] asks endpoint pickers as Envoy does. The `quorate` binary has a command for each. This crate
//! uses the router's parts (`state`, `api`) but knows no replica; one that needs whole replicas
//! gets them through a port ([`replay::ClusterUnderTest`]).

pub mod connector;
pub mod engine;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod gateway;
pub mod ports;
pub mod replay;
pub mod rng;
pub mod simulate;
pub mod terminal;
