//! Formats a comparison as tables.

use api::base::printable::escaped;

use super::matrix;
use super::recorded::RecordedFigures;
use super::report::SimComparison;
use crate::terminal::{FittedTable, column};

/// Explains the columns that [`routing`] can show and that have no common meaning.
const LEGEND: &str = "
of ideal: hits, relative to one cache that all backends share; regret: ms by which the
mean TTFT exceeds its lower bound; gap: ms between tokens; good/s: answers a second within
--goal-ttft and --goal-gap; spread: requests between the busiest and the idlest backend;
busiest: its requests, relative to an even share";

/// Explains the columns of [`fleet`].
const FLEET_LEGEND: &str = "
failed: requests without an answer after all retries; refusals: tries that got 429; held: requests
that waited because there was no engine; engine-hours: time of all engines from start to stop,
starts and drains included; most: engines at the same time. The schedule knows all arrivals; it
takes the fewest engine-hours of those that have at most the same p99 and use an equal part of
their places at any time";

/// Returns the tables of a comparison and the verdicts on its claims, one below the other.
#[must_use]
pub fn tables(comparison: &SimComparison) -> String {
    let mut parts = vec![comparison.title.clone()];
    parts.extend(comparison.recorded.as_ref().map(recorded));
    if matrix::has_loads(comparison) {
        parts.push(format!("\n{}", matrix::tables(comparison)));
        return ended(comparison, parts);
    }
    if comparison.runs.iter().any(|run| run.fleet.is_some()) {
        parts.push(format!("\n{}", fleet(comparison)));
        parts.push(FLEET_LEGEND.to_owned());
        return ended(comparison, parts);
    }
    parts.push(format!("\n{}", routing(comparison)));
    parts.push(LEGEND.to_owned());
    if comparison.runs.iter().any(|run| run.agents.is_some()) {
        parts.push(format!("\n{}", agents(comparison)));
    }
    if comparison.runs.iter().any(|run| run.tiers.is_some()) {
        parts.push(format!("\n{}", tiers(comparison)));
    }
    if comparison.runs.iter().any(|run| run.service.len() > 1) {
        parts.push(format!("\n{}", fairness(comparison)));
    }
    if comparison
        .runs
        .iter()
        .any(|run| run.refusals + run.departures > 0)
    {
        parts.push(format!("\n{}", overload(comparison)));
    }
    ended(comparison, parts)
}

/// Appends verdicts and faults to the tables, and joins all parts.
fn ended(comparison: &SimComparison, mut parts: Vec<String>) -> String {
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

/// Describes the results of the recorded cluster.
fn recorded(figures: &RecordedFigures) -> String {
    let hits = figures.hit_rate.map(|rate| 100.0 * rate);
    let policies: Vec<&str> = figures.policies.keys().map(String::as_str).collect();
    let left_out = match figures.left_out {
        0 => String::new(),
        more => format!("; {more} for other models are left out"),
    };
    let rate = figures.speed.prefill_rate.map(f64::from);
    format!(
        "recorded: {} requests for {} by {}, {} ok, hit {} %, TTFT mean {:.0} p50 {:.0} p99 {:.0} \
         ms, waited p99 {:.0} ms, busiest {:.2}{left_out}\n          \
         engines: prefill {} tokens/s, decode step {} ms",
        figures.requests,
        escaped(&figures.model),
        escaped(&policies.join(", ")),
        figures.ok,
        optional(hits, 1),
        figures.ttft_ms.mean,
        figures.ttft_ms.p50,
        figures.ttft_ms.p99,
        figures.waited_ms.p99,
        figures.busiest_share,
        optional(rate, 0),
        optional(figures.speed.decode_ms, 1),
    )
}

fn routing(comparison: &SimComparison) -> FittedTable {
    let mut table = FittedTable::new(&[
        column("run"),
        column("ok").number(),
        column("refused").number().rank(1),
        column("hit %").number(),
        column("of ideal").number().rank(2),
        column("TTFT mean").number(),
        column("p50").number().rank(3),
        column("p90").number().rank(3),
        column("p99 ms").number(),
        column("regret").number().rank(4),
        column("gap p99").number().rank(3),
        column("good/s").number().rank(2),
        column("req/s").number().rank(2),
        column("tok/s").number().rank(1),
        column("spread").number().rank(4),
        column("busiest").number().rank(4),
        column("log B/req").number().rank(5),
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
            format!("{:.0}", run.gap_ms.p99),
            format!("{:.2}", run.goodput_per_s),
            format!("{:.2}", run.requests_per_s),
            format!("{:.0}", run.tokens_per_s),
            format!("{:.1}", run.load_spread),
            format!("{:.2}", run.busiest_share),
            format!("{:.0}", run.log_bytes_per_request),
        ]);
    }
    table
}

fn fleet(comparison: &SimComparison) -> FittedTable {
    let mut table = FittedTable::new(&[
        column("run"),
        column("requests").number(),
        column("failed").number(),
        column("refusals").number().rank(1),
        column("held").number(),
        column("TTFT p50").number(),
        column("p99 ms").number(),
        column("engine-hours").number(),
        column("most").number(),
        column("starts").number().rank(1),
    ]);
    for run in &comparison.runs {
        let Some(fleet) = &run.fleet else { continue };
        table.add_row([
            run.label.clone(),
            run.requests.to_string(),
            (run.refused + run.abandoned).to_string(),
            run.refusals.to_string(),
            fleet.held.to_string(),
            format!("{:.0}", run.ttft_ms.p50),
            format!("{:.0}", run.ttft_ms.p99),
            format!("{:.1}", fleet.engine_hours),
            fleet.most.to_string(),
            fleet.starts.to_string(),
        ]);
    }
    table
}

fn agents(comparison: &SimComparison) -> FittedTable {
    let mut table = FittedTable::new(&[
        column("run"),
        column("turns").number().rank(1),
        column("at longest prefix %").number(),
        column("moved %").number(),
        column("of which sooner %").number().rank(1),
        column("early %").number(),
        column("unseen %").number(),
        column("missed elsewhere %").number(),
        column("sub-agents").number().rank(1),
        column("at parent's prefix %").number(),
        column("parent has room %").number().rank(1),
        column("then there %").number(),
        column("at a copy %").number().rank(1),
        column("sooner %").number().rank(1),
    ]);
    for run in &comparison.runs {
        let Some(agents) = &run.agents else {
            continue;
        };
        table.add_row([
            run.label.clone(),
            agents.turns.to_string(),
            format!("{:.1}", 100.0 * agents.at_longest_prefix),
            format!("{:.1}", 100.0 * agents.moved),
            format!("{:.1}", 100.0 * agents.moved_sooner),
            format!("{:.1}", 100.0 * agents.early),
            format!("{:.1}", 100.0 * agents.unseen),
            format!("{:.1}", 100.0 * agents.missed_elsewhere),
            agents.children.to_string(),
            format!("{:.1}", 100.0 * agents.at_parents_prefix),
            format!("{:.1}", 100.0 * agents.with_room),
            format!("{:.1}", 100.0 * agents.at_parents_prefix_with_room),
            format!("{:.1}", 100.0 * agents.at_copy_with_room),
            format!("{:.1}", 100.0 * agents.sooner_with_room),
        ]);
    }
    table
}

fn tiers(comparison: &SimComparison) -> FittedTable {
    let mut table = FittedTable::new(&[
        column("run"),
        column("expected: GPU %").number(),
        column("CPU %").number(),
        column("disk %").number(),
        column("found: GPU %").number(),
        column("CPU %").number(),
        column("disk %").number(),
        column("as expected %").number(),
    ]);
    for run in &comparison.runs {
        let Some(tiers) = &run.tiers else {
            continue;
        };
        let shares = tiers.expected.iter().chain(&tiers.found);
        let shares = shares.chain(std::iter::once(&tiers.as_expected));
        let shares = shares.map(|share| format!("{:.1}", 100.0 * share));
        table.add_row(std::iter::once(run.label.clone()).chain(shares));
    }
    table
}

fn fairness(comparison: &SimComparison) -> FittedTable {
    let mut table = FittedTable::new(&[
        column("run"),
        column("order").rank(2),
        column("users").number().rank(1),
        column("gap").number(),
        column("bound").number(),
        column("least/most served").number().rank(1),
        column("Jain").number().rank(1),
        column("tok/s").number().rank(3),
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
    table
}

fn overload(comparison: &SimComparison) -> FittedTable {
    let mut table = FittedTable::new(&[
        column("run"),
        column("asked/s").number().rank(1),
        column("answered/s").number(),
        column("refusals").number().rank(1),
        column("left").number().rank(1),
        column("wasted tokens %").number().rank(2),
        column("TTFT p50").number().rank(3),
        column("p99 ms").number(),
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
    table
}

fn optional(number: Option<f64>, digits: usize) -> String {
    number.map_or_else(|| "-".to_owned(), |number| format!("{number:.digits$}"))
}
