//! An engine of two ranks, readers with a bad connection to it, and two replicas of the router, one
//! of which is occasionally rebuilt from snapshots.

use std::collections::{BTreeMap, BTreeSet};

use state::RouterState;
use state::command::{Command, EngineFacts, Item, Lane, LeaseOutcome, Reply};
use state::ids::{BackendRef, BlockHash, EngineHash, Incarnation, LogIndex, Slot};
use state::kv_events::{KvBatch, KvEvent, KvMessage, KvMode, KvUncertainty, KvUpdate};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::pool::{BLOCK_TOKENS, Engine, Event};
use crate::common::{batch, envelope, init, restored, snapshot, spec};

const SLOT: Slot = Slot(0);
/// A reference before the backend exists.
const NOBODY: BackendRef = BackendRef {
    slot: SLOT,
    incarnation: Incarnation(0),
};
/// Number of events in one part of a message.
const EVENTS_PER_PART: usize = 3;

/// Returns the router's hashes of the full blocks of `tokens`.
pub(crate) fn chain(tokens: &[u8], salt: u8) -> Vec<BlockHash> {
    let mut link = u64::from(salt) + 99;
    let blocks = tokens.chunks_exact(BLOCK_TOKENS);
    let step = |block: &[u8]| {
        link = xxh3_64_with_seed(block, link);
        BlockHash(link)
    };
    blocks.map(step).collect()
}

/// A request that the router sent to the engine.
struct Dispatch {
    attempt: u32,
    is_finished: bool,
}

pub(crate) struct EventFixture {
    steady: RouterState,
    rebuilt: RouterState,
    backend: BackendRef,
    engines: Vec<Engine>,
    publishers: Vec<u64>,
    /// Number of messages of the current run that the router was told of, by rank.
    told: Vec<u64>,
    /// Run of the publisher that the router knows, by rank.
    told_of: Vec<u64>,
    starts: u64,
    now_ms: u64,
    seq: u64,
    attempts: u32,
    /// Dispatches by request.
    dispatches: BTreeMap<usize, Dispatch>,
    requests: usize,
    /// Every prompt with its generated output.
    prompts: BTreeSet<(Vec<u8>, u8)>,
    /// The router's hash by the engine's hash, over all processes.
    names: BTreeMap<u64, BlockHash>,
    pub(crate) exact_seen: usize,
}

impl EventFixture {
    pub(crate) fn new(capacity: Option<u32>) -> Self {
        let mut fixture = Self {
            steady: RouterState::new(),
            rebuilt: RouterState::new(),
            backend: NOBODY,
            engines: Vec::new(),
            publishers: vec![0; 2],
            told: vec![0; 2],
            told_of: vec![0; 2],
            starts: 0,
            now_ms: 1_000,
            seq: 0,
            attempts: 0,
            dispatches: BTreeMap::new(),
            requests: 0,
            prompts: BTreeSet::new(),
            names: BTreeMap::new(),
            exact_seen: 0,
        };
        fixture.apply(init());
        fixture.apply(Command::PutBackend(spec("gpu", 1, capacity)));
        fixture.backend = fixture.steady.backend("gpu").expect("it was put").handle;
        for rank in 0..2 {
            let engine = fixture.process();
            fixture.engines.push(engine);
            fixture.publishers[rank] = fixture.starts;
        }
        fixture
    }

    fn process(&mut self) -> Engine {
        self.starts += 1;
        Engine::new(self.starts, 9, 5)
    }

    fn apply(&mut self, command: Command) -> Reply {
        self.seq += 1;
        let index = LogIndex(self.steady.applied().0 + 1);
        let mut envelope = envelope(1, 1, Lane::Admin, self.seq, command);
        envelope.proposed_at_ms = self.now_ms;
        let reply = self.steady.apply(index, envelope.clone());
        assert_eq!(self.rebuilt.apply(index, envelope), reply);
        reply
    }

    fn note(&mut self, item: Item) -> Reply {
        self.apply(batch(vec![item]))
    }

    fn say(&mut self, rank: usize, news: KvUpdate) {
        self.told_of[rank] = self.told_of[rank].max(self.publishers[rank]);
        self.say_as(rank, self.publishers[rank], news);
    }

    fn say_as(&mut self, rank: usize, publisher: u64, news: KvUpdate) {
        let batch = KvBatch {
            backend: self.backend,
            rank: rank as u16,
            publisher,
            news,
        };
        let reply = self.note(Item::KvEvents(batch));
        let Reply::Batch(reply) = reply else {
            panic!("{reply:?}")
        };
        assert_eq!(reply.dropped, 0);
    }

    /// Submits a request to the engine, through the router or bypassing it.
    pub(crate) fn arrive(&mut self, tokens: &[u8], salt: u8, output: u8, is_routed: bool) {
        let rank = self.requests % 2;
        self.requests += 1;
        let mut whole = tokens.to_vec();
        for _ in 0..output {
            let last = whole.last().expect("no prompt is empty");
            whole.push((last + 1) % 3);
        }
        for engine in &self.engines {
            let engine = engine.hashes(&whole, salt);
            self.names
                .extend(engine.into_iter().zip(chain(&whole, salt)));
        }
        self.prompts.insert((whole, salt));
        if is_routed {
            self.dispatch(tokens, salt);
        }
        self.engines[rank].submit(self.requests, tokens, salt, output);
    }

    fn dispatch(&mut self, tokens: &[u8], salt: u8) {
        let chain = chain(tokens, salt);
        let view = self.steady.view();
        let mut known = 0;
        view.blocks
            .match_prefix(&chain, |_, blocks| known = blocks as usize);
        self.attempts += 1;
        let attempt = self.attempts;
        let reply = self.note(Item::Acquire {
            attempt,
            backend: self.backend,
            tip: known.checked_sub(1).map(|at| chain[at]),
            new: chain[known..].to_vec(),
        });
        assert!(matches!(reply, Reply::Batch(it) if it.missing_tip.is_empty()));
        let is_finished = false;
        self.dispatches.insert(
            self.requests,
            Dispatch {
                attempt,
                is_finished,
            },
        );
    }

    pub(crate) fn step(&mut self, rank: usize) {
        self.engines[rank].step();
        for id in std::mem::take(&mut self.engines[rank].finished) {
            if let Some(dispatch) = self.dispatches.get_mut(&id) {
                dispatch.is_finished = true;
            }
        }
    }

    /// Releases finished requests; with `is_abort`, also the first unfinished one, as if it never
    /// ran.
    pub(crate) fn release(&mut self, is_abort: bool) {
        let over = self.dispatches.iter().filter(|(_, it)| it.is_finished);
        let mut over: Vec<_> = over
            .map(|(id, it)| (*id, it.attempt, LeaseOutcome::Kept))
            .collect();
        if is_abort && let Some((id, it)) = self.dispatches.iter().find(|(_, it)| !it.is_finished) {
            over.push((*id, it.attempt, LeaseOutcome::Discarded));
        }
        for (id, attempt, outcome) in over {
            self.dispatches.remove(&id);
            self.note(Item::Release { attempt, outcome });
        }
    }

    /// Splits a message into its parts.
    fn parts(&self, rank: usize, seq: usize, is_after_loss: bool) -> Vec<KvUpdate> {
        let events = &self.engines[rank].published[seq];
        let parts: Vec<_> = events.chunks(EVENTS_PER_PART).collect();
        let news = parts.iter().enumerate().map(|(part, events)| {
            KvUpdate::Message(KvMessage {
                seq: seq as u64,
                mark: seq as u64 * 7,
                part: part as u16,
                is_last: part + 1 == parts.len(),
                is_after_loss: is_after_loss && part == 0,
                events: events.iter().map(said).collect(),
            })
        });
        news.collect()
    }

    /// Delivers the message `back` messages behind the newest, without its last `cut` parts.
    pub(crate) fn deliver(&mut self, rank: usize, back: usize, cut: usize) {
        let Some(seq) = self.engines[rank].published.len().checked_sub(back + 1) else {
            return;
        };
        let parts = self.parts(rank, seq, false);
        let count = parts.len().saturating_sub(cut);
        for news in parts.into_iter().take(count) {
            self.told[rank] = self.told[rank].max(seq as u64 + 1);
            self.say(rank, news);
        }
    }

    /// Makes a reader continue from the router's position and catch up; with `is_twice`, a second
    /// one too.
    pub(crate) fn catch_up(&mut self, rank: usize, is_twice: bool) {
        let positions = self.steady.kv_positions(SLOT);
        let position = positions.iter().find(|it| usize::from(it.rank) == rank);
        let position = position.filter(|it| it.publisher == self.publishers[rank]);
        let engine = &self.engines[rank];
        let (oldest, newest) = (engine.oldest, engine.published.len());
        let next = position.map_or(0, |it| it.last.map_or(0, |(seq, _)| seq as usize + 1));
        if position.is_none() && oldest == 0 {
            self.say(rank, KvUpdate::Begin);
        }
        let is_loss = next < oldest;
        for seq in next.max(oldest)..newest {
            for news in self.parts(rank, seq, is_loss && seq == oldest) {
                self.say(rank, news.clone());
                if is_twice {
                    self.say(rank, news);
                }
            }
        }
        self.told[rank] = self.told[rank].max(newest as u64);
        let seq = newest.checked_sub(1).map(|seq| seq as u64);
        self.say(rank, KvUpdate::Current { seq });
    }

    pub(crate) fn doubt(&mut self, rank: usize) {
        self.say(rank, KvUpdate::Doubt(KvUncertainty::Unreachable));
    }

    /// Repeats the reports of a reader that does not know of the engine's restart.
    pub(crate) fn old_news(&mut self, rank: usize) {
        if let Some(before) = self.publishers[rank]
            .checked_sub(1)
            .filter(|_| self.told_of[rank] == self.publishers[rank])
        {
            let message = KvMessage {
                seq: 0,
                mark: 0,
                part: 0,
                is_last: true,
                is_after_loss: false,
                events: vec![KvEvent::Cleared],
            };
            self.say_as(rank, before, KvUpdate::Begin);
            self.say_as(rank, before, KvUpdate::Message(message));
        }
    }

    /// Makes the engine forget its messages except for the last `kept`.
    pub(crate) fn forget(&mut self, rank: usize, kept: usize) {
        let engine = &mut self.engines[rank];
        engine.oldest = engine
            .oldest
            .max(engine.published.len().saturating_sub(kept));
    }

    pub(crate) fn reset(&mut self, rank: usize) {
        self.engines[rank].reset();
    }

    /// Restarts one rank's process. With `is_seen`, a probe reports it and the other ranks restart
    /// too.
    pub(crate) fn restart(&mut self, rank: usize, is_seen: bool) {
        for rank in if is_seen { 0..2 } else { rank..rank + 1 } {
            self.engines[rank] = self.process();
            self.publishers[rank] = self.starts;
            (self.told[rank], self.told_of[rank]) = (0, 0);
        }
        for dispatch in self.dispatches.values_mut() {
            dispatch.is_finished = true;
        }
        if is_seen {
            let facts = EngineFacts {
                started_at_s: Some(self.starts + 10),
                ..EngineFacts::default()
            };
            let backend = self.backend;
            self.note(Item::ObserveEngine { backend, facts });
            self.backend = self.steady.backend("gpu").expect("it was put").handle;
        }
        for (tokens, salt) in &self.prompts {
            for engine in &self.engines {
                let hashes = engine.hashes(tokens, *salt);
                self.names
                    .extend(hashes.into_iter().zip(chain(tokens, *salt)));
            }
        }
    }

    pub(crate) fn rebuild(&mut self) {
        self.rebuilt = restored(&snapshot(&self.steady));
    }

    pub(crate) fn pass(&mut self, milliseconds: u64) {
        self.now_ms += milliseconds;
        self.apply(batch(Vec::new()));
    }

    /// Returns the router's hashes of the blocks that a rank held after a message, as far as
    /// lookups reach them.
    fn truth(&self, rank: usize, messages: usize) -> BTreeSet<BlockHash> {
        let engine = &self.engines[rank];
        let Some(cached) = messages.checked_sub(1).map(|at| &engine.history[at]) else {
            return BTreeSet::new();
        };
        let reached = self.prompts.iter().flat_map(|(tokens, salt)| {
            let hashes = engine.hashes(tokens, *salt).into_iter();
            let hits = hashes.take_while(|hash| cached.contains(hash));
            hits.map(|hash| self.names[&hash])
        });
        reached.collect()
    }

    /// Checks that the router never claims to be exact wrongly, and owns exactly what is known when
    /// it is exact.
    pub(crate) fn check(&mut self) {
        assert_eq!(self.steady.check(), Ok(()));
        assert_eq!(self.rebuilt.check(), Ok(()));
        assert_eq!(self.steady.digest(), self.rebuilt.digest());
        let Some(status) = self.steady.kv_status(SLOT) else {
            return;
        };
        if status.condition.mode == KvMode::Lease {
            assert_eq!(status.reported_blocks, 0);
            return;
        }
        let is_exact = status.condition.mode == KvMode::Exact;
        let mut expected = BTreeSet::new();
        for rank in &status.ranks {
            let at = usize::from(rank.rank);
            if rank.publisher != self.publishers[at] {
                // The router has not heard of the current run, so it knows nothing from it.
                assert!(self.told_of[at] < self.publishers[at]);
                return;
            }
            let applied = rank.last_seq.map_or(0, |seq| seq + 1);
            if is_exact {
                assert_eq!(applied, self.told[at], "exact, and more is known of");
            }
            expected.extend(self.truth(at, applied as usize));
        }
        if is_exact {
            self.exact_seen += 1;
            let view = self.steady.view();
            let owned = |it: &&BlockHash| !view.blocks.owns(SLOT, **it);
            assert_eq!(expected.iter().find(owned), None, "held and not owned");
            assert_eq!(status.reported_blocks, expected.len() as u64);
        }
    }

    /// Ends all requests, delivers all messages and lets time pass: both sides must be equal.
    pub(crate) fn settle(&mut self) {
        for rank in 0..2 {
            for _ in 0..200 {
                self.step(rank);
            }
            assert!(self.engines[rank].is_idle());
        }
        self.release(false);
        for rank in 0..2 {
            self.catch_up(rank, false);
        }
        self.pass(6_001);
        self.pass(1);
        self.check();
        assert_eq!(self.steady.open_leases(), 0);
    }

    /// Whether the router knows exactly what the engine holds. Call it after [`Self::settle`].
    pub(crate) fn is_exact(&self) -> bool {
        let status = self.steady.kv_status(SLOT);
        status.is_some_and(|it| it.condition.mode == KvMode::Exact)
    }

    pub(crate) fn compare(&self) {
        let view = self.steady.view();
        let mut all = BTreeSet::<BlockHash>::new();
        for (tokens, salt) in &self.prompts {
            for end in 1..=tokens.len() {
                let (prompt, mut found) = (&tokens[..end], 0);
                let chain = chain(prompt, *salt);
                view.blocks
                    .match_prefix(&chain, |_, blocks| found = blocks as usize);
                let lookups = self.engines.iter().map(|it| it.lookup(prompt, *salt));
                assert_eq!(Some(found), lookups.max(), "{prompt:?}");
                all.extend(&chain[..found]);
            }
        }
        assert_eq!(self.steady.owned_blocks(SLOT), all.len() as u64);
    }
}

/// Returns an event in the form in which a reader reports it.
pub(crate) fn said(event: &Event) -> KvEvent {
    match event {
        Event::Stored {
            parent,
            hashes,
            prefix,
            salt,
        } => {
            let chain = chain(prefix, *salt);
            let routers = &chain[chain.len() - hashes.len()..];
            let engines = hashes.iter().map(|hash| EngineHash(*hash));
            KvEvent::Stored {
                parent: parent.map(EngineHash),
                blocks: engines.zip(routers.iter().copied()).collect(),
            }
        }
        Event::Removed(hash) => KvEvent::Removed {
            blocks: vec![EngineHash(*hash)],
        },
        Event::Cleared => KvEvent::Cleared,
    }
}
