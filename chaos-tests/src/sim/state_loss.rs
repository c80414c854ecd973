//! Faults in which a replica loses its state, and faults before and after it notices.

use std::sync::atomic::Ordering;

use raft::Role;
use state::ids::ReplicaId;

use super::faults::{Fault, Remedy};
use super::workload::MembershipChange;
use super::world::{SimulatedReplica, World};

impl World {
    /// Corrupts the state of one follower, if all others are sound and no current fault may end the
    /// leader's term. A majority must be right: a replica that does not know yet that its state is
    /// wrong may be elected and pass its state on. Once it knows, see
    /// [`World::depose_leader_of_suspect`].
    pub(super) fn lose_state(&mut self) -> bool {
        let is_sound = |seat: &SimulatedReplica| {
            let is_up = seat.machine.core().is_some();
            seat.is_out() || (is_up && !seat.is_spoiled.load(Ordering::Relaxed))
        };
        if !self.seats.values().all(is_sound) || !self.remedies.values().all(Remedy::lets_lead) {
            return false;
        }
        let leader = self.leader();
        let follows = |seat: &SimulatedReplica| {
            let status = seat.status.as_ref().map(|status| status.borrow());
            status.is_some_and(|it| it.leader == leader && it.has_quorum)
        };
        let mut members = self.seats.values().filter(|seat| !seat.is_out());
        if leader.is_none() || !members.all(follows) {
            return false;
        }
        let followers = self.seats.iter().filter(|(_, seat)| {
            let status = seat.status.as_ref().map(|status| status.borrow());
            let core = seat.machine.core();
            let is_formed = core.is_some_and(|core| core.view().registry().initialised);
            is_formed && status.is_some_and(|status| status.role == Role::Follower)
        });
        let followers: Vec<u8> = followers.map(|(id, _)| *id).collect();
        let Some(id) = self.any_of(&followers) else {
            return false;
        };
        let seat = &self.seats[&id];
        let Some(core) = seat.machine.core() else {
            return false;
        };
        seat.is_spoiled.store(true, Ordering::Relaxed);
        core.state_loss()();
        let (now_us, run) = (self.now_us(), seat.run);
        if let Some(seat) = self.seats.get_mut(&id) {
            seat.is_struck = false;
        }
        self.ledger
            .with(|record| record.observation.spoiled(now_us, run));
        true
    }

    /// If a replica has just found that its state is wrong and has not replaced it, kills or
    /// isolates the leader, or requests a transfer of leadership to that replica, as far as the
    /// options allow.
    pub(super) fn depose_leader_of_suspect(&mut self) {
        let just_found = |(_, seat): &(&u8, &SimulatedReplica)| {
            !seat.is_struck && seat.is_spoiled.load(Ordering::Relaxed) && seat.is_in_doubt()
        };
        let Some(id) = self.seats.iter().find(just_found).map(|(id, _)| *id) else {
            return;
        };
        if let Some(seat) = self.seats.get_mut(&id) {
            seat.is_struck = true;
        }
        let strikes = [Fault::Crash, Fault::IsolateLeader, Fault::Transfer];
        let only = self.options.only.clone();
        let strikes =
            strikes.map(|fault| Some(fault).filter(|it| only.is_empty() || only.contains(it)));
        let Some(strike) = self.any_of(&strikes).flatten() else {
            return;
        };
        let has_struck = match strike {
            Fault::Crash => self.leader().is_some_and(|leader| {
                self.kill(leader);
                let wait_us = self.while_us(3000);
                self.remedy_in(wait_us, Remedy::Start(leader));
                true
            }),
            Fault::Transfer => self.ask(MembershipChange::Transfer(Some(ReplicaId(id)))),
            _ => {
                let leader = self.leader();
                self.isolate(leader)
            }
        };
        if has_struck {
            *self.counts.faults.entry(strike).or_default() += 1;
            self.trace
                .event(self.now_us(), format_args!("fault {strike}, {id} in doubt"));
        }
    }
}
