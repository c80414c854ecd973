//! Tests a modelled cluster of holders and issuers under every kind of delivery.

use proptest::prelude::*;

use super::{ClaimAnswer, ClaimMessage, PermitHolder, PermitIssuer, PermitSubject, issuer_of};
use crate::ids::{AgentSessionKey, ReplicaId, UserKey};
use crate::shares::{Epoch, EpochMembers, SILENT_MS};

const REPLICAS: usize = 3;
const LIMIT: u32 = 2;
const USERS: [PermitSubject; 2] = [
    PermitSubject {
        user: UserKey(11),
        tree: None,
    },
    PermitSubject {
        user: UserKey(11),
        tree: Some(AgentSessionKey(12)),
    },
];

/// One replica of a modelled cluster.
#[derive(Default)]
struct Seat {
    holder: PermitHolder,
    issuer: PermitIssuer,
    epoch: u64,
    awake_ms: u64,
    /// Number of requests of each user that run and that wait.
    running: [u32; 2],
    waiting: [u32; 2],
}

/// A message in transit: a claim, or the answer to one.
#[derive(Clone)]
enum Flight {
    Claim(usize, usize, ClaimMessage),
    Answer(usize, usize, u64, Option<ClaimAnswer>),
}

struct Cluster {
    seats: Vec<Seat>,
    flights: Vec<Flight>,
}

fn replica(at: usize) -> ReplicaId {
    ReplicaId(u8::try_from(at + 1).unwrap())
}

impl Cluster {
    fn new() -> Self {
        let seats = (0..REPLICAS).map(|_| Seat::default()).collect();
        let mut cluster = Self {
            seats,
            flights: Vec::new(),
        };
        (0..REPLICAS).for_each(|at| cluster.enter(at, 1));
        cluster
    }

    fn enter(&mut self, at: usize, epoch: u64) {
        let seat = &mut self.seats[at];
        seat.epoch = seat.epoch.max(epoch);
        let now = EpochMembers {
            epoch: Epoch(seat.epoch),
            members: (0..REPLICAS).map(replica).collect(),
            is_settled: true,
            awake_ms: seat.awake_ms,
        };
        seat.holder.follow(&now);
        seat.issuer.follow(&now);
    }

    fn begin(&mut self, at: usize, user: usize) {
        let seat = &mut self.seats[at];
        if seat.holder.take(USERS[user]) {
            seat.running[user] += 1;
        } else {
            seat.holder.begin_wait(USERS[user]);
            seat.waiting[user] += 1;
        }
    }

    fn end(&mut self, at: usize, user: usize) {
        let seat = &mut self.seats[at];
        if seat.running[user] > 0 {
            seat.running[user] -= 1;
            seat.holder.put_back(USERS[user]);
        }
    }

    fn give_up(&mut self, at: usize, user: usize) {
        let seat = &mut self.seats[at];
        if seat.waiting[user] > 0 {
            seat.waiting[user] -= 1;
            seat.holder.end_wait(USERS[user]);
        }
    }

    fn send(&mut self, from: usize) {
        self.seats[from].holder.ask_again(|_| true);
        for to in 0..REPLICAS {
            if let Some(message) = self.seats[from].holder.message(replica(to)) {
                self.flights.push(Flight::Claim(from, to, message));
            }
        }
    }

    /// Delivers the flight at `nth`, or loses it: its sender then hears that there is no answer.
    fn deliver(&mut self, nth: usize, is_lost: bool) {
        match self.flights.remove(nth) {
            Flight::Claim(from, to, message) if is_lost => {
                // The claim may also be late: it arrives after the sender has given it up.
                let number = message.number;
                self.flights.push(Flight::Claim(from, to, message));
                self.answered(from, to, number, None);
            }
            Flight::Claim(from, to, message) => {
                let limit = |_| Some(LIMIT);
                let answer = self.seats[to].issuer.answer(replica(from), &message, limit);
                let answer = Flight::Answer(to, from, message.number, Some(answer));
                self.flights.push(answer);
            }
            Flight::Answer(from, to, number, answer) => {
                let answer = answer.filter(|_| !is_lost);
                self.answered(to, from, number, answer.as_ref());
            }
        }
    }

    fn answered(&mut self, at: usize, issuer: usize, number: u64, answer: Option<&ClaimAnswer>) {
        let seat = &mut self.seats[at];
        seat.holder.answered(replica(issuer), number, answer);
        for (nth, user) in USERS.into_iter().enumerate() {
            while seat.waiting[nth] > 0 && seat.holder.take(user) {
                seat.holder.end_wait(user);
                seat.waiting[nth] -= 1;
                seat.running[nth] += 1;
            }
        }
    }

    fn running(&self, user: usize) -> u32 {
        self.seats.iter().map(|seat| seat.running[user]).sum()
    }

    /// Delivers everything a few times.
    fn exchange(&mut self) {
        for _ in 0..4 {
            (0..REPLICAS).for_each(|at| self.send(at));
            while !self.flights.is_empty() {
                self.deliver(0, false);
            }
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Begin(usize, usize),
    End(usize, usize),
    GiveUp(usize, usize),
    Send(usize),
    Deliver(prop::sample::Index, bool),
    /// A replica enters the next epoch, or the newest one.
    Enter(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let at = || 0..REPLICAS;
    let step = prop_oneof![
        4 => (at(), 0..2_usize).prop_map(|(at, user)| Step::Begin(at, user)),
        3 => (at(), 0..2_usize).prop_map(|(at, user)| Step::End(at, user)),
        1 => (at(), 0..2_usize).prop_map(|(at, user)| Step::GiveUp(at, user)),
        6 => at().prop_map(Step::Send),
        8 => (any::<prop::sample::Index>(), prop::bool::weighted(0.2))
            .prop_map(|(nth, is_lost)| Step::Deliver(nth, is_lost)),
        1 => at().prop_map(Step::Enter),
    ];
    prop::collection::vec(step, 1..200)
}

proptest! {
    #[test]
    fn a_user_never_has_more_permits_than_the_limit(steps in steps()) {
        let mut cluster = Cluster::new();
        for step in steps {
            match step {
                Step::Begin(at, user) => cluster.begin(at, user),
                Step::End(at, user) => cluster.end(at, user),
                Step::GiveUp(at, user) => cluster.give_up(at, user),
                Step::Send(at) => cluster.send(at),
                Step::Deliver(nth, is_lost) if !cluster.flights.is_empty() => {
                    cluster.deliver(nth.index(cluster.flights.len()), is_lost);
                }
                Step::Deliver(..) => {}
                Step::Enter(at) => {
                    let newest = cluster.seats.iter().map(|it| it.epoch).max().unwrap();
                    let epoch = if cluster.seats[at].epoch == newest { newest + 1 } else { newest };
                    cluster.enter(at, epoch);
                }
            }
            for user in 0..2 {
                prop_assert!(cluster.running(user) <= LIMIT, "{step:?}");
            }
        }
        // Once all are in one epoch and messages arrive, whoever waits has what the limit leaves.
        let newest = cluster.seats.iter().map(|it| it.epoch).max().unwrap();
        (0..REPLICAS).for_each(|at| cluster.enter(at, newest));
        for flight in std::mem::take(&mut cluster.flights) {
            match flight {
                Flight::Claim(from, to, message) => cluster.answered(from, to, message.number, None),
                Flight::Answer(from, to, number, answer) => {
                    cluster.answered(to, from, number, answer.as_ref());
                }
            }
        }
        cluster.exchange();
        for user in 0..2 {
            let waiting: u32 = cluster.seats.iter().map(|it| it.waiting[user]).sum();
            let running = cluster.running(user);
            prop_assert!(waiting == 0 || running == LIMIT, "{running} run, {waiting} wait");
        }
        // Nothing is kept for users without requests.
        for at in 0..REPLICAS {
            for user in 0..2 {
                while cluster.seats[at].waiting[user] > 0 {
                    cluster.give_up(at, user);
                }
                while cluster.seats[at].running[user] > 0 {
                    cluster.end(at, user);
                }
            }
        }
        cluster.exchange();
        for seat in &cluster.seats {
            prop_assert!(seat.holder.is_idle() && seat.issuer.is_idle());
        }
    }
}

#[test]
fn a_burst_on_three_replicas_gets_the_limit_and_the_rest_is_refused() {
    let mut cluster = Cluster::new();
    for at in [0, 1, 2, 0, 1, 2] {
        cluster.begin(at, 0);
    }
    cluster.exchange();
    assert_eq!(cluster.running(0), LIMIT);
    for seat in cluster.seats.iter().filter(|it| it.waiting[0] > 0) {
        assert!(seat.holder.is_full(USERS[0]));
    }
    let at = cluster.seats.iter().position(|it| it.running[0] > 0);
    cluster.end(at.unwrap(), 0);
    cluster.exchange();
    assert_eq!(cluster.running(0), LIMIT, "the next one starts");
}

#[test]
fn an_issuer_grants_nothing_before_it_knows_all_members() {
    let mut cluster = Cluster::new();
    let issuer = (0..REPLICAS).find(|at| {
        let now = EpochMembers {
            members: (0..REPLICAS).map(replica).collect(),
            ..EpochMembers::default()
        };
        issuer_of(&now, USERS[0]) == Some(replica(*at))
    });
    let (issuer, other) = (issuer.unwrap(), (issuer.unwrap() + 1) % REPLICAS);
    cluster.seats[other].holder.take_unconfirmed(USERS[0]);
    cluster.begin(issuer, 0);
    cluster.send(issuer);
    while let Some(nth) = cluster
        .flights
        .iter()
        .position(|it| !matches!(it, Flight::Claim(_, to, _) if *to != issuer))
    {
        cluster.deliver(nth, false);
    }
    assert_eq!(cluster.seats[issuer].waiting[0], 1);
    assert!(
        !cluster.seats[issuer].holder.is_full(USERS[0]),
        "nobody knows"
    );
    cluster.seats[issuer].awake_ms += SILENT_MS + 1;
    cluster.enter(issuer, 1);
    cluster.send(issuer);
    cluster.deliver(cluster.flights.len() - 1, false);
    cluster.deliver(cluster.flights.len() - 1, false);
    assert_eq!(cluster.seats[issuer].running[0], 1);
    cluster.exchange();
    cluster.begin(other, 0);
    cluster.exchange();
    assert_eq!(
        cluster.seats[other].waiting[0], 1,
        "its unconfirmed one counts"
    );
}
