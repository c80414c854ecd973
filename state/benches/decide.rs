//! Benchmarks of a decision without matching, and of a request in the state machine.

#![allow(clippy::disallowed_types, reason = "a bench reads the clock")]
#![allow(
    missing_docs,
    reason = "criterion's macros make undocumented functions"
)]

use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group};
use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore, SeedableRng};
use state::RouterState;
use state::codec;
use state::command::{
    BackendSpec, Charge, Command, Envelope, Founding, Item, Lane, LeaseOutcome, Origin, Reply,
};
use state::ids::{
    AttemptId, BackendRef, BlockHash, Incarnation, LogIndex, ReplicaId, SessionId, Slot, UserKey,
};
use state::kv_events::LowerTierBlocks;
use state::policy::{Candidate, LoadPrices, PolicyConfig, PolicyRequest, Prices, choose};
use state::prefix::{BlockHasher, Scope, chain_bytes, chain_tokens};

criterion_group! {
    name = benches;
    // Measurements of nanoseconds settle quickly; the whole run should take about a minute at most.
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    targets = choosing, hashing
}

fn main() {
    benches();
    let mut table = Vec::new();
    deciding(&mut table);
    log_bytes(&mut table);
    applying(&mut table);
    freezing(&mut table);
    println!("\n{:<58} {:>14}", "what", "figure");
    for (what, figure) in table {
        println!("{what:<58} {figure:>14}");
    }
}

type Table = Vec<(String, String)>;

fn choosing(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("choose");
    let request = request();
    for policy in &PolicyConfig::defaults() {
        for count in [8_u16, 64, 512, 1024] {
            let candidates: Vec<Candidate> = (0..count).map(candidate).collect();
            let id = BenchmarkId::new(policy.name(), count);
            group.bench_with_input(id, &candidates, |bencher, candidates| {
                bencher.iter(|| choose(policy, black_box(&request), black_box(candidates)));
            });
        }
    }
    group.finish();
}

/// Measures the policies side by side, where `choosing` measures them one by one.
fn deciding(table: &mut Table) {
    let request = request();
    let fleets = [8_u16, 64, 512].map(|count| (0..count).map(candidate).collect::<Vec<_>>());
    for policy in &PolicyConfig::defaults() {
        let ns = fleets.each_ref().map(|candidates| {
            // The best of several runs: other load on the machine only adds time.
            let runs = (0..9).map(|_| {
                let rounds = 40_000 / candidates.len();
                let started = Instant::now();
                for _ in 0..rounds {
                    black_box(choose(policy, black_box(&request), black_box(candidates)));
                }
                started.elapsed().as_nanos() / rounds as u128
            });
            runs.min().unwrap_or(0).to_string()
        });
        let what = format!("choose by {}, ns at 8 / 64 / 512 backends", policy.name());
        table.push((what, ns.join(" / ")));
    }
}

fn request() -> PolicyRequest {
    PolicyRequest {
        jitter: 7,
        blocks: 512,
        tokens: 16_384,
        tokens_per_block: 32,
        session: Some(3),
        turn: 5,
        ..PolicyRequest::default()
    }
}

fn candidate(slot: u16) -> Candidate {
    let noise = mix(u64::from(slot));
    let prefill_ns_per_token = 50_000 + (noise >> 40) as u32 % 50_000;
    Candidate {
        slot: Slot(slot),
        matched: (noise % 512) as u32,
        running: (noise >> 10) as u32 % 40,
        pending: (noise >> 14) as u32 % 8,
        prices: (!noise.is_multiple_of(8)).then_some(Prices {
            prefill_ns_per_token,
            decode_ns_per_request: 500_000,
            prefill_range_ns: Some((prefill_ns_per_token - 5_000, prefill_ns_per_token + 5_000)),
            decode_range_ns: None,
            load: LoadPrices::ASSUMED,
        }),
        loaded: LowerTierBlocks::default(),
        evicts_to: None,
        waiting: (noise >> 20) as u32 % 4,
        pending_prefill_tokens: (noise >> 30) % 50_000,
        kv_usage_permille: (noise >> 50) as u32 % 1000,
        free_blocks: (noise >> 40) as u32 % 1000,
        is_model_listed: false,
    }
}

fn hashing(criterion: &mut Criterion) {
    const BLOCKS: usize = 512;
    let mut group = criterion.benchmark_group("hash 512 blocks");
    group.throughput(Throughput::Elements(BLOCKS as u64));
    let mut out = Vec::with_capacity(BLOCKS);
    let hashing = BlockHasher::from(42);
    let scope = Scope {
        model: "meta-llama/Llama-3.1-70B-Instruct",
        adapter: "",
        salt: "",
        tokenizer: "character",
        block_size: 128,
    };
    let root = hashing.root(&scope);
    for block_size in [64, 128, 512, 1024] {
        let bytes: Vec<u8> = (0..BLOCKS * block_size)
            .map(|place| mix(place as u64) as u8)
            .collect();
        group.bench_function(BenchmarkId::new("bytes", block_size), |bencher| {
            bencher.iter(|| {
                out.clear();
                chain_bytes(&root, black_box(&bytes), block_size, &mut out);
            });
        });
    }
    let tokens: Vec<u32> = (0..BLOCKS * 16)
        .map(|place| mix(place as u64) as u32)
        .collect();
    group.bench_function(BenchmarkId::new("tokens", 16), |bencher| {
        bencher.iter(|| {
            out.clear();
            chain_tokens(&root, black_box(&tokens), 16, &mut out);
        });
    });
    group.finish();
    criterion.bench_function("root of a scope", |bencher| {
        bencher.iter(|| black_box(&hashing).root(black_box(&scope)));
    });
}

/// Prints the log bytes of a replica at 1,000 requests per second of 20 s each, with a flush every
/// 20 ms: 20 requests of 10 users start and 20 end per batch.
fn log_bytes(table: &mut Table) {
    const REQUESTS: u32 = 20;
    const OPEN: u32 = 20_000;
    for new_blocks in [0, 4, 16] {
        let new = chain(1, new_blocks);
        let backend = BackendRef {
            slot: Slot(100),
            incarnation: Incarnation(1),
        };
        let mut items = Vec::new();
        for request in 0..REQUESTS {
            let tip = Some(BlockHash(mix(1)));
            let attempt = OPEN + request;
            items.push(Item::Acquire {
                attempt,
                backend,
                tip,
                new: new.clone(),
            });
            items.push(Item::Release {
                attempt: request,
                outcome: LeaseOutcome::Kept,
            });
        }
        let leases = envelope_bytes(&items);
        for user in 0..10 {
            items.push(Item::Charge(charge(user)));
        }
        let all = envelope_bytes(&items);
        let per_request = |bytes: usize| bytes as f64 / f64::from(REQUESTS);
        let what = format!("log bytes per request, {new_blocks} new blocks: leases / all");
        table.push((
            what,
            format!("{:.1} / {:.1}", per_request(leases), per_request(all)),
        ));
    }
}

fn envelope_bytes(items: &[Item]) -> usize {
    let batch = Command::Batch {
        base_attempt: AttemptId(1 << 30),
        items: items.to_vec(),
    };
    codec::encode_envelope(&envelope(1 << 20, batch)).len()
}

/// Decodes and applies batches of 32 requests over 100,000 users and 8 backends. First with a chain
/// of 16 unowned blocks on full backends, so that each evicts as many; then without any blocks.
fn applying(table: &mut Table) {
    const ROUNDS: u64 = 4_000;
    for blocks in [0, 16] {
        let mut driver = Driver::new(8);
        driver.add_users(100_000);
        let entries: Vec<Vec<u8>> = (0..ROUNDS)
            .map(|round| {
                let envelope = driver.round(round, blocks);
                driver.seq += 1;
                codec::encode_envelope(&envelope)
            })
            .collect();
        let start = cpu_time();
        let decode = |bytes: &Vec<u8>| codec::decode_envelope(bytes).expect("just encoded");
        let envelopes: Vec<Envelope> = entries.iter().map(decode).collect();
        let decoded = cpu_time();
        envelopes
            .into_iter()
            .for_each(|envelope| driver.apply(envelope));
        let applied = cpu_time();
        let per_request =
            |time: Duration| format!("{:.0} ns", time.as_nanos() as f64 / (32 * ROUNDS) as f64);
        let of = format!("acquire, charge, release; {blocks} blocks");
        table.push((
            format!("decode a request ({of})"),
            per_request(decoded - start),
        ));
        table.push((
            format!("apply a request ({of})"),
            per_request(applied - decoded),
        ));
    }
}

/// Returns the CPU time of this thread as counted by the kernel, which other processes do not
/// affect.
fn cpu_time() -> Duration {
    let schedstat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanoseconds = schedstat
        .split_whitespace()
        .next()
        .and_then(|ran| ran.parse().ok());
    Duration::from_nanos(nanoseconds.expect("Linux counts the time a thread runs"))
}

/// Measures pauses: the freeze itself, and the slowest batch right after it, when shards are
/// copied.
fn freezing(table: &mut Table) {
    for (users, leases) in [(10_000, 1_000), (1_000_000, 100_000)] {
        let mut driver = Driver::new(8);
        driver.add_users(users);
        driver.open_leases(leases);
        let mut slowest = [Duration::ZERO; 3];
        let mut bytes = 0;
        let mut written = Duration::ZERO;
        for round in 0..20 {
            let start = Instant::now();
            black_box(driver.state.digest());
            let digested = Instant::now();
            let frozen = driver.state.freeze();
            let froze = Instant::now();
            let batch = driver.round(round, 16);
            let ready = Instant::now();
            driver.apply(batch);
            let parts = [digested - start, froze - digested, ready.elapsed()];
            slowest = std::array::from_fn(|place| slowest[place].max(parts[place]));
            if round == 0 {
                let mut out = Vec::new();
                let start = Instant::now();
                frozen
                    .write_to(&mut out)
                    .expect("writing into memory cannot fail");
                (bytes, written) = (out.len(), start.elapsed());
            }
        }
        let [digest, freeze, batch] =
            slowest.map(|time| format!("{:.0} us", time.as_nanos() as f64 / 1e3));
        let of = format!("{users} users, {leases} leases");
        table.push((format!("digest, slowest of 20 ({of})"), digest));
        table.push((format!("freeze, slowest of 20 ({of})"), freeze));
        table.push((
            format!("batch of 32 after a freeze, slowest of 20 ({of})"),
            batch,
        ));
        let took = format!("{} MB, {} ms", bytes / 1_000_000, written.as_millis());
        table.push((format!("snapshot ({of})"), took));
    }
}

struct Driver {
    state: RouterState,
    seq: u64,
    next_attempt: u32,
    users: u64,
}

impl Driver {
    fn new(backends: u16) -> Self {
        let (state, seq, next_attempt, users) = (RouterState::new(), 0, 0, 1);
        let mut driver = Self {
            state,
            seq,
            next_attempt,
            users,
        };
        driver.apply_command(Command::from(Founding::of_seed(
            1,
            PolicyConfig::LeastRequest,
        )));
        for slot in 0..backends {
            driver.apply_command(Command::PutBackend(BackendSpec {
                id: slot.to_string(),
                url: "http://127.0.0.1:1".to_owned(),
                models: vec!["*".to_owned()],
                labels: BTreeMap::new(),
                capacity_blocks: Some(30_000),
                kv_events: None,
                kv_replay: None,
                role: state::command::BackendRole::Both,
            }));
        }
        driver
    }

    fn apply_command(&mut self, command: Command) {
        self.seq += 1;
        let envelope = envelope(self.seq, command);
        self.apply(envelope);
    }

    fn apply(&mut self, envelope: Envelope) {
        self.seq = envelope.origin.seq;
        let index = LogIndex(self.state.applied().0 + 1);
        let reply = self.state.apply(index, envelope);
        assert!(!matches!(reply, Reply::Rejected(_)), "{reply:?}");
    }

    fn batch(&mut self, items: Vec<Item>) {
        self.apply_command(Command::Batch {
            base_attempt: AttemptId(0),
            items,
        });
    }

    fn add_users(&mut self, users: u64) {
        self.users = users;
        for first in (0..users).step_by(1000) {
            let items = (first..users.min(first + 1000)).map(|user| Item::Charge(charge(user)));
            let items = items.collect();
            self.batch(items);
        }
    }

    fn open_leases(&mut self, leases: u32) {
        for _ in 0..leases / 1000 {
            let items = (0..1000).map(|_| self.acquire(1)).collect();
            self.batch(items);
        }
    }

    fn acquire(&mut self, blocks: usize) -> Item {
        let attempt = self.next_attempt;
        self.next_attempt += 1;
        let slot = Slot((attempt % 8) as u16);
        let backend = self
            .state
            .backends()
            .find(|it| it.handle.slot == slot)
            .map(|it| it.handle);
        let backend = backend.expect("there are eight backends");
        Item::Acquire {
            attempt,
            backend,
            tip: None,
            new: chain(u64::from(attempt), blocks),
        }
    }

    /// Returns a batch of 32 requests that start, end and are charged, each for a different user.
    fn round(&mut self, round: u64, blocks: usize) -> Envelope {
        let mut items = Vec::new();
        for request in 0..32 {
            let acquire = self.acquire(blocks);
            let attempt = self.next_attempt - 1;
            items.push(acquire);
            items.push(Item::Charge(charge(mix(round * 32 + request) % self.users)));
            items.push(Item::Release {
                attempt,
                outcome: LeaseOutcome::Kept,
            });
        }
        envelope(
            self.seq + 1,
            Command::Batch {
                base_attempt: AttemptId(0),
                items,
            },
        )
    }
}

fn envelope(seq: u64, command: Command) -> Envelope {
    let (replica, session) = (ReplicaId(1), SessionId(u64::MAX));
    let origin = Origin {
        replica,
        session,
        lane: Lane::Outbox,
        seq,
    };
    Envelope {
        origin,
        proposed_at_ms: 1_700_000_000_000 + seq,
        command,
    }
}

fn charge(user: u64) -> Charge {
    Charge {
        user: UserKey(mix(user)),
        input_uncached: 700,
        input_cached: 4000,
        output: 300,
        started: 1,
        ended: 1,
        ..Charge::default()
    }
}

fn chain(seed: u64, blocks: usize) -> Vec<BlockHash> {
    (0..blocks as u64)
        .map(|block| BlockHash(mix(seed << 16 | block)))
        .collect()
}

/// Spreads a number over 64 bits.
fn mix(x: u64) -> u64 {
    SplitMix64::seed_from_u64(x).next_u64()
}
