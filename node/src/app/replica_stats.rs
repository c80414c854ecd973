//! Collects this replica's figures once a second, for its peers and for operators.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use api::admission::Admission;
use api::cluster::divergence::Digests;
use api::cluster::figures::{CounterSample, FigureBoard, RecentWindow, ReplicaFigures};
use api::ports::Cluster;
use api::proxy::ProxyMetrics;
use api::readiness::ReadinessCheck;
use api::routing::Router;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::intervals::every;
use super::log_metrics::disk_space;
use super::replica_core::ReplicaCore;

/// Interval at which figures are collected.
const INTERVAL: Duration = Duration::from_secs(1);

/// Sources of the figures that a replica reports.
pub(super) struct FigureSources {
    board: Arc<FigureBoard>,
    cluster: Arc<dyn Cluster>,
    router: Arc<Router>,
    admission: Arc<Admission>,
    digests: Arc<Digests>,
    readiness: Arc<ReadinessCheck>,
    requests: Arc<ProxyMetrics>,
    data_dir: PathBuf,
}

impl FigureSources {
    pub(super) fn of(
        core: &ReplicaCore,
        readiness: &Arc<ReadinessCheck>,
        requests: &Arc<ProxyMetrics>,
        data_dir: PathBuf,
    ) -> Self {
        Self {
            board: Arc::clone(core.figures()),
            cluster: core.cluster(),
            router: Arc::clone(core.router()),
            admission: Arc::clone(core.admission()),
            digests: Arc::clone(core.digests()),
            readiness: Arc::clone(readiness),
            requests: Arc::clone(requests),
            data_dir,
        }
    }

    /// Updates this replica's figures on the board until `stop`.
    pub(super) async fn run(self, stop: CancellationToken) {
        let (started, mut window) = (Instant::now(), RecentWindow::default());
        let mut ticks = every(INTERVAL);
        while stop.run_until_cancelled(ticks.tick()).await.is_some() {
            self.board.set_own(&self.look(started, &mut window));
        }
    }

    fn look(&self, started: Instant, window: &mut RecentWindow) -> ReplicaFigures {
        let (now, status) = (Instant::now(), self.cluster.status());
        let waiting = self.admission.all_waiting();
        ReplicaFigures {
            role: Some(status.role),
            term: status.term,
            committed_index: status.committed_index,
            applied_index: status.applied_index,
            snapshot_index: status.snapshot_index,
            has_quorum: status.has_quorum,
            has_fault: status.fault.is_some(),
            is_waiting: status.waiting.is_some(),
            is_minority: self.digests.minority().is_some(),
            is_ready: self.readiness.is_fit(),
            digest_mismatches: self.digests.mismatches(),
            recent: window.add(now, self.sample()),
            in_flight: u64::try_from(self.requests.in_flight.get()).unwrap_or(0),
            waiting: waiting.requests as u64,
            waiting_users: waiting.users as u64,
            longest: waiting.longest,
            disk: disk_space(&self.data_dir).map(|it| (it.free_bytes, it.size_bytes)),
            outbox_items: self.router.outbox().status().queued_items as u64,
            uptime_s: now.duration_since(started).as_secs(),
            streams_continued: self.requests.recent.streams_continued.load(Relaxed),
            streams_lost: self.requests.recent.streams_lost.load(Relaxed),
        }
    }

    fn sample(&self) -> CounterSample {
        let recent = &self.requests.recent;
        let [
            prompt_tokens,
            predicted_tokens,
            shared_tokens,
            cached_tokens,
        ] = self.router.metrics().prefix_totals();
        CounterSample {
            ended: recent.ended.load(Relaxed),
            failed: recent.failed.load(Relaxed),
            prompt_tokens,
            cached_tokens,
            predicted_tokens,
            shared_tokens,
            ttft: recent.ttft.counts(),
            routing: recent.routing.counts(),
        }
    }
}
