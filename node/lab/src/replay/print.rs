//! Formats the report of a load as tables.

use super::report::{GroupReport, LatencySummary, LoadReport};
use crate::terminal::{FittedTable, column};

/// Maximum number of users in the table. The JSON lists all.
const USERS_SHOWN: usize = 12;

/// Returns the report as tables, one below the other.
#[must_use]
pub fn tables(report: &LoadReport) -> String {
    let mut parts = vec![
        format!("{}\n", by_target(report)),
        format!("{}\n", times(report)),
    ];
    if report.users.len() > 1 {
        let jain = report
            .jain_index
            .map_or_else(|| "-".to_owned(), |index| format!("{index:.3}"));
        parts.push(by_user(report).to_string());
        parts.push(format!("{} users, Jain {jain}\n", report.users.len()));
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

fn by_target(report: &LoadReport) -> FittedTable {
    let mut table = FittedTable::new(&[
        column("target"),
        column("requests").number().rank(2),
        column("ok").number(),
        column("failed").number(),
        column("lost").number().rank(1),
        column("req/s").number().rank(3),
        column("out tok/s").number().rank(4),
        column("cached %").number(),
        column("predicted %").number().rank(4),
        column("TTFT p50").number(),
        column("p90").number().rank(3),
        column("p99 ms").number(),
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
    table
}

fn times(report: &LoadReport) -> FittedTable {
    let figure = |head| column(head).number();
    let figures = ["mean", "p50", "p90", "p99", "max"].map(figure);
    let mut table = FittedTable::new(&[&[column("ms")], &figures[..]].concat());
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
    table
}

fn by_user(report: &LoadReport) -> FittedTable {
    let mut table = FittedTable::new(&[
        column("user"),
        column("ok").number(),
        column("failed").number(),
        column("prompt tok").number(),
        column("out tok").number(),
        column("service").number(),
    ]);
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
    table
}

pub(super) fn percent(rate: Option<f64>) -> String {
    rate.map_or_else(|| "-".to_owned(), |rate| format!("{:.2}", 100.0 * rate))
}
