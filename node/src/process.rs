//! The standard process metrics of Prometheus clients (`process_*`), and the number of tasks.
//!
//! They are read at each scrape, most of them from `/proc`. Values that cannot be read, because the
//! system has no such files or no descriptor is left, are omitted.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use crate::descriptors;

/// Number of ticks per second, the unit of times in `/proc`. The kernel's interface uses 100
/// everywhere.
const TICKS_PER_S: f64 = 100.0;

/// Collector that reads the process's metrics at each scrape.
#[derive(Debug)]
pub(crate) struct ProcessMetrics;

/// Times in `/proc/self/stat`.
#[derive(Debug, PartialEq)]
struct ProcessTimes {
    /// User and system time of the process, in seconds.
    cpu_s: f64,
    /// Start of the process, in seconds after the start of the system.
    started_s: f64,
}

impl Collector for ProcessMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let read = |file: &str| std::fs::read_to_string(file).ok();
        let times = read("/proc/self/stat").and_then(|stat| times(&stat));
        if let Some(times) = &times {
            let help = "User and system CPU time";
            let metric = encoder.encode_descriptor(
                "process_cpu_seconds",
                help,
                None,
                MetricType::Counter,
            )?;
            ConstCounter::new(times.cpu_s).encode(metric)?;
        }
        let mut gauge = |name: &str, help: &str, value: Option<f64>| match value {
            Some(value) => {
                let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
                ConstGauge::new(value).encode(metric)
            }
            None => Ok(()),
        };
        let booted_s = read("/proc/stat").and_then(|stat| booted_s(&stat));
        gauge(
            "process_start_time_seconds",
            "Unix time at which the process started",
            times
                .zip(booted_s)
                .map(|(times, booted_s)| booted_s + times.started_s),
        )?;
        let status = read("/proc/self/status").unwrap_or_default();
        gauge(
            "process_resident_memory_bytes",
            "Resident memory",
            status_bytes(&status, "VmRSS:"),
        )?;
        gauge(
            "process_virtual_memory_bytes",
            "Virtual memory",
            status_bytes(&status, "VmSize:"),
        )?;
        let open = std::fs::read_dir("/proc/self/fd").ok();
        let open = open.and_then(|open| u32::try_from(open.count()).ok());
        gauge(
            "process_open_fds",
            "Open file descriptors",
            open.map(f64::from),
        )?;
        let runtime = tokio::runtime::Handle::try_current().ok();
        let tasks = runtime.map(|runtime| runtime.metrics().num_alive_tasks());
        gauge(
            "quorate_runtime_tasks",
            "Live tasks of the runtime",
            tasks
                .and_then(|tasks| u32::try_from(tasks).ok())
                .map(f64::from),
        )?;
        // A limit beyond 32 bits is as good as none.
        let most = u32::try_from(descriptors::limit()).unwrap_or(u32::MAX);
        let most = Some(f64::from(most));
        gauge(
            "process_max_fds",
            "Maximum number of open file descriptors",
            most,
        )
    }
}

fn times(stat: &str) -> Option<ProcessTimes> {
    // The second field is the program's name in parentheses, which may contain any characters.
    let (_, rest) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    // Fields are numbered as in proc(5).
    let field = |number: usize| fields.get(number - 3)?.parse::<f64>().ok();
    Some(ProcessTimes {
        cpu_s: (field(14)? + field(15)?) / TICKS_PER_S,
        started_s: field(22)? / TICKS_PER_S,
    })
}

fn booted_s(stat: &str) -> Option<f64> {
    let line = stat.lines().find_map(|line| line.strip_prefix("btime "))?;
    line.trim().parse().ok()
}

/// Returns the size called `name` in `/proc/self/status`, in bytes; `None` if it is missing. The
/// file states kibibytes.
fn status_bytes(status: &str, name: &str) -> Option<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kibibytes: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_files_are_parsed() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 1 0 0 0 1234 566 0 0 20 0 9 0 4200 99 88";
        let read = times(stat).unwrap();
        assert_eq!((read.cpu_s, read.started_s), (18.0, 42.0));
        assert_eq!(times("7 (a) S 1"), None);
        assert_eq!(
            booted_s("cpu 1 2\nbtime 1700000000\n"),
            Some(1_700_000_000.0)
        );
        let status = "Name:\ta\nVmSize:\t  2048 kB\nVmRSS:\t      3 kB\n";
        assert_eq!(status_bytes(status, "VmRSS:"), Some(3072.0));
        assert_eq!(status_bytes(status, "VmSize:"), Some(2_097_152.0));
        assert_eq!(status_bytes(status, "VmSwap:"), None);
    }
}
