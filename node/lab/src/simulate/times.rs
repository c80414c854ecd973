//! Summaries of time distributions.

use crate::replay::report::LatencySummary;

/// Number of points in a distribution's curve.
pub(super) const QUANTILES: usize = 100;

/// Sorts times in microseconds and summarises them in milliseconds.
pub(super) fn summary(times: &mut [u64]) -> LatencySummary {
    times.sort_unstable();
    let Some(max) = times.last() else {
        return LatencySummary::default();
    };
    let sum: u128 = times.iter().map(|time| u128::from(*time)).sum();
    LatencySummary {
        mean: sum as f64 / times.len() as f64 / 1e3,
        p50: quantile(times, 50) as f64 / 1e3,
        p90: quantile(times, 90) as f64 / 1e3,
        p99: quantile(times, 99) as f64 / 1e3,
        max: *max as f64 / 1e3,
    }
}

/// Returns the smallest value that is at least as large as `percent` percent of the sorted values.
pub(super) fn quantile(sorted: &[u64], percent: usize) -> u64 {
    let rank = (sorted.len() * percent).div_ceil(QUANTILES);
    sorted[rank.saturating_sub(1).min(sorted.len() - 1)]
}
