//! Metrics of the log and of its disk, read at each scrape.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use raft::{Replica, SYNC_BUCKETS_S};
use rustix::fs::statvfs;

/// Collector of the log's sync times and disk usage.
pub(super) struct LogMetrics {
    pub(super) replica: Replica,
    pub(super) data_dir: PathBuf,
}

impl fmt::Debug for LogMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LogMetrics")
    }
}

/// Free and total space of a disk, in bytes.
pub(super) struct DiskSpace {
    pub(super) free_bytes: u64,
    pub(super) size_bytes: u64,
}

/// Returns the space of the disk that holds `folder`; `None` if its file system does not report it.
pub(super) fn disk_space(folder: &Path) -> Option<DiskSpace> {
    let space = statvfs(folder).ok().filter(|space| space.f_blocks > 0)?;
    Some(DiskSpace {
        free_bytes: space.f_bavail.saturating_mul(space.f_frsize),
        size_bytes: space.f_blocks.saturating_mul(space.f_frsize),
    })
}

impl Collector for LogMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.encode_disk(&mut encoder)?;
        self.encode_snapshots(&mut encoder)?;
        let times = self.replica.sync_times();
        let bounds = SYNC_BUCKETS_S.iter().chain([&f64::MAX]);
        let fitting: u64 = times.buckets.iter().sum();
        let counts = times.buckets.into_iter().chain([times.count - fitting]);
        let buckets: Vec<(f64, u64)> = bounds.copied().zip(counts).collect();
        let help = "Time that a write of the log waits for the disk to sync";
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
    /// Encodes the attempts to write a snapshot, and the size and age of the newest one.
    fn encode_snapshots(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let counts = self.replica.snapshot_counts();
        for (name, help, count) in [
            (
                "quorate_raft_snapshots_written",
                "Snapshots that this replica has written",
                counts.written,
            ),
            (
                "quorate_raft_snapshots_failed",
                "Attempts to write a snapshot that failed; each is repeated",
                counts.failed,
            ),
        ] {
            encoder
                .encode_descriptor(name, help, None, MetricType::Counter)?
                .encode_counter::<NoLabelSet, _, u64>(&count, None)?;
        }
        let file = self.replica.newest_snapshot();
        let file = file.and_then(|path| path.metadata().ok());
        let written = file.as_ref().and_then(|it| it.modified().ok());
        let written = written.and_then(|it| it.duration_since(UNIX_EPOCH).ok());
        for (name, help, number) in [
            (
                "quorate_raft_snapshot_last_write_seconds",
                "Time that the last snapshot took to write, 0 if there was none since the start",
                counts.last_took.as_secs_f64(),
            ),
            (
                "quorate_raft_snapshot_bytes",
                "Size of the newest snapshot, 0 if there is none",
                file.as_ref().map_or(0.0, |it| it.len() as f64),
            ),
            (
                "quorate_raft_snapshot_timestamp_seconds",
                "Unix time at which the newest snapshot was written, 0 if there is none",
                written.unwrap_or_default().as_secs_f64(),
            ),
        ] {
            encoder
                .encode_descriptor(name, help, None, MetricType::Gauge)?
                .encode_gauge(&number)?;
        }
        Ok(())
    }

    /// Encodes the space of the disk, unless the file system does not report it.
    fn encode_disk(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let Some(space) = disk_space(&self.data_dir) else {
            return Ok(());
        };
        for (name, help, bytes) in [
            (
                "quorate_raft_disk_free_bytes",
                "Free bytes on the disk of node.data_dir",
                space.free_bytes,
            ),
            (
                "quorate_raft_disk_size_bytes",
                "Size of the disk of node.data_dir",
                space.size_bytes,
            ),
        ] {
            encoder
                .encode_descriptor(name, help, None, MetricType::Gauge)?
                .encode_gauge(&i64::try_from(bytes).unwrap_or(i64::MAX))?;
        }
        Ok(())
    }
}
