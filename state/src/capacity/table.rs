//! The demand of all models, as reported, and the engines wanted for it.

use std::collections::{BTreeMap, VecDeque};

use bincode::{Decode, Encode};

use super::need::{EngineRoom, HOLD_MS, needed_engines, saturation_permille, smoothed};
use super::{DEMAND_MODELS_MAX, DemandReport, ModelDemand};
use crate::ids::ReplicaId;

/// Length of the periods whose greatest needs are kept, in milliseconds.
const PERIOD_MS: u64 = 15_000;
/// Number of periods after which a need no longer counts, so that it counts for at least [`HOLD_MS`].
const PERIODS: u64 = HOLD_MS / PERIOD_MS + 1;

/// Greatest need of the last [`HOLD_MS`]: a sliding maximum over periods.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
struct GreatestNeed {
    /// Period and need, with ascending periods and descending needs.
    kept: VecDeque<(u64, u32)>,
}

impl GreatestNeed {
    fn observe(&mut self, engines: u32, now_ms: u64) {
        let period = now_ms / PERIOD_MS;
        while self.kept.back().is_some_and(|(_, need)| *need <= engines) {
            self.kept.pop_back();
        }
        if self.kept.back().is_none_or(|(last, _)| *last < period) {
            self.kept.push_back((period, engines));
        }
        while let Some((first, _)) = self.kept.front()
            && first + PERIODS <= period
        {
            self.kept.pop_front();
        }
    }

    fn engines(&self) -> u32 {
        self.kept.front().map_or(0, |(_, need)| *need)
    }

    fn is_sound(&self) -> bool {
        let is_ordered = |a: &(u64, u32), b: &(u64, u32)| a.0 < b.0 && a.1 > b.1;
        let kept = self.kept.iter().collect::<Vec<_>>();
        kept.is_sorted_by(|a, b| is_ordered(a, b)) && kept.len() as u64 <= PERIODS + 1
    }
}

/// Demand for one model, and the engines wanted for it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
struct ModelCapacity {
    /// Latest report of each replica with any demand.
    reports: BTreeMap<ReplicaId, ModelDemand>,
    /// Smoothed number of requests, in thousandths.
    milli_requests: u64,
    /// Replicated time at which this was last computed, in milliseconds.
    at_ms: u64,
    /// What each of its engines can do, as last known.
    room: EngineRoom,
    /// Number of its registered engines at that time.
    engines: u32,
    greatest: GreatestNeed,
}

impl ModelCapacity {
    fn demand(&self) -> ModelDemand {
        let mut sum = ModelDemand::default();
        self.reports.values().for_each(|it| sum.add(it));
        sum
    }

    /// Lets the smoothed requests follow the demand up to `now_ms`.
    fn follow(&mut self, now_ms: u64) {
        let target = self.demand().requests().saturating_mul(1000);
        let passed_ms = now_ms.saturating_sub(self.at_ms);
        self.milli_requests = smoothed(self.milli_requests, target, passed_ms);
        self.at_ms = now_ms;
    }

    fn set(&mut self, replica: ReplicaId, demand: ModelDemand) {
        if demand == ModelDemand::default() {
            self.reports.remove(&replica);
        } else {
            self.reports.insert(replica, demand);
        }
    }

    /// Records the need as of the last call of [`ModelCapacity::follow`], at least `least` engines.
    fn decide(&mut self, least: u32) {
        let needed = needed_engines(self.milli_requests, &self.demand(), self.room);
        self.greatest.observe(needed.max(least), self.at_ms);
    }

    fn view(&self) -> ModelCapacityView {
        let demand = self.demand();
        let (milli_requests, room, engines) = (self.milli_requests, self.room, self.engines);
        ModelCapacityView {
            wanted: self.greatest.engines(),
            saturation_permille: saturation_permille(milli_requests, &demand, room, engines),
            demand,
            room,
            reports: self.reports.clone(),
        }
    }
}

/// What is known of a model's engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct EngineFigures {
    /// Number of registered engines that take new requests.
    pub(crate) engines: u32,
    /// Mean places of an engine; `None` if nothing is known.
    pub(crate) places: Option<u32>,
    /// Mean time in which an engine computes a prompt token, in nanoseconds; `None` if unknown.
    pub(crate) prefill_ns: Option<u32>,
}

/// Demand for all models, by name.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub(crate) struct Capacity(BTreeMap<String, ModelCapacity>);

impl Capacity {
    /// Applies the report of a replica at replicated time `now_ms`. What `figures` do not tell of the
    /// model's engines is as last known. Returns `false` if the report is not plausible, or if the table
    /// has no room for the model.
    pub(crate) fn observe(
        &mut self,
        replica: ReplicaId,
        report: &DemandReport,
        figures: EngineFigures,
        now_ms: u64,
    ) -> bool {
        if !report.is_plausible() || !self.make_room(&report.model) {
            return false;
        }
        let is_new = || ModelCapacity {
            at_ms: now_ms,
            ..ModelCapacity::default()
        };
        let model = self.0.entry(report.model.clone()).or_insert_with(is_new);
        model.follow(now_ms);
        model.set(replica, report.demand);
        model.engines = figures.engines;
        model.room.places = figures.places.unwrap_or(model.room.places);
        model.room.prefill_ns = figures.prefill_ns.unwrap_or(model.room.prefill_ns);
        model.decide(u32::from(report.started > 0));
        true
    }

    /// Forgets the demand of a replica whose session ends. Returns whether it had any.
    pub(crate) fn close_replica(&mut self, replica: ReplicaId, now_ms: u64) -> bool {
        let mut is_any = false;
        for model in self.0.values_mut() {
            if model.reports.contains_key(&replica) {
                model.follow(now_ms);
                model.reports.remove(&replica);
                model.decide(0);
                is_any = true;
            }
        }
        is_any
    }

    /// Makes room for the model. Returns whether there is.
    fn make_room(&mut self, model: &str) -> bool {
        if self.0.contains_key(model) || self.0.len() < DEMAND_MODELS_MAX {
            return true;
        }
        let unneeded = self.0.iter().filter(|(_, it)| it.greatest.engines() == 0);
        let longest = unneeded.min_by_key(|(_, it)| it.at_ms);
        let longest = longest.map(|(model, _)| model.clone());
        longest.is_some_and(|model| self.0.remove(&model).is_some())
    }

    /// Returns the image to publish.
    pub(crate) fn view(&self) -> CapacityView {
        let models = self.0.iter();
        CapacityView(models.map(|(name, it)| (name.clone(), it.view())).collect())
    }

    /// Returns the replicas with demand.
    pub(crate) fn replicas(&self) -> impl Iterator<Item = ReplicaId> {
        self.0.values().flat_map(|it| it.reports.keys().copied())
    }

    /// Checks I174: bounds, and the order of kept needs. An error describes the fault.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.0.len() > DEMAND_MODELS_MAX {
            return Err(format!("the demand of {} models is kept", self.0.len()));
        }
        for (name, model) in &self.0 {
            let is_none = |demand: &ModelDemand| *demand == ModelDemand::default();
            let needs_some = model.demand().requests() > 0;
            if !model.greatest.is_sound() || model.reports.values().any(is_none) {
                return Err(format!("the demand for {name:?} is {model:?}"));
            }
            if needs_some && model.greatest.engines() == 0 {
                return Err(format!(
                    "requests for {name:?} wait or run and want no engine"
                ));
            }
        }
        Ok(())
    }
}

/// Image of the demand for all models, as of one applied index.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CapacityView(BTreeMap<String, ModelCapacityView>);

/// Demand for one model, and the engines wanted for it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ModelCapacityView {
    /// Number of engines wanted.
    pub wanted: u32,
    /// How much of what its registered engines can do the demand takes, in thousandths; of one engine
    /// if none is registered.
    pub saturation_permille: u32,
    /// Demand of all replicas, as last reported.
    pub demand: ModelDemand,
    /// What each engine can do, as last known.
    pub room: EngineRoom,
    /// Latest reports of the replicas with any demand.
    reports: BTreeMap<ReplicaId, ModelDemand>,
}

impl CapacityView {
    /// Returns the figures of a model; those of no demand if none was reported.
    #[must_use]
    pub fn model(&self, model: &str) -> ModelCapacityView {
        self.0.get(model).cloned().unwrap_or_default()
    }

    /// Whether there is or was demand for a model.
    #[must_use]
    pub fn knows(&self, model: &str) -> bool {
        self.0.contains_key(model)
    }

    /// Returns the number of engines wanted for a model.
    #[must_use]
    pub fn wanted(&self, model: &str) -> u32 {
        self.0.get(model).map_or(0, |it| it.wanted)
    }

    /// Returns the demand for a model that a replica last reported.
    #[must_use]
    pub fn reported(&self, replica: ReplicaId, model: &str) -> ModelDemand {
        let model = self.0.get(model);
        let reported = model.and_then(|it| it.reports.get(&replica));
        reported.copied().unwrap_or_default()
    }

    /// Iterates over the models with demand, or that had some, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &ModelCapacityView)> {
        self.0.iter().map(|(name, it)| (name.as_str(), it))
    }
}
