//! A comparison as tables.

use comfy_table::{CellAlignment, Table};

use super::report::SimComparison;
use crate::terminal::table;

/// The tables and the verdicts, one below the other.
#[must_use]
pub fn tables(comparison: &SimComparison) -> String {
    let mut parts = vec![comparison.title.clone(), routing(comparison).to_string()];
    if comparison.runs.iter().any(|run| run.service.len() > 1) {
        parts.push(fairness(comparison).to_string());
    }
    if comparison
        .runs
        .iter()
        .any(|run| run.refusals + run.departures > 0)
    {
        parts.push(overload(comparison).to_string());
    }
    for verdict in &comparison.verdicts {
        let word = if verdict.holds { "holds" } else { "FAILS" };
        parts.push(format!("{word}: {}", verdict.claim));
    }
    for run in &comparison.runs {
        let faults = run.faults.iter();
        parts.extend(faults.map(|fault| format!("FAULT in {}: {fault}", run.label)));
    }
    parts.join("\n")
}

fn routing(comparison: &SimComparison) -> Table {
    let mut table = table(&[
        "run",
        "ok",
        "refused",
        "hit %",
        "of ideal",
        "TTFT mean",
        "p50",
        "p90",
        "p99 ms",
        "regret",
        "req/s",
        "tok/s",
        "spread",
        "busiest",
        "log B/req",
    ]);
    for run in &comparison.runs {
        table.add_row([
            run.label.clone(),
            run.ok.to_string(),
            run.refused.to_string(),
            format!("{:.1}", 100.0 * run.hit_rate),
            optional(run.share_of_ideal, 3),
            format!("{:.0}", run.ttft_ms.mean),
            format!("{:.0}", run.ttft_ms.p50),
            format!("{:.0}", run.ttft_ms.p90),
            format!("{:.0}", run.ttft_ms.p99),
            optional(run.regret_ms, 0),
            format!("{:.2}", run.requests_per_s),
            format!("{:.0}", run.tokens_per_s),
            format!("{:.1}", run.load_spread),
            format!("{:.2}", run.busiest_share),
            format!("{:.0}", run.log_bytes_per_request),
        ]);
    }
    align_numbers(&mut table);
    table
}

fn fairness(comparison: &SimComparison) -> Table {
    let mut table = table(&[
        "run",
        "order",
        "users",
        "gap",
        "bound",
        "least/most served",
        "Jain",
        "tok/s",
    ]);
    for run in &comparison.runs {
        table.add_row([
            run.label.clone(),
            run.order.clone(),
            run.service.len().to_string(),
            optional(run.gap, 0),
            optional(run.gap_bound, 0),
            optional(run.service_ratio, 4),
            optional(run.jain_index, 4),
            format!("{:.0}", run.tokens_per_s),
        ]);
    }
    align_numbers(&mut table);
    table
}

fn overload(comparison: &SimComparison) -> Table {
    let mut table = table(&[
        "run",
        "asked/s",
        "goodput/s",
        "refusals",
        "left",
        "wasted tokens %",
        "TTFT p50",
        "p99 ms",
    ]);
    for run in &comparison.runs {
        let tokens = run.output_tokens + run.prompt_tokens;
        let wasted = 100.0 * run.wasted_tokens as f64 / tokens.max(1) as f64;
        table.add_row([
            run.label.clone(),
            format!("{:.1}", run.requests as f64 / run.horizon_s),
            format!("{:.1}", run.requests_per_s),
            run.refusals.to_string(),
            run.departures.to_string(),
            format!("{wasted:.1}"),
            format!("{:.0}", run.ttft_ms.p50),
            format!("{:.0}", run.ttft_ms.p99),
        ]);
    }
    align_numbers(&mut table);
    table
}

fn align_numbers(table: &mut Table) {
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
}

fn optional(number: Option<f64>, digits: usize) -> String {
    number.map_or_else(|| "-".to_owned(), |number| format!("{number:.digits$}"))
}
