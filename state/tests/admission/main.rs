//! Admission over several replicas: limits of a whole cluster whose replicas learn everything late,
//! simulated in milliseconds. `quorate simulate` has the same for fairness.

#[path = "../common/mod.rs"]
mod common;

mod applying;
mod cluster;
mod quotas;
