//! Benchmarks of applying KV events: time and memory per stored and removed block, and the duration
//! of a freeze.

// A benchmark reads the clock; the crate it measures must not.
#![allow(clippy::disallowed_types)]
#![allow(missing_docs)]

use std::collections::{BTreeMap, VecDeque};
use std::hint::black_box;
use std::io::Write;
use std::time::{Duration, Instant};

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore, SeedableRng};
use state::RouterState;
use state::codec::{decode_envelope, encode_envelope};
use state::command::{BackendSpec, Command, EngineFacts, Envelope, Founding, Item, Lane, Origin};
use state::ids::{
    AttemptId, BackendRef, BlockHash, EngineHash, LogIndex, ReplicaId, SessionId, Slot,
};
use state::kv_events::{KvBatch, KvEvent, KvMessage, KvMode, KvUpdate};
use state::policy::{CostSettings, PolicyConfig};

const ENGINES: usize = 4;
/// Number of blocks in one prompt, stored by one message.
const PROMPT_BLOCKS: usize = 64;
/// Required rate of blocks stored, and of blocks removed, per second.
const BLOCKS_PER_SECOND: f64 = 6_000.0;

struct Bench {
    state: RouterState,
    random: SplitMix64,
    seq: u64,
    backends: Vec<BackendRef>,
    /// By engine: number of the next message, and the prompts it holds, oldest first.
    engines: Vec<(u64, VecDeque<Vec<EngineHash>>)>,
    log_bytes: u64,
}

impl Bench {
    fn new() -> Self {
        let mut bench = Self {
            state: RouterState::new(),
            random: SplitMix64::seed_from_u64(1),
            seq: 0,
            backends: Vec::new(),
            engines: (0..ENGINES).map(|_| (0, VecDeque::new())).collect(),
            log_bytes: 0,
        };
        bench.apply(Command::from(Founding::of_seed(
            1,
            PolicyConfig::Cost(CostSettings::default()),
        )));
        for engine in 0..ENGINES {
            let id = format!("gpu-{engine}");
            bench.apply(Command::PutBackend(BackendSpec {
                id: id.clone(),
                url: format!("http://127.0.0.1:{}", engine + 1),
                models: vec!["*".to_owned()],
                labels: BTreeMap::new(),
                capacity_blocks: None,
                kv_events: None,
                kv_replay: None,
                role: state::command::BackendRole::Both,
            }));
            let backend = bench.state.backend(&id).expect("it was put").handle;
            bench.backends.push(backend);
            bench.tell(engine, KvUpdate::Current { seq: None });
        }
        bench
    }

    fn apply(&mut self, command: Command) {
        let bytes = self.encode(command);
        self.apply_bytes(&bytes);
    }

    fn encode(&mut self, command: Command) -> Vec<u8> {
        self.seq += 1;
        encode_envelope(&Envelope {
            origin: Origin {
                replica: ReplicaId(1),
                session: SessionId(1),
                lane: Lane::Outbox,
                seq: self.seq,
            },
            proposed_at_ms: self.seq,
            command,
        })
    }

    fn apply_bytes(&mut self, bytes: &[u8]) {
        let envelope = decode_envelope(bytes).expect("it was encoded");
        let index = LogIndex(self.state.applied().0 + 1);
        black_box(self.state.apply(index, envelope));
    }

    fn tell(&mut self, engine: usize, news: KvUpdate) {
        let command = self.batch(engine, news);
        self.apply(command);
    }

    fn batch(&self, engine: usize, news: KvUpdate) -> Command {
        Command::Batch {
            base_attempt: AttemptId(0),
            items: vec![Item::KvEvents(KvBatch {
                backend: self.backends[engine],
                rank: 0,
                publisher: 1,
                news,
            })],
        }
    }

    /// Returns a message that makes room and then stores a prompt.
    fn message(&mut self, engine: usize, removes: bool) -> Vec<u8> {
        let mut events = Vec::new();
        if removes && let Some(mut blocks) = self.engines[engine].1.pop_front() {
            blocks.reverse();
            events.push(KvEvent::Removed { blocks });
        }
        let random = &mut self.random;
        let blocks = (0..PROMPT_BLOCKS)
            .map(|_| (EngineHash(random.next_u64()), BlockHash(random.next_u64())));
        let blocks: Vec<_> = blocks.collect();
        let (seq, prompts) = &mut self.engines[engine];
        prompts.push_back(blocks.iter().map(|(engine, _)| *engine).collect());
        events.push(KvEvent::Stored {
            parent: None,
            blocks,
        });
        let message = KvMessage {
            seq: *seq,
            mark: *seq,
            part: 0,
            is_last: true,
            is_after_loss: false,
            events,
        };
        *seq += 1;
        let command = self.batch(engine, KvUpdate::Message(message));
        let bytes = self.encode(command);
        self.log_bytes += bytes.len() as u64;
        bytes
    }

    /// Applies this many messages of one prompt each and returns the nanoseconds per block.
    fn run(&mut self, messages: usize, removes: bool) -> f64 {
        let mut spent = Duration::ZERO;
        for number in 0..messages {
            let bytes = self.message(number % ENGINES, removes);
            let start = Instant::now();
            self.apply_bytes(&bytes);
            spent += start.elapsed();
        }
        spent.as_nanos() as f64 / (messages * PROMPT_BLOCKS) as f64
    }
}

fn main() -> std::io::Result<()> {
    let blocks = std::env::args().skip(1).find_map(|it| it.parse().ok());
    let blocks: usize = blocks.unwrap_or(1_000_000);
    let mut out = std::io::stdout().lock();
    let mut bench = Bench::new();
    let messages = blocks / PROMPT_BLOCKS;

    let stored = bench.run(messages, false);
    let exact = bench.state.kv_memory_bytes() as f64 / blocks as f64;
    writeln!(
        out,
        "{blocks} blocks of {ENGINES} engines, messages of {PROMPT_BLOCKS}"
    )?;
    writeln!(
        out,
        "stored                          {stored:8.0} ns a block"
    )?;
    let log = bench.log_bytes as f64 / (messages * PROMPT_BLOCKS) as f64;
    writeln!(
        out,
        "log                             {log:8.1} bytes a stored block"
    )?;
    writeln!(
        out,
        "memory beside the owned block   {exact:8.1} bytes a block"
    )?;

    let turned = bench.run(messages / 2, true);
    let share = turned * BLOCKS_PER_SECOND / 1e9 * 100.0;
    writeln!(
        out,
        "stored and removed              {turned:8.0} ns a pair of blocks"
    )?;
    writeln!(
        out,
        "6,000 of each a second          {share:8.2} % of a core"
    )?;

    foreseen(&mut bench, blocks, &mut out)?;
    freeze(&mut bench, blocks, &mut out)?;
    clear(&mut bench, &mut out)
}

/// Measures messages that remove and store a prompt once engines report their capacity, so that
/// each message also publishes the coming evictions.
fn foreseen(bench: &mut Bench, blocks: usize, out: &mut dyn Write) -> std::io::Result<()> {
    for backend in bench.backends.clone() {
        let capacity = bench.state.owned_blocks(backend.slot);
        let facts = EngineFacts {
            capacity_blocks: Some(u32::try_from(capacity).expect("a bench's size")),
            ..EngineFacts::default()
        };
        bench.apply(Command::Batch {
            base_attempt: AttemptId(0),
            items: vec![Item::ObserveEngine { backend, facts }],
        });
    }
    let messages = blocks / PROMPT_BLOCKS / 2;
    let turned = bench.run(messages, true);
    writeln!(
        out,
        "the same, evictions foreseen    {turned:8.0} ns a pair of blocks"
    )
}

/// Measures a snapshot, and its cost to concurrent changes.
fn freeze(bench: &mut Bench, blocks: usize, out: &mut dyn Write) -> std::io::Result<()> {
    let messages = blocks / PROMPT_BLOCKS;
    let start = Instant::now();
    let frozen = bench.state.freeze();
    let freeze = start.elapsed();
    writeln!(
        out,
        "freeze                          {:8.0} us",
        freeze.as_secs_f64() * 1e6
    )?;
    let after = bench.run(messages / 8, true);
    writeln!(
        out,
        "stored and removed while frozen {after:8.0} ns a pair of blocks"
    )?;
    let mut bytes = Vec::new();
    frozen.write_to(&mut bytes)?;
    let disk = bytes.len() as f64 / blocks as f64;
    writeln!(
        out,
        "snapshot                        {disk:8.1} bytes a block, ownership included"
    )?;
    let mut copy = RouterState::new();
    let start = Instant::now();
    copy.restore(&mut &*bytes).expect("it was just written");
    let restore = start.elapsed().as_millis();
    writeln!(out, "restore                         {restore:8} ms")?;

    let start = Instant::now();
    let map = bench.state.kv_map(Slot(0), 0).expect("it is followed");
    let image = start.elapsed().as_secs_f64() * 1e6;
    writeln!(
        out,
        "a reader's map                  {image:8.0} us, {} blocks",
        map.iter().count()
    )?;
    Ok(())
}

/// Measures the event that takes longest: an engine clears its cache.
fn clear(bench: &mut Bench, out: &mut dyn Write) -> std::io::Result<()> {
    let start = Instant::now();
    let cleared = KvMessage {
        seq: bench.engines[0].0,
        mark: 0,
        part: 0,
        is_last: true,
        is_after_loss: false,
        events: vec![KvEvent::Cleared],
    };
    let held = bench.state.owned_blocks(Slot(0));
    bench.tell(0, KvUpdate::Message(cleared));
    let clear = start.elapsed().as_secs_f64() * 1e3;
    writeln!(
        out,
        "clear of one engine             {clear:8.1} ms, {held} blocks"
    )?;
    let status = bench.state.kv_status(Slot(1)).expect("it is followed");
    assert_ne!(status.condition.mode, KvMode::Lease, "{status:?}");
    Ok(())
}
