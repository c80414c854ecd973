//! The metrics registry of a replica, and the metrics read from the replica at each scrape.
//!
//! Areas that count as they work (proxy, routing) register their own structs through
//! [`Metrics::register`]. Values that can be looked up (Raft indexes, sizes of the state, health of
//! backends) are collected at scrape time, so they are never stale and cost nothing between
//! scrapes. Labels come only from the config or the registry: never a user, key, prompt or block.

mod backends;
mod capacity;
pub mod text;
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
use state::StateView;

use crate::base::clock::Clock;
use crate::cluster::divergence::Digests;
use crate::cluster::events::EventBus;
use crate::engines::backends::Backends;
use crate::kv_events::stream_status::StreamBoard;
use crate::ports::{Cluster, ClusterStatus};
use crate::routing::LoadTable;

/// All metrics of one replica.
pub struct Metrics {
    registry: Mutex<Registry>,
    replica: Arc<OnceLock<ScrapedReplica>>,
}

/// Parts of a replica that a scrape reads.
#[derive(Clone)]
pub struct ScrapedReplica {
    /// The log and the membership.
    pub cluster: Arc<dyn Cluster>,
    /// The published part of the state.
    pub view: Arc<StateView>,
    /// Numbers of requests in flight by backend.
    pub load: Arc<LoadTable>,
    /// Health of the backends.
    pub backends: Arc<Backends>,
    /// Digest comparisons with peers.
    pub digests: Arc<Digests>,
    /// KV event streams that this replica reads.
    pub kv_board: Arc<StreamBoard>,
    /// Whether the replica was allowed to start with unprotected listeners.
    pub is_insecure: bool,
    /// Event stream, which counts the leader changes.
    pub events: EventBus,
    /// Clock that determines the day and month of budgets.
    pub clock: Clock,
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

    /// Starts collecting from `replica` at each scrape. Only the first call has an effect.
    pub fn watch(&self, replica: ScrapedReplica) {
        // A replica has one registry and one instance of each part.
        drop(self.replica.set(replica));
    }

    /// Encodes all metrics in Prometheus' text format 0.0.4.
    #[must_use]
    pub fn encode_text(&self) -> String {
        text::prometheus_text(&self.encode())
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

/// Collector that reads the replica at scrape time; it yields nothing before [`Metrics::watch`].
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
        page.gauge(
            "quorate_insecure",
            "1 if the replica was allowed to start with unprotected listeners",
            &i64::from(replica.is_insecure),
        )?;
        replica.raft(&mut page)?;
        replica.state(&mut page)?;
        replica.users(&mut page)?;
        replica.backends(&mut page)?;
        replica.capacity(&mut page)
    }
}

/// Writer of metric families, one after another.
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

/// Metrics with one name, distinguished by one label.
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
        page.counter(
            "quorate_raft_leader_changes",
            "Leaders that this replica saw take over",
            &self.events.leader_changes(),
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
            "quorate_raft_scaling_is_held",
            "1 while this replica cannot bring the membership to the desired scale",
            &i64::from(status.scaling.is_some()),
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
        Self::members(page, &status)
    }

    fn members(page: &mut MetricsPage<'_>, status: &ClusterStatus) -> fmt::Result {
        let members = || status.members.iter().map(|(id, m)| (id.to_string(), m));
        page.gauges(
            "quorate_raft_member_connected",
            "1 while the member is connected",
            "replica",
            members().map(|(id, member)| (id, i64::from(member.is_connected))),
        )?;
        page.gauges(
            "quorate_raft_member_is_voter",
            "1 if the member is a voter, 0 if it is a learner",
            "replica",
            members().map(|(id, member)| (id, i64::from(member.is_voter))),
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
        let mut leases = 0;
        let mut owned = Vec::with_capacity(registry.backends.len());
        self.cluster.with_state(&mut |state| {
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
        page.gauge("quorate_state_leases", "Open leases", &(leases as u64))?;
        page.gauge(
            "quorate_state_backends",
            "Registered backends",
            &(registry.backends.len() as u64),
        )?;
        let usage = self.view.usage();
        page.gauge(
            "quorate_state_usage_rows",
            "Rows of usage by day, user, API key and model",
            &(usage.len() as u64),
        )?;
        page.counter(
            "quorate_state_usage_folded",
            "Rows of usage that lost their API key and model, or their user too, because the table was full",
            &usage.folded(),
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
}
