//! Healing after the faults: repairs everything; the cluster must return to one state by itself.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use node::app::replica_core::ReplicaCore;
use raft::Role;
use state::ids::ReplicaId;

use super::faults::Remedy;
use super::workload::{self, MembershipChange};
use super::world::{SimulatedReplica, World};
use crate::invariants;
use crate::oracle::image::StateImage;
use crate::oracle::observation::AtRest;

/// Maximum duration of healing, in milliseconds. The leases of lost replicas end after 10 s, and an
/// admin write may be retried for as long. This is twice their sum.
const HEAL_MS_MAX: u64 = 40_000;
/// Interval at which the operator tries to remove a replica that came back.
const TEND_EVERY_US: u64 = 2_000_000;
/// Interval at which healing checks the cluster.
const LOOK_EVERY_MS: u64 = 50;

impl World {
    /// Repairs everything and waits until the cluster is whole.
    ///
    /// # Errors
    /// Describes the condition that was not met in time.
    pub(super) fn heal(&mut self) -> Result<(), String> {
        self.mend_everything();
        self.wait("the cluster is whole", |world| {
            world.run_operator();
            world.is_whole()
        })?;
        let mut asked = Vec::new();
        for (id, seat) in &self.seats {
            if let (false, Some(core), Some(handle)) =
                (seat.is_out(), seat.machine.core(), seat.machine.handle())
            {
                asked.push((*id, self.stage.read_all(seat.run, core, handle)));
            }
        }
        self.wait("every replica answers reads and a request", |world| {
            world.unanswered(&asked)
        })?;
        self.wait("the cluster is at rest", Self::is_whole)?;
        self.observe_healed();
        Ok(())
    }

    fn mend_everything(&mut self) {
        self.end_faults();
        self.mend_all();
        let links: Vec<_> = self.links_down.iter().copied().collect();
        self.apply_remedy(Remedy::Heal(links));
        self.soothe_all();
        self.apply_remedy(Remedy::AnswerScale);
        let ids: Vec<u8> = self.seats.keys().copied().collect();
        for id in &ids {
            self.apply_remedy(Remedy::Resume(*id));
            self.apply_remedy(Remedy::RightClock(*id));
            self.apply_remedy(Remedy::QuickDisk(*id));
            self.start(*id);
        }
        self.stage.close();
        self.trace
            .event(self.now_us(), format_args!("all is mended"));
    }

    /// Acts as an operator at the end: stops removed replicas and starts the others. A replica that
    /// never heard of the cluster may ask to join before it is stopped, and is then removed again.
    fn run_operator(&mut self) {
        self.stop_removed();
        let is_back = |(id, _): &(u8, bool)| {
            let seat = self.seats.get(id);
            seat.is_some_and(|seat| seat.is_gone && seat.machine.core().is_none())
        };
        let back = self.members().into_iter().find(is_back);
        if let Some((id, _)) = back
            && self.now_us() >= self.tended_us + TEND_EVERY_US
        {
            self.tended_us = self.now_us();
            self.ask(MembershipChange::Remove(ReplicaId(id)));
        }
        let ids: Vec<u8> = self.seats.keys().copied().collect();
        for id in ids {
            self.start(id);
        }
    }

    /// Schedules the end of replicas that the others removed, and keeps them down.
    pub(super) fn stop_removed(&mut self) {
        if self.fleet.set.is_some() {
            // A StatefulSet starts and stops its replicas itself.
            return;
        }
        for id in self.stage.take_removed() {
            self.schedule_kill(id);
        }
        let removed = self.seats.iter().filter(|(_, seat)| {
            let status = seat.status.as_ref();
            !seat.is_gone && status.is_some_and(|it| it.borrow().role == Role::Removed)
        });
        for id in removed.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.schedule_kill(id);
        }
    }

    fn schedule_kill(&mut self, id: u8) {
        let Some(seat) = self.seats.get_mut(&id) else {
            return;
        };
        seat.is_gone = true;
        let wait_us = 1000 * self.rng.below(1500);
        self.remedy_in(wait_us, Remedy::Kill(id));
    }

    fn wait(
        &mut self,
        what: &str,
        mut is_so: impl FnMut(&mut Self) -> Result<(), String>,
    ) -> Result<(), String> {
        let until_us = self.now_us() + 1000 * HEAL_MS_MAX;
        loop {
            for _ in 0..LOOK_EVERY_MS {
                self.step();
            }
            if let Some(wrong) = self.ledger.wrong() {
                return Err(wrong);
            }
            match is_so(self) {
                Ok(()) => return Ok(()),
                Err(why) if self.now_us() >= until_us => {
                    let why = format!("heal: waited in vain until {what}: {why}");
                    return Err(self.explain(why));
                }
                Err(_) => {}
            }
        }
    }

    /// Returns an error if a replica has not responded, unless it was removed in the meantime. A
    /// removal without a response may still take effect.
    fn unanswered(&self, asked: &[(u8, Arc<AtomicBool>)]) -> Result<(), String> {
        let is_waited_for = |(id, done): &&(u8, Arc<AtomicBool>)| {
            !done.load(Ordering::Relaxed)
                && !self.seats.get(id).is_none_or(SimulatedReplica::is_out)
        };
        match asked.iter().find(is_waited_for) {
            Some((id, _)) => Err(format!("replica {id} has not answered")),
            None => Ok(()),
        }
    }

    /// Checks that one leader leads, all members have the same state, and no request is in flight.
    fn is_whole(&mut self) -> Result<(), String> {
        let leader = self.leader().ok_or("nobody leads")?;
        let core = self.seats[&leader].machine.core().ok_or("nobody leads")?;
        let status = core.replica().status();
        self.unscaled(&status)?;
        let members: BTreeSet<u8> = status.members.keys().copied().collect();
        let mut digests = BTreeSet::new();
        for (id, seat) in &self.seats {
            if seat.is_out() {
                if seat.is_scaled_away && seat.machine.is_on() {
                    return Err(format!("replica {id} is scaled away and runs"));
                }
                continue;
            }
            if !members.contains(id) {
                return Err(format!("replica {id} is not a member of {members:?}"));
            }
            let core = seat
                .machine
                .core()
                .ok_or_else(|| format!("replica {id} is not up"))?;
            let theirs = core.replica().status();
            if theirs.leader != Some(leader) || !theirs.caught_up || !theirs.has_quorum {
                return Err(format!("replica {id} does not follow {leader}: {theirs:?}"));
            }
            if theirs.applied != status.committed {
                let (applied, committed) = (theirs.applied, status.committed);
                return Err(format!("replica {id} applied {applied} of {committed}"));
            }
            let left = core.router().outbox().status();
            if left.queued_items > 0 {
                return Err(format!("the outbox of replica {id} holds {left:?}"));
            }
            if !core.router().is_overlay_empty() {
                return Err(format!("replica {id} believes in what no log tells"));
            }
            // Reports of the last requests may not have reached the other replicas yet.
            let running = in_flight(seat, core);
            if running > 0 {
                return Err(format!("replica {id} counts {running} requests under way"));
            }
            if !core.admission().queues().is_empty() {
                return Err(format!("requests wait at replica {id}"));
            }
            digests.insert(core.with_state(state::RouterState::digest));
            core.with_state(at_rest)
                .map_err(|why| format!("replica {id}: {why}"))?;
        }
        for id in members {
            if self.seats.get(&id).is_none_or(SimulatedReplica::is_out) {
                return Err(format!("replica {id} is a member and gone"));
            }
        }
        if digests.len() != 1 {
            return Err(format!("{} different states", digests.len()));
        }
        Ok(())
    }

    /// Returns `why`, preceded by a violated invariant, if any. Judges the unhealed cluster as if
    /// it had healed.
    fn explain(&mut self, why: String) -> String {
        self.observe_healed();
        let judged = self.ledger.with(|record| invariants::check_all(record));
        match judged {
            Ok(_) => why,
            Err(violation) => format!("{violation}; {why}"),
        }
    }

    fn observe_healed(&mut self) {
        let keys = workload::keys();
        let (now_us, ledger) = (self.now_us(), self.ledger.clone());
        for (id, seat) in &self.seats {
            let (false, Some(core)) = (seat.is_out(), seat.machine.core()) else {
                continue;
            };
            let image = Arc::new(core.with_state(|state| StateImage::of(state, &keys)));
            let router = core.router();
            let trees = core.view().trees();
            let at_rest = AtRest {
                run: seat.run,
                image: Arc::clone(&image),
                outbox_items: router.outbox().status().queued_items,
                overlay_blocks: usize::from(!router.is_overlay_empty()),
                in_flight: in_flight(seat, core),
                agent_sessions: trees.sessions().map(|(key, it)| (key, *it)).collect(),
                answers: seat.machine.handle().map_or_else(Vec::new, |handle| {
                    // The current time is that of the replica's own clock.
                    let _within = handle.enter();
                    workload::answers(core)
                }),
            };
            ledger.with(|record| {
                let observation = &mut record.observation;
                observation.images.push((now_us, seat.run, image));
                observation
                    .at_rest
                    .insert(state::ids::ReplicaId(*id), at_rest);
            });
        }
    }
}

/// Returns the number of requests that a replica counts at all backends, including those that peers
/// reported.
fn in_flight(seat: &SimulatedReplica, core: &ReplicaCore) -> u64 {
    let Some(handle) = seat.machine.handle() else {
        return 0;
    };
    // Enters the runtime, so that the current time is that of the replica's own clock.
    let _within = handle.enter();
    let now = tokio::time::Instant::now();
    let registry = core.view().registry();
    let load = core.router().load();
    let running = registry.backends.iter();
    let running = running.map(|it| u64::from(load.cluster(it.handle, now).running));
    running.sum()
}

/// Checks that a state knows of no request in flight or waiting.
fn at_rest(state: &state::RouterState) -> Result<(), String> {
    match (
        state.open_leases(),
        state.users_backlogged(),
        state.users_waiting(),
    ) {
        (0, 0, 0) => Ok(()),
        (leases, backlogged, waiting) => Err(format!(
            "{leases} leases are open, {backlogged} users have requests in flight, {waiting} wait"
        )),
    }
}
