//! Tests of streams: message by message from tables, and recorded ones to the token.

use std::collections::{BTreeMap, HashMap};

use rmp::encode as pack;
use state::kv_events::KvEvent;

use super::replay::REPLAY_ATTEMPTS_MAX;
use super::*;
use crate::kv_events::fixtures;
use crate::prompt::{TokenScope, chain_of_tokens};

/// Tokens per block in the messages of these tests.
pub(super) const BLOCK: u32 = 2;

/// The state of a publisher's cache that a cluster derives from the reports.
#[derive(Default)]
pub(super) struct View {
    pub(super) publisher: u64,
    pub(super) last: Option<u64>,
    pub(super) is_current: bool,
    /// Number of copies of each block.
    pub(super) copies: HashMap<EngineHash, u32>,
    /// First engine hash of each block.
    names: BTreeMap<BlockHash, EngineHash>,
    pub(super) story: String,
}

impl View {
    fn take(&mut self, publisher: u64, news: KvUpdate) {
        assert!(publisher >= self.publisher, "runs ascend");
        let is_new = publisher > self.publisher;
        self.publisher = publisher;
        match news {
            KvUpdate::Begin => {
                self.story += "begin ";
                self.last = None;
                self.forget();
            }
            KvUpdate::Message(message) => {
                if message.is_after_loss {
                    self.story += "lost ";
                    self.forget();
                } else {
                    assert!(!is_new);
                    assert_eq!(message.seq, self.last.map_or(0, |last| last + 1));
                }
                self.story += &format!("{} ", message.seq);
                self.last = Some(message.seq);
                for event in message.events {
                    self.event(event);
                }
            }
            KvUpdate::Current { seq } => {
                assert_eq!(seq, self.last);
                self.story += "current ";
                self.is_current = true;
            }
            KvUpdate::Doubt(why) => {
                self.story += &format!("{why:?} ").to_lowercase();
                self.is_current = false;
            }
            KvUpdate::Refuse(why) => self.story += &format!("{why:?} "),
        }
    }

    fn forget(&mut self) {
        self.copies.clear();
        self.names.clear();
    }

    fn event(&mut self, event: KvEvent) {
        match event {
            KvEvent::Stored { blocks, .. } => {
                for (engine, router) in blocks {
                    *self.copies.entry(engine).or_default() += 1;
                    self.names.entry(router).or_insert(engine);
                }
            }
            KvEvent::Removed { blocks } => {
                for engine in blocks {
                    if let Some(copies) = self.copies.get_mut(&engine) {
                        *copies -= 1;
                    }
                }
                self.copies.retain(|_, copies| *copies > 0);
            }
            KvEvent::TierStored { tier, .. }
            | KvEvent::TierCopied { tier, .. }
            | KvEvent::TierRemoved { tier, .. } => self.story += &format!("{} ", tier.name()),
            KvEvent::Cleared => self.forget(),
            KvEvent::LeftOut { parent } => self.story += &format!("without-child-of-{} ", parent.0),
        }
    }

    /// Returns the leading blocks of a prompt that an engine would find.
    fn hits(&self, chain: &[BlockHash], tokens: usize, block_size: u32) -> usize {
        let most = tokens.saturating_sub(1) / block_size as usize;
        let is_held = |hash: &&BlockHash| {
            let engine = self.names.get(hash);
            engine.is_some_and(|engine| self.copies.contains_key(engine))
        };
        chain.iter().take(most).take_while(is_held).count()
    }
}

/// A stream, the cluster's view of it, and its requests for replays.
pub(super) struct Table {
    pub(super) stream: EventStream,
    pub(super) view: View,
    pub(super) asked: Option<u64>,
}

pub(super) fn identity(block_size: u32) -> HashIdentity {
    HashIdentity {
        hashing: 7.into(),
        model: "tiny".to_owned(),
        has_qualified_adapters: false,
        block_size,
        parts: 1,
    }
}

impl Table {
    pub(super) fn new(stream: EventStream) -> Self {
        Self {
            stream,
            view: View::default(),
            asked: None,
        }
    }

    pub(super) fn fresh() -> Self {
        Self::new(EventStream::new(identity(BLOCK), true, None))
    }

    pub(super) fn act(
        &mut self,
        act: impl FnOnce(&mut EventStream, &StreamContext<'_>),
    ) -> &mut Self {
        let around = StreamContext {
            now_ms: 1000,
            known: &|_| None,
        };
        act(&mut self.stream, &around);
        for effect in self.stream.take_effects() {
            match effect {
                StreamEffect::Tell { publisher, news } => self.view.take(publisher, news),
                StreamEffect::Replay { from } => {
                    self.view.story += &format!("[ask {from}] ");
                    self.asked = Some(from);
                }
            }
        }
        self
    }

    pub(super) fn connect(&mut self) -> &mut Self {
        self.act(|stream, _| stream.connected())
    }

    pub(super) fn live(&mut self, run: &str, seqs: impl IntoIterator<Item = u64>) -> &mut Self {
        for seq in seqs {
            self.act(|stream, around| stream.live(seq, message(run, seq), around));
        }
        self
    }

    /// Responds to the stream's replay requests with the messages `has` of `run`, until there are
    /// no more requests.
    fn answer(&mut self, run: &str, has: std::ops::Range<u64>) -> &mut Self {
        while let Some(from) = self.asked.take() {
            for seq in has.clone().filter(|seq| *seq >= from) {
                let payload = message(run, seq);
                self.act(|stream, around| stream.replayed(seq, &payload, around));
                if self.asked.is_some() {
                    break;
                }
            }
            if self.asked.is_none() {
                self.act(EventStream::replay_ended);
            }
        }
        self
    }

    #[track_caller]
    pub(super) fn check(&mut self, story: &str) -> &mut Self {
        assert_eq!(std::mem::take(&mut self.view.story).trim_end(), story);
        self
    }
}

fn stored(bytes: &mut Vec<u8>, hash: u64, parent: Option<u64>, tokens: [u32; 2]) {
    pack::write_array_len(bytes, 7).unwrap();
    pack::write_str(bytes, "BlockStored").unwrap();
    pack::write_array_len(bytes, 1).unwrap();
    pack::write_uint(bytes, hash).unwrap();
    match parent {
        Some(parent) => {
            pack::write_uint(bytes, parent).unwrap();
        }
        None => pack::write_nil(bytes).unwrap(),
    }
    pack::write_array_len(bytes, 2).unwrap();
    for token in tokens {
        pack::write_uint(bytes, token.into()).unwrap();
    }
    pack::write_uint(bytes, BLOCK.into()).unwrap();
    pack::write_nil(bytes).unwrap();
    pack::write_str(bytes, "GPU").unwrap();
}

fn payload(run: &str, events: u32, write: impl FnOnce(&mut Vec<u8>)) -> Bytes {
    let mut bytes = Vec::new();
    pack::write_array_len(&mut bytes, 2).unwrap();
    pack::write_str(&mut bytes, run).unwrap();
    pack::write_array_len(&mut bytes, events).unwrap();
    write(&mut bytes);
    bytes.into()
}

/// Returns message number `seq` of `run`, with one block that begins a prompt.
pub(super) fn message(run: &str, seq: u64) -> Bytes {
    let token = u32::try_from(seq).unwrap();
    payload(run, 1, |bytes| {
        stored(bytes, 100 + seq, None, [token, token]);
    })
}

pub(super) fn position(run: &str, seq: u64) -> KvPosition {
    KvPosition {
        rank: 0,
        publisher: 5,
        last: Some((seq, xxh3_64(&message(run, seq)))),
    }
}

#[test]
fn the_cluster_learns_which_parent_of_a_block_the_reader_does_not_know() {
    let child = payload("a", 1, |bytes| stored(bytes, 50, Some(7), [8, 8]));
    let mut table = Table::fresh();
    table.connect().answer("a", 0..1);
    table.check("[ask 0] begin 0 [ask 0] current");
    table.act(|stream, around| stream.live(1, child, around));
    table.check("1 without-child-of-7");
}

#[test]
fn a_parent_is_remembered_while_65536_further_blocks_arrive() {
    const EACH: u32 = 1024;
    let mut table = Table::fresh();
    table
        .connect()
        .answer("a", 0..1)
        .check("[ask 0] begin 0 [ask 0] current");
    let others = |seq: u64| {
        payload("a", EACH, |bytes| {
            for token in 0..EACH {
                let hash = seq * 1000 * u64::from(EACH) + u64::from(token);
                stored(bytes, hash, None, [token, 7]);
            }
        })
    };
    let child = |hash| payload("a", 1, move |bytes| stored(bytes, hash, Some(100), [8, 8]));
    let mut seq = 1;
    let mut hear = |table: &mut Table, payload: Bytes| {
        table.act(|stream, around| stream.live(seq, payload, around));
        seq += 1;
    };
    for message in 1..=64 {
        hear(&mut table, others(message));
    }
    table.view.story.clear();
    hear(&mut table, child(50));
    table.check("65");
    for message in 65..=130 {
        hear(&mut table, others(message));
    }
    table.view.story.clear();
    hear(&mut table, child(51));
    table.check("132 without-child-of-100");
}

#[test]
fn a_fresh_engines_events_are_read_from_the_start() {
    let mut table = Table::fresh();
    table
        .connect()
        .answer("a", 0..0)
        .check("[ask 0] begin current");
    table.live("a", 0..3).check("0 1 2");
    let mut table = Table::fresh();
    table
        .connect()
        .answer("a", 0..3)
        .check("[ask 0] begin 0 1 2 [ask 2] current");
    assert_eq!(table.view.copies.len(), 3);
}

#[test]
fn an_engine_without_its_first_events_is_a_loss() {
    let mut table = Table::fresh();
    table
        .connect()
        .answer("a", 4..6)
        .check("[ask 0] lost 4 5 [ask 5] current");
    assert_eq!(table.stream.counts().losses, 1);
}

#[test]
fn messages_during_a_replay_are_buffered_and_not_repeated() {
    let mut table = Table::fresh();
    table.connect().live("a", 2..5).check("[ask 0]");
    table.answer("a", 0..4).check("begin 0 1 2 3 4 current");
    assert_eq!(table.stream.counts().repeats, 2);
}

#[test]
fn repeats_are_dropped() {
    let mut table = Table::fresh();
    table.connect().answer("a", 0..2).live("a", [2, 2, 1, 3]);
    table.check("[ask 0] begin 0 1 [ask 1] current 2 3");
}

#[test]
fn a_gap_is_replayed_from_the_last_message() {
    let mut table = Table::fresh();
    table.connect().answer("a", 0..2).live("a", [2, 5]);
    table.check("[ask 0] begin 0 1 [ask 1] current 2 gap [ask 2]");
    table.answer("a", 0..6).check("3 4 5 current");
    assert!(table.view.is_current);
    assert_eq!(table.view.copies.len(), 6);
}

#[test]
fn reordered_messages_are_delivered_in_order() {
    let mut table = Table::fresh();
    table.connect().answer("a", 0..1).live("a", [2, 1, 3]);
    table.check("[ask 0] begin 0 [ask 0] current gap [ask 0]");
    table.answer("a", 0..4).check("1 2 3 current");
}

#[test]
fn messages_missing_from_the_replay_are_lost() {
    let mut table = Table::fresh();
    table.connect().answer("a", 0..2).live("a", [20]);
    table.check("[ask 0] begin 0 1 [ask 1] current gap [ask 1]");
    table.answer("a", 15..21);
    table.check("lost 15 16 17 18 19 20 current");
    assert_eq!(table.view.copies.len(), 6);
}

#[test]
fn an_unavailable_replay_becomes_a_loss() {
    let mut table = Table::fresh();
    table
        .connect()
        .answer("a", 0..2)
        .live("a", [4, 5])
        .check("[ask 0] begin 0 1 [ask 1] current gap [ask 1]");
    for _ in 1..REPLAY_ATTEMPTS_MAX {
        table.act(EventStream::replay_failed).check("[ask 1]");
    }
    table
        .act(EventStream::replay_failed)
        .check("lost 4 5 current");
}

#[test]
fn falling_sequence_numbers_indicate_a_restart() {
    let mut table = Table::fresh();
    table.connect().answer("a", 0..5).live("b", [0]);
    table.check("[ask 0] begin 0 1 2 3 4 [ask 4] current gap [ask 4]");
    table
        .answer("b", 0..2)
        .check("[ask 0] begin 0 1 [ask 1] current");
    assert_eq!(table.view.copies.len(), 2);
    assert_eq!(table.stream.counts().runs, 2);
}

#[test]
fn a_restart_during_a_disconnect_is_detected_by_the_mark() {
    // The restarted engine has come as far as the previous one, so numbers alone do not distinguish
    // them.
    for has in [5..5, 0..3, 0..5, 0..6, 0..9] {
        let mut table = Table::fresh();
        table.connect().answer("a", 0..5);
        table.act(|stream, _| stream.disconnected());
        table.check("[ask 0] begin 0 1 2 3 4 [ask 4] current unreachable");
        table.connect().answer("b", has.clone());
        assert!(
            table.view.story.contains("begin"),
            "{has:?}: {}",
            table.view.story
        );
        assert!(table.view.is_current && !table.view.story.contains("lost"));
        assert_eq!(table.view.copies.len() as u64, has.end - has.start);
    }
}

#[test]
fn the_next_reader_continues_at_the_last_position() {
    let mut table = Table::new(EventStream::new(
        identity(BLOCK),
        true,
        Some(position("a", 80)),
    ));
    table.view.publisher = 5;
    table.view.last = Some(80);
    table.connect().check("[ask 16]");
    table.answer("a", 10..83).check("81 82 [ask 82] current");
    let mut table = Table::new(EventStream::new(
        identity(BLOCK),
        true,
        Some(position("b", 80)),
    ));
    table.view.publisher = 5;
    table.connect().answer("a", 0..82);
    assert!(table.view.story.starts_with("[ask 16] [ask 0] begin 0 1 "));
    assert!(table.view.publisher > 5);
}

#[test]
fn a_check_of_a_silent_stream_restores_exact_mode() {
    let mut table = Table::fresh();
    table
        .connect()
        .answer("a", 0..2)
        .check("[ask 0] begin 0 1 [ask 1] current");
    table
        .act(|stream, _| stream.check(false))
        .answer("a", 0..2)
        .check("[ask 1]");
    // The publisher dropped messages for this subscriber and has been silent since.
    table
        .act(|stream, _| stream.check(false))
        .answer("a", 0..4)
        .check("[ask 1] 2 3 [ask 3]");
    table
        .act(|stream, _| stream.check(true))
        .answer("a", 0..4)
        .check("[ask 3] current");
}

#[test]
fn a_restarted_reader_reports_degraded_mode() {
    let mut table = Table::new(EventStream::new(
        identity(BLOCK),
        true,
        Some(position("a", 1)),
    ));
    (table.view.publisher, table.view.last) = (5, Some(1));
    table.act(|stream, _| stream.object()).check("handover");
    table.connect().answer("a", 0..3);
    table.check("[ask 0] 2 [ask 2] current");
    table.act(|stream, _| stream.object()).check("");
}

#[test]
fn a_run_followed_again_has_a_later_publisher_id() {
    let mut table = Table::new(EventStream::anew(identity(BLOCK), true, 5_000));
    table.connect().answer("a", 0..2);
    table.check("[ask 0] begin 0 1 [ask 1] current");
    assert_eq!(table.view.publisher, 5_001);
}

#[test]
fn without_replays_a_gap_is_a_loss() {
    let mut table = Table::new(EventStream::new(identity(BLOCK), false, None));
    table.connect().live("a", [0, 1]).check("begin 0 current 1");
    table.live("a", [1, 3, 4]).check("lost 3 current 4");
    table.live("b", [0]).check("begin 0 current");
    let mut table = Table::new(EventStream::new(identity(BLOCK), false, None));
    table.connect().live("a", [7, 8]).check("lost 7 current 8");
}

#[test]
fn blocks_of_a_different_size_are_refused_once() {
    let mut table = Table::new(EventStream::new(identity(BLOCK + 1), true, None));
    table.connect().answer("a", 0..0).live("a", 0..3);
    table.check("[ask 0] begin current BlockSize { engine: 2, router: 3 }");
    // The next run may be another engine.
    table.live("b", [0]).answer("b", 0..1);
    assert!(table.view.story.contains("begin BlockSize"));
}

#[test]
fn unreadable_messages_are_refused() {
    let mut table = Table::fresh();
    table.connect().answer("a", 0..0);
    table.act(|stream, around| stream.live(0, Bytes::from_static(b"no"), around));
    table.check("[ask 0] begin current Unreadable");
}

#[test]
fn a_block_without_its_parent_waits_and_is_no_root() {
    let mut table = Table::fresh();
    table.connect().answer("a", 0..0);
    let child = payload("a", 1, |bytes| stored(bytes, 2, Some(1), [3, 4]));
    let grandchild = payload("a", 1, |bytes| stored(bytes, 3, Some(2), [5, 6]));
    let parent = payload("a", 1, |bytes| stored(bytes, 1, None, [1, 2]));
    for (seq, payload) in (0..).zip([grandchild, child]) {
        table.act(|stream, around| stream.live(seq, payload, around));
    }
    assert!(table.view.copies.is_empty());
    table.act(|stream, around| stream.live(2, parent, around));
    let scope = TokenScope {
        model: "tiny",
        salt: "",
        block_size: BLOCK,
    };
    let chain = chain_of_tokens(&7.into(), &scope, None, &[1, 2, 3, 4, 5, 6], &[]);
    assert_eq!(table.view.hits(&chain, 7, BLOCK), 3);
}

#[test]
fn large_messages_are_split_into_parts() {
    let mut table = Table::fresh();
    table.connect().answer("a", 0..0);
    let count = 5000;
    let large = payload("a", count, |bytes| {
        for block in 0..u64::from(count) {
            stored(bytes, block, block.checked_sub(1), [1, 2]);
        }
    });
    let around = StreamContext {
        now_ms: 1000,
        known: &|_| None,
    };
    table.stream.live(0, large, &around);
    let mut parts = Vec::new();
    for effect in table.stream.take_effects() {
        if let StreamEffect::Tell {
            news: KvUpdate::Message(message),
            ..
        } = effect
        {
            let item = state::command::Item::KvEvents(state::kv_events::KvBatch {
                backend: state::ids::BackendRef {
                    slot: state::ids::Slot(0),
                    incarnation: state::ids::Incarnation(0),
                },
                rank: 0,
                publisher: 1,
                news: KvUpdate::Message(message.clone()),
            });
            assert!(state::codec::item_bytes(&item) < 60 << 10);
            parts.push((message.part, message.is_last));
        }
    }
    assert_eq!(parts, [(0, false), (1, false), (2, true)]);
}

/// Checks after each recorded message that the view equals the engine's cache, so that the hit of
/// every later prompt is predicted to the token.
#[test]
fn recorded_hits_are_predicted_exactly() {
    for (name, engine, block_size) in [
        ("vllm012_bs16", 16_u32, 16_u32),
        ("vllm032_bs32", 32, 32),
        // Reported in blocks of half the engine's size.
        ("vllm032_bs32", 32, 16),
    ] {
        let mut table = Table::new(EventStream::new(identity(block_size), true, None));
        table.connect().act(EventStream::replay_ended);
        let mut messages = fixtures::messages(name).iter().peekable();
        let mut predicted = 0;
        for request in fixtures::requests(name) {
            while let Some(message) = messages.next_if(|message| message.at_s < request.from_s) {
                let payload = message.payload.clone();
                table.act(|stream, around| stream.live(message.seq, payload, around));
            }
            // Version 0.12 does not report salts, so a salted prompt is never predicted there.
            let is_told = name == "vllm032_bs32" || request.salt.is_none();
            let (Some(hit), true) = (request.hit, is_told && !request.prompt.is_empty()) else {
                continue;
            };
            let scope = TokenScope {
                model: "tiny",
                salt: request.salt.as_deref().unwrap_or_default(),
                block_size,
            };
            let chain = chain_of_tokens(&7.into(), &scope, None, &request.prompt, &[]);
            let hits = table.view.hits(&chain, request.prompt.len(), block_size);
            // The engine computes the last token, and with it that token's whole block.
            let hits = hits as u32 * block_size / engine * engine;
            // The engine reports the reset only in the next step that has events.
            if request.name != "after_reset" {
                assert_eq!(f64::from(hits), hit, "{name}: {}", request.name);
                predicted += 1;
            }
        }
        assert!(predicted > 15, "{name}: {predicted}");
        let counts = table.stream.counts();
        assert_eq!((counts.foreign, counts.orphans, counts.gaps), (0, 0, 0));
    }
}
