//! A report as tables.

use comfy_table::presets::UTF8_HORIZONTAL_ONLY;
use comfy_table::{CellAlignment, Table};

use super::report::{GroupReport, LatencySummary, LoadReport};

/// Users shown; the JSON has all.
const USERS_SHOWN: usize = 12;

/// The report's tables, one below the other.
#[must_use]
pub fn tables(report: &LoadReport) -> String {
    let mut parts = vec![by_target(report).to_string(), times(report).to_string()];
    if report.users.len() > 1 {
        parts.push(by_user(report).to_string());
    }
    if !report.backends.is_empty() {
        let share = |(backend, count): (&String, &u64)| format!("{backend} {count}");
        let shares: Vec<String> = report.backends.iter().map(share).collect();
        parts.push(format!("answers by backend: {}", shares.join(", ")));
    }
    if report.decisions_untold > 0 {
        parts.push(format!(
            "{} answers came without the router's decision, so that `predicted %` and the answers by \
             backend do not count them: set users.expose = \"full\" on the replicas to see them",
            report.decisions_untold
        ));
    }
    for (kind, error) in &report.errors {
        parts.push(format!(
            "{} x {kind}; the first: {}",
            error.count, error.example
        ));
    }
    parts.join("\n")
}

fn by_target(report: &LoadReport) -> Table {
    let mut table = table(&[
        "target",
        "requests",
        "ok",
        "failed",
        "lost",
        "req/s",
        "out tok/s",
        "cached %",
        "predicted %",
        "TTFT p50",
        "p90",
        "p99 ms",
    ]);
    let mut row = |name: &str, group: &GroupReport| {
        table.add_row([
            name.to_owned(),
            group.requests.to_string(),
            group.ok.to_string(),
            group.failed.to_string(),
            group.lost.to_string(),
            format!("{:.1}", group.requests_per_s),
            format!("{:.0}", group.output_tokens_per_s),
            percent(group.hit_rate),
            percent(group.predicted_hit_rate),
            format!("{:.1}", group.ttft_ms.p50),
            format!("{:.1}", group.ttft_ms.p90),
            format!("{:.1}", group.ttft_ms.p99),
        ]);
    };
    for (name, group) in &report.targets {
        row(name, group);
    }
    if report.targets.len() > 1 {
        row("all", &report.total);
    }
    align_numbers(&mut table);
    table
}

fn times(report: &LoadReport) -> Table {
    let mut table = table(&["ms", "mean", "p50", "p90", "p99", "max"]);
    for (name, times) in [
        ("time to first token", report.total.ttft_ms),
        ("latency", report.total.latency_ms),
        ("sent late", report.late_ms),
    ] {
        let LatencySummary {
            mean,
            p50,
            p90,
            p99,
            max,
        } = times;
        let number = |value: f64| format!("{value:.1}");
        let mut row = vec![name.to_owned()];
        row.extend([mean, p50, p90, p99, max].map(number));
        table.add_row(row);
    }
    align_numbers(&mut table);
    table
}

fn by_user(report: &LoadReport) -> Table {
    let mut table = table(&["user", "ok", "failed", "prompt tok", "out tok", "service"]);
    let mut users: Vec<_> = report.users.iter().collect();
    users.sort_by_key(|(name, user)| (std::cmp::Reverse(user.service), *name));
    for (name, user) in users.iter().take(USERS_SHOWN) {
        table.add_row([
            (*name).clone(),
            user.ok.to_string(),
            user.failed.to_string(),
            user.prompt_tokens.to_string(),
            user.completion_tokens.to_string(),
            user.service.to_string(),
        ]);
    }
    let jain = report
        .jain_index
        .map_or_else(|| "-".to_owned(), |index| format!("{index:.3}"));
    let all = format!("{} users, Jain {jain}", report.users.len());
    table.add_row([all]);
    align_numbers(&mut table);
    table
}

pub(super) fn table(heading: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_HORIZONTAL_ONLY).set_header(heading);
    table
}

pub(super) fn align_numbers(table: &mut Table) {
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
}

pub(super) fn percent(rate: Option<f64>) -> String {
    rate.map_or_else(|| "-".to_owned(), |rate| format!("{:.2}", 100.0 * rate))
}
