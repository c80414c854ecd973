//! Injection of faults into a world.

use std::sync::atomic::Ordering;

use raft::DiskShortage;
use state::ids::ReplicaId;

use super::faults::{FORGED_CALLS, Fault, Remedy};
use super::network::{LOSS_PERMILLE_BAD, Link, LinkCut, REPEATS_PERMILLE_BAD};
use super::plan::FleetKind;
use super::reach::{self, Reachability};
use super::workload::MembershipChange;
use super::world::{SimulatedReplica, World};

/// Maximum error of a clock that counts as right, in milliseconds.
const CLOCK_ERROR_MS: u64 = 1000;
/// Minimum duration of a slow disk's sync, in microseconds.
const SLOW_SYNC_US: u64 = 50_000;

impl World {
    /// Starts injecting faults.
    pub fn begin_faults(&mut self) {
        self.next_fault_us = self.now_us() + 1;
    }

    /// Stops injecting faults.
    pub(super) fn end_faults(&mut self) {
        self.next_fault_us = 0;
    }

    /// Injects the next fault and schedules the one after it.
    pub(super) fn inject_next_fault(&mut self) {
        let gap_us = 1000 * self.plan.fault_gap_ms;
        self.next_fault_us = self.now_us() + gap_us / 4 + self.rng.below(2 * gap_us);
        let only = self.options.only.clone();
        let fault = Fault::draw(&mut self.rng, &only);
        if only.is_empty() && self.forged_calls.below(FORGED_CALLS) == 0 {
            self.happen(Fault::Liar);
        }
        if only.is_empty()
            && let Some(change) = self.fleet.draw(self.plan.fleet)
        {
            self.happen(change);
        }
        self.happen(fault);
    }

    fn happen(&mut self, fault: Fault) {
        if self.inject(fault) {
            *self.counts.faults.entry(fault).or_default() += 1;
            self.trace
                .event(self.now_us(), format_args!("fault {fault}"));
        }
    }

    /// Injects a fault. Returns whether it was possible at this moment.
    fn inject(&mut self, fault: Fault) -> bool {
        let is_barred = |seat: &SimulatedReplica| {
            let is_spoiled = seat.is_spoiled.load(Ordering::Relaxed);
            is_spoiled && (!seat.is_in_doubt() || fault.ends_processes())
        };
        if !fault.lets_lead() && self.seats.values().any(is_barred) {
            return false;
        }
        let is_operators = matches!(fault, Fault::Join | Fault::Promote | Fault::Remove);
        if is_operators && self.plan.fleet != FleetKind::Plain {
            return false;
        }
        match fault {
            Fault::Scale => self.scale(),
            Fault::Upgrade => self.upgrade(),
            Fault::Crash => self.crash_one(3000),
            Fault::Bounce => self.crash_one(20),
            Fault::CrashAll => self.crash_all(),
            Fault::Leave => self.leave(),
            Fault::Pause => self.pause(),
            Fault::ClockJump => self.clock_jump(),
            Fault::WrongClock => self.wrong_clock(),
            Fault::Halves => self.halves(),
            Fault::Isolate => {
                let id = self.any_running();
                self.isolate(id)
            }
            Fault::IsolateLeader => {
                let id = self.leader();
                self.isolate(id)
            }
            Fault::OneWay => self.one_way(),
            Fault::Deafen => self.deafen(),
            Fault::Hold => self.hold(),
            Fault::BadLinks => self.bad_links(),
            Fault::SlowLinks => self.slow_links(),
            Fault::CutStreams => self.cut_streams(),
            Fault::SlowDisk => self.slow_disk(),
            Fault::FailDisk => self.fail_disk(),
            Fault::Join => self.join(),
            Fault::Promote => self.promote(),
            Fault::Remove => self.remove(),
            Fault::Transfer => self.transfer(),
            Fault::Snapshot => self.snapshot(),
            Fault::LoseState => self.lose_state(),
            Fault::Liar => self.lie(),
            Fault::Descriptors => self.run_short(DiskShortage::Descriptors),
            Fault::FullDisk => self.run_short(DiskShortage::Space),
        }
    }

    /// Draws the duration of a fault in microseconds, mostly short and seldom up to `longest_ms`.
    pub(super) fn while_us(&mut self, longest_ms: u64) -> u64 {
        let most = match self.rng.below(4) {
            0 => longest_ms,
            _ => longest_ms / 5,
        };
        1000 * (1 + self.rng.below(most.max(1)))
    }

    pub(super) fn any_of<T: Copy>(&mut self, among: &[T]) -> Option<T> {
        if among.is_empty() {
            return None;
        }
        let at = self.rng.below(among.len() as u64) as usize;
        Some(among[at])
    }

    fn any_running(&mut self) -> Option<u8> {
        let running = self.running();
        self.any_of(&running)
    }

    /// Returns a random running replica.
    pub(super) fn any_up(&mut self) -> Option<u8> {
        let up: Vec<u8> = self
            .seats
            .iter()
            .filter(|(_, seat)| seat.machine.core().is_some())
            .map(|(id, _)| *id)
            .collect();
        self.any_of(&up)
    }

    fn crash_one(&mut self, longest_ms: u64) -> bool {
        let Some(id) = self.any_running() else {
            return false;
        };
        self.kill(id);
        let wait_us = self.while_us(longest_ms);
        self.remedy_in(wait_us, Remedy::Start(id));
        true
    }

    fn crash_all(&mut self) -> bool {
        for id in self.running() {
            self.kill(id);
            let wait_us = self.while_us(2000);
            self.remedy_in(wait_us, Remedy::Start(id));
        }
        true
    }

    fn leave(&mut self) -> bool {
        let Some(id) = self.any_up() else {
            return false;
        };
        if let Some(seat) = self.seats.get_mut(&id) {
            seat.machine.leave();
        }
        true
    }

    fn pause(&mut self) -> bool {
        let Some(id) = self.any_running() else {
            return false;
        };
        let Some(seat) = self.seats.get_mut(&id) else {
            return false;
        };
        if seat.machine.is_paused() {
            return false;
        }
        seat.machine.pause();
        self.network.pause(id);
        let wait_us = self.while_us(8000);
        self.remedy_in(wait_us, Remedy::Resume(id));
        true
    }

    fn clock_jump(&mut self) -> bool {
        let ids: Vec<u8> = self.seats.keys().copied().collect();
        let Some(id) = self.any_of(&ids) else {
            return false;
        };
        let most_ms = [500, 5000, 60_000, 7_200_000][self.rng.below(4) as usize];
        let error_ms = self.rng.below(2 * most_ms + 1) as i64 - most_ms as i64;
        self.seats[&id].machine.wall.set_error_ms(error_ms);
        self.observe_clocks();
        if self.rng.below(2) == 0 {
            let wait_us = self.while_us(10_000);
            self.remedy_in(wait_us, Remedy::RightClock(id));
        }
        true
    }

    fn wrong_clock(&mut self) -> bool {
        let mut ids: Vec<u8> = self.seats.keys().copied().collect();
        if self.rng.below(4) > 0 {
            ids = self.any_of(&ids).into_iter().collect();
        }
        let error_ms = [2, 30, 240, 9600][self.rng.below(4) as usize] * 3_600_000;
        let error_ms = if self.rng.below(2) == 0 {
            error_ms
        } else {
            -error_ms
        };
        for id in &ids {
            self.seats[id].machine.wall.set_error_ms(error_ms);
        }
        // The other clocks are corrected when everything is repaired.
        if self.rng.below(2) == 0 {
            let wait_us = self.while_us(10_000);
            for id in ids {
                self.remedy_in(wait_us, Remedy::RightClock(id));
            }
        }
        self.observe_clocks();
        true
    }

    /// Records that the time is unknowable, unless more than half of all replicas run, have a right
    /// clock and can reach each other.
    pub(super) fn observe_clocks(&mut self) {
        let wrong_ms = |seat: &SimulatedReplica| seat.machine.wall.error_ms().unsigned_abs();
        if self
            .seats
            .values()
            .all(|seat| wrong_ms(seat) <= CLOCK_ERROR_MS)
        {
            return;
        }
        let is_right = |seat: &SimulatedReplica| {
            seat.machine.core().is_some()
                && !seat.machine.is_paused()
                && wrong_ms(seat) <= CLOCK_ERROR_MS
        };
        let right = self.seats.values().filter(|seat| is_right(seat)).count();
        let do_all_hear = self.links_down.is_empty() && self.deaf.is_empty();
        if 2 * right <= self.seats.len() || !do_all_hear {
            self.ledger
                .with(|record| record.observation.are_clocks_doubted = true);
        }
    }

    fn ids(&self) -> Vec<u8> {
        let there = self.seats.iter().filter(|(_, seat)| !seat.is_out());
        there.map(|(id, _)| *id).collect()
    }

    /// Cuts links and schedules their repair. Returns whether there were any.
    fn cut(&mut self, links: Vec<(u8, u8)>, how: LinkCut, longest_ms: u64) -> bool {
        for (from, to) in &links {
            self.network.cut(*from, *to, how);
            self.links_down.insert((*from, *to));
        }
        self.observe_reach();
        let wait_us = self.while_us(longest_ms);
        let is_any = !links.is_empty();
        self.remedy_in(wait_us, Remedy::Heal(links));
        is_any
    }

    fn any_cut(&mut self) -> LinkCut {
        match self.rng.below(2) {
            0 => LinkCut::Holds,
            _ => LinkCut::Drops,
        }
    }

    fn halves(&mut self) -> bool {
        let ids = self.ids();
        let side: Vec<bool> = ids.iter().map(|_| self.rng.below(2) == 0).collect();
        let mut links = Vec::new();
        for (from, on) in ids.iter().zip(&side) {
            for (to, other) in ids.iter().zip(&side) {
                if on != other {
                    links.push((*from, *to));
                }
            }
        }
        let how = self.any_cut();
        self.cut(links, how, 12_000)
    }

    pub(super) fn isolate(&mut self, id: Option<u8>) -> bool {
        let Some(id) = id else { return false };
        let others = self.ids().into_iter().filter(|other| *other != id);
        let links = others
            .flat_map(|other| [(id, other), (other, id)])
            .collect();
        let how = self.any_cut();
        self.cut(links, how, 12_000)
    }

    fn one_way(&mut self) -> bool {
        let ids = self.ids();
        let Some(id) = self.any_of(&ids) else {
            return false;
        };
        let is_inbound = self.rng.below(2) == 0;
        let is_one = self.rng.below(2) == 0;
        let mut others: Vec<u8> = ids.into_iter().filter(|other| *other != id).collect();
        if is_one && let Some(other) = self.any_of(&others) {
            others = vec![other];
        }
        let links = others.into_iter().map(|other| match is_inbound {
            true => (other, id),
            false => (id, other),
        });
        let (links, how) = (links.collect(), self.any_cut());
        self.cut(links, how, 6000)
    }

    fn deafen(&mut self) -> bool {
        let id = match self.rng.below(4) {
            0 => self.any_running(),
            _ => self.leader(),
        };
        let Some(id) = id.filter(|id| !self.deaf.contains(id)) else {
            return false;
        };
        self.network.deafen(id);
        self.deaf.insert(id);
        self.observe_clocks();
        let wait_us = self.while_us(12_000);
        self.remedy_in(wait_us, Remedy::Hear(id));
        true
    }

    fn some_links(&mut self) -> Vec<(u8, u8)> {
        let ids = self.ids();
        let mut links = Vec::new();
        for from in &ids {
            for to in &ids {
                if from != to && self.rng.below(3) == 0 {
                    links.push((*from, *to));
                }
            }
        }
        links
    }

    fn hold(&mut self) -> bool {
        let links = self.some_links();
        self.cut(links, LinkCut::Holds, 1500)
    }

    fn bad_links(&mut self) -> bool {
        let links = self.change_links(|link| {
            link.loss_permille = LOSS_PERMILLE_BAD;
            link.repeats_permille = REPEATS_PERMILLE_BAD;
        });
        let wait_us = self.while_us(8000);
        self.remedy_in(wait_us, Remedy::Soothe(links));
        true
    }

    fn slow_links(&mut self) -> bool {
        let links = self.change_links(|link| {
            link.base_us += 30_000;
            link.jitter_us += 30_000;
        });
        let wait_us = self.while_us(8000);
        self.remedy_in(wait_us, Remedy::Quicken(links));
        true
    }

    /// Changes some random links and returns them.
    fn change_links(&mut self, change: impl Fn(&mut Link)) -> Vec<(u8, u8)> {
        let links = self.some_links();
        for (from, to) in &links {
            self.network.change_link(*from, *to, &change);
        }
        links
    }

    fn cut_streams(&mut self) -> bool {
        for (from, to) in self.some_links() {
            self.network.break_connections(from, to);
        }
        true
    }

    fn slow_disk(&mut self) -> bool {
        let Some(id) = self.any_running() else {
            return false;
        };
        let sync_us = SLOW_SYNC_US + self.rng.below(400_000);
        self.seats[&id].pace.slow_to_us(sync_us);
        let wait_us = self.while_us(6000);
        self.remedy_in(wait_us, Remedy::QuickDisk(id));
        true
    }

    fn fail_disk(&mut self) -> bool {
        let Some(id) = self.any_running() else {
            return false;
        };
        // Only a minority of replicas may have a bad disk.
        let bad = self.seats.values().filter(|seat| seat.is_disk_bad).count();
        if bad > 0 {
            return false;
        }
        let Some(seat) = self.seats.get_mut(&id) else {
            return false;
        };
        seat.is_disk_bad = true;
        seat.machine
            .disk
            .fail(Some("input/output error".to_owned()));
        let wait_us = self.while_us(6000);
        self.remedy_in(wait_us, Remedy::MendDisk(id));
        true
    }

    fn run_short(&mut self, of: DiskShortage) -> bool {
        let Some(id) = self.any_running() else {
            return false;
        };
        self.seats[&id].machine.disk.run_short(Some(of));
        let wait_us = self.while_us(6000);
        self.remedy_in(wait_us, Remedy::EndShortage(id));
        true
    }

    fn join(&mut self) -> bool {
        if !self.has_room() {
            return false;
        }
        let (id, members) = (self.next_id(), self.ids());
        if let Err(error) = self.build(id, &members, true) {
            self.ledger
                .report_error(format!("build replica {id}: {error:#}"));
            return false;
        }
        self.start(id);
        true
    }

    /// Lets a faulty member or a stranger call a random replica. A wrong reaction shows as a panic.
    fn lie(&mut self) -> bool {
        let up: Vec<u8> = self
            .seats
            .iter()
            .filter(|(_, seat)| seat.machine.core().is_some())
            .map(|(id, _)| *id)
            .collect();
        let draw = self.forged_calls.next_u64();
        if up.is_empty() {
            return false;
        }
        let seat = &self.seats[&up[self.forged_calls.below(up.len() as u64) as usize]];
        let Some((core, handle)) = seat.machine.core().zip(seat.machine.handle()) else {
            return false;
        };
        let replica = core.replica().clone();
        handle.spawn(async move { raft::forged_calls::send(&replica, draw).await });
        true
    }

    /// Requests a change of the membership from a random replica. Returns whether one is up.
    pub(super) fn ask(&mut self, change: MembershipChange) -> bool {
        let Some(id) = self.any_up() else {
            return false;
        };
        let seat = &self.seats[&id];
        match seat.machine.core().zip(seat.machine.handle()) {
            Some((core, handle)) => {
                self.stage.change(core.cluster(), handle, change);
                true
            }
            None => false,
        }
    }

    /// Returns the members, each with whether it votes, according to the replica that applied most.
    pub(super) fn members(&self) -> Vec<(u8, bool)> {
        let statuses = self.seats.values().filter_map(|seat| seat.status.as_ref());
        let newest = statuses.max_by_key(|status| status.borrow().applied);
        newest.map_or_else(Vec::new, |status| {
            let status = status.borrow();
            let members = status.members.iter();
            members.map(|(id, member)| (*id, member.is_voter)).collect()
        })
    }

    fn promote(&mut self) -> bool {
        let members = self.members().into_iter();
        let learners: Vec<u8> = members
            .filter(|(_, votes)| !votes)
            .map(|(id, _)| id)
            .collect();
        let Some(id) = self.any_of(&learners) else {
            return false;
        };
        self.ask(MembershipChange::Promote(ReplicaId(id)))
    }

    fn remove(&mut self) -> bool {
        let members = self.members();
        let voters = members.iter().filter(|(_, votes)| *votes).count();
        let can_go = members.iter().filter(|(_, votes)| !votes || voters > 3);
        let can_go: Vec<u8> = can_go.map(|(id, _)| *id).collect();
        let Some(id) = self.any_of(&can_go) else {
            return false;
        };
        self.ask(MembershipChange::Remove(ReplicaId(id)))
    }

    fn transfer(&mut self) -> bool {
        let members = self.members().into_iter();
        let voters: Vec<u8> = members
            .filter(|(_, votes)| *votes)
            .map(|(id, _)| id)
            .collect();
        let to = match self.rng.below(2) {
            0 => None,
            _ => self.any_of(&voters).map(ReplicaId),
        };
        self.ask(MembershipChange::Transfer(to))
    }

    fn snapshot(&mut self) -> bool {
        self.ask(MembershipChange::Snapshot)
    }

    /// Records which replicas can reach a majority. Must be called after every change of links or
    /// electorates.
    pub(super) fn observe_reach(&mut self) {
        let now_us = self.now_us();
        // A removed replica that still runs may relay messages between others.
        let there = self.seats.iter();
        let there = there.filter(|(_, seat)| !seat.is_out() || seat.machine.is_on());
        let ids: Vec<u8> = there.map(|(id, _)| *id).collect();
        let ways = ids
            .iter()
            .flat_map(|from| ids.iter().map(|to| (*from, *to)));
        let is_open = |way: &(u8, u8)| way.0 != way.1 && !self.links_down.contains(way);
        // A restarted replica votes as before, even before it reports its voters. One that does not
        // know the cluster yet knows no voters; an empty electorate must not count as unreachable.
        let running = self.seats.values().filter(|seat| seat.machine.is_on());
        let known = running.map(|seat| seat.voters.clone());
        let now = Reachability {
            open: ways.filter(is_open).collect(),
            electorates: known.filter(|voters| !voters.is_empty()).collect(),
        };
        for change in self.reach.look(&ids, &now) {
            let (id, does) = match change {
                reach::ReachChange::Lost(id) => (id, false),
                reach::ReachChange::Regained(id) => (id, true),
            };
            self.ledger.with(|record| {
                let observation = &mut record.observation;
                observation.reaches_majority(now_us, ReplicaId(id), does);
            });
        }
    }
}
