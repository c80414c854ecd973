//! Metrics of the log and of the disk that it is on, read at each scrape.

use std::fmt;
use std::path::PathBuf;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use raft::{Replica, SYNC_BUCKETS_S};
use rustix::fs::statvfs;

/// Reads how long syncs took, and how full the disk is.
pub(super) struct LogMetrics {
    pub(super) replica: Replica,
    pub(super) data_dir: PathBuf,
}

impl fmt::Debug for LogMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LogMetrics")
    }
}

impl Collector for LogMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.encode_disk(&mut encoder)?;
        let times = self.replica.sync_times();
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

impl LogMetrics {
    /// A file system that does not say how large it is has no metrics.
    fn encode_disk(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let space = statvfs(&self.data_dir).ok();
        let Some(space) = space.filter(|space| space.f_blocks > 0) else {
            return Ok(());
        };
        let bytes = |blocks: u64| i64::try_from(blocks.saturating_mul(space.f_frsize));
        for (name, help, blocks) in [
            (
                "quorate_raft_disk_free_bytes",
                "Free bytes of the disk that node.data_dir is on",
                space.f_bavail,
            ),
            (
                "quorate_raft_disk_size_bytes",
                "Size of the disk that node.data_dir is on",
                space.f_blocks,
            ),
        ] {
            encoder
                .encode_descriptor(name, help, None, MetricType::Gauge)?
                .encode_gauge(&bytes(blocks).unwrap_or(i64::MAX))?;
        }
        Ok(())
    }
}
