//! Overload and nothing else: goodput must stay close to the capacity with low latency, and recover
//! as soon as the load is gone.
//!
//! Half of the clients are patient; half give up after 3 s and retry like SDKs.

use std::time::Duration;

use anyhow::ensure;
use tokio::time::interval;

use super::checks::{SoakCheck, ready};
use super::{ClientKind, PhasePlan, SoakDriver, SoakPhase, WARM_UP, capacity};
use crate::processes::figures::ProcessFigures;

/// Kinds of clients that overload the cluster.
const KINDS: &[ClientKind] = &[ClientKind::Patient, ClientKind::Impatient];
/// Divisor of the storm's duration for those of full load and of the phase after the storm, clamped
/// to these bounds.
const ASIDE: (u32, Duration, Duration) = (4, Duration::from_secs(5), Duration::from_secs(30));
/// Load after the storm, relative to the capacity.
const AFTER: f64 = 0.5;
/// Time after the storm within which everything must have recovered.
const RECOVERY: Duration = Duration::from_secs(2);
/// Minimum goodput in the storm, in permille of that at full load.
const GOODPUT_PERMILLE: f64 = 900.0;
/// Maximum time to first token in the storm, as a multiple of that at full load.
const FIRST_FACTOR: u32 = 2;
/// Interval at which memory is measured.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Options of an overload.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OverloadOptions {
    /// Duration of the storm.
    pub storm: Duration,
    /// Requested load, as a multiple of the capacity.
    pub factor: f64,
    /// Seed of all random choices.
    pub seed: u64,
    /// Whether the cluster uses TLS everywhere, a token and API keys.
    pub is_secure: bool,
    /// Maximum growth of a replica's memory, in bytes.
    pub grown_bytes_max: u64,
}

/// Measurements of one phase.
#[derive(Debug, Clone, serde::Serialize)]
pub struct OverloadRow {
    /// Name of the phase.
    pub name: &'static str,
    /// Number of requests per second, without retries.
    pub asked_per_s: f64,
    /// Number of complete responses per second.
    pub goodput: f64,
    /// Number of requests per second that were rejected with 503.
    pub refused_per_s: f64,
    /// Median time to the first byte of a response.
    pub first_p50: Duration,
    /// 99th percentile of the time to the first byte.
    pub first_p99: Duration,
    /// Maximum resident memory of any replica, in bytes.
    pub rss_bytes: u64,
}

/// Result of an overload.
#[derive(Debug, Clone, serde::Serialize)]
pub struct OverloadReport {
    /// Capacity of the engines, in responses per second.
    pub capacity: f64,
    /// Measurements of full load, the storm, and the phase after it.
    pub rows: [OverloadRow; 3],
    /// Results of all checks.
    pub checks: Vec<SoakCheck>,
}

/// Runs an overload and checks the measurements. Passes progress messages to `say`.
///
/// # Errors
/// If the cluster cannot be started. Failed checks are in the report.
pub async fn run(options: &OverloadOptions, say: impl Fn(&str)) -> anyhow::Result<OverloadReport> {
    super::raise_descriptors();
    let stage = SoakDriver::start(options.seed, options.is_secure).await?;
    let aside = (options.storm / ASIDE.0).clamp(ASIDE.1, ASIDE.2);
    let plan = |load: f64, warm_up, length| PhasePlan {
        kinds: KINDS,
        factor: load / KINDS.iter().map(|kind| kind.share()).sum::<f64>(),
        warm_up,
        length,
    };
    say(&format!("full load for {} s", aside.as_secs()));
    let full = row("full load", &stage, plan(1.0, WARM_UP, aside)).await?;
    let storm_for = options.storm.as_secs();
    say(&format!(
        "{} times as much for {storm_for} s",
        options.factor
    ));
    let storm = row(
        "storm",
        &stage,
        plan(options.factor, WARM_UP, options.storm),
    )
    .await?;
    say("half of the capacity");
    let is_ready = ready(&stage.cluster).await;
    let after = row("afterwards", &stage, plan(AFTER, RECOVERY, aside)).await?;

    let mut checks = judge(options, [&full, &storm, &after]);
    checks.push(SoakCheck::new(
        "every replica is ready within 2 s",
        is_ready,
    ));
    if SoakCheck::all_hold(&checks) {
        stage.cluster.stop();
    }
    Ok(OverloadReport {
        capacity: capacity(),
        rows: [full, storm, after],
        checks,
    })
}

fn judge(options: &OverloadOptions, rows: [&OverloadRow; 3]) -> Vec<SoakCheck> {
    let [full, storm, after] = rows;
    let held = |found: String, holds: bool| {
        ensure!(holds, "{found}");
        Ok(found)
    };
    let goodput = format!(
        "{:.2} answers a second of {:.2}",
        storm.goodput, full.goodput
    );
    let is_good = 1000.0 * storm.goodput >= GOODPUT_PERMILLE * full.goodput;
    let first = |row: &OverloadRow| {
        let [half, most] = [row.first_p50, row.first_p99].map(|it| it.as_millis());
        format!("{half} and {most} ms")
    };
    let is_soon = |row: &OverloadRow| {
        row.first_p50 <= FIRST_FACTOR * full.first_p50
            && row.first_p99 <= FIRST_FACTOR * full.first_p99
    };
    let grown = storm.rss_bytes.saturating_sub(full.rss_bytes);
    let memory = format!(
        "{} MiB more, {} MiB may be",
        grown >> 20,
        options.grown_bytes_max >> 20
    );
    let recovered = format!(
        "{} to the first token, {:.2} refused a second",
        first(after),
        after.refused_per_s
    );
    vec![
        SoakCheck::new(
            "goodput is 90 % of that at full load",
            held(goodput, is_good),
        ),
        SoakCheck::new(
            "first tokens come within twice the time at full load",
            held(
                format!("{}, before {}", first(storm), first(full)),
                is_soon(storm),
            ),
        ),
        SoakCheck::new(
            "memory is bounded",
            held(memory, grown <= options.grown_bytes_max),
        ),
        SoakCheck::new(
            "2 s later all is as before",
            held(recovered, is_soon(after) && after.refused_per_s == 0.0),
        ),
    ]
}

/// Runs a phase and measures memory meanwhile.
async fn row(
    name: &'static str,
    stage: &SoakDriver,
    plan: PhasePlan<'_>,
) -> anyhow::Result<OverloadRow> {
    let mut rss_bytes = 0;
    let watched = async {
        let mut looks = interval(LOOK_EVERY);
        loop {
            looks.tick().await;
            match ProcessFigures::of(&stage.cluster).await {
                Ok(figures) => rss_bytes = rss_bytes.max(figures.rss_bytes),
                Err(error) => return error,
            }
        }
    };
    let phase = tokio::select! {
        biased;
        phase = stage.phase(plan) => phase?,
        error = watched => return Err(error.context(name)),
    };
    Ok(OverloadRow {
        name,
        rss_bytes,
        ..seen(&phase)
    })
}

fn seen(phase: &SoakPhase) -> OverloadRow {
    let seconds = phase.counted.as_secs_f64();
    let (mut asked, mut whole, mut refused) = (0, 0, 0);
    let mut firsts = Vec::new();
    for kind in KINDS {
        let book = phase.scene.book(*kind);
        asked += book.by_user.values().map(|[asked, _]| asked).sum::<u64>();
        whole += book.whole;
        refused += book.counted_refusals;
        firsts.extend_from_slice(book.firsts());
    }
    firsts.sort_unstable();
    let first = |permille: usize| match firsts.len().checked_sub(1) {
        Some(last) => firsts[last * permille / 1000],
        None => Duration::ZERO,
    };
    OverloadRow {
        name: "",
        asked_per_s: asked as f64 / seconds,
        goodput: whole as f64 / seconds,
        refused_per_s: refused as f64 / seconds,
        first_p50: first(500),
        first_p99: first(990),
        rss_bytes: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(goodput: f64, first_ms: u64, refused_per_s: f64, rss_bytes: u64) -> OverloadRow {
        OverloadRow {
            name: "",
            asked_per_s: 0.0,
            goodput,
            refused_per_s,
            first_p50: Duration::from_millis(first_ms),
            first_p99: Duration::from_millis(2 * first_ms),
            rss_bytes,
        }
    }

    #[test]
    fn missed_overload_targets_are_reported() {
        let options = OverloadOptions {
            storm: Duration::from_secs(120),
            factor: 10.0,
            seed: 1,
            is_secure: true,
            grown_bytes_max: 100,
        };
        let violated = |storm: &OverloadRow, after: &OverloadRow| {
            let checks = judge(&options, [&row(10.0, 100, 1.0, 1000), storm, after]);
            let violated = checks.into_iter().filter(|it| it.violation.is_some());
            violated.map(|it| it.name).collect::<Vec<_>>()
        };
        let (storm, after) = (row(9.0, 200, 90.0, 1100), row(5.0, 100, 0.0, 0));
        assert!(violated(&storm, &after).is_empty());
        assert_eq!(violated(&row(8.9, 201, 90.0, 1101), &after).len(), 3);
        assert_eq!(violated(&storm, &row(5.0, 201, 0.0, 0)).len(), 1);
        assert_eq!(violated(&storm, &row(5.0, 100, 0.1, 0)).len(), 1);
    }
}
