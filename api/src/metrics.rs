//! The registry of a replica's metrics, and the metrics read from the replica at each scrape.
//!
//! Areas that count as they work (proxy, routing) register their own structs through
//! [`Metrics::register`]. Values that can be looked up (Raft indexes, sizes of the state, health of
//! backends) are collected at scrape time, so that they are never stale and cost nothing in
//! between. Labels come only from the config or the registry: never a user, key, prompt or block.

mod users;

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, MetricEncoder,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use state::exact::KvMode;
use state::service::{BackendServiceView, CapacitySource};
use state::{Backend, StateView};
use tokio::time::Instant;

use crate::backends::{Backends, ProbeRecord};
use crate::divergence::Digests;
use crate::kv_events::board::{BackendStreams, StreamBoard};
use crate::kv_events::stream::StreamCounts;
use crate::ports::Cluster;
use crate::routing::LoadTable;

/// All metrics of one replica.
pub struct Metrics {
    registry: Mutex<Registry>,
    replica: Arc<OnceLock<ScrapedReplica>>,
}

/// The parts of a replica that a scrape reads.
#[derive(Clone)]
pub struct ScrapedReplica {
    /// The log and the members.
    pub cluster: Arc<dyn Cluster>,
    /// Published part of the state.
    pub view: Arc<StateView>,
    /// Requests in flight.
    pub load: Arc<LoadTable>,
    /// Health of the engines.
    pub backends: Arc<Backends>,
    /// Comparisons of digests with peers.
    pub digests: Arc<Digests>,
    /// KV event streams that this replica reads.
    pub kv_board: Arc<StreamBoard>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::default();
        let build = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("quorate_build", "Version of this replica", build);
        let replica = Arc::default();
        registry.register_collector(Box::new(ReplicaCollector(Arc::clone(&replica))));
        Self {
            registry: Mutex::new(registry),
            replica,
        }
    }
}

impl Metrics {
    /// Registers an area's metrics under their full names (`quorate_proxy_...`).
    pub fn register(&self, area: impl FnOnce(&mut Registry)) {
        // Registering is additive, so the registry stays well formed even if an area panics.
        area(&mut self.registry.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Collects from `replica` at each scrape. Only the first call has an effect.
    pub fn watch(&self, replica: ScrapedReplica) {
        // A replica has one registry, and one of everything that is watched.
        drop(self.replica.set(replica));
    }

    /// Encodes all metrics as OpenMetrics text.
    #[must_use]
    pub fn encode(&self) -> String {
        let registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        let mut text = String::new();
        encode(&mut text, &registry).expect("writing to a string does not fail");
        text
    }
}

/// Reads the replica at scrape time; collects nothing before [`Metrics::watch`].
struct ReplicaCollector(Arc<OnceLock<ScrapedReplica>>);

impl fmt::Debug for ReplicaCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AtScrape")
    }
}

impl Collector for ReplicaCollector {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(replica) = self.0.get() else {
            return Ok(());
        };
        let mut page = MetricsPage(encoder);
        replica.raft(&mut page)?;
        replica.state(&mut page)?;
        replica.users(&mut page)?;
        replica.backends(&mut page)
    }
}

/// Writes metric families one after another.
struct MetricsPage<'a>(DescriptorEncoder<'a>);

impl MetricsPage<'_> {
    fn gauge(&mut self, name: &str, help: &str, value: &impl EncodeGaugeValue) -> fmt::Result {
        self.0
            .encode_descriptor(name, help, None, MetricType::Gauge)?
            .encode_gauge(value)
    }

    fn counter(&mut self, name: &str, help: &str, value: &impl EncodeCounterValue) -> fmt::Result {
        self.0
            .encode_descriptor(name, help, None, MetricType::Counter)?
            .encode_counter::<[(&str, &str); 0], _, u64>(value, None)
    }

    fn gauges<V: EncodeGaugeValue>(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        values: impl Iterator<Item = (String, V)>,
    ) -> fmt::Result {
        let family = MetricFamily {
            name,
            help,
            label,
            kind: MetricType::Gauge,
        };
        family.write(self, values, |mut encoder, value| {
            encoder.encode_gauge(&value)
        })
    }

    fn counters<V: EncodeCounterValue>(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        values: impl Iterator<Item = (String, V)>,
    ) -> fmt::Result {
        let family = MetricFamily {
            name,
            help,
            label,
            kind: MetricType::Counter,
        };
        family.write(self, values, |mut encoder, value| {
            encoder.encode_counter::<[(&str, &str); 0], _, u64>(&value, None)
        })
    }
}

/// Metrics of one name, distinguished by one label.
struct MetricFamily<'a> {
    name: &'a str,
    help: &'a str,
    label: &'a str,
    kind: MetricType,
}

impl MetricFamily<'_> {
    fn write<V>(
        &self,
        page: &mut MetricsPage<'_>,
        values: impl Iterator<Item = (String, V)>,
        write: impl Fn(MetricEncoder<'_>, V) -> fmt::Result,
    ) -> fmt::Result {
        let mut family = page
            .0
            .encode_descriptor(self.name, self.help, None, self.kind)?;
        for (of, value) in values {
            let labels = [(self.label, of)];
            write(family.encode_family(&labels)?, value)?;
        }
        Ok(())
    }
}

impl ScrapedReplica {
    fn raft(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let status = self.cluster.status();
        let is_leader = status.role == "leader";
        page.gauge("quorate_raft_term", "Raft term", &status.term)?;
        page.gauge(
            "quorate_raft_is_leader",
            "1 on the Raft leader",
            &i64::from(is_leader),
        )?;
        page.gauge(
            "quorate_raft_has_leader",
            "1 while a leader is known",
            &i64::from(status.leader.is_some()),
        )?;
        page.gauge(
            "quorate_raft_has_quorum",
            "1 while a quorum responds",
            &i64::from(status.has_quorum),
        )?;
        page.gauge(
            "quorate_raft_has_fault",
            "1 after a storage fault",
            &i64::from(status.fault.is_some()),
        )?;
        page.gauge(
            "quorate_raft_log_is_waiting",
            "1 while the log waits for disk space",
            &i64::from(status.waiting.is_some()),
        )?;
        page.gauge(
            "quorate_raft_committed_index",
            "Last log index known to be committed",
            &status.committed_index,
        )?;
        page.gauge(
            "quorate_raft_applied_index",
            "Last log index applied",
            &status.applied_index,
        )?;
        page.gauge(
            "quorate_raft_lag_entries",
            "Entries committed but not applied here",
            &status.committed_index.saturating_sub(status.applied_index),
        )?;
        page.gauge(
            "quorate_raft_snapshot_index",
            "Log index of the newest snapshot, 0 if there is none",
            &status.snapshot_index.unwrap_or(0),
        )?;
        let members = || status.members.iter().map(|(id, m)| (id.to_string(), m));
        page.gauges(
            "quorate_raft_member_connected",
            "1 while the member is connected",
            "replica",
            members().map(|(id, member)| (id, i64::from(member.is_connected))),
        )?;
        page.gauges(
            "quorate_raft_member_lag_entries",
            "Entries the member lags behind, as far as this replica knows",
            "replica",
            members().filter_map(|(id, member)| Some((id, member.lag?))),
        )?;
        page.gauges(
            "quorate_raft_clock_skew_seconds",
            "How far the member's wall clock is ahead of this replica's",
            "replica",
            members().filter_map(|(id, member)| {
                let skew_ms = i32::try_from(member.clock_skew_ms?);
                Some((id, f64::from(skew_ms.unwrap_or(i32::MAX)) / 1000.0))
            }),
        )
    }

    fn state(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let registry = self.view.registry();
        let (mut users, mut leases) = (0, 0);
        let mut owned = Vec::with_capacity(registry.backends.len());
        self.cluster.with_state(&mut |state| {
            users = state.users_len();
            leases = state.open_leases();
            owned.clear();
            for backend in &registry.backends {
                owned.push((
                    backend.spec.id.clone(),
                    state.owned_blocks(backend.handle.slot),
                ));
            }
        });
        let blocks: u64 = owned.iter().map(|(_, blocks)| blocks).sum();
        page.gauge(
            "quorate_state_blocks",
            "Owned blocks of all backends",
            &blocks,
        )?;
        page.gauge("quorate_state_users", "Users known", &(users as u64))?;
        page.gauge("quorate_state_leases", "Open leases", &(leases as u64))?;
        page.gauge(
            "quorate_state_backends",
            "Registered backends",
            &(registry.backends.len() as u64),
        )?;
        page.counter(
            "quorate_state_digest_mismatch",
            "State comparisons in which a peer differed at the same log index",
            &self.digests.mismatches(),
        )?;
        page.gauge(
            "quorate_state_is_minority",
            "1 while most members disagree with this replica's state",
            &i64::from(self.digests.minority().is_some()),
        )?;
        page.gauges(
            "quorate_backend_owned_blocks",
            "Blocks the backend is believed to have cached",
            "backend",
            owned.into_iter(),
        )
    }

    fn backends(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
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
        page.gauges(
            "quorate_backend_prediction_error_ratio",
            "Recent prediction error of all replicas: (predicted - cached) / prompt tokens",
            "backend",
            rows.iter().filter_map(|row| {
                let permille = row.served?.accuracy?.error_permille;
                Some((row.id(), f64::from(permille) / 1000.0))
            }),
        )?;
        for (name, help, value) in BACKEND_GAUGES {
            let of_rows = rows.iter().filter_map(|row| Some((row.id(), value(row)?)));
            page.gauges(name, help, "backend", of_rows)?;
        }
        page.gauges(
            "quorate_backend_engine_kv_usage_ratio",
            "KV cache usage reported by the engine",
            "backend",
            rows.iter().filter_map(|row| {
                let permille = row.record.metrics.kv_usage_permille?;
                Some((row.id(), f64::from(permille) / 1000.0))
            }),
        )?;
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
        )
    }
}

impl ScrapedReplica {
    /// Writes the condition of the backends' ownership and the streams that this replica reads.
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
                "1 while block ownership is exactly what KV events say",
                KvMode::Exact,
            ),
            (
                "quorate_backend_kv_degraded",
                "1 while what KV events told may be out of date",
                KvMode::Degraded,
            ),
        ] {
            let of_modes = modes
                .iter()
                .map(|(id, it)| (id.clone(), i64::from(*it == mode)));
            page.gauges(name, help, "backend", of_modes)?;
        }
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

/// Name, help and value of a counter of the streams that this replica reads.
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

/// Values of one backend for a scrape.
struct BackendRow<'a> {
    backend: &'a Backend,
    record: ProbeRecord,
    served: Option<BackendServiceView>,
    is_circuit_open: bool,
    /// Requests in flight from this replica.
    here: u32,
    /// Requests in flight from all connected replicas.
    cluster: u32,
}

impl BackendRow<'_> {
    fn id(&self) -> String {
        self.backend.spec.id.clone()
    }
}

/// Name, help and value of a gauge. Backends without a value are left out.
type BackendGauge = (
    &'static str,
    &'static str,
    fn(&BackendRow<'_>) -> Option<u64>,
);

const BACKEND_GAUGES: [BackendGauge; 16] = [
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
        "1 while the engine's blocks cannot be told in the blocks of its model",
        |row| Some(row.record.unfit_block_size.is_some().into()),
    ),
    (
        "quorate_backend_capacity_assumed",
        "1 while neither the operator nor the engine says how large the cache is",
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
        "quorate_backend_prefill_nanoseconds_per_token",
        "Learned time that each uncached prompt token adds to a first token",
        |row| Some(row.served?.learnt?.prefill_ns_per_token.into()),
    ),
    (
        "quorate_backend_decode_nanoseconds_per_request",
        "Learned time that each running request adds to a first token",
        |row| Some(row.served?.learnt?.decode_ns_per_request.into()),
    ),
    (
        "quorate_backend_prediction_off",
        "1 while cache predictions are off by more than routing.prediction_off_permille",
        |row| Some(row.served?.accuracy?.is_off.into()),
    ),
    (
        "quorate_backend_capacity_correction_permille",
        "Correction applied to the cache capacity the engine reports, in thousandths",
        |row| Some(row.served?.accuracy?.correction_permille.into()),
    ),
];
