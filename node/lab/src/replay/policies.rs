//! `quorate replay --policies`: replays a trace with one policy after the other, each with three
//! fresh replicas and fresh emulated engines in this process, and prints one table.
//!
//! Replicas and engines are those of `quorate dev`. The trait [`ClusterUnderTest`] starts the
//! replicas, because this crate does not depend on the crate that implements them. Engines only
//! wait where a GPU would compute, so results do not depend on the machine as long as the load
//! generator keeps up (`late_ms`).

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use serde::Serialize;
use state::command::BackendSpec;

use super::client::ReplayClient;
use super::load::{LoadPlan, LoadSource, run as run_load};
use super::print::percent;
use super::progress::show;
use super::report::LoadReport;
use super::targets::Targets;
use super::trace::Arrival;
use crate::engine::fleet::{Engines, EnginesPlan};
use crate::terminal::{self, FittedTable, INTERRUPTED, column};

/// Name that stands for all policies.
pub(super) const EVERY_POLICY: &str = "all";

/// Replicas that a comparison starts and stops for each policy.
pub trait ClusterUnderTest: Sized {
    /// Starts replicas with these settings (`section.key=value`) in their config, and waits until
    /// all of them route requests to `backends`.
    fn start(
        settings: &[String],
        backends: &[BackendSpec],
    ) -> impl Future<Output = anyhow::Result<Self>>;

    /// Returns the base URL of each replica's API for clients.
    fn data_urls(&self) -> Vec<String>;

    /// Stops the replicas and deletes their data.
    fn stop(self) -> impl Future<Output = ()>;
}

/// Parameters of a comparison of policies.
pub(super) struct PolicyComparison<'a> {
    /// Policies to compare, in the order of the table.
    pub(super) policies: Vec<&'static str>,
    pub(super) engines: EnginesPlan<'a>,
    pub(super) settings: &'a [String],
    pub(super) speed: f64,
    pub(super) in_flight_max: usize,
    pub(super) timeout: Duration,
    pub(super) is_json: bool,
}

/// Result of the load under one policy.
#[derive(Debug, Serialize)]
struct PolicyRow {
    policy: &'static str,
    /// Number of responses of the busiest engine, relative to the mean of all engines; 1 if even.
    load_spread: f64,
    #[serde(flatten)]
    report: LoadReport,
}

/// Replays the trace with each policy and prints the table. The exit code is 1 if requests failed.
///
/// # Errors
/// If engines or replicas cannot be started, or the table cannot be printed.
pub(super) async fn compare<C: ClusterUnderTest>(
    comparison: &PolicyComparison<'_>,
    arrivals: &[Arrival],
) -> anyhow::Result<ExitCode> {
    let mut rows = Vec::new();
    for policy in &comparison.policies {
        let engines = Engines::start(comparison.engines).await?;
        let row = tokio::select! {
            row = with_policy::<C>(comparison, policy, &engines, arrivals) => Some(row),
            interrupt = tokio::signal::ctrl_c() => interrupt.map(|()| None)?,
        };
        engines.stop().await;
        match row {
            Some(row) => rows.push(row?),
            None => return Ok(ExitCode::from(INTERRUPTED)),
        }
    }
    if comparison.is_json {
        terminal::print(serde_json::to_string_pretty(&rows)?)?;
    } else {
        terminal::print(tabled(&rows))?;
    }
    let failed = |row: &PolicyRow| row.report.total.failed + row.report.total.lost > 0;
    Ok(if rows.iter().any(failed) {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

async fn with_policy<C: ClusterUnderTest>(
    comparison: &PolicyComparison<'_>,
    policy: &'static str,
    engines: &Engines,
    arrivals: &[Arrival],
) -> anyhow::Result<PolicyRow> {
    let mut settings = comparison.settings.to_vec();
    settings.push(format!("routing.policy={policy}"));
    let cluster = C::start(&settings, &engines.specs).await?;
    let targets = Targets::new(&cluster.data_urls())?;
    let model = ReplayClient::new(comparison.timeout)
        .first_model(targets.uri(0, "/v1/models"))
        .await
        .context("ask for the models")?;
    let bar = terminal::progress_bar(arrivals.len() as u64, terminal::COUNT)?;
    bar.set_prefix(format!("{policy} "));
    let plan = LoadPlan {
        work: LoadSource::Trace(arrivals.to_vec()),
        model,
        speed: comparison.speed,
        in_flight_max: comparison.in_flight_max,
        timeout: comparison.timeout,
    };
    let report = run_load(plan, &targets, |progress| show(&bar, progress)).await;
    bar.finish_and_clear();
    cluster.stop().await;
    Ok(PolicyRow {
        policy,
        load_spread: spread(&report, engines.specs.len()),
        report,
    })
}

/// Returns the number of responses of the busiest engine, relative to the mean of all `engines`.
fn spread(report: &LoadReport, engines: usize) -> f64 {
    let all: u64 = report.backends.values().sum();
    let most = report.backends.values().max().copied().unwrap_or(0);
    if all == 0 {
        return 1.0;
    }
    most as f64 * engines as f64 / all as f64
}

fn tabled(rows: &[PolicyRow]) -> FittedTable {
    let mut table = FittedTable::new(&[
        column("policy"),
        column("cached %").number(),
        column("predicted %").number().rank(2),
        column("TTFT p50").number(),
        column("p90").number().rank(2),
        column("p99 ms").number(),
        column("load max/mean").number().rank(1),
        column("requests").number().rank(3),
        column("errors").number(),
        column("late p99 ms").number().rank(1),
    ]);
    for PolicyRow {
        policy,
        load_spread,
        report,
    } in rows
    {
        let total = &report.total;
        let ms = |value: f64| format!("{value:.1}");
        table.add_row([
            (*policy).to_owned(),
            percent(total.hit_rate),
            percent(total.predicted_hit_rate),
            ms(total.ttft_ms.p50),
            ms(total.ttft_ms.p90),
            ms(total.ttft_ms.p99),
            format!("{load_spread:.2}"),
            total.requests.to_string(),
            (total.failed + total.lost).to_string(),
            ms(report.late_ms.p99),
        ]);
    }
    table
}
