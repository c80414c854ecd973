//! Latest reports of the sources of engines and their outcome, for the reconciler, operators and
//! metrics.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeGaugeValue, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use schemars::JsonSchema;
use serde::Serialize;
use state::Registry;
use state::discovery::{DiscoveryChange, ListedEngine, RefusedEngine, SourcePlan};
use tokio::sync::Notify;

use super::SourceSettings;
use crate::base::clock::Clock;
use crate::base::printable::escaped;

/// Maximum number of refused engines to keep for operators.
const REFUSED_MAX: usize = 100;

/// Contents of one report of a source of engines.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct SourceReading {
    /// Engines that may be registered.
    pub(super) engines: Vec<ListedEngine>,
    /// Listed engines that may not be registered, with the reasons.
    pub(super) refused: Vec<RefusedEngine>,
}

/// Latest reports of this replica's sources of engines.
#[derive(Debug, Default)]
pub struct DiscoveryBoard {
    sources: Mutex<BTreeMap<String, SourceCard>>,
    changed: Notify,
    clock: Clock,
}

#[derive(Debug, Default)]
struct SourceCard {
    kind: &'static str,
    /// Last report of the source; `None` before its first response.
    reading: Option<Arc<SourceReading>>,
    answered_at_ms: Option<u64>,
    /// Why the last query failed; `None` if it succeeded.
    error: Option<String>,
    queries: [u64; 2],
    planned: PlannedCounts,
    /// Engines that the source's report or the plan refuses.
    refused: Vec<RefusedEngine>,
    refused_total: usize,
    /// Number of changes from this replica that the cluster accepted: engines found, lost and
    /// forgotten.
    changes: [u64; 3],
    /// Why the cluster did not accept the last change; `None` if it did.
    failure: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct PlannedCounts {
    registered: usize,
    lost: usize,
    withheld: usize,
}

/// Status of a source of engines.
#[derive(Debug, Serialize, JsonSchema)]
pub struct SourceReport {
    /// Id of the source.
    id: String,
    kind: &'static str,
    /// When it last responded to this replica, in Unix milliseconds.
    answered_at_ms: Option<u64>,
    /// Why the last query failed; `null` if it succeeded. Until one succeeds, the source's backends
    /// stay as they are.
    error: Option<String>,
    /// Number of engines in its last response.
    told: usize,
    /// Number of the cluster's backends that it registered.
    registered: usize,
    /// Number of registered backends that drain because the source no longer lists them or reports
    /// that they take no requests.
    lost: usize,
    /// Number of registered backends that the source no longer lists, but that stay because too
    /// many others are lost.
    withheld: usize,
    /// Number of listed engines that were refused.
    refused_total: usize,
    /// First refused engines, each with the reason.
    refused: Vec<RefusedReport>,
    /// Why the cluster did not accept the last change; `null` if it did.
    failure: Option<String>,
}

/// A listed engine that was refused, so that it is not registered.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct RefusedReport {
    engine: String,
    reason: String,
}

impl SourceReport {
    /// Returns the id of the source.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }
}

impl DiscoveryBoard {
    /// Creates a board for `sources`, none of which has responded yet.
    #[must_use]
    pub fn new(sources: &[SourceSettings], clock: Clock) -> Self {
        let cards = sources.iter().map(|source| {
            let card = SourceCard {
                kind: source.kind.name(),
                ..SourceCard::default()
            };
            (source.rules.source.clone(), card)
        });
        Self {
            sources: Mutex::new(cards.collect()),
            changed: Notify::new(),
            clock,
        }
    }

    /// Returns the status of each source.
    #[must_use]
    pub fn report(&self) -> Vec<SourceReport> {
        let sources = self.lock();
        let report = |(id, card): (&String, &SourceCard)| SourceReport {
            id: id.clone(),
            kind: card.kind,
            answered_at_ms: card.answered_at_ms,
            error: card.error.clone(),
            told: card.reading.as_ref().map_or(0, |it| it.engines.len()),
            registered: card.planned.registered,
            lost: card.planned.lost,
            withheld: card.planned.withheld,
            refused_total: card.refused_total,
            refused: card
                .refused
                .iter()
                .map(|refused| RefusedReport {
                    engine: escaped(&refused.engine).into_owned(),
                    reason: escaped(&refused.reason).into_owned(),
                })
                .collect(),
            failure: card.failure.clone(),
        };
        sources.iter().map(report).collect()
    }

    /// Waits until a source has reported something, or [`DiscoveryBoard::wake`] is called.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Wakes the task that waits for changes.
    pub(super) fn wake(&self) {
        self.changed.notify_one();
    }

    /// Records the result of querying a source.
    pub(super) fn record_report(&self, id: &str, looked: Result<SourceReading, String>) {
        let at_ms = self.clock.unix_ms();
        let mut sources = self.lock();
        let Some(card) = sources.get_mut(id) else {
            return;
        };
        card.queries[usize::from(looked.is_err())] += 1;
        match looked {
            Ok(reading) => {
                if card.error.take().is_some() {
                    tracing::info!(source = id, "source of engines responds again");
                }
                if reading.engines.is_empty() {
                    tracing::debug!(source = id, "source of engines lists none");
                }
                card.answered_at_ms = Some(at_ms);
                card.reading = Some(Arc::new(reading));
            }
            Err(error) => {
                if card.error.as_ref() != Some(&error) {
                    tracing::warn!(source = id, error, "no response from a source of engines");
                }
                card.error = Some(error);
            }
        }
        drop(sources);
        self.wake();
    }

    /// Records that a source responded, but has nothing new to report.
    pub(super) fn record_contact(&self, id: &str) {
        let at_ms = self.clock.unix_ms();
        if let Some(card) = self.lock().get_mut(id) {
            card.error = None;
            card.answered_at_ms = Some(at_ms);
        }
    }

    /// Returns the last report of a source; `None` if it has not responded yet or its last query
    /// failed.
    pub(super) fn reading(&self, id: &str) -> Option<Arc<SourceReading>> {
        let sources = self.lock();
        let card = sources.get(id).filter(|card| card.error.is_none())?;
        card.reading.clone()
    }

    /// Records the plan made from a report. Logs each new refusal once.
    pub(super) fn planned(
        &self,
        id: &str,
        (reading, plan): (&SourceReading, &SourcePlan),
        registry: &Registry,
    ) {
        let own = registry.discovered.values().filter(|it| it.source == id);
        let (mut registered, mut lost) = (0, 0);
        for backend in own {
            registered += 1;
            lost += usize::from(backend.lost.is_some());
        }
        let refused = reading.refused.iter().chain(&plan.refused);
        let first: Vec<_> = refused.take(REFUSED_MAX).cloned().collect();
        let mut sources = self.lock();
        let Some(card) = sources.get_mut(id) else {
            return;
        };
        for refused in first.iter().filter(|it| !card.refused.contains(it)) {
            let engine = escaped(&refused.engine);
            let reason = escaped(&refused.reason);
            tracing::warn!(source = id, %engine, %reason, "an engine is not registered");
        }
        card.refused_total = reading.refused.len() + plan.refused.len();
        card.refused = first;
        card.planned = PlannedCounts {
            registered,
            lost,
            withheld: plan.withheld,
        };
    }

    /// Records whether the cluster accepted a change, or why it did not.
    pub(super) fn changed_by(&self, id: &str, change: &DiscoveryChange, taken: Result<(), String>) {
        if let Some(card) = self.lock().get_mut(id) {
            card.failure = taken.err();
            if card.failure.is_none() {
                card.changes[place(change)] += 1;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, SourceCard>> {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const CHANGES: [&str; 3] = ["found", "lost", "forgotten"];
const OUTCOMES: [&str; 2] = ["answered", "failed"];

fn place(change: &DiscoveryChange) -> usize {
    match change {
        DiscoveryChange::Found(_) => 0,
        DiscoveryChange::Lost { .. } => 1,
        DiscoveryChange::Forgotten { .. } => 2,
    }
}

/// Collector of the metrics in the area `discovery`.
pub struct DiscoveryMetrics(pub Arc<DiscoveryBoard>);

impl fmt::Debug for DiscoveryMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DiscoveryMetrics")
    }
}

impl Collector for DiscoveryMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let sources = self.0.lock();
        if sources.is_empty() {
            return Ok(());
        }
        let mut engines = encoder.encode_descriptor(
            "quorate_discovery_engines",
            "Engines of a source: told (listed by it), refused; and its backends: registered, lost, \
             withheld",
            None,
            MetricType::Gauge,
        )?;
        for (id, card) in &*sources {
            let told = card.reading.as_ref().map_or(0, |it| it.engines.len());
            for (state, count) in [
                ("told", told),
                ("refused", card.refused_total),
                ("registered", card.planned.registered),
                ("lost", card.planned.lost),
                ("withheld", card.planned.withheld),
            ] {
                let labels = [("source", &**id), ("state", state)];
                let gauge = ConstGauge::new(i64::try_from(count).unwrap_or(i64::MAX));
                gauge.encode(engines.encode_family(&labels)?)?;
            }
        }
        let mut count = |name, help, label, kinds: &[&str], counts: fn(&SourceCard) -> &[u64]| {
            let mut counters = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for (id, card) in &*sources {
                for (kind, count) in kinds.iter().zip(counts(card)) {
                    let labels = [("source", &**id), (label, kind)];
                    ConstCounter::new(*count).encode(counters.encode_family(&labels)?)?;
                }
            }
            Ok::<(), fmt::Error>(())
        };
        count(
            "quorate_discovery_looks",
            "Queries of this replica to a source, by outcome",
            "outcome",
            &OUTCOMES,
            |card| &card.queries,
        )?;
        count(
            "quorate_discovery_changes",
            "Changes of backends that the cluster accepted from this replica as leader",
            "change",
            &CHANGES,
            |card| &card.changes,
        )?;
        gauges(
            &mut encoder,
            "quorate_discovery_is_failing",
            "1 if the source did not respond to this replica's last query",
            sources
                .iter()
                .map(|(id, card)| (&**id, i64::from(card.error.is_some()))),
        )?;
        gauges(
            &mut encoder,
            "quorate_discovery_answered_timestamp_seconds",
            "When the source last responded to this replica; 0 if never",
            sources.iter().map(|(id, card)| {
                let at_ms = card.answered_at_ms.unwrap_or(0);
                (&**id, at_ms as f64 / 1000.0)
            }),
        )
    }
}

/// Encodes a gauge with one sample per source.
fn gauges<'a, V: EncodeGaugeValue>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    values: impl Iterator<Item = (&'a str, V)>,
) -> fmt::Result {
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (source, value) in values {
        let labels = [("source", source)];
        family.encode_family(&labels)?.encode_gauge(&value)?;
    }
    Ok(())
}
