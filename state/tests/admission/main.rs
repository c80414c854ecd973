//! Admission over several replicas: limits and fairness of a whole cluster whose replicas learn
//! everything late, simulated to the millisecond.

#[path = "../common/mod.rs"]
mod common;

mod applying;
mod cluster;
mod fairness;
mod grants;
mod quotas;
