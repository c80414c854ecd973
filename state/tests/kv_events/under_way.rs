//! Several concurrent requests at an engine that evicts for each of them and reports late.

use std::collections::VecDeque;

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore, SeedableRng};
use state::command::{EngineFacts, Item, LeaseOutcome};
use state::ids::BlockHash;
use state::kv_events::{KvMessage, KvUpdate};

use super::fixture::{chain, said};
use super::pool::{BLOCK_TOKENS, Engine};
use super::scenes::Scene;

/// Number of blocks of the engine, one of which no request can use.
const BLOCKS: usize = 97;
/// Number of chats, which need about five times as many blocks.
const CHATS: usize = 60;
/// Number of steps after which an event is heard.
const LAG: usize = 3;
const REQUESTS: usize = 1_500;

struct UnderWay {
    request: usize,
    chat: usize,
    predicted: usize,
    /// Number of leading blocks that the backend owned at the dispatch, as far as events had
    /// arrived.
    known: usize,
}

struct Load {
    scene: Scene,
    engine: Engine,
    /// Tokens of each chat, and the step from which it may continue.
    chats: Vec<(Vec<u8>, usize)>,
    under_way: Vec<UnderWay>,
    random: SplitMix64,
    requests: usize,
    heard: usize,
    /// Number of messages after each of the last steps.
    published: VecDeque<usize>,
    now: usize,
    /// Number of requests whose hits differed from `predicted`, and from `known`.
    wrong: [usize; 2],
}

impl Load {
    fn new() -> Self {
        let mut scene = Scene::followed(None);
        let capacity_blocks = u32::try_from(BLOCKS).ok();
        let facts = EngineFacts {
            capacity_blocks,
            ..EngineFacts::default()
        };
        let backend = scene.backend;
        scene.note(Item::ObserveEngine { backend, facts });
        let mut engine = Engine::new(1, BLOCKS - 1, 64);
        engine.takes_empty_first = true;
        Self {
            scene,
            engine,
            chats: vec![(Vec::new(), 0); CHATS],
            under_way: Vec::new(),
            random: SplitMix64::seed_from_u64(7),
            requests: 0,
            heard: 0,
            published: VecDeque::new(),
            now: 0,
            wrong: [0; 2],
        }
    }

    /// Starts the next turn of a chat that was answered some time ago.
    fn arrive(&mut self) {
        let chat = loop {
            let chat = self.below(CHATS);
            if self.chats[chat].1 <= self.now {
                break chat;
            }
        };
        let message = 3 + self.below(6);
        let added: Vec<u8> = (0..message).map(|_| self.below(200) as u8).collect();
        let tokens = &mut self.chats[chat].0;
        if tokens.len() > 24 {
            tokens.clear();
        }
        tokens.extend(added);
        if tokens.len().is_multiple_of(BLOCK_TOKENS) {
            tokens.push(201);
        }
        let tokens = tokens.clone();
        self.chats[chat].1 = usize::MAX;
        self.requests += 1;
        let (predicted, known) = self.predict(&tokens);
        let request = self.requests;
        self.under_way.push(UnderWay {
            request,
            chat,
            predicted,
            known,
        });
        let backend = self.scene.backend;
        let chain = chain(&tokens, 0);
        let view = self.scene.driver.state.view();
        let known = chain
            .iter()
            .take_while(|it| view.blocks.owns(backend.slot, **it));
        let known = known.count();
        self.scene.note(Item::Acquire {
            attempt: request as u32,
            backend,
            tip: known.checked_sub(1).map(|at| chain[at]),
            new: chain[known..].to_vec(),
        });
        // The output fills the prompt's last block and needs no other.
        let output = 1;
        self.engine.submit(request, &tokens, 0, output);
    }

    fn below(&mut self, bound: usize) -> usize {
        self.random.next_u64() as usize % bound
    }

    fn predict(&self, tokens: &[u8]) -> (usize, usize) {
        let view = self.scene.driver.state.view();
        let chain: Vec<BlockHash> = chain(tokens, 0);
        let chain = &chain[..chain.len().min((tokens.len() - 1) / BLOCK_TOKENS)];
        let mut matched = 0;
        view.blocks
            .match_prefix(chain, |_, blocks| matched = blocks);
        let evictions = view.evictions();
        let coming = evictions.get(self.scene.backend).expect("it is followed");
        let running = self.under_way.len() as u32;
        let left = coming.left(chain, matched, (running, 0), |_| false);
        (left as usize, matched as usize)
    }

    fn step(&mut self) {
        self.now += 1;
        self.engine.step();
        for request in std::mem::take(&mut self.engine.finished) {
            let at = self.under_way.iter().position(|it| it.request == request);
            let ended = self.under_way.remove(at.expect("it was under way"));
            // Until the cache is full, nothing is evicted.
            if request > REQUESTS / 10 {
                let found = self.engine.hits[&request];
                self.wrong[0] += usize::from(found != ended.predicted);
                self.wrong[1] += usize::from(found != ended.known);
            }
            self.chats[ended.chat].1 = self.now + LAG + 1;
            let mut whole = self.chats[ended.chat].0.clone();
            whole.push(whole.last().map_or(0, |it| (it + 1) % 3));
            self.scene.note(Item::Materialize {
                attempt: request as u32,
                new: chain(&whole, 0).split_off(whole.len() / BLOCK_TOKENS - 1),
            });
            self.scene.note(Item::Release {
                attempt: request as u32,
                outcome: LeaseOutcome::Kept,
            });
        }
        self.published.push_back(self.engine.published.len());
        if self.published.len() > LAG {
            let end = self.published.pop_front().expect("there are some");
            self.hear(end);
        }
    }

    fn hear(&mut self, end: usize) {
        for seq in self.heard..end {
            let message = KvUpdate::Message(KvMessage {
                seq: seq as u64,
                mark: 1,
                part: 0,
                is_last: true,
                is_after_loss: false,
                events: self.engine.published[seq].iter().map(said).collect(),
            });
            self.scene.tell_quickly(message);
        }
        self.heard = end;
    }
}

/// Predictions leave out what an engine evicts for the requests before, although its events arrive
/// three steps late, which is longer than a request takes here.
#[test]
fn predicting_evictions_lowers_the_error_under_concurrency() {
    for at_once in [3, 6] {
        let mut load = Load::new();
        while load.requests < REQUESTS {
            while load.under_way.len() < at_once && load.requests < REQUESTS {
                load.arrive();
            }
            load.step();
        }
        assert_eq!(load.scene.driver.state.check(), Ok(()));
        let [wrong, without] = load.wrong;
        println!("{at_once} at once: {wrong} wrong, {without} without foresight");
        assert!(
            wrong * 3 <= without * 2,
            "{wrong} of {without} at {at_once}"
        );
    }
}
