//! Admission over several replicas: limits of a whole cluster whose replicas learn everything late,
//! simulated in milliseconds. `quorate simulate` has the same for fairness.

mod applying;
mod cluster;
mod quotas;
