//! Metrics of the area `backend`: health, load, cache and KV events of each backend.

use std::fmt;

use state::kv_events::{KvMode, LOWER_TIERS, LowerTier};
use state::service::{BackendServiceView, CapacitySource, LearntPrices};
use state::{Backend, Registry};
use tokio::time::Instant;

use super::{MetricsPage, ScrapedReplica};
use crate::engines::backends::ProbeRecord;
use crate::kv_events::stream::StreamCounts;
use crate::kv_events::stream_status::BackendStreams;

impl ScrapedReplica {
    pub(super) fn backends(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let (registry, now) = (self.view.registry(), Instant::now());
        let rows: Vec<BackendRow<'_>> = registry
            .backends
            .iter()
            .map(|backend| BackendRow {
                backend,
                record: self
                    .backends
                    .record(backend.handle.slot)
                    .unwrap_or_default(),
                served: self.view.service().get(backend.handle.slot).copied(),
                is_circuit_open: self.backends.circuit(backend.handle, now).is_open,
                here: self.load.here(backend.handle).running,
                cluster: self.load.cluster(backend.handle, now).running,
            })
            .collect();
        for (name, help, value) in BACKEND_GAUGES {
            let of_rows = rows.iter().filter_map(|row| Some((row.id(), value(row)?)));
            page.gauges(name, help, "backend", of_rows)?;
        }
        for (name, help, permille) in BACKEND_RATIOS {
            let of_rows = rows
                .iter()
                .filter_map(|row| Some((row.id(), f64::from(permille(row)?) / 1000.0)));
            page.gauges(name, help, "backend", of_rows)?;
        }
        for (name, help, nanoseconds) in BACKEND_PRICES {
            let of_rows = rows.iter().filter_map(|row| {
                let nanoseconds = nanoseconds(&row.served?.learnt?);
                Some((row.id(), f64::from(nanoseconds) / 1e9))
            });
            page.gauges(name, help, "backend", of_rows)?;
        }
        self.kv_events(page)?;
        page.counters(
            "quorate_backend_probes",
            "Health probes",
            "backend",
            rows.iter().map(|row| (row.id(), row.record.probes_total)),
        )?;
        page.counters(
            "quorate_backend_failures",
            "Failed probes, and requests that could not reach the backend",
            "backend",
            rows.iter().map(|row| (row.id(), row.record.failures_total)),
        )?;
        let answers = |row: &BackendRow<'_>| self.backends.answer_count(row.backend.handle.slot);
        page.counters(
            "quorate_backend_answers",
            "Responses of the engine to this replica's requests, with any status",
            "backend",
            rows.iter().map(|row| (row.id(), answers(row).all)),
        )?;
        page.counters(
            "quorate_backend_client_errors",
            "Responses of the engine with a status 4xx",
            "backend",
            rows.iter()
                .map(|row| (row.id(), answers(row).client_errors)),
        )
    }
}

impl ScrapedReplica {
    /// Writes metrics of the backends' ownership and of the KV event streams that this replica
    /// reads.
    fn kv_events(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let registry = self.view.registry();
        let modes = registry.backends.iter().filter_map(|backend| {
            let condition = registry.kv(backend.handle.slot)?;
            Some((backend.spec.id.clone(), condition.mode))
        });
        let modes: Vec<(String, KvMode)> = modes.collect();
        for (name, help, mode) in [
            (
                "quorate_backend_kv_exact",
                "1 while block ownership exactly follows KV events",
                KvMode::Exact,
            ),
            (
                "quorate_backend_kv_degraded",
                "1 while ownership from KV events may be out of date",
                KvMode::Degraded,
            ),
        ] {
            let of_modes = modes
                .iter()
                .map(|(id, it)| (id.clone(), i64::from(*it == mode)));
            page.gauges(name, help, "backend", of_modes)?;
        }
        self.lower_tiers(page, &registry)?;
        let read: Vec<(String, BackendStreams)> = registry
            .backends
            .iter()
            .filter_map(|backend| {
                let standing = self.kv_board.standing(backend.handle.slot)?;
                Some((backend.spec.id.clone(), standing))
            })
            .collect();
        page.gauges(
            "quorate_backend_kv_reading",
            "1 while this replica reads the backend's KV events and is connected to all ranks",
            "backend",
            read.iter().map(|(id, it)| {
                let is_connected =
                    !it.ranks.is_empty() && it.ranks.iter().all(|it| it.is_connected);
                (id.clone(), i64::from(is_connected))
            }),
        )?;
        page.gauges(
            "quorate_backend_kv_lag_messages",
            "KV event messages received but not applied",
            "backend",
            read.iter().map(|(id, it)| {
                (
                    id.clone(),
                    it.ranks.iter().map(|rank| rank.lag_messages).sum::<u64>(),
                )
            }),
        )?;
        for (name, help, count) in KV_COUNTERS {
            let of_read = read.iter().map(|(id, it)| {
                (
                    id.clone(),
                    it.ranks.iter().map(|rank| count(&rank.counts)).sum::<u64>(),
                )
            });
            page.counters(name, help, "backend", of_read)?;
        }
        Ok(())
    }
}

impl ScrapedReplica {
    /// Writes the blocks that engines hold on each tier below the GPU and on no faster one.
    fn lower_tiers(&self, page: &mut MetricsPage<'_>, registry: &Registry) -> fmt::Result {
        const NAMES: [(&str, &str); LOWER_TIERS] = [
            (
                "quorate_backend_cpu_tier_blocks",
                "Cached blocks in memory of the engine's host and not on its GPU",
            ),
            (
                "quorate_backend_disk_tier_blocks",
                "Cached blocks on the engine's disk and on no faster tier",
            ),
            (
                "quorate_backend_store_tier_blocks",
                "Cached blocks in a store shared by engines and on no faster tier",
            ),
        ];
        for ((name, help), tier) in NAMES.into_iter().zip(LowerTier::ALL) {
            let blocks = registry.backends.iter().filter_map(|backend| {
                let slot = backend.handle.slot;
                let level = self.view.tiers[tier.at()].owned(slot);
                let faster = self.view.tiers[..tier.at()].iter().map(|it| it.owned(slot));
                let faster = faster.fold(self.view.blocks.owned(slot), u32::max);
                (level > 0).then(|| {
                    (
                        backend.spec.id.clone(),
                        i64::from(level.saturating_sub(faster)),
                    )
                })
            });
            page.gauges(name, help, "backend", blocks)?;
        }
        Ok(())
    }
}

/// Name, help and value of a counter of the KV event streams that this replica reads.
type KvCounter = (&'static str, &'static str, fn(&StreamCounts) -> u64);

const KV_COUNTERS: [KvCounter; 7] = [
    (
        "quorate_backend_kv_messages",
        "KV event messages passed to the log",
        |it| it.messages,
    ),
    (
        "quorate_backend_kv_stored_blocks",
        "Blocks reported stored",
        |it| it.stored,
    ),
    (
        "quorate_backend_kv_removed_blocks",
        "Blocks reported removed",
        |it| it.removed,
    ),
    (
        "quorate_backend_kv_gaps",
        "Gaps found in the message sequence",
        |it| it.gaps,
    ),
    (
        "quorate_backend_kv_losses",
        "Gaps that could not be replayed",
        |it| it.losses,
    ),
    ("quorate_backend_kv_runs", "Engine restarts seen", |it| {
        it.runs
    }),
    (
        "quorate_backend_kv_unusable_blocks",
        "Blocks that cannot be matched to prompts",
        |it| it.foreign + it.orphans,
    ),
];

/// Values of one backend at one scrape.
struct BackendRow<'a> {
    backend: &'a Backend,
    record: ProbeRecord,
    served: Option<BackendServiceView>,
    is_circuit_open: bool,
    /// Number of requests in flight from this replica.
    here: u32,
    /// Number of requests in flight from all connected replicas.
    cluster: u32,
}

impl BackendRow<'_> {
    fn id(&self) -> String {
        self.backend.spec.id.clone()
    }
}

/// Name, help and value, in nanoseconds, of a learned price.
type BackendPrice = (&'static str, &'static str, fn(&LearntPrices) -> u32);

const BACKEND_PRICES: [BackendPrice; 2] = [
    (
        "quorate_backend_prefill_seconds_per_token",
        "Learned time that each uncached prompt token adds to a first token",
        |learnt| learnt.prices.prefill_ns_per_token,
    ),
    (
        "quorate_backend_decode_seconds_per_request",
        "Learned time that each running request adds to a first token",
        |learnt| learnt.prices.decode_ns_per_request,
    ),
];

/// Name, help and value, in thousandths, of a ratio of each backend. Backends without a value are
/// omitted.
type BackendRatio = (
    &'static str,
    &'static str,
    fn(&BackendRow<'_>) -> Option<i32>,
);

const BACKEND_RATIOS: [BackendRatio; 3] = [
    (
        "quorate_backend_prediction_error_ratio",
        "Recent prediction error of all replicas: (predicted - cached) / prompt tokens",
        |row| Some(row.served?.accuracy?.error_permille),
    ),
    (
        "quorate_backend_capacity_correction_ratio",
        "Factor by which the cache capacity that the engine reports is corrected",
        |row| row.served?.accuracy?.correction_permille.try_into().ok(),
    ),
    (
        "quorate_backend_engine_kv_usage_ratio",
        "KV cache usage reported by the engine",
        |row| row.record.metrics.kv_usage_permille?.try_into().ok(),
    ),
];

/// Name, help and value of a gauge of each backend. Backends without a value are omitted.
type BackendGauge = (
    &'static str,
    &'static str,
    fn(&BackendRow<'_>) -> Option<u64>,
);

const BACKEND_GAUGES: [BackendGauge; 13] = [
    (
        "quorate_backend_healthy",
        "1 while the backend is healthy, as seen by this replica",
        |row| Some(row.record.is_healthy.into()),
    ),
    (
        "quorate_backend_draining",
        "1 while the backend drains",
        |row| Some(row.backend.draining.into()),
    ),
    (
        "quorate_backend_engine_running",
        "Requests running, as reported by the engine",
        |row| row.record.metrics.running.map(u64::from),
    ),
    (
        "quorate_backend_engine_waiting",
        "Requests queued, as reported by the engine",
        |row| row.record.metrics.waiting.map(u64::from),
    ),
    (
        "quorate_backend_capacity_blocks",
        "Capacity of the backend's cache in blocks",
        |row| row.served?.capacity_blocks.map(u64::from),
    ),
    (
        "quorate_backend_block_size_tokens",
        "Tokens per block of the engine's cache, as it reports them",
        |row| row.record.metrics.block_size.map(u64::from),
    ),
    (
        "quorate_backend_block_size_unfit",
        "1 while the engine's blocks do not fit the blocks of its model",
        |row| Some(row.record.unfit_block_size.is_some().into()),
    ),
    (
        "quorate_backend_capacity_assumed",
        "1 while neither the operator nor the engine reports the cache's size",
        |row| Some((row.served?.capacity_from == CapacitySource::Assumed).into()),
    ),
    (
        "quorate_backend_in_flight_here",
        "Requests in flight from this replica",
        |row| Some(row.here.into()),
    ),
    (
        "quorate_backend_in_flight_cluster",
        "Requests in flight from all connected replicas",
        |row| Some(row.cluster.into()),
    ),
    (
        "quorate_backend_circuit_open",
        "1 while the circuit breaker is open, as seen by this replica",
        |row| Some(row.is_circuit_open.into()),
    ),
    (
        "quorate_backend_limit_requests",
        "Concurrency limit of the backend, if it has one",
        |row| row.served?.limit.map(u64::from),
    ),
    (
        "quorate_backend_prediction_off",
        "1 while cache predictions are off by more than routing.prediction_off_permille",
        |row| Some(row.served?.accuracy?.is_off.into()),
    ),
];
