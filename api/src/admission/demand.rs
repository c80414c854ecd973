//! Reports of this replica's demand to the log, from which all replicas know how many engines each
//! model needs (`state/src/capacity/`).
//!
//! A report says how much runs and waits, not what changed, so one that is lost is made good by the
//! next. It is compared with what the state has of this replica, so it is repeated if the state lost
//! it. A model is reported at most once a second while its demand changes, every
//! [`REPEAT_EVERY`] while engines are wanted, so that the number can fall with time, and otherwise
//! never. Only the first request of a model that has no engine is reported at once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use state::capacity::{
    CapacityView, DEMAND_MODELS_MAX, DEMAND_REQUESTS_MAX, DEMAND_TOKENS_MAX, DemandReport,
    ModelDemand,
};
use state::command::Item;
use state::ids::ReplicaId;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Admission;

/// Interval at which demand is compared with what was reported.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Interval at which demand is reported again while engines are wanted.
const REPEAT_EVERY: Duration = Duration::from_secs(5);

/// When a replica last reported its demand, by model.
#[derive(Debug, Default)]
pub struct DemandSchedule(BTreeMap<String, Instant>);

impl DemandSchedule {
    /// Queues `report` of `replica`, as of `now`, with `queue` if it is due by what the state has of
    /// this replica. `queue` returns whether there was room.
    pub fn report(
        &mut self,
        report: DemandReport,
        (replica, capacity): (ReplicaId, &CapacityView),
        now: Instant,
        queue: impl FnOnce(Item) -> bool,
    ) {
        let model = &report.model;
        let is_old = |at: &Instant| now.saturating_duration_since(*at) >= REPEAT_EVERY;
        let is_due = report.started > 0
            || report.demand != capacity.reported(replica, model)
            || capacity.wanted(model) > 0 && self.0.get(model).is_none_or(is_old);
        let model = model.clone();
        if is_due && queue(Item::ObserveDemand(Box::new(report))) {
            self.0.insert(model, now);
        }
    }
}

/// Whether a model of which so many engines are wanted wants its first engine for what waits, which is
/// reported at once.
#[must_use]
pub fn wants_first(wanted: u32, demand: &ModelDemand) -> bool {
    wanted == 0 && demand.waiting > 0
}

/// What this replica sent to engines for one model.
#[derive(Default)]
struct StartCount {
    /// Number of requests since the last report.
    since_report: AtomicU32,
    /// Whether a request was sent since none of the replica's requests ran at the model's engines.
    /// An engine may serve many models of which few are asked for.
    is_running: AtomicBool,
}

impl StartCount {
    fn add(&self) {
        self.since_report.fetch_add(1, Ordering::AcqRel);
        self.is_running.store(true, Ordering::Release);
    }
}

/// What the reports of demand are made from, besides the queues.
#[derive(Default)]
pub(super) struct DemandMeter {
    /// Counts of the models that the config or a backend names.
    starts: ArcSwap<BTreeMap<String, Arc<StartCount>>>,
    /// Other models for which requests were sent since the models were last compared: an engine may
    /// have registered in between. At most [`DEMAND_MODELS_MAX`].
    unknown: Mutex<BTreeSet<String>>,
    /// Signal that the first request of a model waits.
    begins: Notify,
}

impl DemandMeter {
    /// Counts a request that goes to an engine.
    pub(super) fn started(&self, model: &str) {
        if let Some(count) = self.starts.load().get(model) {
            count.add();
            return;
        }
        let mut unknown = self.unknown.lock().unwrap_or_else(PoisonError::into_inner);
        if unknown.len() < DEMAND_MODELS_MAX && !unknown.contains(model) {
            unknown.insert(model.to_owned());
        }
    }

    /// Records that the first request of a model waits.
    pub(super) fn begins(&self) {
        self.begins.notify_one();
    }

    /// Counts requests for these models from now on, and returns the counts.
    fn follow(&self, models: &BTreeSet<&str>) -> Arc<BTreeMap<String, Arc<StartCount>>> {
        let mut counts = self.starts.load_full();
        if !counts.keys().map(String::as_str).eq(models.iter().copied()) {
            let count = |model: &str| counts.get(model).map(Arc::clone).unwrap_or_default();
            let named = models
                .iter()
                .map(|model| ((*model).to_owned(), count(model)));
            counts = Arc::new(named.collect());
            self.starts.store(Arc::clone(&counts));
        }
        // A request that still looked at the former models is counted by the next call.
        let mut unknown = self.unknown.lock().unwrap_or_else(PoisonError::into_inner);
        let begun = std::mem::take(&mut *unknown);
        let begun = begun.iter().filter_map(|model| counts.get(model));
        begun.for_each(|count| count.add());
        counts
    }
}

impl Admission {
    /// Reports this replica's demand to the log until `stop`. Call this once per instance.
    pub async fn run_demand(&self, replica: ReplicaId, stop: CancellationToken) {
        let mut ticks = tokio::time::interval(LOOK_EVERY);
        let mut schedule = DemandSchedule::default();
        loop {
            let is_tick = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                _ = ticks.tick() => true,
                () = self.demand.begins.notified() => false,
            };
            self.report_demand(replica, &mut schedule, (is_tick, Instant::now()));
        }
    }

    /// Queues the reports that are due at `now` for the log. Between two ticks, only those of models
    /// are due that want their first engine.
    fn report_demand(
        &self,
        replica: ReplicaId,
        schedule: &mut DemandSchedule,
        (is_tick, now): (bool, Instant),
    ) {
        let registry = self.view.registry();
        let starts = self.demand.follow(&self.known_models(&registry));
        schedule.0.retain(|model, _| starts.contains_key(model));
        let capacity = self.view.capacity();
        let waiting = self.waiting_demand();
        for (model, count) in &*starts {
            let mut demand = waiting.get(&**model).copied().unwrap_or_default();
            if !is_tick && !wants_first(capacity.wanted(model), &demand) {
                continue;
            }
            // The count is taken first, so that a request that starts now is still seen to run.
            let started = count.since_report.swap(0, Ordering::AcqRel);
            if count.is_running.load(Ordering::Acquire) {
                let running = self.decider.running_here(model);
                demand.running = bounded(running);
                if running == 0 && started == 0 {
                    count.is_running.store(false, Ordering::Release);
                }
            }
            let report = DemandReport {
                model: model.clone(),
                demand,
                started: bounded(started.into()),
            };
            schedule.report(report, (replica, &capacity), now, |item| {
                self.dispatcher.report(item)
            });
        }
    }

    /// Returns what waits here, by model.
    fn waiting_demand(&self) -> BTreeMap<String, ModelDemand> {
        let queues = self.lock();
        let lines = queues.by_model.values().map(|line| {
            let requests = line.queue.iter();
            let tokens = requests.map(|it| u64::from(it.input_tokens)).sum::<u64>();
            let demand = ModelDemand {
                waiting: bounded(line.entries.len() as u64),
                running: 0,
                waiting_tokens: tokens.min(DEMAND_TOKENS_MAX),
            };
            (line.model().to_owned(), demand)
        });
        lines.collect()
    }
}

fn bounded(requests: u64) -> u32 {
    requests.min(u64::from(DEMAND_REQUESTS_MAX)) as u32
}
