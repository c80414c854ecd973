//! Rates and times of the last seconds, computed from counters that only grow.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::time::Instant;

/// Length of the window for recent figures.
pub const WINDOW: Duration = Duration::from_secs(10);
/// Number of buckets: four for each doubling, up to 2^28 us, which is more than four minutes.
const BUCKETS: usize = 4 * 28;

/// Histogram of times with a precision of one eighth. Adding one costs one atomic addition.
#[derive(Debug)]
pub struct TimeBuckets([AtomicU64; BUCKETS]);

/// Counts of [`TimeBuckets`] at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TimeCounts([u64; BUCKETS]);

impl Default for TimeBuckets {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl Default for TimeCounts {
    fn default() -> Self {
        Self([0; BUCKETS])
    }
}

impl TimeBuckets {
    /// Adds a time to the histogram.
    pub fn add(&self, time: Duration) {
        self.0[bucket_of(time)].fetch_add(1, Relaxed);
    }

    /// Returns the present counts.
    #[must_use]
    pub fn counts(&self) -> TimeCounts {
        TimeCounts(std::array::from_fn(|at| self.0[at].load(Relaxed)))
    }
}

fn bucket_of(time: Duration) -> usize {
    let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX).max(4);
    let doubling = us.ilog2();
    let quarter = (us >> (doubling - 2)) & 3;
    let place = u64::from(doubling) * 4 + quarter;
    usize::try_from(place).map_or(BUCKETS - 1, |place| place.min(BUCKETS - 1))
}

/// Returns the middle of a bucket, in microseconds.
fn middle_us(bucket: usize) -> u64 {
    let (doubling, quarter) = (bucket / 4, (bucket % 4) as u64);
    ((8 + 2 * quarter + 1) << doubling) / 8
}

impl TimeCounts {
    /// Returns the `permille` quantile of the times counted since `before`, in microseconds; 0 if
    /// there were none.
    fn quantile_us(&self, before: &Self, permille: u64) -> u64 {
        let counts = self.0.iter().zip(&before.0);
        let counts: Vec<u64> = counts
            .map(|(now, then)| now.saturating_sub(*then))
            .collect();
        let all: u64 = counts.iter().sum();
        let wanted = (all * permille).div_ceil(1000);
        let mut sum = 0;
        let found = counts.iter().position(|count| {
            sum += count;
            *count > 0 && sum >= wanted
        });
        found.map_or(0, middle_us)
    }
}

/// Values of the counters at one moment.
#[derive(Debug, Clone, Default)]
pub struct CounterSample {
    /// Number of requests that ended.
    pub ended: u64,
    /// Number of requests that failed, at this replica, at the backend, or during the response.
    pub failed: u64,
    /// Number of prompt tokens of requests whose engine reported how many were cached.
    pub prompt_tokens: u64,
    /// Number of prompt tokens in [`Self::prompt_tokens`] that were cached.
    pub cached_tokens: u64,
    /// Number of prompt tokens in [`Self::prompt_tokens`] that were predicted to be cached.
    pub predicted_tokens: u64,
    /// Number of prompt tokens in [`Self::predicted_tokens`] that the replica did not know from its
    /// own requests since its start.
    pub shared_tokens: u64,
    /// Counts of times to the first byte.
    pub ttft: TimeCounts,
    /// Counts of durations of routing.
    pub routing: TimeCounts,
}

/// Rates and times within [`WINDOW`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RecentRates {
    /// Rate of requests that ended, in thousandths per second.
    pub requests_milli_per_s: u64,
    /// Rate of requests that failed, in thousandths per second.
    pub failed_milli_per_s: u64,
    /// Median time to the first byte, in microseconds; 0 if there was none.
    pub ttft_p50_us: u64,
    /// 99th percentile of the time to the first byte, in microseconds; 0 if there was none.
    pub ttft_p99_us: u64,
    /// Median duration of routing, in microseconds; 0 if there was none.
    pub routing_p50_us: u64,
    /// 99th percentile of the duration of routing, in microseconds; 0 if there was none.
    pub routing_p99_us: u64,
    /// Increase of [`CounterSample::prompt_tokens`] within the window.
    pub prompt_tokens: u64,
    /// Increase of [`CounterSample::cached_tokens`] within the window.
    pub cached_tokens: u64,
    /// Increase of [`CounterSample::predicted_tokens`] within the window.
    pub predicted_tokens: u64,
    /// Increase of [`CounterSample::shared_tokens`] within the window.
    pub shared_tokens: u64,
}

/// Samples of the last [`WINDOW`].
#[derive(Debug, Default)]
pub struct RecentWindow(VecDeque<(Instant, CounterSample)>);

impl RecentWindow {
    /// Adds a sample and returns the rates between the oldest one in the window and this one.
    pub fn add(&mut self, at: Instant, sample: CounterSample) -> RecentRates {
        while self
            .0
            .get(1)
            .is_some_and(|(next, _)| at.duration_since(*next) >= WINDOW)
        {
            self.0.pop_front();
        }
        self.0.push_back((at, sample));
        let (Some((since, before)), Some((_, now))) = (self.0.front(), self.0.back()) else {
            return RecentRates::default();
        };
        let ms = u64::try_from(at.duration_since(*since).as_millis()).unwrap_or(u64::MAX);
        let per_s = |now: u64, before: u64| {
            let grown = now.saturating_sub(before).saturating_mul(1_000_000);
            grown.checked_div(ms).unwrap_or(0)
        };
        RecentRates {
            requests_milli_per_s: per_s(now.ended, before.ended),
            failed_milli_per_s: per_s(now.failed, before.failed),
            ttft_p50_us: now.ttft.quantile_us(&before.ttft, 500),
            ttft_p99_us: now.ttft.quantile_us(&before.ttft, 990),
            routing_p50_us: now.routing.quantile_us(&before.routing, 500),
            routing_p99_us: now.routing.quantile_us(&before.routing, 990),
            prompt_tokens: now.prompt_tokens.saturating_sub(before.prompt_tokens),
            cached_tokens: now.cached_tokens.saturating_sub(before.cached_tokens),
            predicted_tokens: now.predicted_tokens.saturating_sub(before.predicted_tokens),
            shared_tokens: now.shared_tokens.saturating_sub(before.shared_tokens),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reported_times_are_within_an_eighth() {
        for us in [4, 5, 7, 8, 100, 1234, 50_000, 999_999, 200_000_000] {
            let told = middle_us(bucket_of(Duration::from_micros(us)));
            assert!(told.abs_diff(us) * 8 <= us.max(8), "{us} is told as {told}");
        }
        assert_eq!(bucket_of(Duration::ZERO), 8);
        assert_eq!(bucket_of(Duration::MAX), BUCKETS - 1);
    }

    #[tokio::test(start_paused = true)]
    async fn rates_cover_the_window() {
        let (start, mut window) = (Instant::now(), RecentWindow::default());
        let times = TimeBuckets::default();
        let mut last = RecentRates::default();
        for second in 0..=30_u64 {
            times.add(Duration::from_millis(if second < 15 { 800 } else { 10 }));
            let sample = CounterSample {
                ended: 5 * second,
                ttft: times.counts(),
                prompt_tokens: 100 * second,
                ..CounterSample::default()
            };
            last = window.add(start + Duration::from_secs(second), sample);
        }
        assert_eq!(last.requests_milli_per_s, 5000);
        assert_eq!(last.prompt_tokens, 1000);
        assert!((9_000..=11_250).contains(&last.ttft_p99_us), "{last:?}");
        assert_eq!(last.routing_p50_us, 0);
        assert!(window.0.len() <= 11);
    }
}
