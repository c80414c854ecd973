//! The world: machines, the network between them, and one clock that steps them all.
//!
//! A step is a millisecond. In each step, the network delivers due packets, faults happen, and then
//! every process runs until it is idle up to the step's end. Everything runs on one thread and is
//! drawn from one seed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use lab::rng::Rng;
use raft::{MemoryDisk, Role, Status};
use state::ids::{ReplicaId, SessionId};

use super::apply_observer::{RecordKeeper, RunWatcher};
use super::faults::{Fault, Remedy};
use super::fleet::FleetDriver;
use super::network::SimNetwork;
use super::node::{Machine, SimTime, StartOptions, Stepped};
use super::panics;
use super::plan::{DiskSpeed, FleetKind, WorldPlan};
use super::reach::Reach;
use super::trace::Trace;
use super::workload::{self, WorkloadContext, WorkloadDriver};
use crate::oracle::image::StateImage;
use crate::oracle::observation::ReplicaRun;

/// Length of a step, in microseconds.
pub const STEP_US: u64 = 1000;
/// Interval at which the world checks the outboxes, in microseconds.
const LOOK_EVERY_US: u64 = 200_000;
/// Interval at which the world takes an image of a state, in microseconds.
const IMAGE_EVERY_US: u64 = 2_000_000;
/// Maximum number of replicas at the same time.
pub(super) const REPLICAS_MAX: usize = 7;
/// Label of the world's draws, which separates them from others under the same seed.
const RNG_LABEL: u64 = 0x776f_726c;
/// Label of the draws of forged calls, which separates them from others under the same seed.
const FORGED_CALLS_LABEL: u64 = 0x6c69_6573;
/// Label of raft's draws, which separates them from others under the same seed.
const RAFT_LABEL: u64 = 0x7261_6674;

/// Options of a world.
#[derive(Debug, Clone, Default)]
pub struct WorldOptions {
    /// Seed that decides everything.
    pub seed: u64,
    /// Whether the trace keeps text.
    pub is_traced: bool,
    /// Faults that may happen; all faults if empty.
    pub only: Vec<Fault>,
    /// Whether no fault happens.
    pub is_calm: bool,
    /// Whether the seed draws values of the config.
    pub varies: bool,
    /// Number of clients per replica that send requests; as the seed decides if `None`.
    pub clients: Option<u8>,
    /// Number of replicas that found the cluster; as the seed decides if `None`.
    pub voters: Option<u8>,
}

/// Counts of events in a world.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct WorldCounts {
    /// Number of faults by kind.
    pub faults: BTreeMap<Fault, u64>,
    /// Number of terms that had a leader.
    pub leaders: u64,
    /// Number of snapshots that replaced a state: installed, or read at startup.
    pub restored: u64,
    /// Number of log entries.
    pub entries: u64,
    /// Number of processes started.
    pub starts: u64,
}

/// A replica as the world tracks it.
pub(super) struct SimulatedReplica {
    pub(super) machine: Machine,
    pub(super) pace: DiskSpeed,
    pub(super) run: ReplicaRun,
    /// Status that the replica reports; `None` until it is up.
    pub(super) status: Option<raft::watch::WatchReceiver<Status>>,
    pub(super) is_spoiled: Arc<AtomicBool>,
    /// Whether a fault has hit the cluster since the replica knew that its state is wrong.
    pub(super) is_struck: bool,
    /// Whether the replica was removed and must never come back.
    pub(super) is_gone: bool,
    /// Whether the StatefulSet currently does not request the replica.
    pub(super) is_scaled_away: bool,
    /// Whether the replica's disk accepts no writes.
    pub(super) is_disk_bad: bool,
    /// Role and term that the replica last reported, and whether it had a quorum.
    said: Option<(Role, u64, bool)>,
    /// Voters that the replica last reported, in this run or an earlier one.
    pub(super) voters: Vec<u8>,
}

impl SimulatedReplica {
    /// Returns whether the replica is not to be part of the cluster.
    pub(super) fn is_out(&self) -> bool {
        self.is_gone || self.is_scaled_away
    }

    /// Returns whether the replica knows that its state is wrong.
    pub(super) fn is_in_doubt(&self) -> bool {
        let core = self.machine.core_at_rest();
        core.is_some_and(|core| core.digests().minority().is_some())
    }
}

/// A simulated world: replicas, network, clients, faults and the record of the run.
pub struct World {
    pub(super) plan: WorldPlan,
    pub(super) options: WorldOptions,
    pub(super) rng: Rng,
    /// Generator that draws which replica is lied to, and how.
    pub(super) forged_calls: Rng,
    pub(super) time: SimTime,
    pub(super) network: SimNetwork,
    pub(super) trace: Trace,
    pub(super) ledger: RecordKeeper,
    pub(super) seats: BTreeMap<u8, SimulatedReplica>,
    /// Scheduled remedies, by time and then by order of scheduling.
    pub(super) remedies: BTreeMap<(u64, u64), Remedy>,
    pub(super) next_fault_us: u64,
    pub(super) links_down: BTreeSet<(u8, u8)>,
    /// Replicas that no call reaches.
    pub(super) deaf: BTreeSet<u8>,
    /// Time at which the operator last removed a replica that came back, in microseconds.
    pub(super) tended_us: u64,
    pub(super) reach: Reach,
    pub(super) counts: WorldCounts,
    pub(super) stage: WorkloadDriver,
    pub(super) fleet: FleetDriver,
    planned: u64,
}

impl World {
    /// Creates a world before its beginning. A thread can have only one at a time, because raft's
    /// draws are per thread.
    ///
    /// # Errors
    /// If a config or machine cannot be created.
    pub fn new(options: WorldOptions) -> anyhow::Result<Self> {
        let seed = options.seed;
        let mut plan = WorldPlan::of(seed, options.varies);
        plan.clients = options.clients.unwrap_or(plan.clients);
        plan.voters = options.voters.unwrap_or(plan.voters);
        if options.only.contains(&Fault::Scale) {
            plan.fleet = FleetKind::Scaled;
        } else if options.only.contains(&Fault::Upgrade) {
            plan.fleet = FleetKind::Mixed;
        } else if !options.only.is_empty() || options.is_calm {
            plan.fleet = FleetKind::Plain;
        }
        raft::random::seed(Rng::new(seed, RAFT_LABEL).next_u64());
        panics::watch();
        let (time, trace) = (SimTime::default(), Trace::new(options.is_traced));
        trace.event(0, format_args!("{plan:?}"));
        let network = SimNetwork::new(seed, trace.clone());
        let ledger = RecordKeeper::default();
        let context = WorkloadContext::new(&plan, time.clone(), ledger.clone(), trace.clone());
        let mut world = Self {
            rng: Rng::new(seed, RNG_LABEL),
            forged_calls: Rng::new(seed, FORGED_CALLS_LABEL),
            options,
            time,
            network,
            trace,
            ledger,
            seats: BTreeMap::new(),
            remedies: BTreeMap::new(),
            next_fault_us: 0,
            links_down: BTreeSet::new(),
            deaf: BTreeSet::new(),
            tended_us: 0,
            reach: Reach::default(),
            counts: WorldCounts::default(),
            stage: WorkloadDriver::new(context),
            fleet: FleetDriver::new(seed, plan.fleet, plan.voters),
            planned: 0,
            plan,
        };
        let founders: Vec<u8> = (1..=world.plan.voters).collect();
        for id in &founders {
            world.build(*id, &founders, false)?;
            world.install(*id);
            let wait_us = 1000 * world.rng.below(200);
            world.remedy_in(wait_us, Remedy::Start(*id));
        }
        Ok(world)
    }

    /// Returns the simulated time, in microseconds.
    #[must_use]
    pub fn now_us(&self) -> u64 {
        self.time.now_us()
    }

    /// Returns the trace of the world.
    #[must_use]
    pub fn trace(&self) -> &Trace {
        &self.trace
    }

    /// Returns the counts of events so far.
    #[must_use]
    pub fn counts(&self) -> WorldCounts {
        let mut counts = self.counts.clone();
        self.ledger.with(|record| {
            let observation = &record.observation;
            let terms = observation.leading.iter().map(|it| it.term);
            counts.leaders = terms.collect::<BTreeSet<_>>().len() as u64;
            let steps = observation.steps.values().flatten();
            let restored =
                steps.filter(|it| it.cause == crate::oracle::observation::Cause::Restored);
            counts.restored = restored.count() as u64;
            counts.entries = observation.log.len() as u64;
        });
        counts
    }

    /// Adds a replica that founds a cluster with `members`, or joins theirs if `joins` is set.
    pub(super) fn build(&mut self, id: u8, members: &[u8], joins: bool) -> anyhow::Result<()> {
        // Everything is on the simulated disk; the path only appears in errors.
        let dir = PathBuf::from(format!("/simulated/n{id}"));
        let config = self.plan.config(id, &dir, members, joins)?;
        let pace = self.plan.pace();
        let (synced, mut draws) = (pace.clone(), Rng::new(self.plan.seed, u64::from(id)));
        let disk = MemoryDisk::with_sync(move || synced.sync(draws.next_u64()));
        let seat = SimulatedReplica {
            machine: Machine::new(id, config, disk, &self.time),
            pace,
            run: ReplicaRun {
                replica: ReplicaId(id),
                number: 0,
            },
            status: None,
            is_spoiled: Arc::default(),
            is_struck: false,
            is_gone: false,
            is_scaled_away: false,
            is_disk_bad: false,
            said: None,
            voters: Vec::new(),
        };
        self.seats.insert(id, seat);
        Ok(())
    }

    /// Returns whether there is room for one more replica.
    pub(super) fn has_room(&self) -> bool {
        self.seats.values().filter(|seat| !seat.is_gone).count() < REPLICAS_MAX
    }

    /// Returns the id of the next replica. Ids are never reused.
    pub(super) fn next_id(&self) -> u8 {
        self.seats.keys().next_back().copied().unwrap_or(0) + 1
    }

    /// Returns whether the cluster has formed: a leader leads, and its state is initialised.
    #[must_use]
    pub fn is_formed(&self) -> bool {
        let leader = self.leader().and_then(|id| self.seats[&id].machine.core());
        leader.is_some_and(|core| core.view().registry().initialised)
    }

    /// Advances the world by one step.
    pub fn step(&mut self) {
        let now_us = self.time.now_us() + STEP_US;
        self.time.set_us(now_us);
        self.network.step(now_us);
        self.mend();
        if !self.options.is_calm && now_us >= self.next_fault_us && self.next_fault_us > 0 {
            self.inject_next_fault();
        }
        let ids: Vec<u8> = self.seats.keys().copied().collect();
        for id in &ids {
            self.step_machine(*id);
        }
        for id in &ids {
            self.observe(*id);
        }
        if self.next_fault_us > 0 {
            self.depose_leader_of_suspect();
        }
        self.stop_removed();
        if now_us.is_multiple_of(LOOK_EVERY_US) {
            self.look_around();
        }
        self.observe_limits();
        for panic in panics::take() {
            self.ledger.report_error(format!("panic: {panic}"));
        }
    }

    fn step_machine(&mut self, id: u8) {
        let now_us = self.time.now_us();
        let Some(seat) = self.seats.get_mut(&id) else {
            return;
        };
        super::log::on(id, now_us);
        let stepped = seat.machine.step(now_us);
        super::log::off();
        match stepped {
            Stepped::On => {}
            Stepped::Up => {
                let Some(core) = seat.machine.core() else {
                    return;
                };
                seat.status = Some(core.replica().watch());
                self.trace.event(now_us, format_args!("{id} up"));
                if let Some(handle) = seat.machine.handle() {
                    self.stage.enter(seat.run, core, handle);
                }
            }
            Stepped::Ended(why) => {
                self.trace.event(now_us, format_args!("{id} ended"));
                let is_disk_bad = seat.is_disk_bad;
                self.kill(id);
                match why {
                    Some(why) if !is_disk_bad => self
                        .ledger
                        .report_error(format!("replica {id} did not start: {why}")),
                    Some(_) | None => {
                        let wait_us = 1000 * (100 + self.rng.below(2000));
                        self.remedy_in(wait_us, Remedy::Start(id));
                    }
                }
            }
        }
    }

    /// Records the status that a replica reports, if it has changed.
    fn observe(&mut self, id: u8) {
        let now_us = self.time.now_us();
        let Some(seat) = self.seats.get_mut(&id) else {
            return;
        };
        let Some(status) = &mut seat.status else {
            return;
        };
        // The first reported status may be the initial one.
        if !status.has_changed() && seat.said.is_some() {
            return;
        }
        let status = status.borrow_and_update();
        let said = (status.role, status.term, status.has_quorum);
        if status.role == Role::Leader {
            let (run, term) = (seat.run, status.term);
            self.ledger
                .with(|record| record.observation.leads(now_us, run, term));
        }
        if seat.said != Some(said) {
            let (role, term, has_quorum) = said;
            self.trace.event(
                now_us,
                format_args!("{id} is {role:?} of {term}, quorum {has_quorum}"),
            );
        }
        seat.said = Some(said);
        let voters = status.members.iter().filter(|(_, it)| it.is_voter);
        let voters: Vec<u8> = voters.map(|(id, _)| *id).collect();
        let leading = (status.role == Role::Leader).then(|| status.clone());
        drop(status);
        if seat.voters != voters {
            seat.voters = voters;
            self.observe_reach();
        }
        if let Some(status) = leading {
            self.observe_scale(&status);
        }
    }

    /// Records which outboxes are empty, and now and then the image of one state.
    fn look_around(&mut self) {
        self.observe_clocks();
        let now_us = self.time.now_us();
        for seat in self.seats.values() {
            let Some(core) = seat.machine.core() else {
                continue;
            };
            if core.router().outbox().status().queued_items == 0 {
                self.ledger
                    .with(|record| record.observation.outbox_is_empty(now_us, seat.run));
            }
        }
        if now_us.is_multiple_of(IMAGE_EVERY_US)
            && let Some(id) = self.any_up()
            && let Some(core) = self.seats[&id].machine.core()
            && !self.seats[&id].is_spoiled.load(Ordering::Relaxed)
        {
            let keys = workload::keys();
            let image = core.with_state(|state| StateImage::of(state, &keys));
            let run = self.seats[&id].run;
            self.ledger
                .with(|record| record.observation.image(now_us, run, image));
        }
    }

    /// Starts the process of a replica, unless it runs, is out, or has a bad disk.
    pub(super) fn start(&mut self, id: u8) {
        let now_us = self.time.now_us();
        let Some(seat) = self.seats.get_mut(&id) else {
            return;
        };
        if seat.machine.is_on() || seat.is_out() || seat.is_disk_bad {
            return;
        }
        let run = ReplicaRun {
            replica: ReplicaId(id),
            number: seat.machine.runs + 1,
        };
        let label = u64::from(run.number) << 8 | u64::from(id);
        let is_spoiled = seat.is_spoiled.load(Ordering::Relaxed);
        let watcher = RunWatcher::new(
            run,
            is_spoiled,
            self.ledger.clone(),
            self.trace.clone(),
            self.time.clone(),
        );
        seat.run = run;
        seat.is_spoiled = watcher.is_spoiled();
        seat.said = None;
        let format = self.install(id);
        let scale = self.fleet.set.clone();
        let start = StartOptions {
            format,
            scale: scale.map(|set| Arc::new(set) as _),
            session: SessionId(Rng::new(self.plan.seed, label).next_u64()),
            hash_seed: self.plan.hash_seed,
            observer: Arc::new(watcher),
        };
        self.trace
            .event(now_us, format_args!("{id} starts, run {}", run.number));
        self.ledger
            .with(|record| record.observation.started(now_us, run));
        if is_spoiled {
            self.ledger
                .with(|record| record.observation.spoiled(now_us, run));
        }
        self.counts.starts += 1;
        super::log::on(id, now_us);
        if let Some(seat) = self.seats.get_mut(&id) {
            seat.machine.start(&self.network, now_us, start);
        }
        super::log::off();
        self.observe_reach();
    }

    /// Kills the process of a replica. Its disk loses unsynced data, except for a prefix.
    pub(super) fn kill(&mut self, id: u8) {
        let now_us = self.time.now_us();
        let Some(seat) = self.seats.get_mut(&id) else {
            return;
        };
        if !seat.machine.is_on() {
            return;
        }
        let (rng, mut lost) = (&mut self.rng, (0, 0));
        seat.machine.disk.crash(|unsynced| {
            // All, none, or torn in the middle.
            let kept = match rng.below(3) {
                0 => 0,
                1 => unsynced,
                _ => rng.below(unsynced as u64 + 1) as usize,
            };
            lost = (unsynced, kept);
            kept
        });
        self.trace.event(
            now_us,
            format_args!("{id} dies; of {} unsynced {} stay", lost.0, lost.1),
        );
        self.network.power_off(id);
        seat.status = None;
        let run = seat.run;
        super::log::on(id, now_us);
        seat.machine.kill();
        super::log::off();
        self.ledger
            .with(|record| record.observation.ended(now_us, run));
    }

    /// Schedules the end of a fault in `wait_us` microseconds.
    pub(super) fn remedy_in(&mut self, wait_us: u64, remedy: Remedy) {
        self.planned += 1;
        let at = (self.time.now_us() + wait_us, self.planned);
        self.remedies.insert(at, remedy);
    }

    /// Ends the faults whose remedies are due.
    fn mend(&mut self) {
        while let Some(due) = self.remedies.first_entry()
            && due.key().0 <= self.time.now_us()
        {
            let remedy = due.remove();
            self.apply_remedy(remedy);
        }
    }

    /// Ends all faults by applying their remedies at once.
    pub(super) fn mend_all(&mut self) {
        let rest: VecDeque<Remedy> = std::mem::take(&mut self.remedies).into_values().collect();
        for remedy in rest {
            self.apply_remedy(remedy);
        }
    }

    /// Returns the ids of all running replicas.
    pub(super) fn running(&self) -> Vec<u8> {
        let running = self.seats.iter().filter(|(_, seat)| seat.machine.is_on());
        running.map(|(id, _)| *id).collect()
    }

    /// Returns the replica that believes that it leads the newest term.
    pub(super) fn leader(&self) -> Option<u8> {
        let leading = |seat: &SimulatedReplica| {
            let status = seat.status.as_ref()?.borrow();
            (status.role == Role::Leader).then_some(status.term)
        };
        let leaders = self
            .seats
            .iter()
            .filter_map(|(id, seat)| Some((leading(seat)?, *id)));
        leaders.max().map(|(_, id)| id)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.network.end();
    }
}
