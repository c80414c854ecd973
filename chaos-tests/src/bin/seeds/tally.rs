//! Totals over many seeds, as a table or JSON.

use std::collections::BTreeMap;
use std::time::Duration;

use chaos_tests::sim::{SeedReport, SeedResult};
use comfy_table::{Table, presets};

/// Totals over all seeds that were run.
#[derive(Debug, Default, serde::Serialize)]
pub(crate) struct SeedCounts {
    seeds: u64,
    simulated_s: f64,
    events: u64,
    entries: u64,
    leaders: u64,
    starts: u64,
    restored: u64,
    faults: BTreeMap<String, u64>,
    network: BTreeMap<&'static str, u64>,
    /// Number of operations, by kind and outcome.
    operations: BTreeMap<String, BTreeMap<String, u64>>,
    /// Number of subjects that each invariant has checked.
    subjects: BTreeMap<String, u64>,
    /// Failures by seed, with a description each.
    pub(crate) failures: BTreeMap<u64, String>,
}

impl SeedCounts {
    /// Adds the report of one seed to the totals.
    pub(crate) fn add(&mut self, report: &SeedReport) {
        self.seeds += 1;
        self.simulated_s += report.simulated_us as f64 / 1e6;
        self.events += report.events;
        self.entries += report.counts.entries;
        self.leaders += report.counts.leaders;
        self.starts += report.counts.starts;
        self.restored += report.counts.restored;
        for (fault, count) in &report.counts.faults {
            *self.faults.entry(fault.to_string()).or_default() += count;
        }
        let network = &report.network;
        for (what, count) in [
            ("delivered", network.delivered),
            ("lost", network.lost),
            ("held", network.held),
            ("repeated", network.repeated),
            ("connections broken", network.broken),
            ("streams cut", network.streams_cut),
        ] {
            *self.network.entry(what).or_default() += count;
        }
        for ((what, how), count) in &report.outcomes {
            let by_end = self.operations.entry(what.clone()).or_default();
            *by_end.entry(how.clone()).or_default() += count;
        }
        for ((number, name), count) in &report.subjects {
            let looked_at = self.subjects.entry(format!("{number} {name}")).or_default();
            *looked_at += count;
        }
        if let SeedResult::Broke(what) = &report.outcome {
            self.failures.insert(report.seed, what.clone());
        }
    }

    /// Formats the totals as JSON.
    pub(crate) fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("numbers and names are JSON")
    }

    /// Formats the totals as a table.
    pub(crate) fn table(&self, took: Duration) -> String {
        let mut text = format!(
            "{} seeds, {:.0} s simulated in {:.1} s: {} log entries, {} terms with a leader, \
             {} starts, {} states restored, {} events\n",
            self.seeds,
            self.simulated_s,
            took.as_secs_f64(),
            self.entries,
            self.leaders,
            self.starts,
            self.restored,
            self.events,
        );
        let mut section = |title: &str, rows: Vec<(String, String)>| {
            let mut table = Table::new();
            table.load_preset(presets::ASCII_MARKDOWN);
            table.set_header([title, ""]);
            for (name, value) in rows {
                table.add_row([name, value]);
            }
            text += &format!("\n{table}\n");
        };
        let of = |counts: &BTreeMap<String, u64>| -> Vec<(String, String)> {
            let rows = counts.iter();
            rows.map(|(name, count)| (name.clone(), count.to_string()))
                .collect()
        };
        section("faults", of(&self.faults));
        let network = self.network.iter();
        section(
            "network",
            network
                .map(|(name, count)| ((*name).to_owned(), count.to_string()))
                .collect(),
        );
        let operations = self.operations.iter().map(|(what, by_end)| {
            let ends = by_end.iter().map(|(how, count)| format!("{how} {count}"));
            (what.clone(), ends.collect::<Vec<_>>().join(", "))
        });
        section("operations", operations.collect());
        section("invariant: looked at", of(&self.subjects));
        // An invariant that never had a subject has proved nothing.
        let unproved = self.subjects.iter().filter(|(_, count)| **count == 0);
        for (invariant, _) in unproved {
            text += &format!("\nnever looked at anything: {invariant}\n");
        }
        text += &format!("\n{} violations\n", self.failures.len());
        text
    }
}
