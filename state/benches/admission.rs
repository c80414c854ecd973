//! Benchmarks of admission: an empty queue, the next of many requests, and publishing the users.

#![allow(clippy::disallowed_types, reason = "a bench reads the clock")]
#![allow(
    missing_docs,
    reason = "criterion's macros make undocumented functions"
)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BatchSize, Criterion, criterion_group};
use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore, SeedableRng};
use state::RouterState;
use state::admission::{
    AdmissionSettings, DispatchVerdict, Gate, Order, Pricing, Queue, QueueSettings, QueuedRequest,
    UserFigures,
};
use state::command::{Charge, Command, Envelope, Founding, Item, Lane, Origin};
use state::ids::{AttemptId, LogIndex, ReplicaId, SessionId, Ticket, UserKey};
use state::policy::{CostSettings, PolicyConfig};
use state::quotas::PendingUse;

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(2));
    targets = queues, reading
}

fn main() {
    benches();
    println!("\n{:<66} {:>12}", "what", "figure");
    for users in [1_000, 100_000] {
        publishing(users);
    }
}

const ORDERS: [Order; 7] = [
    Order::Vtc,
    Order::VtcMaxFair,
    Order::VtcPred,
    Order::Dlpm,
    Order::Lcf,
    Order::Rpm,
    Order::Fcfs,
];

fn rules(order: Order) -> QueueSettings {
    let settings = AdmissionSettings {
        order,
        max_queue: 100_000,
        ..AdmissionSettings::default()
    };
    QueueSettings::of(&settings, Pricing::default())
}

fn waiting(ticket: u64, users: u64) -> QueuedRequest {
    QueuedRequest {
        ticket: Ticket(ticket),
        user: key(ticket % users),
        tree: None,
        priority: 0,
        arrived_ms: ticket,
        input_tokens: 500,
        predicted_output: 200,
        bin: 0,
        matched_blocks: (mix(ticket) % 64) as u32,
        due_ms: None,
        hold_ms: None,
        is_selective: false,
    }
}

/// Measures 10,000 queued requests of 1000 users: admits one, charges its user, queues another.
fn queues(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("queue");
    for order in ORDERS {
        let mut state = users(1_000);
        let view = state.view();
        let mut gate = Gate::default();
        gate.set_slack(1000);
        let mut queue = Queue::new(rules(order));
        let image = view.users();
        let figures = |user: UserKey| image.figures(user);
        for ticket in 0..10_000 {
            let pushed = queue.push(waiting(ticket, 1_000), 0, &figures, &gate);
            assert!(pushed.is_ok(), "the queue has room");
        }
        let (mut ticket, mut index) = (10_000, state.applied().0);
        let mut now_ms = 0;
        group.bench_function(format!("next of 10,000 ({order:?})"), |bencher| {
            bencher.iter_custom(|rounds| {
                let mut spent = Duration::ZERO;
                for _ in 0..rounds {
                    now_ms += 1;
                    let image = view.users();
                    let figures = |user: UserKey| image.figures(user);
                    let from = Instant::now();
                    let next = queue.next(now_ms, &figures, &mut gate, |_| DispatchVerdict::Go);
                    spent += from.elapsed();
                    let state::admission::Next::Go(gone) = next else {
                        panic!("{next:?}");
                    };
                    index += 1;
                    state.apply(LogIndex(index), batch(index, &[charge(gone.user)]));
                    ticket += 1;
                    let back = QueuedRequest {
                        user: gone.user,
                        ..waiting(ticket, 1_000)
                    };
                    let pushed = queue.push(back, now_ms, &figures, &gate);
                    assert!(pushed.is_ok(), "the queue has room");
                }
                spent
            });
        });
    }
    let mut queue = Queue::new(rules(Order::Vtc));
    let mut gate = Gate::default();
    let nobody = |_: UserKey| UserFigures::default();
    group.bench_function("next of an empty queue", |bencher| {
        bencher.iter(|| queue.next(black_box(1), &nobody, &mut gate, |_| DispatchVerdict::Go));
    });
    group.bench_function("push and remove, 1 waiting", |bencher| {
        bencher.iter_batched(
            || waiting(7, 10),
            |request| {
                let pushed = queue.push(request, 0, &nobody, &gate);
                (pushed, queue.remove(request.ticket))
            },
            BatchSize::SmallInput,
        );
    });
    group.finish();
}

fn reading(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("users");
    let state = users(100_000);
    let view = state.view();
    let mut at = 0;
    group.bench_function("figures of one of 100,000", |bencher| {
        bencher.iter(|| {
            at = (at + 7919) % 100_000;
            view.user_figures(key(at))
        });
    });
    group.bench_function("quota of one of 100,000, and its check", |bencher| {
        bencher.iter(|| {
            at = (at + 7919) % 100_000;
            view.quota(key(at)).check(5, &PendingUse::default())
        });
    });
    group.finish();
}

/// A published state with this many users.
fn users(count: u64) -> RouterState {
    let mut state = RouterState::new();
    let init = Command::from(Founding::of_seed(
        1,
        PolicyConfig::Cost(CostSettings::default()),
    ));
    state.apply(LogIndex(1), envelope(1, init));
    // They wait, so that no charge lifts them.
    let waiting = |user| Charge {
        user: key(user),
        queued: 1,
        ..Charge::default()
    };
    let charges: Vec<Item> = (0..count).map(waiting).map(Item::Charge).collect();
    for (index, charges) in (2..).zip(charges.chunks(500)) {
        state.apply(LogIndex(index), batch(index, charges));
    }
    state
}

/// Measures applying a batch of 20 charges and publishing the users after it.
fn publishing(count: u64) {
    const BATCHES: u64 = 2000;
    const CHARGES: u64 = 20;
    let mut figures = Vec::new();
    for (what, holds) in [
        ("users published", false),
        ("users published, the last image held by a reader", true),
    ] {
        let mut state = RouterState::new();
        let view = state.view();
        let init = Command::from(Founding::of_seed(
            1,
            PolicyConfig::Cost(CostSettings::default()),
        ));
        state.apply(LogIndex(1), envelope(1, init));
        let charges: Vec<Item> = (0..count).map(|user| charge(key(user))).collect();
        let mut index = 1;
        for charges in charges.chunks(500) {
            index += 1;
            state.apply(LogIndex(index), batch(index, charges));
        }
        let mut held = None;
        let mut spent = Duration::ZERO;
        for round in 0..BATCHES {
            let users = (0..CHARGES).map(|at| mix(round * CHARGES + at) % count);
            let charges: Vec<Item> = users.map(|user| charge(key(user))).collect();
            index += 1;
            let batch = batch(index, &charges);
            let from = Instant::now();
            state.apply(LogIndex(index), batch);
            spent += from.elapsed();
            if holds {
                held = Some(view.users());
            }
        }
        drop(held);
        let per_batch = spent.as_secs_f64() * 1e6 / BATCHES as f64;
        figures.push((what, per_batch));
    }
    for (what, per_batch) in figures {
        let what = format!("apply {CHARGES} charges, {count} users, {what}");
        println!("{what:<66} {per_batch:>9.1} us");
    }
}

fn charge(user: UserKey) -> Item {
    Item::Charge(Charge {
        user,
        input_uncached: 300,
        output: 40,
        started: 1,
        ended: 1,
        ..Charge::default()
    })
}

fn batch(seq: u64, items: &[Item]) -> Envelope {
    let command = Command::Batch {
        base_attempt: AttemptId(0),
        items: items.to_vec(),
    };
    envelope(seq, command)
}

fn envelope(seq: u64, command: Command) -> Envelope {
    Envelope {
        origin: Origin {
            replica: ReplicaId(1),
            session: SessionId(1),
            lane: Lane::Outbox,
            seq,
        },
        proposed_at_ms: 1_700_000_000_000 + seq,
        command,
    }
}

fn key(user: u64) -> UserKey {
    UserKey(mix(user))
}

/// Spreads a number over 64 bits.
fn mix(x: u64) -> u64 {
    SplitMix64::seed_from_u64(x).next_u64()
}
