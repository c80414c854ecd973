//! Charges of resumable streams, whoever carries them.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::table::StreamVerdict;
use super::*;
use crate::admission::{Advance, CreditLedger, Pricing, TokenDelta};

const USER: UserKey = UserKey(7);
const STREAM: StreamId = StreamId(9);
/// The answer that all carriers give together: prompt and output tokens.
const ANSWER: [u64; 2] = [100, 50];

fn charge(user: u64, stream: u64, carrier: u64, output: u64) -> StreamCharge {
    let carried = CarriedStream {
        stream: StreamId(stream),
        carrier: StreamCarrier(carrier),
    };
    let mut charge = StreamCharge::empty(UserKey(user), carried);
    charge.charge.output = output;
    charge
}

fn takes_over(mut charge: StreamCharge, epoch: u32) -> StreamCharge {
    charge.takes_over = Some(epoch);
    charge
}

fn record(table: &StreamTable, user: u64, stream: u64) -> Option<StreamRecord> {
    let key = StreamKey {
        stream: StreamId(stream),
        user: UserKey(user),
    };
    table.published().record(key).copied()
}

/// A request that carries the stream at a replica of its own.
struct Carrier {
    carried: CarriedStream,
    /// Number of output tokens of the answer that its client has, at most.
    produced: u64,
    charged: [u64; 2],
    advance: Advance,
    queued: StreamCharge,
    /// Charges on their way to the log, in order.
    sent: VecDeque<StreamCharge>,
}

/// A stream with all requests that carried it, and what the log made of their charges.
struct Scene {
    table: StreamTable,
    carriers: Vec<Carrier>,
    ledger: CreditLedger,
    pricing: Pricing,
    /// Take-overs that were given up, which may still be applied once the stream has gone on.
    late: Vec<StreamCharge>,
    /// Tokens charged to the user, and the priced tokens of them.
    user: [u64; 2],
    due: u64,
}

impl Scene {
    fn new() -> Self {
        let mut scene = Self {
            table: StreamTable::default(),
            carriers: Vec::new(),
            ledger: CreditLedger::default(),
            pricing: Pricing::default(),
            late: Vec::new(),
            user: [0; 2],
            due: 0,
        };
        let estimate = TokenDelta {
            input_uncached: ANSWER[0] + 20,
            ..TokenDelta::default()
        };
        let (advance, ahead) = scene.ledger.open(USER, &estimate, &scene.pricing);
        scene.begin([0; 2], 0, advance);
        scene.carriers[0].queued.charge.advance = ahead.advance;
        scene
    }

    fn begin(&mut self, charged: [u64; 2], produced: u64, advance: Advance) {
        let carried = CarriedStream {
            stream: STREAM,
            carrier: StreamCarrier(self.carriers.len() as u64),
        };
        self.carriers.push(Carrier {
            carried,
            produced,
            charged,
            advance,
            queued: StreamCharge::empty(USER, carried),
            sent: VecDeque::new(),
        });
    }

    /// A carrier relays up to `tokens` more and charges what is new.
    fn produce(&mut self, which: usize, tokens: u64) {
        let carrier = &mut self.carriers[which];
        carrier.produced = ANSWER[1].min(carrier.produced + tokens);
        let used = TokenDelta {
            input_uncached: ANSWER[0] - carrier.charged[0],
            output: carrier.produced.saturating_sub(carrier.charged[1]),
            ..TokenDelta::default()
        };
        carrier.charged[0] += used.input_uncached;
        carrier.charged[1] += used.output;
        let (ledger, advance) = (&mut self.ledger, &mut carrier.advance);
        let settled = ledger.settle(USER, advance, &used, &self.pricing);
        carrier.queued.charge.add(&settled);
    }

    fn flush(&mut self, which: usize) {
        let carrier = &mut self.carriers[which];
        let next = StreamCharge::empty(USER, carrier.carried);
        let sent = std::mem::replace(&mut carrier.queued, next);
        carrier.sent.push_back(sent);
    }

    fn deliver(&mut self, which: usize) {
        if let Some(item) = self.carriers[which].sent.pop_front() {
            self.apply(&item);
        }
    }

    fn apply(&mut self, item: &StreamCharge) {
        if let StreamVerdict::Counts { .. } = self.table.charge(item, 1) {
            self.user[0] += item.charge.input_uncached;
            self.user[1] += item.charge.output;
            self.due += self.pricing.due(&item.charge);
        }
    }

    /// A client that has a part of what the carrier has relayed goes on elsewhere.
    fn resume(&mut self, from: usize, missing: u64) {
        let received = self.carriers[from].produced.saturating_sub(missing);
        let new = self.carriers.len();
        self.begin([0; 2], received, Advance::default());
        let known = record(&self.table, USER.0, STREAM.0);
        let epoch = known.map_or(1, |record| record.epoch + 1);
        let item = takes_over(StreamCharge::empty(USER, self.carriers[new].carried), epoch);
        self.apply(&item);
        let record = record(&self.table, USER.0, STREAM.0).unwrap();
        // Somebody else has asked for the same, and left.
        let carrier = StreamCarrier(1000 + new as u64);
        let carried = CarriedStream {
            carrier,
            ..self.carriers[new].carried
        };
        let late = StreamCharge::empty(USER, carried);
        self.late.push(takes_over(late, epoch));
        let carrier = &mut self.carriers[new];
        carrier.charged = [record.charged.input(), record.charged.output];
        carrier.advance = Advance::left_over(record.advance, carrier.charged[0] > 0);
    }
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Produce(usize, u64),
    Flush(usize),
    Deliver(usize),
    Resume(usize, u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let which = || 0_usize..4;
    let step = prop_oneof![
        3 => (which(), 0_u64..20).prop_map(|(which, tokens)| Step::Produce(which, tokens)),
        2 => which().prop_map(Step::Flush),
        2 => which().prop_map(Step::Deliver),
        1 => (which(), 0_u64..20).prop_map(|(which, missing)| Step::Resume(which, missing)),
    ];
    prop::collection::vec(step, 0..60)
}

proptest! {
    /// I168.
    #[test]
    fn all_carriers_of_a_stream_charge_one_answer(steps in steps(), last in steps()) {
        let mut scene = Scene::new();
        for step in steps {
            let known = |which: usize| which % scene.carriers.len();
            match step {
                Step::Produce(which, tokens) => scene.produce(known(which), tokens),
                Step::Flush(which) => scene.flush(known(which)),
                Step::Deliver(which) => scene.deliver(known(which)),
                Step::Resume(from, missing) => scene.resume(known(from), missing),
            }
        }
        // Whoever carries the stream ends it. What others sent may arrive at any time.
        let carrier = scene.carriers.len() - 1;
        scene.produce(carrier, ANSWER[1]);
        let mut order: Vec<usize> = last.iter().map(|step| match step {
            Step::Produce(which, _) | Step::Flush(which) | Step::Deliver(which)
            | Step::Resume(which, _) => which % scene.carriers.len(),
        }).collect();
        order.extend(0..scene.carriers.len());
        for item in std::mem::take(&mut scene.late) {
            scene.apply(&item);
        }
        for which in order {
            scene.flush(which);
            while !scene.carriers[which].sent.is_empty() {
                scene.deliver(which);
            }
        }
        prop_assert_eq!(scene.user, ANSWER);
        let record = record(&scene.table, USER.0, STREAM.0).unwrap();
        prop_assert_eq!([record.charged.input(), record.charged.output], ANSWER);
        let price = scene.pricing.input(ANSWER[0], 0) + scene.pricing.output(ANSWER[1]);
        prop_assert_eq!(scene.due, price + record.advance);
        scene.table.check().unwrap();
    }
}

#[test]
fn a_stream_of_another_user_is_another_stream() {
    let mut table = StreamTable::default();
    table.charge(&charge(1, 5, 1, 10), 0);
    let verdict = table.charge(&takes_over(charge(2, 5, 2, 0), 1), 0);
    assert_eq!(verdict, StreamVerdict::Counts { turn: None });
    assert_eq!(record(&table, 2, 5).unwrap().charged.output, 0);
    assert_eq!(record(&table, 1, 5).unwrap().carrier, StreamCarrier(1));
    assert!(matches!(
        table.charge(&charge(1, 5, 1, 1), 0),
        StreamVerdict::Counts { .. }
    ));
}

#[test]
fn streams_unused_for_long_are_forgotten_and_the_idlest_makes_room() {
    let mut table = StreamTable::with_bound(3);
    for (stream, now_ms) in [(1, 0), (2, 10), (3, 20), (1, 30), (4, 40)] {
        table.charge(&charge(1, stream, 1, 1), now_ms);
    }
    let known = |table: &StreamTable| [1, 2, 3, 4].map(|it| record(table, 1, it).is_some());
    assert_eq!(known(&table), [true, false, true, true]);
    table.forget_some(STREAM_IDLE_MS + 20);
    assert_eq!(known(&table), [true, false, false, true]);
    table.forget_user(UserKey(1));
    assert_eq!(known(&table), [false; 4]);
    assert_eq!(table.digest(), StreamTable::default().digest());
}

#[test]
fn a_user_with_many_streams_makes_room_for_others() {
    let mut table = StreamTable::with_bound(32);
    table.charge(&charge(1, 0, 1, 1), 0);
    for stream in 0..31 {
        table.charge(&charge(2, stream, 1, 1), 1);
    }
    for user in 3..6 {
        table.charge(&charge(user, 0, 1, 1), 2);
    }
    assert!((0..3).all(|stream| record(&table, 2, stream).is_none()));
    assert!(
        [1, 3, 4, 5]
            .iter()
            .all(|user| record(&table, *user, 0).is_some())
    );
    table.check().unwrap();
}

#[test]
fn a_take_over_that_comes_late_takes_nothing() {
    let mut table = StreamTable::default();
    table.charge(&charge(1, 1, 1, 10), 0);
    table.charge(&takes_over(charge(1, 1, 3, 0), 1), 0);
    let late = takes_over(charge(1, 1, 2, 0), 1);
    assert_eq!(table.charge(&late, 0), StreamVerdict::Void);
    assert_eq!(record(&table, 1, 1).unwrap().carrier, StreamCarrier(3));
    table.charge(&takes_over(charge(1, 1, 2, 0), 2), 0);
    assert_eq!(record(&table, 1, 1).unwrap().carrier, StreamCarrier(2));
}

#[test]
fn the_record_of_an_unknown_stream_begins_with_its_take_over() {
    let mut table = StreamTable::default();
    table.charge(&takes_over(charge(1, 1, 2, 0), 1), 0);
    // The first charge of the first carrier comes too late.
    assert_eq!(table.charge(&charge(1, 1, 1, 10), 0), StreamVerdict::Void);
    assert_eq!(record(&table, 1, 1).unwrap().charged.output, 0);
}
