//! Changes of fleets (`fleet.rs`): scales a world's replicas, and starts them with other builds.

use raft::Status;
use state::codec::FORMAT_VERSION;

use super::faults::Remedy;
use super::plan::FleetKind;
use super::world::{REPLICAS_MAX, World};

/// Maximum time from creating a pod to its start, in milliseconds.
const CREATE_MS: u64 = 2000;

impl World {
    /// Changes the number of replicas that the StatefulSet requests. Returns whether there is a
    /// StatefulSet.
    pub(super) fn scale(&mut self) -> bool {
        let Some(set) = self.fleet.set.clone() else {
            return false;
        };
        if self.fleet.rng.below(3) == 0 {
            set.answers(false);
            let wait_us = self.while_us(8000);
            self.remedy_in(wait_us, Remedy::AnswerScale);
        }
        let (before, least) = (set.replicas(), u64::from(self.plan.voters));
        let most = REPLICAS_MAX as u64;
        let now = least + self.fleet.rng.below(most - least + 1);
        set.scale_to(now);
        self.trace
            .event(self.now_us(), format_args!("scaled from {before} to {now}"));
        for id in before + 1..=now {
            self.create(id as u8);
        }
        for id in now + 1..=before {
            self.delete(id as u8);
        }
        before != now
    }

    /// Creates the pod of a replica, with its volume if it had one before.
    fn create(&mut self, id: u8) {
        if let Some(seat) = self.seats.get_mut(&id) {
            seat.is_scaled_away = false;
        } else {
            let founders: Vec<u8> = (1..=self.plan.voters).collect();
            if let Err(error) = self.build(id, &founders, false) {
                self.ledger
                    .report_error(format!("build replica {id}: {error:#}"));
                return;
            }
        }
        let wait_us = 1000 * self.fleet.rng.below(CREATE_MS);
        self.remedy_in(wait_us, Remedy::Start(id));
    }

    /// Stops the pod of a replica. Kills some before they can leave.
    fn delete(&mut self, id: u8) {
        let is_killed = self.fleet.rng.below(4) == 0;
        let Some(seat) = self.seats.get_mut(&id) else {
            return;
        };
        seat.is_scaled_away = true;
        match seat.machine.core() {
            Some(_) if !is_killed => seat.machine.leave(),
            Some(_) | None => self.kill(id),
        }
    }

    /// Reports an error if a leader has removed a replica that was always wanted.
    pub(super) fn observe_scale(&mut self, status: &Status) {
        if self.fleet.set.is_none() {
            return;
        }
        for id in 1..=self.plan.voters {
            if !status.members.contains_key(&id) {
                let by = status.id;
                self.ledger.report_error(format!(
                    "I128: replica {id} is wanted, and {by} leads a cluster without it"
                ));
            }
        }
    }

    /// Checks that the members of a healed cluster are the requested ones, and that enough vote.
    pub(super) fn unscaled(&self, status: &Status) -> Result<(), String> {
        let Some(set) = &self.fleet.set else {
            return Ok(());
        };
        let members: Vec<u64> = status.members.keys().map(|id| u64::from(*id)).collect();
        let wanted: Vec<u64> = (1..=set.replicas()).collect();
        if members != wanted {
            return Err(format!("{members:?} are members, wanted are {wanted:?}"));
        }
        let voters = status.members.values().filter(|it| it.is_voter).count();
        let most = members.len().min(self.plan.voters_max().into());
        let expected = most - usize::from(most.is_multiple_of(2));
        match voters < expected {
            true => Err(format!("{voters} of {members:?} vote")),
            false => Ok(()),
        }
    }

    /// Restarts a replica with another build: a later one, or an earlier one that can read all of
    /// the log, now and later, because another member knows no more formats. As in the guide, this
    /// happens only once all members report their formats.
    pub(super) fn upgrade(&mut self) -> bool {
        if self.plan.fleet != FleetKind::Mixed || !self.are_formats_told() {
            return false;
        }
        let ids: Vec<u8> = self.running();
        if ids.is_empty() {
            return false;
        }
        let id = ids[self.fleet.rng.below(ids.len() as u64) as usize];
        let others = self.seats.keys().filter(|other| **other != id);
        let least = others.map(|other| self.fleet.format(*other)).min();
        let (least, own) = (least.unwrap_or(FORMAT_VERSION), self.fleet.format(id));
        let format = match self.fleet.rng.below(3) {
            0 if own > least => {
                let earlier = u64::from(own - least);
                least + self.fleet.rng.below(earlier) as u8
            }
            _ if own < FORMAT_VERSION => {
                let later = u64::from(FORMAT_VERSION - own);
                own + 1 + self.fleet.rng.below(later) as u8
            }
            _ => return false,
        };
        self.trace.event(
            self.now_us(),
            format_args!("{id} is to know format {format}, it knows {own}"),
        );
        let is_killed = self.fleet.rng.below(3) == 0;
        match self.seats.get_mut(&id) {
            Some(seat) if !is_killed && seat.machine.core().is_some() => seat.machine.leave(),
            _ => {
                self.kill(id);
                let wait_us = 1000 * self.fleet.rng.below(CREATE_MS);
                self.remedy_in(wait_us, Remedy::Start(id));
            }
        }
        self.fleet.next.insert(id, format);
        true
    }

    /// Installs the next build, if any, for a process that starts, and returns its newest format.
    pub(super) fn install(&mut self, id: u8) -> u8 {
        if let Some(format) = self.fleet.next.remove(&id) {
            self.fleet.formats.insert(id, format);
        }
        let format = self.fleet.format(id);
        if self.plan.fleet == FleetKind::Mixed {
            let replica = state::ids::ReplicaId(id);
            self.ledger.with(|record| {
                record.observation.builds.insert(replica, format);
            });
        }
        format
    }

    /// Returns whether the leader knows the current format of every member.
    fn are_formats_told(&self) -> bool {
        let leader = self.leader().and_then(|id| self.seats[&id].status.as_ref());
        let Some(status) = leader else { return false };
        let status = status.borrow();
        self.fleet.next.is_empty()
            && self.seats.keys().all(|id| {
                let told = status
                    .members
                    .get(id)
                    .and_then(|it| it.labels.get("format"));
                told.is_some_and(|told| *told == self.fleet.format(*id).to_string())
            })
    }
}
