//! The `scale` experiment: the limits of one Raft group, computed from benchmarks.
//!
//! The experiment simulates nothing. It multiplies each measured cost by its frequency, for fleets
//! of growing size under the same load per engine. docs/internals/scale.md states the source of
//! each figure and explains the table.

use crate::terminal::{FittedTable, column};

/// Fleet sizes to compute, in engines.
const FLEETS: [u32; 7] = [16, 64, 256, 512, 1024, 2048, 4000];

/// Number of cached blocks per engine. The next two constants are the rest of an engine's load.
const BLOCKS_PER_ENGINE: f64 = 250_000.0;
const REQUESTS_PER_S: f64 = 5.0;
const NEW_BLOCKS_PER_REQUEST: f64 = 64.0;
const REPLICAS: f64 = 3.0;

/// Bytes of log per request with its charges; each new block adds `LOG_BYTES_PER_BLOCK`.
const LOG_BYTES_PER_REQUEST: f64 = 26.0;
const LOG_BYTES_PER_BLOCK: f64 = 8.0;
/// New blocks applied per second while as many are evicted. `LEASES_APPLIED_PER_S` is the rate for
/// leases on known prompts.
const BLOCKS_APPLIED_PER_S: f64 = 1.51e6;
const LEASES_APPLIED_PER_S: f64 = 2.04e6;
/// Process memory per owned block, in bytes. `SNAPSHOT_PER_BLOCK` is its size in a snapshot.
const MEMORY_PER_BLOCK: f64 = 52.0;
const SNAPSHOT_PER_BLOCK: f64 = 19.1;
/// Number of blocks that a replica restores from a snapshot per second.
const BLOCKS_RESTORED_PER_S: f64 = 10e6 / 4.1;
/// Fixed part of a decision's duration, in seconds. Each backend adds `DECISION_PER_BACKEND_S`.
const DECISION_S: f64 = 0.6e-6;
const DECISION_PER_BACKEND_S: f64 = 29.6e-6 / 512.0;
/// Bytes per busy backend in a load report. Each peer gets `REPORTS_PER_S` reports per second.
const REPORT_BYTES: f64 = 9.0;
const REPORTS_PER_S: f64 = 50.0;

/// Costs of one replica of a group that serves `engines` engines.
struct GroupCosts {
    engines: u32,
    requests_per_s: f64,
    blocks: f64,
}

impl GroupCosts {
    fn of(engines: u32) -> Self {
        let count = f64::from(engines);
        Self {
            engines,
            requests_per_s: count * REQUESTS_PER_S,
            blocks: count * BLOCKS_PER_ENGINE,
        }
    }

    fn log_bytes_per_s(&self) -> f64 {
        let request = LOG_BYTES_PER_REQUEST + NEW_BLOCKS_PER_REQUEST * LOG_BYTES_PER_BLOCK;
        self.requests_per_s * request
    }

    /// Returns the number of cores busy with applying the log. A single thread applies it, so the
    /// limit is 1.
    fn apply_cores(&self) -> f64 {
        let request = NEW_BLOCKS_PER_REQUEST / BLOCKS_APPLIED_PER_S + 1.0 / LEASES_APPLIED_PER_S;
        self.requests_per_s * request
    }

    fn decision_s(&self) -> f64 {
        DECISION_S + f64::from(self.engines) * DECISION_PER_BACKEND_S
    }

    fn decision_cores(&self) -> f64 {
        self.requests_per_s / REPLICAS * self.decision_s()
    }

    fn report_bytes_per_s(&self) -> f64 {
        f64::from(self.engines) * REPORT_BYTES * REPORTS_PER_S * (REPLICAS - 1.0)
    }

    fn restore_s(&self) -> f64 {
        self.blocks / BLOCKS_RESTORED_PER_S
    }
}

/// Returns the table of costs, with a row per fleet size.
#[must_use]
pub fn table() -> FittedTable {
    let mut table = FittedTable::new(&[
        column("engines").number(),
        column("M blocks").number(),
        column("requests/s").number(),
        column("log MB/s").number(),
        column("apply, cores").number(),
        column("memory GB").number(),
        column("snapshot GB").number(),
        column("restore s").number(),
        column("decision us").number(),
        column("decisions, cores").number(),
        column("load out, MB/s").number(),
    ]);
    for costs in FLEETS.map(GroupCosts::of) {
        table.add_row([
            costs.engines.to_string(),
            format!("{:.0}", costs.blocks / 1e6),
            format!("{:.0}", costs.requests_per_s),
            format!("{:.2}", costs.log_bytes_per_s() / 1e6),
            format!("{:.3}", costs.apply_cores()),
            format!("{:.2}", costs.blocks * MEMORY_PER_BLOCK / 1e9),
            format!("{:.2}", costs.blocks * SNAPSHOT_PER_BLOCK / 1e9),
            format!("{:.1}", costs.restore_s()),
            format!("{:.1}", 1e6 * costs.decision_s()),
            format!("{:.3}", costs.decision_cores()),
            format!("{:.2}", costs.report_bytes_per_s() / 1e6),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_grow_with_the_fleet_and_decisions_with_its_square() {
        let (small, large) = (GroupCosts::of(400), GroupCosts::of(4000));
        let grows = |of: fn(&GroupCosts) -> f64| of(&large) / of(&small);
        for linear in [
            GroupCosts::log_bytes_per_s,
            GroupCosts::apply_cores,
            GroupCosts::report_bytes_per_s,
            GroupCosts::restore_s,
        ] {
            assert!((grows(linear) - 10.0).abs() < 1e-6);
        }
        assert!((95.0..100.0).contains(&grows(GroupCosts::decision_cores)));
        assert_eq!(large.blocks, 1e9);
    }
}
