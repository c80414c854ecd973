//! Histogram of the duration of log syncs.

use std::sync::Mutex;
use std::time::Duration;

use crate::locks::lock;

/// Upper bounds of the histogram's buckets, in seconds. A longer sync counts in no bucket.
pub const SYNC_BUCKETS_S: [f64; 12] = [
    0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 1.0, 4.0,
];

/// Durations of the syncs since the log was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SyncTimes {
    /// Number of syncs since the log was opened.
    pub count: u64,
    /// Total duration of all syncs, in seconds.
    pub sum_s: f64,
    /// Number of syncs per bucket, not cumulative: see [`SYNC_BUCKETS_S`].
    pub buckets: [u64; SYNC_BUCKETS_S.len()],
}

/// Meter that records the duration of each sync.
#[derive(Debug, Default)]
pub(crate) struct SyncMeter(Mutex<SyncTimes>);

impl SyncMeter {
    pub(crate) fn observe(&self, took: Duration) {
        let took_s = took.as_secs_f64();
        let mut times = lock(&self.0);
        times.count += 1;
        times.sum_s += took_s;
        let bucket = SYNC_BUCKETS_S.iter().position(|bound| took_s <= *bound);
        if let Some(bucket) = bucket {
            times.buckets[bucket] += 1;
        }
    }

    pub(crate) fn times(&self) -> SyncTimes {
        *lock(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_sync_counts_in_the_first_fitting_bucket() {
        let meter = SyncMeter::default();
        for millis in [0, 1, 3, 9000] {
            meter.observe(Duration::from_millis(millis));
        }
        let times = meter.times();
        assert_eq!(times.count, 4);
        assert!((times.sum_s - 9.004).abs() < 1e-9);
        assert_eq!(times.buckets[..4], [1, 1, 0, 1]);
        assert_eq!(times.buckets.iter().sum::<u64>(), 3);
    }
}
