//! Recorded streams end to end: bytes, [`EventStream`], log, state, and the resulting routing
//! matches. Readers hand over in between, and a second replica is rebuilt from snapshots.

use std::collections::{BTreeMap, HashMap};

use state::RouterState;
use state::command::{BackendSpec, Command, Envelope, Founding, Item, Lane, Origin, Reply};
use state::ids::{
    AttemptId, BackendRef, EngineHash, Incarnation, LogIndex, ReplicaId, SessionId, Slot,
};
use state::kv_events::{KvBatch, KvCondition, LowerTier, LowerTierBlocks};
use state::policy::{CostSettings, PolicyConfig};

use super::fixtures::{self, RecordedMessage};
use super::stream::{EventStream, HashIdentity, StreamContext, StreamEffect};
use crate::engines::kv_transport::wire::{self, EngineEvent};
use crate::prompt::{TokenScope, chain_of_tokens};

const HASH_SEED: u64 = 7;
const MODEL: &str = "tiny";
/// Number of requests between two handovers of the stream.
const REQUESTS_PER_READER: usize = 7;

/// Two replicas, a reader, and the messages that the engine has sent so far.
struct EventFixture {
    steady: RouterState,
    rebuilt: RouterState,
    backend: BackendRef,
    seq: u64,
    stream: EventStream,
    block_size: u32,
    sent: &'static [RecordedMessage],
}

fn identity(block_size: u32) -> HashIdentity {
    HashIdentity {
        hashing: HASH_SEED.into(),
        model: MODEL.to_owned(),
        has_qualified_adapters: false,
        block_size,
        parts: 1,
    }
}

fn rebuilt(state: &RouterState) -> RouterState {
    let mut bytes = Vec::new();
    state.freeze().write_to(&mut bytes).unwrap();
    let mut copy = RouterState::new();
    copy.restore(&mut &*bytes).unwrap();
    copy
}

impl EventFixture {
    fn new(block_size: u32) -> Self {
        let mut fixture = Self {
            steady: RouterState::new(),
            rebuilt: RouterState::new(),
            backend: BackendRef {
                slot: Slot(0),
                incarnation: Incarnation(0),
            },
            seq: 0,
            stream: EventStream::new(identity(block_size), true, None),
            block_size,
            sent: &[],
        };
        fixture.apply(Command::from(Founding::of_seed(
            HASH_SEED,
            PolicyConfig::Cost(CostSettings::default()),
        )));
        fixture.apply(Command::PutBackend(BackendSpec {
            id: "gpu".to_owned(),
            url: "http://127.0.0.1:1".to_owned(),
            models: vec![MODEL.to_owned()],
            labels: BTreeMap::new(),
            capacity_blocks: None,
            kv_events: Some("tcp://127.0.0.1:2".to_owned()),
            kv_replay: None,
            role: state::command::BackendRole::Both,
        }));
        fixture.backend = fixture.steady.backend("gpu").unwrap().handle;
        fixture
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
        let bytes = state::codec::encode_envelope(&envelope);
        for replica in [&mut self.steady, &mut self.rebuilt] {
            let envelope = state::codec::decode_envelope(&bytes).unwrap();
            match replica.apply(LogIndex(self.seq), envelope) {
                Reply::Applied => {}
                Reply::Batch(reply) => assert_eq!(reply.dropped, 0),
                other => panic!("{other:?}"),
            }
        }
    }

    /// Calls `act` on the stream and carries out the effects, with replays from the messages sent
    /// so far.
    fn act(&mut self, act: &mut dyn FnMut(&mut EventStream, &StreamContext<'_>)) {
        let (slot, state) = (self.backend.slot, &self.steady);
        let around = StreamContext {
            now_ms: 1000,
            known: &|engine| state.kv_router_hash(slot, 0, engine),
        };
        act(&mut self.stream, &around);
        for effect in self.stream.take_effects() {
            match effect {
                StreamEffect::Tell { publisher, news } => self.apply(Command::Batch {
                    base_attempt: AttemptId(0),
                    items: vec![Item::KvEvents(KvBatch {
                        backend: self.backend,
                        rank: 0,
                        publisher,
                        news,
                    })],
                }),
                StreamEffect::Replay { from } => {
                    let sent = self.sent;
                    for message in sent.iter().filter(|it| it.seq >= from) {
                        self.act(&mut |stream, around| {
                            stream.replayed(message.seq, &message.payload, around);
                        });
                    }
                    self.act(&mut EventStream::replay_ended);
                }
            }
        }
    }

    /// Lets another replica read on from the state's position.
    fn hand_over(&mut self) {
        let position = self.steady.kv_positions(self.backend.slot).pop();
        self.stream = EventStream::new(identity(self.block_size), true, position);
        // The doubt has not been reported yet.
        self.act(&mut |stream, _| stream.object());
        if position.is_some() {
            assert_ne!(self.condition(), KvCondition::EXACT);
        }
        self.act(&mut |stream, _| stream.connected());
    }

    /// Passes on the messages of `all` that the engine sent before `until_s`.
    fn hear_until(
        &mut self,
        all: &'static [RecordedMessage],
        until_s: f64,
        mut also: impl FnMut(&RecordedMessage),
    ) {
        while let Some(message) = all.get(self.sent.len()) {
            if message.at_s >= until_s {
                break;
            }
            self.sent = &all[..=self.sent.len()];
            also(message);
            self.act(&mut |stream, around| {
                stream.live(message.seq, message.payload.clone(), around);
            });
        }
    }

    fn condition(&self) -> KvCondition {
        let status = self.steady.kv_status(self.backend.slot);
        status.map(|it| it.condition).unwrap()
    }

    fn check(&self) {
        assert_eq!(self.condition(), KvCondition::EXACT);
        assert_eq!(self.steady.check(), Ok(()));
        assert_eq!(self.rebuilt.check(), Ok(()));
        assert_eq!(self.steady.digest(), self.rebuilt.digest());
    }
}

/// The cache as the engine reports it, without any of the router's rules: the engine's hashes with
/// the number of copies, and the parent of each.
#[derive(Default)]
struct Cache {
    copies: HashMap<EngineHash, u32>,
    parents: HashMap<EngineHash, Option<EngineHash>>,
}

impl Cache {
    fn hear(&mut self, message: &RecordedMessage) {
        for event in wire::decode(&message.payload).unwrap().events {
            match event {
                EngineEvent::Stored(stored) => {
                    let mut parent = stored.parent;
                    for name in stored.hashes {
                        *self.copies.entry(name).or_default() += 1;
                        self.parents.insert(name, parent);
                        parent = Some(name);
                    }
                }
                EngineEvent::Removed(removed) => {
                    for name in removed.hashes {
                        *self.copies.get_mut(&name).expect("it was stored") -= 1;
                    }
                }
                EngineEvent::Cleared => *self = Self::default(),
                EngineEvent::Unknown => panic!("an event of an unknown kind"),
            }
        }
    }

    fn holds(&self, name: EngineHash) -> bool {
        self.copies.get(&name).is_some_and(|copies| *copies > 0)
    }

    /// Returns the number of blocks in the cache, and how many of them a lookup reaches.
    fn blocks(&self) -> (u32, u64) {
        let is_reached = |name: &EngineHash| {
            let mut at = Some(*name);
            while let Some(name) = at.filter(|it| self.holds(*it)) {
                at = self.parents[&name];
            }
            at.is_none()
        };
        let held: Vec<_> = self.copies.keys().filter(|it| self.holds(**it)).collect();
        let reached = held.iter().filter(|it| is_reached(it)).count();
        (held.len() as u32, reached as u64)
    }
}

/// Checks after each recorded request that the state holds the same blocks as the engine. For the
/// request's prompt, it must find what the engine found, to the token.
#[test]
fn the_state_equals_the_recorded_engines_cache() {
    for (name, block_size) in [("vllm012_bs16", 16_u32), ("vllm032_bs32", 32)] {
        let all = fixtures::messages(name);
        let tells_salts = name == "vllm032_bs32";
        let (mut fixture, mut cache) = (EventFixture::new(block_size), Cache::default());
        let mut predicted = 0;
        for (number, request) in fixtures::requests(name).into_iter().enumerate() {
            if number % REQUESTS_PER_READER == 0 {
                fixture.hand_over();
                fixture.rebuilt = rebuilt(&fixture.steady);
            }
            fixture.hear_until(all, request.from_s, |message| cache.hear(message));
            fixture.check();
            let status = fixture.steady.kv_status(fixture.backend.slot).unwrap();
            let (held, reached) = cache.blocks();
            assert_eq!(status.ranks[0].blocks, held, "{name}: {}", request.name);
            // Without salts in the events, blocks that differ only in their salt count as one.
            if tells_salts {
                assert_eq!(status.reported_blocks, reached, "{name}: {}", request.name);
            } else {
                assert!(status.reported_blocks <= reached);
            }
            assert_eq!(fixture.steady.owned_blocks(Slot(0)), status.reported_blocks);
            let is_foretold = (tells_salts || request.salt.is_none())
                // The engine reports the reset only in the next step that has events.
                && request.name != "after_reset"
                && !request.prompt.is_empty();
            let Some(hit) = request.hit.filter(|_| is_foretold) else {
                continue;
            };
            let scope = TokenScope {
                model: MODEL,
                salt: request.salt.as_deref().unwrap_or_default(),
                block_size,
            };
            let chain = chain_of_tokens(&HASH_SEED.into(), &scope, None, &request.prompt, &[]);
            let matchable = request.prompt.len().saturating_sub(1) / block_size as usize;
            let mut found = 0;
            let view = fixture.steady.view();
            let chain = &chain[..matchable.min(chain.len())];
            view.blocks.match_prefix(chain, |_, blocks| found = blocks);
            let expected = f64::from(found * block_size);
            assert_eq!(expected, hit, "{name}: {}", request.name);
            predicted += 1;
        }
        assert!(predicted > 15, "{name}: {predicted}");
    }
}

/// Checks that the state finds on each tier what a recorded engine with an `OffloadingConnector` found
/// on its GPU and loaded from its lower tiers, to the token.
#[test]
fn loaded_tokens_equal_those_of_recorded_engines_with_tiers() {
    const BLOCK_SIZE: u32 = 32;
    for (name, tiers) in [
        ("vllm032_offload_placeholder", [true, false]),
        ("vllm032_offload_tiering_fs", [true, true]),
    ] {
        let all = fixtures::messages(name);
        let mut fixture = EventFixture::new(BLOCK_SIZE);
        let (mut predicted, mut loads) = (0, 0);
        for (number, request) in fixtures::requests(name).into_iter().enumerate() {
            if number % REQUESTS_PER_READER == 0 {
                fixture.hand_over();
                fixture.rebuilt = rebuilt(&fixture.steady);
            }
            // The engine reports a reset only in the next step that has events, and not whether it
            // concerns all tiers.
            if request.name.contains("reset") {
                break;
            }
            fixture.hear_until(all, request.from_s, |_| {});
            fixture.check();
            let Some(hit) = request.hit.filter(|_| !request.prompt.is_empty()) else {
                continue;
            };
            let scope = TokenScope {
                model: MODEL,
                salt: request.salt.as_deref().unwrap_or_default(),
                block_size: BLOCK_SIZE,
            };
            let chain = chain_of_tokens(&HASH_SEED.into(), &scope, None, &request.prompt, &[]);
            let matchable = request.prompt.len().saturating_sub(1) / BLOCK_SIZE as usize;
            let view = fixture.steady.view();
            let on_gpu = view.blocks.match_by_position(&chain[..matchable], Slot(0));
            // Unlike on the GPU, the engine also finds a prompt's last block on lower tiers.
            let mut loaded = LowerTierBlocks::default();
            let mut found = on_gpu;
            for (tier, level) in LowerTier::ALL.into_iter().zip(&view.tiers) {
                let at_level = level.match_by_position(&chain, Slot(0));
                loaded.extend(&mut found, tier, at_level);
            }
            let is = [on_gpu, loaded.total()].map(|blocks| f64::from(blocks * BLOCK_SIZE));
            assert_eq!(
                is,
                [hit, request.loaded],
                "{name}: {}: {loaded:?}",
                request.name
            );
            predicted += 1;
            loads += usize::from(request.loaded > 0.0);
        }
        assert!(predicted > 20 && loads > 8, "{name}: {predicted}, {loads}");
        let status = fixture.steady.kv_status(fixture.backend.slot).unwrap();
        let blocks = status.ranks[0].lower_tier_blocks;
        assert_eq!(
            [blocks.cpu > 0, blocks.disk > 0],
            tiers,
            "{name}: {blocks:?}"
        );
    }
}
