//! Benchmarks of the block index: matching, changes, memory, snapshots. `-- matches` prints only
//! the table of matching.

// A benchmark reads the clock; the crate it measures must not.
#![allow(clippy::disallowed_types)]
#![allow(missing_docs)]

use std::hint::black_box;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput};
use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore, SeedableRng};
use state::ids::{BlockHash, Slot};
use state::ownership::Ownership;
use state::view::BlockView;

/// Lengths of the prompts, in blocks.
const LENGTHS: [usize; 3] = [64, 512, 8192];
const MATCHES: usize = 20_000;
/// Number of blocks shared by all prompts of [`Fixture::sharing`].
const SHARED: usize = 128;

/// A uniform pseudo-random sequence: block hashes and choices.
struct Random(SplitMix64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(SplitMix64::seed_from_u64(seed))
    }

    fn below(&mut self, end: usize) -> usize {
        (self.0.next_u64() % end as u64) as usize
    }

    fn chain(&mut self, blocks: usize) -> Vec<BlockHash> {
        (0..blocks).map(|_| BlockHash(self.0.next_u64())).collect()
    }
}

/// An index of prompts, with a third of the blocks in prompts of each length. One backend owns each
/// prompt completely, another its first half. All backends own the first 32 blocks of an additional
/// shared prompt.
struct Fixture {
    ownership: Ownership,
    /// Prompts by length, as in `LENGTHS`.
    prompts: [Vec<Vec<BlockHash>>; 3],
    random: Random,
}

impl Fixture {
    fn new(blocks: u64, backends: u16) -> Self {
        let mut ownership = Ownership::new();
        for slot in 0..backends {
            ownership.add_backend(Slot(slot), None);
        }
        let mut random = Random::new(1);
        let mut prompts = [const { Vec::new() }; 3];
        let system = random.chain(32);
        for slot in 0..backends {
            hold(&mut ownership, Slot(slot), &system);
        }
        for (kind, length) in LENGTHS.into_iter().enumerate() {
            let end = blocks * (kind as u64 + 1) / 3;
            while ownership.owned_total() < end {
                let mut prompt = random.chain(length);
                if prompts[kind].len() % 4 == 0 {
                    prompt[..32].copy_from_slice(&system);
                }
                let first = random.below(backends.into()) as u16;
                let second =
                    (first + 1 + random.below(usize::from(backends) - 1) as u16) % backends;
                hold(&mut ownership, Slot(first), &prompt);
                hold(&mut ownership, Slot(second), &prompt[..length / 2]);
                prompts[kind].push(prompt);
            }
        }
        Self {
            ownership,
            prompts,
            random,
        }
    }

    /// Creates an index of prompts of 512 blocks, each owned completely by one backend. All share
    /// their first 128 blocks, which every backend owns.
    fn sharing(blocks: u64, backends: u16) -> Self {
        let mut ownership = Ownership::new();
        let mut random = Random::new(5);
        let shared = random.chain(SHARED);
        for slot in 0..backends {
            ownership.add_backend(Slot(slot), None);
            hold(&mut ownership, Slot(slot), &shared);
        }
        let mut prompts = [const { Vec::new() }; 3];
        while ownership.owned_total() < blocks {
            let mut prompt = random.chain(LENGTHS[1]);
            prompt[..SHARED].copy_from_slice(&shared);
            let slot = Slot(random.below(backends.into()) as u16);
            hold(&mut ownership, slot, &prompt);
            prompts[1].push(prompt);
        }
        Self {
            ownership,
            prompts,
            random,
        }
    }

    /// Returns prompts to match: owned completely, owned up to the middle (and different after it),
    /// or not owned.
    fn queries(&mut self, kind: usize, mix: Mix, count: usize) -> Vec<Vec<BlockHash>> {
        let length = LENGTHS[kind];
        let query = |at: usize| {
            let known = self.random.below(self.prompts[kind].len());
            let known = &self.prompts[kind][known];
            let hit = match mix {
                Mix::Full => length,
                Mix::Half => length / 2,
                Mix::Branch => SHARED + self.random.below(SHARED + 1),
                Mix::Miss => 0,
                Mix::Even => [length, length / 2, 0][at % 3],
            };
            let mut query = self.random.chain(length);
            query[..hit].copy_from_slice(&known[..hit]);
            query
        };
        (0..count).map(query).collect()
    }
}

#[derive(Debug, Clone, Copy)]
enum Mix {
    Full,
    Half,
    /// Prompts whose first 128 to 256 blocks are owned.
    Branch,
    Miss,
    Even,
}

fn hold(ownership: &mut Ownership, slot: Slot, chain: &[BlockHash]) {
    let lease = ownership
        .acquire(slot, None, chain)
        .expect("no tip is named");
    ownership.release(lease, true);
}

fn do_match(view: &BlockView, chain: &[BlockHash]) -> u64 {
    let mut sum = 0;
    view.match_prefix(chain, |slot, blocks| {
        sum += u64::from(slot.0) * u64::from(blocks);
    });
    sum
}

/// Measures latency percentiles of single matches and the rate of consecutive matches.
fn match_row(name: &str, view: &BlockView, queries: &[Vec<BlockHash>]) {
    let mut nanos: Vec<u64> = Vec::with_capacity(MATCHES);
    for query in queries.iter().cycle().take(MATCHES) {
        let start = Instant::now();
        black_box(do_match(view, black_box(query)));
        nanos.push(start.elapsed().as_nanos() as u64);
    }
    nanos.sort_unstable();
    // The system counts core time in ticks, so measure several of them.
    let (wall, core) = (Instant::now(), CoreTime::start());
    let mut done = 0;
    while wall.elapsed() < Duration::from_millis(300) {
        for query in queries {
            black_box(do_match(view, black_box(query)));
        }
        done += queries.len();
    }
    let rate = done as f64 / core.seconds() / 1e6;
    let at = |permille: usize| nanos[nanos.len() * permille / 1000];
    println!(
        "{name:<44} p50 {:>6} ns  p99 {:>6} ns  {rate:>6.2} M/s",
        at(500),
        at(990)
    );
}

/// A stopwatch of this thread's core time, which does not stretch on a busy machine. Measures wall
/// time where the system does not report core time.
struct CoreTime {
    core: Option<Duration>,
    wall: Instant,
}

impl CoreTime {
    fn start() -> Self {
        Self {
            core: Self::read(),
            wall: Instant::now(),
        }
    }

    fn read() -> Option<Duration> {
        // Yielding the core for a moment updates the count.
        std::thread::yield_now();
        let line = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        line.split(' ')
            .next()?
            .parse()
            .ok()
            .map(Duration::from_nanos)
    }

    fn seconds(&self) -> f64 {
        let core = self
            .core
            .zip(Self::read())
            .map(|(start, end)| end.saturating_sub(start));
        core.unwrap_or_else(|| self.wall.elapsed()).as_secs_f64()
    }
}

fn rss_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm
        .split(' ')
        .nth(1)
        .and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or(0) * 4096
}

fn matching(blocks: u64, backends: u16) {
    let start = CoreTime::start();
    let mut fixture = Fixture::new(blocks, backends);
    let seconds = start.seconds();
    println!(
        "-- {:.1} M owned blocks, {backends} backends: filled at {:.2} M blocks/s, {:.1} B/block",
        blocks as f64 / 1e6,
        fixture.ownership.owned_total() as f64 / seconds / 1e6,
        fixture.ownership.memory_bytes() as f64 / fixture.ownership.owned_total() as f64,
    );
    let view = fixture.ownership.view();
    for (kind, length) in LENGTHS.into_iter().enumerate() {
        for mix in [Mix::Full, Mix::Half, Mix::Miss, Mix::Even] {
            let queries = fixture.queries(kind, mix, if length > 1000 { 500 } else { 4000 });
            match_row(&format!("match {length} blocks, {mix:?}"), &view, &queries);
        }
    }
}

/// Measures matching of prompts that share their first [`SHARED`] blocks.
fn matching_shared(blocks: u64, backends: u16) {
    let mut fixture = Fixture::sharing(blocks, backends);
    println!(
        "-- {:.1} M owned blocks, {backends} backends, the first {SHARED} blocks of all prompts are shared: {:.1} B/block",
        blocks as f64 / 1e6,
        fixture.ownership.memory_bytes() as f64 / fixture.ownership.owned_total() as f64,
    );
    let view = fixture.ownership.view();
    for mix in [Mix::Full, Mix::Branch, Mix::Miss] {
        let queries = fixture.queries(1, mix, 4000);
        match_row(
            &format!("match {} blocks, {mix:?}", LENGTHS[1]),
            &view,
            &queries,
        );
    }
}

/// Fills an index with prompts of `length` blocks that share nothing: the most expensive case.
fn memory(blocks: u64, backends: u16, length: usize) -> Ownership {
    let mut random = Random::new(2);
    let mut ownership = Ownership::new();
    for slot in 0..backends {
        ownership.add_backend(Slot(slot), None);
    }
    let start = CoreTime::start();
    while ownership.owned_total() < blocks {
        let slot = Slot(random.below(backends.into()) as u16);
        hold(&mut ownership, slot, &random.chain(length));
    }
    let owned = ownership.owned_total() as f64;
    println!(
        "memory {:.1} M blocks, {backends} backends, prompts of {length}: {:.1} B/block, whole process {:.1} B/block, \
         filled at {:.2} M blocks/s",
        owned / 1e6,
        ownership.memory_bytes() as f64 / owned,
        rss_bytes() as f64 / owned,
        owned / start.seconds() / 1e6,
    );
    ownership
}

/// Measures new prompts at full caches: every new block evicts another.
fn churn(blocks: u32, backends: u16) {
    let mut random = Random::new(3);
    let mut ownership = Ownership::new();
    for slot in 0..backends {
        ownership.add_backend(Slot(slot), Some(blocks / u32::from(backends)));
    }
    let mut round = |ownership: &mut Ownership, rounds: usize| {
        for _ in 0..rounds {
            let slot = Slot(random.below(backends.into()) as u16);
            hold(ownership, slot, &random.chain(64));
        }
    };
    round(&mut ownership, blocks as usize / 64 * 2);
    let rounds = 20_000;
    let start = CoreTime::start();
    round(&mut ownership, rounds);
    let rate = (rounds * 64) as f64 / start.seconds() / 1e6;
    println!(
        "apply: {:.1} M blocks, {backends} full backends, new prompts of 64: {rate:.2} M blocks/s in and as \
         many out, {:.1} B/block",
        f64::from(blocks) / 1e6,
        ownership.memory_bytes() as f64 / ownership.owned_total() as f64,
    );
}

/// Measures known prompts: leases by tip.
fn touches(blocks: u64, backends: u16) {
    let mut fixture = Fixture::new(blocks, backends);
    let prompts = std::mem::take(&mut fixture.prompts[1]);
    let rounds = 500_000;
    let mut touched = 0;
    let start = CoreTime::start();
    for _ in 0..rounds {
        let prompt = &prompts[fixture.random.below(prompts.len())];
        let tip = prompt.last().copied();
        for slot in 0..backends {
            if let Ok(lease) = fixture.ownership.acquire(Slot(slot), tip, &[]) {
                fixture.ownership.release(lease, true);
                touched += prompt.len();
                break;
            }
        }
    }
    let seconds = start.seconds();
    println!(
        "apply: leases on known prompts by tip: {:.2} M/s, that is {:.0} M block touches/s",
        f64::from(rounds) / seconds / 1e6,
        touched as f64 / seconds / 1e6,
    );
}

struct Counted(u64);

impl Write for Counted {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(black_box(bytes).len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Measures a snapshot while the writer continues: its duration, and that of single changes in the
/// meantime.
fn snapshot(mut ownership: Ownership, backends: u16) {
    let mut random = Random::new(4);
    let (calm, _) = changes(&mut ownership, &mut random, backends, || true);
    let start = Instant::now();
    let frozen = ownership.freeze();
    let freeze = start.elapsed();
    let is_done = AtomicBool::new(false);
    let owned = ownership.owned_total();
    let (during, bytes, wrote) = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let start = Instant::now();
            let mut out = Counted(0);
            frozen.write_to(&mut out).expect("counting does not fail");
            drop(frozen);
            let wrote = start.elapsed();
            is_done.store(true, Ordering::Release);
            (out.0, wrote)
        });
        let (during, _) = changes(&mut ownership, &mut random, backends, || {
            is_done.load(Ordering::Acquire)
        });
        let (bytes, wrote) = writer.join().expect("the writer does not panic");
        (during, bytes, wrote)
    });
    println!(
        "snapshot {:.1} M blocks: freeze {:.0} us, write {:.2} s ({:.2} B/block)",
        owned as f64 / 1e6,
        freeze.as_secs_f64() * 1e6,
        wrote.as_secs_f64(),
        bytes as f64 / owned as f64,
    );
    println!("  changes of 16 blocks without a snapshot: {calm}");
    println!("  changes of 16 blocks during the snapshot: {during}");
    restore(&ownership);
}

fn restore(ownership: &Ownership) {
    let mut image = Vec::new();
    ownership
        .freeze()
        .write_to(&mut image)
        .expect("memory does not fail");
    let mut other = Ownership::new();
    let start = CoreTime::start();
    other
        .restore(&mut &image[..])
        .expect("it was written just now");
    let seconds = start.seconds();
    assert_eq!(other.digest(), ownership.digest());
    println!("  restore: {seconds:.2} s");
    let owned = other.owned(Slot(0));
    let start = CoreTime::start();
    other.remove_backend(Slot(0));
    let millis = start.seconds() * 1e3;
    println!(
        "  remove a backend of {:.2} M blocks: {millis:.1} ms",
        owned as f64 / 1e6
    );
}

/// Acquires and releases 16 new blocks at a time, at least 20,000 times and until `is_done`.
fn changes(
    ownership: &mut Ownership,
    random: &mut Random,
    backends: u16,
    is_done: impl Fn() -> bool,
) -> (String, usize) {
    let mut nanos = Vec::new();
    while nanos.len() < 20_000 || (!is_done() && nanos.len() < 10_000_000) {
        let slot = Slot(random.below(backends.into()) as u16);
        let chain = random.chain(16);
        let start = Instant::now();
        hold(ownership, slot, &chain);
        nanos.push(start.elapsed());
    }
    nanos.sort_unstable();
    let micros = |at: Duration| at.as_secs_f64() * 1e6;
    let at = |permille: usize| micros(nanos[(nanos.len() * permille / 1000).min(nanos.len() - 1)]);
    let worst = micros(nanos[nanos.len() - 1]);
    let line = format!(
        "p50 {:.1} us, p99.9 {:.1} us, longest {worst:.0} us",
        at(500),
        at(999)
    );
    (line, nanos.len())
}

fn table() {
    drop(memory(10_000_000, 1024, 64));
    let ownership = memory(10_000_000, 8, 512);
    for slot in 0..8 {
        black_box(ownership.owned(Slot(slot)));
    }
    let mut ownership = ownership;
    for slot in 0..8 {
        // Full from now on: changes evict.
        let owned = u32::try_from(ownership.owned(Slot(slot))).expect("10 M fit");
        ownership.set_capacity(Slot(slot), Some(owned));
    }
    snapshot(ownership, 8);
    churn(1_000_000, 8);
    churn(8_000_000, 8);
    churn(1_000_000, 400);
    touches(1_000_000, 8);
    matches();
}

fn matches() {
    for backends in [8, 64, 400] {
        matching(1_000_000, backends);
        matching_shared(1_000_000, backends);
    }
    matching(8_000_000, 8);
}

fn criterion_matches(criterion: &mut Criterion) {
    let mut fixture = Fixture::new(1_000_000, 8);
    let view = fixture.ownership.view();
    let mut group = criterion.benchmark_group("match_1m_blocks_8_backends");
    group.throughput(Throughput::Elements(1));
    for (kind, length) in LENGTHS.into_iter().enumerate() {
        let queries = fixture.queries(kind, Mix::Even, 500);
        let mut next = queries.iter().cycle();
        group.bench_function(format!("{length}_blocks_even_mix"), |bench| {
            bench.iter(|| do_match(&view, next.next().expect("it cycles")));
        });
    }
    group.finish();
}

fn main() {
    let mut words = std::env::args().skip(1).filter(|arg| !arg.starts_with('-'));
    match words.next().as_deref() {
        None => table(),
        Some("matches") => return matches(),
        Some(_) => {}
    }
    let criterion = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    let mut criterion = criterion.configure_from_args();
    criterion_matches(&mut criterion);
    criterion.final_summary();
}
