//! Tests of replays that lack messages, as from a ROUTER socket that drops what exceeds its queue.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::tests::{BLOCK, Table, identity, message, position};
use super::*;

/// An engine that publishes, drops live messages, and replays with holes. The answers to "does it
/// drop this one" come from a tape, which repeats.
#[derive(Debug)]
struct LossyEngine {
    /// Number of messages published.
    published: u64,
    /// Number of messages that it publishes in all.
    total: u64,
    /// Numbers that it cannot replay.
    gone: BTreeSet<u64>,
    drops_live: bool,
    tape: Vec<u8>,
    at: usize,
    requests: u64,
}

impl LossyEngine {
    /// Answers a question with yes once in `of` times, roughly.
    fn draw(&mut self, of: u8) -> bool {
        self.at += 1;
        self.tape[self.at % self.tape.len()].is_multiple_of(of)
    }

    /// Publishes a message now and then.
    fn step(&mut self, table: &mut Table) {
        if self.published < self.total && self.draw(3) {
            let seq = self.published;
            self.published += 1;
            if !(self.drops_live && self.draw(2)) {
                table.live("a", [seq]);
            }
        }
    }

    /// Answers the stream's requests until there are no more. Of each replay, the first message and
    /// the first new one arrive; any other may be dropped, and behind a new one the end marker too.
    fn serve(&mut self, table: &mut Table) {
        while let Some(from) = table.asked.take() {
            self.requests += 1;
            assert!(self.requests <= 20 + 3 * self.total, "endless requests");
            let published = self.published;
            let next = table
                .stream
                .told()
                .and_then(|(_, last)| last)
                .map_or(0, |last| last + 1);
            let has = (from..published).filter(|seq| !self.gone.contains(seq));
            let mut has_new = false;
            for (place, seq) in has.collect::<Vec<_>>().into_iter().enumerate() {
                self.step(table);
                let is_first_new = seq >= next && !has_new;
                if place > 0 && !is_first_new && self.draw(2) {
                    continue;
                }
                has_new |= seq >= next;
                let payload = message("a", seq);
                table.act(|stream, around| stream.replayed(seq, &payload, around));
                if table.asked.is_some() {
                    break;
                }
            }
            self.step(table);
            if table.asked.is_some() {
                continue;
            }
            if has_new && self.draw(3) {
                table.act(EventStream::replay_failed);
            } else {
                table.act(EventStream::replay_ended);
            }
            let is_exact = table.stream.is_following() && !table.stream.is_in_doubt();
            let told = table.view.last.map_or(0, |last| last + 1);
            assert!(
                !is_exact || self.drops_live || told >= published,
                "counts as exact at {told} of {published}: {}",
                table.view.story
            );
        }
    }

    /// Lets the rest be published, and the stream notice a silence.
    fn settle(&mut self, table: &mut Table) {
        table.connect();
        self.serve(table);
        while self.published < self.total {
            self.step(table);
            self.serve(table);
        }
        table.act(|stream, _| stream.check(false));
        self.serve(table);
    }
}

prop_compose! {
    fn lossy_engine()(
        total in 1_u64..60,
        early in 0_u64..60,
        drops_live: bool,
        tape in proptest::collection::vec(any::<u8>(), 1..200),
    ) -> LossyEngine {
        LossyEngine {
            published: early.min(total),
            total,
            gone: BTreeSet::new(),
            drops_live,
            // A tape of one answer may publish nothing.
            tape: [&tape[..], &[0, 1]].concat(),
            at: 0,
            requests: 0,
        }
    }
}

proptest! {
    /// While the engine has all messages and each replay brings a new one, no pattern of dropped
    /// messages is a loss.
    #[test]
    fn dropped_messages_of_replays_are_no_loss(mut engine in lossy_engine(), told in 0_u64..90) {
        let mut table = Table::fresh();
        if let Some(last) = told.checked_sub(1).filter(|last| *last < engine.published) {
            // Another reader has reported these.
            let position = position("a", last);
            table = Table::new(EventStream::new(identity(BLOCK), true, Some(position)));
            (table.view.publisher, table.view.last) = (position.publisher, Some(last));
        }
        engine.settle(&mut table);
        prop_assert!(!table.view.story.contains("lost"), "{}", table.view.story);
        prop_assert_eq!(table.stream.counts().losses, 0);
        prop_assert!(table.view.is_current && !table.stream.is_in_doubt());
        prop_assert_eq!(table.view.last, engine.total.checked_sub(1));
    }

    /// Messages that the engine no longer has are a loss, whatever else it drops.
    #[test]
    fn messages_that_no_replay_brings_are_a_loss(
        mut engine in lossy_engine(),
        first in 0_u64..60,
        gone in 1_u64..20,
    ) {
        engine.gone = (first..first + gone).collect();
        // The engine has at least one message behind them.
        engine.published = engine.published.max(first + gone + 1);
        engine.total = engine.total.max(engine.published);
        let mut table = Table::fresh();
        engine.settle(&mut table);
        prop_assert_eq!(table.stream.counts().losses, 1, "{}", table.view.story);
        prop_assert!(table.view.is_current && !table.stream.is_in_doubt());
        prop_assert_eq!(table.view.last, engine.total.checked_sub(1));
        prop_assert_eq!(table.view.copies.len() as u64, engine.total - first - gone);
    }
}

/// Replays `seqs` of run `a`, and returns whether another replay is requested.
fn replay(table: &mut Table, seqs: impl IntoIterator<Item = u64>) -> Option<u64> {
    table.asked = None;
    for seq in seqs {
        assert_eq!(table.asked, None);
        let payload = message("a", seq);
        table.act(|stream, around| stream.replayed(seq, &payload, around));
    }
    table.asked
}

/// Holes of vLLM 0.32's replays of 4,415 messages: the first one begins behind message 999, and the
/// last ones reach the end of the replay.
#[test]
fn holes_of_a_replay_are_requested_until_none_is_left() {
    let mut table = Table::fresh();
    table.connect().check("[ask 0]");
    assert_eq!(replay(&mut table, (0..1000).chain([1104])), Some(999));
    assert_eq!(replay(&mut table, (999..1630).chain([1871])), Some(1629));
    // The end marker came although the last messages were dropped.
    assert_eq!(replay(&mut table, 1629..3000), None);
    table.act(EventStream::replay_ended);
    assert_eq!(table.asked, Some(2999));
    assert!(!table.stream.is_following());
    // The end marker was dropped, too.
    assert_eq!(replay(&mut table, 2999..3500), None);
    table.act(EventStream::replay_failed);
    assert_eq!(replay(&mut table, 3499..4415), None);
    table.act(EventStream::replay_ended);
    assert_eq!(replay(&mut table, [4414]), None);
    table.act(EventStream::replay_ended);
    assert!(table.view.is_current && table.stream.is_following());
    assert_eq!(table.view.copies.len(), 4415);
    let counts = table.stream.counts();
    assert_eq!((counts.gaps, counts.losses, counts.runs), (2, 0, 1));
}

#[test]
fn failed_replays_that_bring_messages_are_no_loss() {
    let mut table = Table::fresh();
    table.connect().live("a", [40]).check("[ask 0]");
    for from in (0..40_u64).step_by(2) {
        let first = from.saturating_sub(1);
        assert_eq!(replay(&mut table, first..from + 2), None);
        table.act(EventStream::replay_failed);
    }
    assert!(table.view.is_current && !table.view.story.contains("lost"));
    assert_eq!(table.view.copies.len(), 41);
}

#[test]
fn live_messages_make_the_end_of_a_replay_unnecessary() {
    let mut table = Table::fresh();
    table.connect().live("a", [3, 4]).check("[ask 0]");
    replay(&mut table, 0..3);
    table
        .act(EventStream::replay_failed)
        .check("begin 0 1 2 3 4 current");
}

#[test]
fn a_slow_replay_brings_any_number_of_live_messages() {
    let count = 2 * MARKS_MAX as u64;
    let mut table = Table::fresh();
    table.connect().live("a", 0..count);
    assert_eq!(replay(&mut table, 0..count), None);
    table.act(EventStream::replay_ended);
    assert!(table.view.is_current && table.stream.is_following());
    assert_eq!(table.view.copies.len() as u64, count);
    assert_eq!(table.stream.counts().repeats, count);
}

#[test]
fn a_live_gap_that_no_replay_closes_is_a_loss() {
    let mut table = Table::fresh();
    table.connect();
    replay(&mut table, 0..2);
    table.act(EventStream::replay_ended);
    replay(&mut table, [1]);
    table.act(EventStream::replay_ended);
    table.check("[ask 0] begin 0 1 [ask 1] current");
    table.live("a", [4, 5]).check("gap [ask 1]");
    replay(&mut table, [1]);
    table
        .act(EventStream::replay_ended)
        .check("lost 4 5 current");
}

/// The engine's other port is unreachable, but the subscription never broke.
#[test]
fn an_unreachable_replay_does_not_end_an_unbroken_subscription() {
    let mut table = Table::fresh();
    table.connect();
    replay(&mut table, []);
    table.act(EventStream::replay_ended);
    table.live("a", [0]).check("[ask 0] begin current 0");
    for seq in 1..20 {
        table.asked = None;
        table.act(|stream, _| stream.check(false)).live("a", [seq]);
        table.act(EventStream::replay_failed);
    }
    assert!(!table.view.story.contains("lost") && !table.view.story.contains("begin 1"));
    assert!(table.view.is_current && table.stream.is_following());
    assert_eq!(table.view.last, Some(19));
    // A gap remains a doubt at once.
    table.act(|stream, _| stream.check(false)).live("a", [25]);
    table.act(EventStream::replay_failed);
    assert!(table.stream.is_in_doubt() && !table.view.is_current);
}

/// A replay repeats what the subscription brought meanwhile, and more than can be held.
#[test]
fn messages_without_room_are_requested() {
    let mut table = Table::fresh();
    table.connect();
    let large = Bytes::from(vec![0; HELD_BYTES_MAX - 1]);
    table.act(|stream, around| stream.live(0, large.clone(), around));
    table.live("a", 1..4);
    assert_eq!(replay(&mut table, 0..3), None);
    table.live("a", [4]);
    table.act(EventStream::replay_ended);
    assert_eq!(table.asked, Some(2), "message 3 had no room");
    assert!(table.stream.is_in_doubt());
    replay(&mut table, 2..5);
    table.act(EventStream::replay_ended);
    assert!(table.view.is_current && table.stream.is_following());
    assert_eq!(table.view.last, Some(4));
}
