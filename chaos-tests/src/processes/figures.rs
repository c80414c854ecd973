//! Resources of replicas' processes, to check whether they are released.

use std::fs;

use anyhow::Context as _;
use http::Method;

use super::ProcessCluster;

/// Resources that a replica's process holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProcessFigures {
    /// Size of resident memory, in bytes.
    pub rss_bytes: u64,
    /// Number of open file descriptors.
    pub descriptors: u64,
    /// Number of live tasks in the replica's runtime.
    pub tasks: u64,
    /// Number of client connections.
    pub connections: u64,
    /// Number of requests in flight.
    pub in_flight: u64,
}

impl ProcessFigures {
    /// Returns the maximum of each figure over all replicas.
    ///
    /// # Errors
    /// If a replica is down or does not respond.
    pub async fn of(cluster: &ProcessCluster) -> anyhow::Result<Self> {
        let mut most = Self::default();
        for number in 0..cluster.replicas() {
            let one = Self::of_replica(cluster, number).await;
            let one = one.with_context(|| format!("replica {}", number + 1))?;
            most.rss_bytes = most.rss_bytes.max(one.rss_bytes);
            most.descriptors = most.descriptors.max(one.descriptors);
            most.tasks = most.tasks.max(one.tasks);
            most.connections = most.connections.max(one.connections);
            most.in_flight = most.in_flight.max(one.in_flight);
        }
        Ok(most)
    }

    async fn of_replica(cluster: &ProcessCluster, number: usize) -> anyhow::Result<Self> {
        let id = cluster.process_id(number).context("it is down")?;
        let status = fs::read_to_string(format!("/proc/{id}/status")).context("it has ended")?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kilobytes = line.and_then(|it| it.split_whitespace().next()?.parse::<u64>().ok());
        let url = cluster.admin_url(number, "/metrics");
        let shown = cluster.operator().send(Method::GET, &url, None).await?;
        let shown = String::from_utf8_lossy(&shown.body);
        let gauge = |name: &str| {
            let line = shown.lines().find(|line| line.starts_with(name));
            let value = line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
            let value = value.with_context(|| format!("/metrics has no {name}"))?;
            anyhow::Ok(value as u64)
        };
        Ok(Self {
            rss_bytes: kilobytes.context("it has ended")? << 10,
            descriptors: fs::read_dir(format!("/proc/{id}/fd"))?.count() as u64,
            tasks: gauge("quorate_runtime_tasks ")?,
            connections: gauge("quorate_proxy_connections ")?,
            in_flight: gauge("quorate_proxy_in_flight_requests ")?,
        })
    }
}
