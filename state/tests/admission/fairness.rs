//! The gate: users who always wait are served equally, regardless of where they wait.

use state::admission::{
    AdmissionSettings, Advance, Backlog, DispatchVerdict, Gate, Next, Order, Pricing, Queue,
    QueueSettings, QueuedRequest, TokenDelta, bound, slack_tokens,
};
use state::command::{Charge, Command, UserSpec};
use state::ids::{ReplicaId, Ticket, UserKey};

use crate::cluster::{Cluster, Numbers};
use crate::common;

/// Number of requests that the engines run at once.
const PLACES: usize = 16;
/// Time in which an engine generates one token of a request.
const TOKEN_MS: u64 = 2;
/// Number of output tokens charged together.
const STEP_TOKENS: u64 = 32;
/// Interval at which backlogs are reported, and delay of their arrival.
const TELL_MS: u64 = 20;
/// Number of requests that each user has waiting at each of their replicas.
const DEPTH: usize = 3;
const INPUT_MAX: u64 = 300;
const OUTPUT_MAX: u64 = 80;
/// Price of the largest request.
const LARGEST: u64 = INPUT_MAX + 2 * OUTPUT_MAX;

struct User {
    key: UserKey,
    weight: u64,
    /// Replicas that receive the user's requests, by position in the cluster.
    replicas: Vec<usize>,
    is_active: bool,
    /// Priced tokens.
    served: u64,
}

struct Running {
    user: usize,
    replica: usize,
    advance: Advance,
    output_left: u64,
    uncharged: u64,
}

struct Simulation {
    cluster: Cluster,
    queues: Vec<Queue>,
    gates: Vec<Gate>,
    users: Vec<User>,
    running: Vec<Running>,
    /// Time, receiving replica, sending replica, report.
    told: Vec<(u64, usize, usize, Option<Backlog>)>,
    numbers: Numbers,
    next_ticket: u64,
    /// Users whose requests fit nowhere.
    stuck: Vec<usize>,
    silent: Vec<usize>,
    dispatched: u64,
    /// Largest part of a user's service that a replica did not know about, divided by the weight.
    uncharged_most: u64,
    /// For each pair of users, minimum and maximum of the difference in service.
    spans: Vec<(i64, i64)>,
}

fn weights(users: usize) -> Vec<u64> {
    (0..users as u64).map(|user| user % 4 + 1).collect()
}

impl Simulation {
    /// Creates a simulation in which user `i` has weight `i % 4 + 1` and sends to the replicas in
    /// `homes[i]`.
    fn new(homes: &[&[usize]], order: Order, slack: u64) -> Self {
        let name = |user: usize| format!("user-{user}");
        let weights = weights(homes.len());
        let mut commands = vec![common::init()];
        for (user, weight) in weights.iter().enumerate() {
            commands.push(Command::PutUser(UserSpec {
                name: name(user),
                weight_milli: 1000 * *weight as u32,
            }));
        }
        let cluster = Cluster::new(&[15, 30, 45], commands);
        let settings = AdmissionSettings {
            order,
            // Every request must be served in the end.
            wait_ms_max: u32::MAX,
            ..AdmissionSettings::default()
        };
        let rules = QueueSettings::of(&settings, Pricing::default());
        let mut gate = Gate::default();
        gate.set_slack(slack);
        let users = homes.iter().zip(weights).enumerate();
        let users = users.map(|(user, (homes, weight))| User {
            key: state::prefix::user_key(common::HASH_SEED, &name(user)),
            weight,
            replicas: homes.to_vec(),
            is_active: true,
            served: 0,
        });
        Self {
            cluster,
            queues: vec![Queue::new(rules); 3],
            gates: vec![gate; 3],
            users: users.collect(),
            running: Vec::new(),
            told: Vec::new(),
            numbers: Numbers::new(7),
            next_ticket: 0,
            stuck: Vec::new(),
            silent: Vec::new(),
            dispatched: 0,
            uncharged_most: 0,
            spans: vec![(i64::MAX, i64::MIN); homes.len() * homes.len()],
        }
    }

    fn run(&mut self, seconds: u64) {
        for _ in 0..seconds * 1000 {
            self.cluster.tick();
            self.come();
            self.generate();
            self.exchange();
            self.dispatch();
            self.measure();
        }
    }

    /// Resets the measurements.
    fn measure_anew(&mut self) {
        self.spans.fill((i64::MAX, i64::MIN));
        self.dispatched = 0;
        for user in &mut self.users {
            user.served = 0;
        }
        // Compares what replicas know with what they knew then.
        self.uncharged_most = u64::MAX;
    }

    fn come(&mut self) {
        for at in 0..self.users.len() {
            for replica in self.users[at].replicas.clone() {
                let user = self.users[at].key;
                if !self.users[at].is_active {
                    continue;
                }
                while self.queues[replica].len_of(user) < DEPTH {
                    self.push(user, replica);
                }
            }
        }
    }

    fn push(&mut self, user: UserKey, at: usize) {
        self.next_ticket += 1;
        let waiting = QueuedRequest {
            ticket: Ticket(self.next_ticket),
            user,
            priority: 0,
            arrived_ms: self.cluster.now_ms,
            input_tokens: 20 + self.numbers.below(INPUT_MAX - 20) as u32,
            predicted_output: 1 + self.numbers.below(OUTPUT_MAX) as u32,
            bin: 0,
            matched_blocks: self.numbers.below(30) as u32,
            due_ms: None,
            is_selective: false,
        };
        let now_ms = self.cluster.now_ms;
        let pricing = self.cluster.pricing;
        let replica = &mut self.cluster.replicas[at];
        let figures = |user: UserKey| replica.figures(user);
        self.queues[at]
            .push(waiting, now_ms, &figures, &self.gates[at])
            .expect("the queue has room");
        let queued = Charge {
            user,
            queued: 1,
            ..Charge::default()
        };
        replica.charge(&queued, &pricing);
    }

    fn generate(&mut self) {
        if !self.cluster.now_ms.is_multiple_of(TOKEN_MS) {
            return;
        }
        let pricing = self.cluster.pricing;
        let (users, replicas) = (&mut self.users, &mut self.cluster.replicas);
        self.running.retain_mut(|it| {
            users[it.user].served += pricing.output(1);
            it.output_left -= 1;
            it.uncharged += 1;
            let is_over = it.output_left == 0;
            if is_over || it.uncharged == STEP_TOKENS {
                let replica = &mut replicas[it.replica];
                let used = TokenDelta {
                    output: std::mem::take(&mut it.uncharged),
                    ..TokenDelta::default()
                };
                let user = users[it.user].key;
                let mut charge = replica
                    .ledger
                    .settle(user, &mut it.advance, &used, &pricing);
                if is_over {
                    charge.ended = 1;
                    replica.ledger.close(user, it.advance);
                }
                replica.charge(&charge, &pricing);
            }
            !is_over
        });
    }

    fn exchange(&mut self) {
        let now_ms = self.cluster.now_ms;
        if now_ms.is_multiple_of(TELL_MS) {
            for from in 0..3 {
                let replica = &self.cluster.replicas[from];
                let figures = |user: UserKey| replica.figures(user);
                let backlog = self.queues[from].backlog(now_ms, &figures);
                if self.silent.contains(&from) {
                    continue;
                }
                let others = (0..3).filter(|to| *to != from);
                self.told
                    .extend(others.map(|to| (now_ms + TELL_MS, to, from, backlog)));
            }
        }
        let gates = &mut self.gates;
        self.told.retain(|(at_ms, to, from, backlog)| {
            let is_due = *at_ms <= now_ms;
            if is_due {
                gates[*to].record_report(ReplicaId(*from as u8 + 1), *backlog, now_ms);
            }
            !is_due
        });
    }

    /// Gives every free place to the first replica with a request for it, starting at any.
    fn dispatch(&mut self) {
        while self.running.len() < PLACES {
            let first = self.numbers.below(3) as usize;
            let went = (0..3).any(|step| self.dispatch_at((first + step) % 3));
            if !went {
                return;
            }
        }
    }

    fn dispatch_at(&mut self, at: usize) -> bool {
        let (now_ms, pricing) = (self.cluster.now_ms, self.cluster.pricing);
        let replica = &mut self.cluster.replicas[at];
        let stuck: Vec<UserKey> = self.stuck.iter().map(|it| self.users[*it].key).collect();
        let verdict = |waiting: &QueuedRequest| {
            if stuck.contains(&waiting.user) {
                DispatchVerdict::Skip
            } else {
                DispatchVerdict::Go
            }
        };
        let figures = |user: UserKey| replica.figures(user);
        let next = self.queues[at].next(now_ms, &figures, &mut self.gates[at], verdict);
        let Next::Go(waiting) = next else {
            return false;
        };
        let users = self.users.iter().position(|it| it.key == waiting.user);
        let user = users.expect("only these wait");
        let input = u64::from(waiting.input_tokens);
        let estimate = TokenDelta {
            input_uncached: input,
            ..TokenDelta::default()
        };
        let (mut advance, mut charge) = replica.ledger.open(waiting.user, &estimate, &pricing);
        let settled = replica
            .ledger
            .settle(waiting.user, &mut advance, &estimate, &pricing);
        charge.add(&settled);
        (charge.started, charge.dequeued) = (1, 1);
        replica.charge(&charge, &pricing);
        self.users[user].served += pricing.input(input, 0);
        self.running.push(Running {
            user,
            replica: at,
            advance,
            output_left: u64::from(waiting.predicted_output),
            uncharged: 0,
        });
        self.dispatched += 1;
        true
    }

    fn measure(&mut self) {
        let normal = |user: &User| (user.served / user.weight) as i64;
        let count = self.users.len();
        for a in 0..count {
            for b in 0..a {
                if self.users[a].is_active && self.users[b].is_active {
                    let difference = normal(&self.users[a]) - normal(&self.users[b]);
                    let (least, most) = &mut self.spans[a * count + b];
                    *least = difference.min(*least);
                    *most = difference.max(*most);
                }
            }
        }
        if self.uncharged_most == u64::MAX {
            return;
        }
        for user in &self.users {
            for replica in &self.cluster.replicas {
                let known = replica.figures(user.key).served_milli / 1000;
                let unknown = (user.served / user.weight).saturating_sub(known);
                self.uncharged_most = self.uncharged_most.max(unknown);
            }
        }
    }

    /// Returns the largest difference in service of two always waiting users over any interval.
    fn gap(&self) -> u64 {
        let spans = self.spans.iter().filter(|(least, most)| least <= most);
        spans
            .map(|(least, most)| (most - least) as u64)
            .max()
            .unwrap_or(0)
    }

    fn normal(&self) -> Vec<u64> {
        let normal = |user: &User| user.served / user.weight;
        self.users.iter().map(normal).collect()
    }
}

/// Returns `G` for eight users, for reports that are 65 ms late and for 16 places that each
/// generate a token per 2 ms.
fn slack() -> u64 {
    let rate = PLACES as u64 * 1000 / TOKEN_MS * 2;
    slack_tokens(LARGEST, rate, 65, 8)
}

const SPREAD: [&[usize]; 8] = [&[0, 1, 2]; 8];
/// One replica has five users, one has two, and one has one.
const PINNED: [&[usize]; 8] = [&[0], &[0], &[1], &[0], &[0], &[1], &[0], &[2]];

#[test]
fn waiting_users_are_served_by_weight_at_any_replica() {
    for (homes, order) in [
        (SPREAD, Order::Vtc),
        (PINNED, Order::Vtc),
        (PINNED, Order::VtcMaxFair),
        (PINNED, Order::Dlpm),
    ] {
        let mut simulation = Simulation::new(&homes, order, slack());
        simulation.run(12);
        let bound = bound(LARGEST, simulation.uncharged_most, slack());
        let gap = simulation.gap();
        assert!(gap <= bound, "{order:?}: {gap} of {bound}");
        let normal = simulation.normal();
        let (least, most) = (normal.iter().min().unwrap(), normal.iter().max().unwrap());
        assert!(*least * 100 >= *most * 80, "{order:?}: {normal:?}");
        assert!(
            simulation.uncharged_most < 6 * LARGEST,
            "{}",
            simulation.uncharged_most
        );
    }
}

#[test]
fn without_the_gate_a_user_alone_at_a_replica_gets_more() {
    let mut simulation = Simulation::new(&PINNED, Order::Vtc, u64::MAX);
    simulation.run(12);
    let bound = bound(LARGEST, simulation.uncharged_most, slack());
    assert!(simulation.gap() > 2 * bound, "{}", simulation.gap());
}

#[test]
fn the_gate_costs_no_throughput() {
    let dispatched = |order, slack| {
        let mut simulation = Simulation::new(&PINNED, order, slack);
        simulation.run(6);
        simulation.dispatched
    };
    let free = dispatched(Order::Fcfs, u64::MAX);
    let gated = dispatched(Order::Vtc, slack());
    assert!(gated * 100 >= free * 95, "{gated} of {free}");
}

#[test]
fn a_returning_user_gets_its_share_and_no_more() {
    let mut simulation = Simulation::new(&PINNED, Order::Vtc, slack());
    simulation.users[7].is_active = false;
    simulation.users[2].is_active = false;
    simulation.run(6);
    let uncharged = simulation.uncharged_most;
    simulation.users[7].is_active = true;
    simulation.users[2].is_active = true;
    simulation.measure_anew();
    simulation.run(6);
    let bound = bound(LARGEST, uncharged.max(LARGEST), slack());
    let normal = simulation.normal();
    for back in [2, 7] {
        for other in [0, 1, 3, 4, 5, 6] {
            let difference = normal[back].abs_diff(normal[other]);
            assert!(
                difference <= bound,
                "{back} and {other}: {normal:?}, {bound}"
            );
        }
    }
}

#[test]
fn stuck_and_silent_users_block_no_other_user() {
    let free = {
        let mut simulation = Simulation::new(&PINNED, Order::Vtc, slack());
        simulation.run(6);
        simulation.dispatched
    };
    // User 7 waits alone at a replica, for engines that others do not use.
    let mut simulation = Simulation::new(&PINNED, Order::Vtc, slack());
    simulation.stuck = vec![7];
    simulation.run(6);
    assert!(
        simulation.dispatched * 100 >= free * 75,
        "{}",
        simulation.dispatched
    );
    assert_eq!(simulation.users[7].served, 0);
    // A replica goes silent after its last report.
    let mut simulation = Simulation::new(&PINNED, Order::Vtc, slack());
    simulation.run(1);
    simulation.silent = vec![0];
    simulation.stuck = vec![0, 1, 3, 4, 6];
    simulation.dispatched = 0;
    simulation.run(5);
    assert!(
        simulation.dispatched * 100 >= free * 5 / 6 * 75,
        "{}",
        simulation.dispatched
    );
}
