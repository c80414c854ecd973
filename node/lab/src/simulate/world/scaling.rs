//! Engines that start and stop during a run, and the reports of demand by which a scaler decides.
//!
//! The scaler stands for KEDA with the HPA that it makes: one engine at once when some are wanted and
//! none runs; otherwise, at intervals, as many as are wanted, within an HPA's default tolerance and
//! rate. An engine counts from its start until it has drained.

use api::admission::wants_first;
use state::capacity::DemandReport;
use state::command::{Command, Envelope, Item, Lane, Origin};
use state::ids::{ReplicaId, SessionId};

use super::{Micros, SimEngine, SimEvent, SimWorld, backend_spec};
use crate::simulate::clock::unix_ms;
use crate::simulate::plan::ScalingRule;
use crate::simulate::workload::MODEL;

/// Time until KEDA hears that the first engine is wanted.
const PUSH: Micros = 200_000;
/// Time after which every replica knows that an engine drains.
const DRAIN_KNOWN: Micros = 2_000_000;
/// Time after the last request within which all engines have to stop.
const END: Micros = 3_600_000_000;
/// Deviation from one engine per wanted one that an HPA tolerates, in percent.
const TOLERANCE_PERCENT: u32 = 10;
/// Number of engines that an HPA starts at a time if doubling gives fewer.
const STARTS: u32 = 4;

/// An engine from its start to its stop.
#[derive(Debug, Clone, Copy)]
struct EngineRun {
    number: u64,
    began: Micros,
    stage: EngineStage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EngineStage {
    Starting,
    /// Its registration is in the log.
    Joining,
    Up {
        slot: usize,
    },
    Draining {
        slot: usize,
        since: Micros,
    },
}

/// The engines of a run with a scaler.
#[derive(Debug, Default)]
pub(super) struct SimFleet {
    /// Those that run, by start.
    engines: Vec<EngineRun>,
    /// Number of commands proposed to the log, with those before the run.
    commands: u64,
    is_push_planned: bool,
    /// Number of preemptions in stopped engines.
    pub(super) preemptions: u64,
}

impl SimFleet {
    /// Creates a fleet without engines, for a log that begins with `commands` commands.
    pub(super) fn new(commands: u64) -> Self {
        Self {
            commands,
            ..Self::default()
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.engines.is_empty()
    }

    /// Returns the number of engines that are not to stop.
    fn kept(&self) -> u32 {
        let is_kept = |it: &&EngineRun| !matches!(it.stage, EngineStage::Draining { .. });
        self.engines.iter().filter(is_kept).count() as u32
    }
}

impl SimWorld<'_> {
    /// Plans the first event of the scaler.
    pub(super) fn begin_scaling(&mut self) {
        match self.plan.scaling.as_ref().map(|it| &it.rule) {
            None => {}
            Some(ScalingRule::Wanted(_)) => self.events.plan(0, SimEvent::Poll),
            Some(ScalingRule::Schedule(steps)) => {
                for (at, _) in steps {
                    self.events.plan(*at, SimEvent::Scale);
                }
            }
        }
    }

    /// Lets the scaler look, and plans its next look.
    pub(super) fn poll(&mut self) {
        self.scale();
        if let Some(ScalingRule::Wanted(every)) = self.plan.scaling.as_ref().map(|it| &it.rule)
            && self.is_going_on()
        {
            self.events.plan(self.now + every, SimEvent::Poll);
        }
    }

    /// Starts and stops engines as the plan's rule says.
    pub(super) fn scale(&mut self) {
        self.fleet.is_push_planned = false;
        let kept = self.fleet.kept();
        let target = match self.plan.scaling.as_ref().map(|it| &it.rule) {
            None => return,
            Some(ScalingRule::Wanted(_)) => scaled(kept, self.wanted()),
            Some(ScalingRule::Schedule(steps)) => {
                let begun = steps.iter().take_while(|(at, _)| *at <= self.now);
                begun.last().map_or(0, |(_, engines)| u32::from(*engines))
            }
        };
        for _ in kept..target {
            self.start_engine();
        }
        for _ in target..kept {
            self.stop_engine();
        }
    }

    /// Returns whether a scaler asks, instead of a schedule.
    fn is_asked(&self) -> bool {
        let rule = self.plan.scaling.as_ref().map(|it| &it.rule);
        matches!(rule, Some(ScalingRule::Wanted(_)))
    }

    /// Returns the number of engines that the replicas want.
    fn wanted(&self) -> u32 {
        let view = self.places[0].replica.state.view();
        view.capacity().wanted(MODEL)
    }

    fn start_engine(&mut self) {
        let (Some(scaling), true) = (
            &self.plan.scaling,
            self.fleet.engines.len() < self.engines.len(),
        ) else {
            return;
        };
        let tally = &mut self.tally.fleet;
        let number = tally.starts;
        tally.starts += 1;
        self.events
            .plan(self.now + scaling.start, SimEvent::Up(number));
        self.fleet.engines.push(EngineRun {
            number,
            began: self.now,
            stage: EngineStage::Starting,
        });
        tally.most = tally.most.max(self.fleet.engines.len());
    }

    /// Stops an engine that still starts, or else lets one drain: the latest.
    fn stop_engine(&mut self) {
        let engines = &mut self.fleet.engines;
        let is_starting = |it: &EngineRun| it.stage == EngineStage::Starting;
        if let Some(place) = engines.iter().rposition(is_starting) {
            let stopped = engines.remove(place);
            self.tally.fleet.ran += self.now - stopped.began;
            return;
        }
        let mut latest_first = engines.iter_mut().rev();
        let up = latest_first.find_map(|it| match it.stage {
            EngineStage::Up { slot } => Some((it, slot)),
            _ => None,
        });
        let Some((engine, slot)) = up else {
            return;
        };
        let since = self.now;
        engine.stage = EngineStage::Draining { slot, since };
        let number = engine.number;
        self.propose(Command::SetDraining {
            name: name_of(number),
            draining: true,
            moves_streams: false,
        });
    }

    /// Registers an engine that has started, unless it was stopped before.
    pub(super) fn up(&mut self, number: u64) {
        let mut engines = self.fleet.engines.iter_mut();
        let Some(engine) = engines.find(|it| it.number == number) else {
            return;
        };
        engine.stage = EngineStage::Joining;
        let spec = backend_spec(self.plan, name_of(number), number);
        self.propose(Command::PutBackend(spec));
    }

    /// Removes the engines that have drained.
    pub(super) fn remove_drained(&mut self) {
        let now = self.now;
        let engines = &self.engines;
        let is_drained = |it: &EngineRun| match it.stage {
            EngineStage::Draining { slot, since } => {
                now >= since + DRAIN_KNOWN && engines[slot].is_idle()
            }
            EngineStage::Starting | EngineStage::Joining | EngineStage::Up { .. } => false,
        };
        let (drained, left) = (self.fleet.engines.iter().copied()).partition(is_drained);
        self.fleet.engines = left;
        let drained: Vec<EngineRun> = drained;
        for engine in drained {
            self.tally.fleet.ran += now - engine.began;
            let name = name_of(engine.number);
            self.propose(Command::DeleteBackend { name });
        }
    }

    fn propose(&mut self, command: Command) {
        self.fleet.commands += 1;
        let envelope = Envelope {
            origin: Origin {
                replica: ReplicaId(u8::MAX),
                session: SessionId(1),
                lane: Lane::Admin,
                seq: self.fleet.commands,
            },
            proposed_at_ms: unix_ms(self.now),
            command,
        };
        self.append(0, envelope);
    }

    /// Follows an entry that the replica at `place` has applied: the engine that it registers takes
    /// requests, and the first engine that is wanted is started.
    pub(super) fn follow(&mut self, place: usize, entry: &Envelope) {
        if self.plan.scaling.is_none() {
            return;
        }
        if let Command::PutBackend(spec) = &entry.command {
            if place == 0 {
                self.join(&spec.id);
            }
            let replica = &self.places[place].replica;
            replica.probed(|slot| self.probed[usize::from(slot.0)]);
        }
        let is_at_zero = place == 0 && self.fleet.is_empty();
        if is_at_zero && self.is_asked() && !self.fleet.is_push_planned && self.wanted() > 0 {
            self.fleet.is_push_planned = true;
            self.events.plan(self.now + PUSH, SimEvent::Scale);
        }
    }

    fn join(&mut self, name: &str) {
        let registry = self.places[0].replica.state.view().registry();
        let joined = registry.backends.iter().find(|it| it.spec.id == name);
        let slot = usize::from(joined.expect("it was put").handle.slot.0);
        let is_it = |it: &&mut EngineRun| name_of(it.number) == name;
        let engine = self.fleet.engines.iter_mut().find(is_it);
        engine.expect("it started").stage = EngineStage::Up { slot };
        let fresh = SimEngine::new(&self.plan.engine, &self.plan.offload);
        let former = std::mem::replace(&mut self.engines[slot], fresh);
        self.fleet.preemptions += former.figures().preemptions;
        self.probed[slot] = Default::default();
        // A schedule may have wanted fewer since.
        self.scale();
    }

    /// Returns whether engines run that have not had too long to stop.
    pub(super) fn is_winding_down(&self) -> bool {
        !self.fleet.is_empty() && self.now < self.plan.horizon + END
    }

    /// Queues the demand at `place` for the log, if a report is due: at a tick, or for the first engine.
    pub(super) fn report_demand(&mut self, place: usize, is_tick: bool) {
        if self.plan.scaling.is_none() {
            return;
        }
        let here = &mut self.places[place];
        let capacity = here.replica.state.view().capacity();
        let mut demand = here.queue.demand();
        if !is_tick && !wants_first(capacity.wanted(MODEL), &demand) {
            return;
        }
        demand.running = here.replica.running_here() as u32;
        let report = DemandReport {
            model: MODEL.to_owned(),
            demand,
            started: std::mem::take(&mut here.started),
        };
        let now = here.replica.instant(self.now);
        let outbox = here.replica.outbox();
        let queue = |item: Item| outbox.note(item);
        here.demand
            .report(report, (here.replica.id, &capacity), now, queue);
        self.changed(place);
    }
}

/// Returns the size to which KEDA or its HPA scales `engines` engines if `wanted` are wanted.
fn scaled(engines: u32, wanted: u32) -> u32 {
    match (engines, wanted) {
        (_, 0) => 0,
        (0, _) => 1,
        _ if engines.abs_diff(wanted) * 100 <= engines * TOLERANCE_PERCENT => engines,
        _ => wanted.min(engines + engines.max(STARTS)),
    }
}

fn name_of(number: u64) -> String {
    format!("engine-{number:03}")
}

#[cfg(test)]
mod tests {
    use super::scaled;

    #[test]
    fn an_hpa_starts_at_most_as_many_as_run_and_tolerates_a_tenth() {
        let cases = [
            ((0, 0), 0),
            ((0, 9), 1),
            ((1, 9), 5),
            ((5, 9), 9),
            ((6, 40), 12),
            ((10, 11), 10),
            ((10, 12), 12),
            ((10, 9), 10),
            ((9, 3), 3),
            ((9, 0), 0),
        ];
        for ((engines, wanted), expected) in cases {
            assert_eq!(scaled(engines, wanted), expected, "{engines}, {wanted}");
        }
    }
}
