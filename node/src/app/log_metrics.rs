//! The metric of the log's syncs, read from the replica at each scrape.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use raft::{Replica, SYNC_BUCKETS_S};

/// Reads how long syncs took.
pub(super) struct LogMetrics(pub(super) Replica);

impl fmt::Debug for LogMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LogMetrics")
    }
}

impl Collector for LogMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let times = self.0.sync_times();
        let bounds = SYNC_BUCKETS_S.iter().chain([&f64::MAX]);
        let fitting: u64 = times.buckets.iter().sum();
        let counts = times.buckets.into_iter().chain([times.count - fitting]);
        let buckets: Vec<(f64, u64)> = bounds.copied().zip(counts).collect();
        let help = "Time that a write of the log waits for the disk to have it";
        encoder
            .encode_descriptor(
                "quorate_raft_log_sync_seconds",
                help,
                None,
                MetricType::Histogram,
            )?
            .encode_histogram::<NoLabelSet>(times.sum_s, times.count, &buckets, None)
    }
}
