//! Admission over several replicas: limits and fairness of a whole cluster whose replicas learn
//! everything late, simulated in milliseconds.

#[path = "../common/mod.rs"]
mod common;

mod applying;
mod cluster;
mod fairness;
mod quotas;
