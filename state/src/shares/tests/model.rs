//! Tests clusters of ledgers under every kind of delivery: no places are created or lost.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use crate::ids::{BackendRef, Incarnation, ReplicaId, SessionId, Slot};
use crate::shares::{Demand, SILENT_MS, ShareLedger, ShareReport};

const BACKEND: BackendRef = BackendRef {
    slot: Slot(1),
    incarnation: Incarnation(1),
};
/// Duration of one step, in milliseconds.
const STEP_MS: u64 = 20;

/// One replica of a modelled cluster.
struct Seat {
    id: ReplicaId,
    book: ShareLedger,
    running: u32,
    waiting: u32,
    started: u64,
    is_down: bool,
}

/// A cluster and its messages in transit.
struct Cluster {
    seats: Vec<Seat>,
    limit: u32,
    now_ms: u64,
    /// Messages in transit: sender, receiver, report.
    on_the_way: Vec<(usize, usize, ShareReport)>,
    cut: BTreeSet<(usize, usize)>,
    sessions: u64,
}

impl Cluster {
    fn new(replicas: usize, limit: u32) -> Self {
        let mut cluster = Self {
            seats: Vec::new(),
            limit,
            now_ms: 0,
            on_the_way: Vec::new(),
            cut: BTreeSet::new(),
            sessions: 0,
        };
        for id in 1..=replicas {
            let seat = cluster.seat(ReplicaId(u8::try_from(id).unwrap()));
            cluster.seats.push(seat);
        }
        cluster
    }

    /// Creates several replicas that have heard each other.
    fn settled(replicas: usize, limit: u32) -> Self {
        let mut cluster = Self::new(replicas, limit);
        cluster.exchanges(4);
        cluster
    }

    fn seat(&mut self, id: ReplicaId) -> Seat {
        self.sessions += 1;
        Seat {
            id,
            book: ShareLedger::new(id, SessionId(self.sessions)),
            running: 0,
            waiting: 0,
            started: 0,
            is_down: false,
        }
    }

    fn pass(&mut self, at: usize) {
        let others = self.seats.iter().map(|it| it.id);
        let expected: Vec<ReplicaId> = others.filter(|id| *id != self.seats[at].id).collect();
        let seat = &mut self.seats[at];
        seat.book.advance_time(self.now_ms, &expected);
        seat.book.set_limit(BACKEND, Some(self.limit));
        self.turn(at);
    }

    /// Lets the replica `at` react, as replicas do whenever something has changed.
    fn turn(&mut self, at: usize) {
        let seat = &mut self.seats[at];
        let demand = Demand {
            running: seat.running,
            waiting: seat.waiting,
            ..Demand::default()
        };
        seat.book.set_demand(BACKEND, demand, seat.started);
        for (to, places) in seat.book.plan(BACKEND, false).gifts {
            let left = seat.book.share(BACKEND).unwrap_or(0) - i64::from(places);
            if left >= i64::from(seat.running) {
                seat.book.give(BACKEND, to, places);
            }
        }
        self.start_waiting(at);
    }

    fn allowed(&self, at: usize) -> u32 {
        self.seats[at].book.allowed(BACKEND).unwrap_or(0)
    }

    fn start_waiting(&mut self, at: usize) {
        let allowed = self.allowed(at);
        let seat = &mut self.seats[at];
        while seat.waiting > 0 && seat.running < allowed {
            seat.waiting -= 1;
            seat.running += 1;
            seat.started += 1;
        }
    }

    fn arrive(&mut self, at: usize, requests: u32) {
        if !self.seats[at].is_down {
            self.seats[at].waiting += requests;
            self.turn(at);
        }
    }

    fn end(&mut self, at: usize) {
        if !self.seats[at].is_down && self.seats[at].running > 0 {
            self.seats[at].running -= 1;
            self.turn(at);
        }
    }

    fn tell(&mut self, at: usize) {
        if self.seats[at].is_down {
            return;
        }
        let report = self.seats[at].book.report();
        for to in (0..self.seats.len()).filter(|to| *to != at) {
            if !self.cut.contains(&(at.min(to), at.max(to))) {
                self.on_the_way.push((at, to, report.clone()));
            }
        }
    }

    fn deliver(&mut self, which: usize) {
        let (from, to, report) = self.on_the_way[which].clone();
        if !self.seats[to].is_down {
            let from = self.seats[from].id;
            self.seats[to].book.record_report(from, report);
            self.turn(to);
        }
    }

    /// Exchanges reports between all replicas, without faults.
    fn exchange(&mut self) {
        self.now_ms += STEP_MS;
        for at in 0..self.seats.len() {
            if !self.seats[at].is_down {
                self.pass(at);
            }
            self.tell(at);
        }
        while !self.on_the_way.is_empty() {
            self.deliver(0);
            self.on_the_way.remove(0);
        }
    }

    fn exchanges(&mut self, count: u64) {
        for _ in 0..count {
            self.exchange();
        }
    }

    /// Runs long enough for everything to be noticed.
    fn settle(&mut self) {
        self.exchanges(5 * SILENT_MS / STEP_MS / 2);
    }

    fn running(&self) -> u32 {
        self.seats.iter().map(|it| it.running).sum()
    }

    /// Returns the sum of the requests that replicas may run, by epoch.
    fn allowed_by_epoch(&self) -> BTreeMap<u64, u64> {
        let mut sums = BTreeMap::new();
        for (at, seat) in self.seats.iter().enumerate().filter(|(_, it)| !it.is_down) {
            *sums.entry(seat.book.epoch().0).or_default() += u64::from(self.allowed(at));
        }
        sums
    }

    fn shares(&self) -> Vec<i64> {
        let share = |it: &Seat| it.book.share(BACKEND).unwrap_or(0);
        self.seats.iter().map(share).collect()
    }
}

#[test]
fn shares_add_up_to_the_limit() {
    for (replicas, limit) in [(1, 6), (2, 6), (3, 6), (3, 1), (5, 3), (7, 100), (3, 0)] {
        let cluster = Cluster::settled(replicas, limit);
        assert_eq!(cluster.shares().iter().sum::<i64>(), i64::from(limit));
        assert!(cluster.shares().iter().all(|it| *it >= 0));
    }
}

#[test]
fn a_starting_replica_uses_no_places_until_it_hears_peers() {
    let mut cluster = Cluster::new(3, 6);
    for at in 0..3 {
        cluster.pass(at);
        cluster.arrive(at, 9);
    }
    assert_eq!(cluster.running(), 0);
    cluster.exchanges(3);
    assert_eq!(cluster.running(), 6);
    let mut alone = Cluster::new(1, 6);
    alone.pass(0);
    alone.arrive(0, 9);
    assert_eq!(
        alone.running(),
        6,
        "with nobody else there is none to wait for"
    );
}

#[test]
fn a_single_busy_replica_gets_all_places() {
    let mut cluster = Cluster::settled(3, 6);
    cluster.arrive(1, 20);
    assert_eq!(cluster.running(), 2);
    cluster.exchanges(2);
    assert_eq!(cluster.seats[1].running, 6);
    // Its places go where they are needed next, although its own requests still wait.
    cluster.arrive(2, 1);
    cluster.exchange();
    cluster.end(1);
    cluster.exchanges(2);
    assert_eq!((cluster.seats[1].running, cluster.seats[2].running), (5, 1));
}

#[test]
fn a_single_place_rotates_among_replicas() {
    let mut cluster = Cluster::settled(3, 1);
    let mut served = [0; 3];
    for at in 0..3 {
        cluster.arrive(at, 50);
    }
    for _ in 0..60 {
        cluster.exchange();
        assert!(cluster.running() <= 1);
        if let Some(at) = (0..3).find(|at| cluster.seats[*at].running > 0) {
            served[at] += 1;
            // The replica that was served now has the shortest wait.
            cluster.end(at);
        }
    }
    assert!(served.iter().sum::<u32>() >= 30, "{served:?}");
}

#[test]
fn the_share_of_a_silent_replica_moves_away_and_back() {
    let mut cluster = Cluster::settled(3, 6);
    cluster.arrive(0, 1000);
    cluster.seats[2].is_down = true;
    cluster.settle();
    assert_eq!(cluster.seats[0].running, 6);
    cluster.seats[2].is_down = false;
    // It has not noticed, and may still use its former share.
    assert!(cluster.allowed(2) <= 2);
    for _ in 0..100 {
        cluster.exchange();
        cluster.arrive(2, 1);
        cluster.end(0);
        cluster.end(2);
        assert!(cluster.running() <= 6 + 2, "{}", cluster.running());
    }
    cluster.settle();
    assert_eq!(cluster.shares().iter().sum::<i64>(), 6);
    assert_eq!(cluster.running(), 6);
}

#[test]
fn each_side_of_a_partition_holds_the_limit() {
    let mut cluster = Cluster::settled(3, 6);
    cluster.cut = BTreeSet::from([(0, 2), (1, 2)]);
    cluster.settle();
    let sums: Vec<u64> = cluster.allowed_by_epoch().into_values().collect();
    assert_eq!(sums, [6, 6]);
    cluster.arrive(0, 100);
    cluster.arrive(2, 100);
    cluster.settle();
    assert_eq!(cluster.running(), 12);
    cluster.cut.clear();
    cluster.settle();
    // Running requests continue; none starts before the total is below the limit again.
    for _ in 0..6 {
        assert!(cluster.running() > 6);
        cluster.end(0);
        cluster.exchange();
    }
    for _ in 0..50 {
        cluster.end(0);
        cluster.end(2);
        cluster.exchange();
        assert!(cluster.running() <= 6, "{}", cluster.running());
    }
    assert!(cluster.running() >= 4);
}

#[test]
fn members_connected_through_a_third_share_an_epoch() {
    let mut cluster = Cluster::settled(3, 6);
    cluster.cut = BTreeSet::from([(0, 2)]);
    cluster.settle();
    assert_eq!(cluster.allowed_by_epoch().into_values().sum::<u64>(), 6);
    assert_eq!(cluster.allowed_by_epoch().len(), 1);
}

#[test]
fn a_paused_replica_does_not_consider_its_peers_silent() {
    let mut cluster = Cluster::settled(2, 6);
    let before = cluster.allowed(0);
    cluster.now_ms += 100 * SILENT_MS;
    cluster.pass(0);
    assert_eq!(cluster.allowed(0), before);
}

#[test]
fn a_lowered_limit_is_reached_as_requests_end() {
    let mut cluster = Cluster::settled(3, 9);
    for at in 0..3 {
        cluster.arrive(at, 50);
    }
    cluster.exchange();
    assert_eq!(cluster.running(), 9);
    cluster.limit = 3;
    cluster.exchange();
    for turn in 0..30 {
        let before = cluster.running();
        cluster.end(turn % 3);
        cluster.exchange();
        assert!(cluster.running() <= 3.max(before - 1), "turn {turn}");
    }
    assert_eq!(cluster.running(), 3);
    cluster.limit = 12;
    cluster.exchanges(2);
    assert_eq!(cluster.running(), 12);
}

#[test]
fn places_handed_over_before_a_lower_limit_are_offset_first() {
    let mut cluster = Cluster::settled(4, 3);
    (0..3).for_each(|at| cluster.arrive(at, 1));
    cluster.exchanges(2);
    // The last one's place went to the first, which had none.
    assert_eq!((cluster.shares(), cluster.running()), (vec![1, 1, 1, 0], 3));
    for seat in &mut cluster.seats {
        seat.book.set_limit(BACKEND, Some(2));
    }
    assert_eq!(cluster.shares(), [1, 1, 1, -1]);
    let allowed: Vec<u32> = (0..4).map(|at| cluster.allowed(at)).collect();
    assert_eq!(allowed, [0, 1, 1, 0]);
    cluster.limit = 2;
    cluster.end(0);
    cluster.exchange();
    assert_eq!(cluster.shares(), [0, 1, 1, 0]);
}

#[test]
fn a_restarted_replica_gives_no_place_away_twice() {
    let mut cluster = Cluster::settled(3, 6);
    cluster.arrive(0, 100);
    cluster.exchanges(2);
    assert_eq!(cluster.seats[0].running, 6);
    let id = cluster.seats[1].id;
    cluster.seats[1] = cluster.seat(id);
    cluster.pass(1);
    cluster.arrive(1, 100);
    for _ in 0..100 {
        cluster.exchange();
        cluster.end(0);
        cluster.end(1);
        assert!(cluster.running() <= 6, "{}", cluster.running());
    }
}

/// Step of a random run.
#[derive(Debug, Clone)]
enum Step {
    Arrive(usize, u32),
    End(usize),
    Pass(usize),
    Tell(usize),
    /// Delivers the message at this position of those in transit.
    Deliver(usize),
    Repeat(usize),
    Lose(usize),
    Time,
    Limit(u32),
    Cut(usize, usize),
    Heal,
    Restart(usize),
}

fn any_step(is_steady: bool) -> impl Strategy<Value = Step> {
    let seat = 0..4_usize;
    let steady = prop_oneof![
        4 => (seat.clone(), 1..6_u32).prop_map(|(at, requests)| Step::Arrive(at, requests)),
        6 => seat.clone().prop_map(Step::End),
        4 => seat.clone().prop_map(Step::Pass),
        6 => seat.clone().prop_map(Step::Tell),
        12 => any::<usize>().prop_map(Step::Deliver),
        2 => any::<usize>().prop_map(Step::Repeat),
        3 => any::<usize>().prop_map(Step::Lose),
    ];
    if is_steady {
        return steady.boxed();
    }
    prop_oneof![
        30 => steady,
        6 => Just(Step::Time),
        1 => (0..20_u32).prop_map(Step::Limit),
        1 => (seat.clone(), seat.clone()).prop_map(|(a, b)| Step::Cut(a.min(b), a.max(b))),
        1 => Just(Step::Heal),
        1 => seat.prop_map(Step::Restart),
    ]
    .boxed()
}

impl Cluster {
    fn step(&mut self, step: &Step) {
        let len = self.seats.len();
        let any = |at: usize, of: usize| (of > 0).then(|| at % of);
        match *step {
            Step::Arrive(at, requests) => self.arrive(at % len, requests),
            Step::End(at) => self.end(at % len),
            Step::Pass(at) => self.pass(at % len),
            Step::Tell(at) => self.tell(at % len),
            Step::Deliver(at) => {
                if let Some(at) = any(at, self.on_the_way.len()) {
                    self.deliver(at);
                    self.on_the_way.remove(at);
                }
            }
            Step::Repeat(at) => {
                if let Some(at) = any(at, self.on_the_way.len()) {
                    self.deliver(at);
                }
            }
            Step::Lose(at) => {
                if let Some(at) = any(at, self.on_the_way.len()) {
                    self.on_the_way.remove(at);
                }
            }
            Step::Time => self.now_ms += STEP_MS,
            Step::Limit(limit) => self.limit = limit,
            Step::Cut(a, b) => {
                self.cut.insert((a % len, b % len));
            }
            Step::Heal => self.cut.clear(),
            Step::Restart(at) => {
                let id = self.seats[at % len].id;
                self.seats[at % len] = self.seat(id);
                // Its connections are gone, with the messages on them.
                self.on_the_way.retain(|(from, ..)| *from != at % len);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn steady_members_never_exceed_the_limit(
        replicas in 1..5_usize,
        limit in 0..12_u32,
        steps in proptest::collection::vec(any_step(true), 0..300),
    ) {
        let mut cluster = Cluster::settled(replicas, limit);
        for step in &steps {
            cluster.step(step);
            prop_assert!(cluster.running() <= limit);
            prop_assert!(cluster.shares().iter().sum::<i64>() <= i64::from(limit));
            prop_assert!(cluster.shares().iter().all(|it| *it >= 0));
        }
        // All transfers arrive in the end, and no request waits while a place is free.
        cluster.exchanges(10);
        prop_assert_eq!(cluster.shares().iter().sum::<i64>(), i64::from(limit));
        let waiting: u32 = cluster.seats.iter().map(|it| it.waiting).sum();
        prop_assert!(waiting == 0 || cluster.running() == limit);
    }

    #[test]
    fn an_epoch_never_has_more_places_than_the_limit(
        replicas in 1..5_usize,
        limit in 0..12_u32,
        steps in proptest::collection::vec(any_step(false), 0..500),
    ) {
        let mut cluster = Cluster::settled(replicas, limit);
        let mut limits = BTreeSet::from([limit]);
        for step in &steps {
            cluster.step(step);
            limits.insert(cluster.limit);
            let most = limits.last().copied().unwrap_or(0);
            for (_, sum) in cluster.allowed_by_epoch() {
                prop_assert!(sum <= u64::from(most), "{} of {} in an epoch", sum, most);
            }
        }
        // After any history, requests end.
        cluster.cut.clear();
        cluster.settle();
        prop_assert_eq!(cluster.shares().iter().sum::<i64>(), i64::from(cluster.limit));
        prop_assert_eq!(cluster.allowed_by_epoch().len(), 1);
        for _ in 0..100 {
            let before = cluster.running();
            (0..replicas).for_each(|at| cluster.end(at));
            cluster.exchange();
            prop_assert!(cluster.running() <= cluster.limit.max(before));
        }
        prop_assert!(cluster.running() <= cluster.limit);
    }

    #[test]
    fn allowed_places_never_exceed_a_lowered_limit(
        replicas in 2..5_usize,
        limit in 1..12_u32,
        lower in 0..12_u32,
        steps in proptest::collection::vec(any_step(true), 0..200),
        more in proptest::collection::vec(any_step(true), 0..200),
    ) {
        let mut cluster = Cluster::settled(replicas, limit);
        steps.iter().for_each(|step| cluster.step(step));
        cluster.limit = lower.min(limit);
        (0..replicas).for_each(|at| cluster.pass(at));
        for step in &more {
            for (_, sum) in cluster.allowed_by_epoch() {
                prop_assert!(sum <= u64::from(cluster.limit), "{} of {}", sum, cluster.limit);
            }
            cluster.step(step);
        }
        // Missing places return, and every waiting replica gets one.
        for _ in 0..4 * limit {
            (0..replicas).for_each(|at| cluster.seats[at].waiting = limit);
            (0..replicas).for_each(|at| cluster.end(at));
            cluster.exchange();
        }
        cluster.exchanges(10);
        prop_assert_eq!(cluster.running(), cluster.limit);
    }

    #[test]
    fn membership_changes_create_no_places(
        replicas in 2..5_usize,
        limit in 1..12_u32,
        steps in proptest::collection::vec(any_step(true), 0..100),
        restarted in 0..4_usize,
        more in proptest::collection::vec(any_step(true), 0..200),
    ) {
        let mut cluster = Cluster::settled(replicas, limit);
        steps.iter().for_each(|step| cluster.step(step));
        let restarted = restarted % replicas;
        // What the previous run had in progress ended with it.
        cluster.step(&Step::Restart(restarted));
        for step in &more {
            cluster.step(step);
            prop_assert!(cluster.running() <= limit, "{} of {}", cluster.running(), limit);
        }
    }
}
