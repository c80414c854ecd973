//! Benchmarks of limits and bins: time per applied sample and output, per published view, and per
//! prediction and bin of a request.

// A benchmark reads the clock; the crate it measures must not.
#![allow(clippy::disallowed_types)]
#![allow(missing_docs)]

use std::collections::BTreeMap;
use std::hint::black_box;
use std::io::{self, Write};
use std::time::Instant;

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore, SeedableRng};
use state::RouterState;
use state::admission::AdmissionSettings;
use state::command::{BackendSpec, Command, Envelope, Founding, Item, Lane, Origin};
use state::ids::{
    AttemptId, BackendRef, Incarnation, LogIndex, ModelKey, ReplicaId, SessionId, Slot, UserKey,
};
use state::outputs::{Boundaries, Histogram};
use state::policy::{CostSettings, PolicyConfig};
use state::service::ServiceSample;

const BATCHES: usize = 2_000;

/// A uniform pseudo-random sequence.
struct Random(SplitMix64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(SplitMix64::seed_from_u64(seed))
    }

    fn below(&mut self, end: u64) -> u64 {
        self.0.next_u64() % end
    }
}

struct Driver {
    state: RouterState,
    seq: u64,
}

impl Driver {
    fn new(backends: u16) -> Self {
        let mut driver = Self {
            state: RouterState::new(),
            seq: 0,
        };
        driver.apply(Command::from(Founding::of_seed(
            1,
            PolicyConfig::Cost(CostSettings::default()),
        )));
        for backend in 0..backends {
            driver.apply(Command::PutBackend(BackendSpec {
                id: backend.to_string(),
                url: format!("http://127.0.0.1:{}", 1 + backend),
                models: vec!["*".to_owned()],
                labels: BTreeMap::new(),
                capacity_blocks: Some(30_000),
                kv_events: None,
                kv_replay: None,
                role: state::command::BackendRole::Both,
            }));
        }
        driver.apply(Command::PutAdmission(AdmissionSettings {
            bins: 8,
            inter_token_us: 50_000,
            ..AdmissionSettings::default()
        }));
        driver
    }

    fn apply(&mut self, command: Command) {
        self.seq += 1;
        let origin = Origin {
            replica: ReplicaId(1),
            session: SessionId(1),
            lane: Lane::Admin,
            seq: self.seq,
        };
        let envelope = Envelope {
            origin,
            proposed_at_ms: self.seq,
            command,
        };
        black_box(self.state.apply(LogIndex(self.seq), envelope));
    }

    /// Returns the mean time of applying a batch of the given items, in microseconds.
    fn batches(&mut self, mut items: impl FnMut() -> Vec<Item>) -> f64 {
        let commands: Vec<Command> = (0..BATCHES)
            .map(|_| Command::Batch {
                base_attempt: AttemptId(0),
                items: items(),
            })
            .collect();
        let start = Instant::now();
        commands.into_iter().for_each(|command| self.apply(command));
        start.elapsed().as_secs_f64() * 1e6 / BATCHES as f64
    }
}

fn sample(slot: u16, random: &mut Random) -> Item {
    let backend = BackendRef {
        slot: Slot(slot),
        incarnation: Incarnation(1),
    };
    let tokens = 300 + random.below(400);
    Item::ObserveService(Box::new(ServiceSample {
        ended: 10,
        added_tokens: tokens * 10,
        added_squared: tokens * tokens * 11,
        block_tokens: 16,
        gaps: 1000,
        gap_us: 1000 * (40_000 + random.below(20_000)),
        gap_running: 1000 * random.below(200),
        gaps_at_limit: 1000,
        ..ServiceSample::empty(backend)
    }))
}

fn nanos(times: u32, mut run: impl FnMut(u32)) -> f64 {
    let start = Instant::now();
    (0..times).for_each(&mut run);
    start.elapsed().as_secs_f64() * 1e9 / f64::from(times)
}

fn applying(out: &mut impl Write) -> io::Result<()> {
    let random = &mut Random::new(1);
    writeln!(out, "apply and publish, mean per batch")?;
    for backends in [8, 64, 512] {
        let mut driver = Driver::new(backends);
        let empty = driver.batches(Vec::new);
        let one = driver.batches(|| vec![sample(random.below(backends.into()) as u16, random)]);
        let all = driver.batches(|| (0..backends).map(|slot| sample(slot, random)).collect());
        writeln!(
            out,
            "  {backends:>3} backends: empty {empty:.1} us, one sample {one:.1} us, \
             one of each {all:.1} us"
        )?;
    }
    for users in [100, 100_000] {
        let mut driver = Driver::new(8);
        let mut outputs = |count: usize| {
            let item = |random: &mut Random| Item::ObserveOutputs {
                user: UserKey(random.below(users)),
                model: ModelKey(random.below(4)),
                tokens: vec![random.below(2000) as u32],
            };
            driver.batches(|| (0..count).map(|_| item(random)).collect())
        };
        let (one, many) = (outputs(1), outputs(50));
        writeln!(
            out,
            "  {users:>6} users: one output {one:.1} us, fifty {many:.1} us"
        )?;
    }
    Ok(())
}

fn reading(out: &mut impl Write) -> io::Result<()> {
    const TIMES: u32 = 1_000_000;
    let random = &mut Random::new(2);
    let mut driver = Driver::new(8);
    driver.batches(|| {
        vec![
            sample(random.below(8) as u16, random),
            Item::ObserveOutputs {
                user: UserKey(random.below(1000)),
                model: ModelKey(1),
                tokens: vec![random.below(2000) as u32],
            },
        ]
    });
    let view = driver.state.view();
    let limit = nanos(TIMES, |at| {
        black_box(view.limit(Slot((at % 8) as u16)));
    });
    let outputs = |at: u32| (view.outputs(), UserKey(u64::from(at % 1000)));
    let predict = nanos(TIMES, |at| {
        let (outputs, user) = outputs(at);
        black_box(outputs.predict(user, ModelKey(1), Some(4096)));
    });
    let bin = nanos(TIMES, |at| {
        let (outputs, _) = outputs(at);
        black_box(outputs.bin_of(ModelKey(1), at % 2000));
    });
    let correct = nanos(TIMES / 10, |at| {
        let (outputs, _) = outputs(at);
        black_box(outputs.correct(ModelKey(1), 1, at % 2000, None));
    });
    writeln!(
        out,
        "read: limit {limit:.0} ns, prediction {predict:.0} ns, bin of 8 {bin:.0} ns, \
         correction {correct:.0} ns"
    )
}

fn forming(out: &mut impl Write) -> io::Result<()> {
    let random = &mut Random::new(3);
    let mut histogram = Histogram::default();
    let add = nanos(1_000_000, |_| histogram.add(random.below(4000) as u32));
    writeln!(out, "histogram: {add:.0} ns per length")?;
    for bins in [4, 32] {
        let mut boundaries = Boundaries::default();
        let make = nanos(10_000, |_| {
            boundaries = black_box(Boundaries::equal_mass(&histogram, bins));
        });
        let lengths: Vec<u32> = (0..10_000).map(|_| random.below(4000) as u32).collect();
        let find = nanos(1_000_000, |at| {
            black_box(boundaries.bin_of(lengths[at as usize % lengths.len()]));
        });
        writeln!(
            out,
            "  {bins:>2} bins: boundaries {make:.0} ns, bin {find:.1} ns"
        )?;
    }
    Ok(())
}

fn main() -> io::Result<()> {
    let out = &mut io::stdout().lock();
    applying(out)?;
    reading(out)?;
    forming(out)
}
