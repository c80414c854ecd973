//! Follows the sources of engines; the leader applies their reports to the cluster.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, join_all};
use state::StateView;
use state::command::{Command, Reply};
use state::discovery::{Discovery, DiscoveryChange, SourcePlan};
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::source_status::DiscoveryBoard;
use super::{SourceKind, SourceSettings, dns, file, kubernetes};
use crate::base::clock::LogTime;
use crate::engines::backends::EngineDialer;
use crate::ports::Cluster;

/// Interval at which plans are made without news of a source, for changes that become due over
/// time.
const PLAN_EVERY: Duration = Duration::from_millis(500);
/// Maximum number of changes before a source's report is read again. It keeps a large new fleet
/// from delaying the draining of an engine that leaves.
const CHANGES_AT_ONCE: usize = 32;
/// Pause while a committed change is not applied here yet.
const APPLY_PAUSE: Duration = Duration::from_millis(2);

/// Parts of a replica that discovery depends on.
#[derive(Clone)]
pub struct DiscoveryParts {
    /// Sources in the config.
    pub sources: Vec<SourceSettings>,
    /// Board that receives the reports of the sources.
    pub board: Arc<DiscoveryBoard>,
    /// The log, through which changes go.
    pub cluster: Arc<dyn Cluster>,
    /// Published part of the state.
    pub view: Arc<StateView>,
    /// Dialer that checks the addresses of engines.
    pub dialer: EngineDialer,
}

/// Follows all sources until `stop`, and applies their reports while this replica leads.
#[must_use]
pub fn run(parts: DiscoveryParts, stop: CancellationToken) -> BoxFuture<'static, ()> {
    async move {
        if parts.sources.is_empty() {
            return;
        }
        let looking = parts.sources.iter().map(|source| {
            let (board, dialer) = (Arc::clone(&parts.board), parts.dialer.clone());
            look(source.clone(), board, dialer, stop.clone())
        });
        let all = async { tokio::join!(join_all(looking), reconcile(&parts, &stop)) };
        all.await;
    }
    .boxed()
}

fn look(
    source: SourceSettings,
    board: Arc<DiscoveryBoard>,
    dialer: EngineDialer,
    stop: CancellationToken,
) -> BoxFuture<'static, ()> {
    let template = source.template;
    match source.kind {
        SourceKind::File(path) => file::follow(path, template, (board, dialer), stop).boxed(),
        SourceKind::Dns(dns) => async move {
            let looking = dns::follow(&dns, &template, (&board, &dialer));
            stop.run_until_cancelled(looking).await;
        }
        .boxed(),
        SourceKind::Kubernetes(pods) => async move {
            let looking = kubernetes::follow(&pods, &template, (&board, &dialer));
            stop.run_until_cancelled(looking).await;
        }
        .boxed(),
    }
}

/// Plans after every report and interval. Applies the plans while this replica leads.
async fn reconcile(parts: &DiscoveryParts, stop: &CancellationToken) {
    let time = LogTime::default();
    let mut ticks = interval(PLAN_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = parts.board.changed() => {}
            _ = ticks.tick() => {}
        }
        for source in &parts.sources {
            let acting = act(parts, source, &time);
            if stop.run_until_cancelled(acting).await.is_none() {
                return;
            }
        }
    }
}

/// Applies the last report of a source. If another replica leads, only records the plan.
async fn act(parts: &DiscoveryParts, source: &SourceSettings, time: &LogTime) {
    let id = &source.rules.source;
    let Some(reading) = parts.board.reading(id) else {
        return;
    };
    let registry = parts.view.registry();
    let status = parts.cluster.status();
    if !registry.initialised || !status.caught_up {
        return;
    }
    let now_ms = time.present_ms(parts.view.now_ms());
    let plan = SourcePlan::of(&source.rules, &reading.engines, &registry.fleet(), now_ms);
    parts.board.planned(id, (&reading, &plan), &registry);
    if status.leader != Some(status.id) {
        return;
    }
    let is_more = plan.changes.len() > CHANGES_AT_ONCE;
    for change in plan.changes.into_iter().take(CHANGES_AT_ONCE) {
        if !submit(parts, id, &change).await {
            return;
        }
    }
    if is_more {
        parts.board.wake();
    }
}

/// Submits a change. Returns whether it is known to be accepted or rejected, so that the next one
/// may follow.
async fn submit(parts: &DiscoveryParts, id: &str, change: &DiscoveryChange) -> bool {
    let discovery = Discovery {
        source: id.to_owned(),
        change: change.clone(),
    };
    let command = Command::Discover(Box::new(discovery));
    let committed = match parts.cluster.submit(command).await {
        Ok(committed) => committed,
        Err(failure) => {
            // The next plan repeats the change if it is still due.
            tracing::debug!(source = id, %failure, "could not change a backend yet");
            let failure = Err(failure.to_string());
            parts.board.changed_by(id, change, failure);
            return false;
        }
    };
    let backend = change.backend();
    let taken = match committed.reply {
        Reply::Rejected(reject) => {
            tracing::warn!(source = id, backend, %reject, "a change of a backend was rejected");
            Err(reject.to_string())
        }
        Reply::Applied | Reply::Batch(_) | Reply::Repeated(_) => {
            let log_index = committed.index.0;
            match change {
                DiscoveryChange::Found(spec) => {
                    let url = &spec.url;
                    tracing::info!(source = id, backend, url, log_index, "backend was found");
                }
                DiscoveryChange::Lost { .. } => {
                    tracing::info!(
                        source = id,
                        backend,
                        log_index,
                        "backend was lost and drains"
                    );
                }
                DiscoveryChange::Forgotten { .. } => {
                    tracing::info!(source = id, backend, log_index, "lost backend was removed");
                }
            }
            Ok(())
        }
    };
    parts.board.changed_by(id, change, taken);
    // Without this wait, the next plan would repeat the decision.
    while parts.view.applied() < committed.index {
        tokio::time::sleep(APPLY_PAUSE).await;
    }
    true
}
