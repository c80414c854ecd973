//! Formats runs of several loads as one table: a row per policy, a column per load.

use std::fmt::Write as _;

use super::report::{RunReport, SimComparison};

/// Returns whether the runs have several loads.
#[must_use]
pub fn has_loads(comparison: &SimComparison) -> bool {
    let mut loads = comparison.runs.iter().map(|run| &run.load);
    loads
        .next()
        .is_some_and(|first| loads.any(|it| it != first))
}

/// Returns the tables in Markdown: times to first token, then hit rates. Rows are sorted by the
/// distance of a policy to the best one, over all loads.
#[must_use]
pub fn tables(comparison: &SimComparison) -> String {
    let loads: Vec<&[RunReport]> = comparison
        .runs
        .chunk_by(|one, other| one.load == other.load)
        .collect();
    let Some(first) = loads.first() else {
        return String::new();
    };
    let mut rows: Vec<(f64, &str)> = first
        .iter()
        .map(|run| (behind(&loads, &run.label), run.label.as_str()))
        .collect();
    rows.sort_by(|a, b| a.0.total_cmp(&b.0));
    let times = |run: &RunReport| format!("{:.0} / {:.0}", run.ttft_ms.mean, run.ttft_ms.p99);
    let hits = |run: &RunReport| format!("{:.1}", 100.0 * run.hit_rate);
    format!(
        "TTFT mean / p99, ms; behind: geometric mean over the loads of the mean TTFT over the best \
         policy's\n\n{}\nhit rate, %\n\n{}",
        table(&loads, &rows, times),
        table(&loads, &rows, hits),
    )
}

/// Returns a policy's mean time to first token relative to the best, as geometric mean over loads.
fn behind(loads: &[&[RunReport]], label: &str) -> f64 {
    let log = |runs: &&[RunReport]| {
        let mean = |run: &RunReport| run.ttft_ms.mean;
        let own = runs.iter().find(|run| run.label == label).map(mean);
        let best = runs.iter().map(mean).min_by(f64::total_cmp);
        own.zip(best).map_or(0.0, |(own, best)| (own / best).ln())
    };
    (loads.iter().map(log).sum::<f64>() / loads.len() as f64).exp()
}

fn table(
    loads: &[&[RunReport]],
    rows: &[(f64, &str)],
    cell: impl Fn(&RunReport) -> String,
) -> String {
    let mut text = String::from("| policy | behind |");
    for runs in loads {
        write!(text, " {} |", runs[0].load).expect("writing to a string");
    }
    text.push_str("\n| --- | --- |");
    text.push_str(&" --- |".repeat(loads.len()));
    text.push('\n');
    for (behind, label) in rows {
        write!(text, "| `{label}` | {behind:.3} |").expect("writing to a string");
        for runs in loads {
            let own = runs.iter().find(|run| run.label == *label);
            let own = own.map_or_else(|| "-".to_owned(), &cell);
            write!(text, " {own} |").expect("writing to a string");
        }
        text.push('\n');
    }
    text
}
