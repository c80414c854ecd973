//! Tests the order in which a user's charges are written, whichever sources they have and whether they
//! are a stream's.

use std::collections::BTreeMap;

use proptest::prelude::*;
use state::command::{Charge, Command, Item};
use state::ids::{ModelKey, SourceKey, StreamCarrier, StreamId, UserKey};
use state::streams::CarriedStream;
use state::usage::UsageSource;
use tokio::time::Instant;

use super::{OutboxSettings, outbox};

/// What happens to a request, or that a charge is written.
#[derive(Debug, Clone, Copy)]
enum Step {
    Waits,
    Leaves,
    /// A waiting request starts, which may carry a stream.
    Starts {
        source: u64,
        is_stream: bool,
    },
    Ends {
        at: usize,
        tokens: u64,
    },
    /// Usage of no source.
    Owes,
    Writes,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => Just(Step::Waits),
        1 => Just(Step::Leaves),
        3 => (1_u64..4, any::<bool>()).prop_map(|(source, is_stream)| Step::Starts { source, is_stream }),
        3 => (0_usize..4, 0_u64..2).prop_map(|(at, tokens)| Step::Ends { at, tokens }),
        1 => Just(Step::Owes),
        4 => Just(Step::Writes),
    ]
}

/// What is written for a user, in order.
#[derive(Debug, Default)]
struct Written {
    waiting: i64,
    running: i64,
    output: BTreeMap<SourceKey, u64>,
}

impl Written {
    fn add(&mut self, item: &Item) -> Result<(), TestCaseError> {
        let charge = match item {
            Item::Charge(charge) => charge,
            Item::ChargeStream(item) => &item.charge,
            _ => return Err(TestCaseError::fail("not a charge")),
        };
        self.waiting += i64::from(charge.queued) - i64::from(charge.dequeued);
        self.running += i64::from(charge.started) - i64::from(charge.ended);
        *self.output.entry(charge.source).or_default() += charge.output;
        prop_assert!(self.waiting >= 0 && self.running >= 0, "{self:?} {item:?}");
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_wait_or_request_ends_before_it_has_begun(steps in proptest::collection::vec(step(), 0..60)) {
        let mut outbox = outbox(OutboxSettings::default());
        let charge = Charge { user: UserKey(5), ..Charge::default() };
        let (mut waiting, mut running, mut output, mut streams) = (0, Vec::new(), 0, 0);
        let mut written = Written::default();
        for step in steps {
            match step {
                Step::Waits => {
                    outbox.charge(Charge { queued: 1, ..charge });
                    waiting += 1;
                }
                Step::Leaves if waiting > 0 => {
                    outbox.charge(Charge { dequeued: 1, ..charge });
                    waiting -= 1;
                }
                Step::Starts { source, is_stream } if waiting > 0 => {
                    let source = SourceKey(source);
                    let carried = is_stream.then(|| {
                        streams += 1;
                        CarriedStream { stream: StreamId(streams), carrier: StreamCarrier(1) }
                    });
                    outbox.charge(Charge { dequeued: 1, ..charge });
                    outbox.charge_for(carried, Charge { source, started: 1, ..charge });
                    waiting -= 1;
                    running.push((source, carried));
                }
                Step::Ends { at, tokens } if !running.is_empty() => {
                    let (source, carried) = running.remove(at % running.len());
                    outbox.charge_for(carried, Charge { source, ended: 1, output: tokens, ..charge });
                    output += tokens;
                }
                Step::Owes => {
                    outbox.charge(Charge { output: 1, ..charge });
                    output += 1;
                }
                Step::Writes => {
                    if let Some(item) = outbox.next_charge() {
                        written.add(&item)?;
                    }
                }
                _ => {}
            }
        }
        while let Some(item) = outbox.next_charge() {
            written.add(&item)?;
        }
        prop_assert_eq!(written.waiting, waiting);
        prop_assert_eq!(written.running, i64::try_from(running.len()).unwrap());
        prop_assert_eq!(written.output.values().sum::<u64>(), output);
    }
}

#[test]
fn a_stream_begins_in_the_step_that_ends_its_wait() {
    let mut outbox = outbox(OutboxSettings::default());
    let charge = Charge {
        user: UserKey(5),
        ..Charge::default()
    };
    let carried = CarriedStream {
        stream: StreamId(1),
        carrier: StreamCarrier(1),
    };
    let waits = Charge {
        dequeued: 1,
        ..charge
    };
    let starts = Charge {
        source: SourceKey(3),
        started: 1,
        ..charge
    };
    outbox.charge(waits);
    outbox.charge_for(Some(carried), starts);
    let Some(Item::ChargeStream(item)) = outbox.next_charge() else {
        panic!("not a stream's charge");
    };
    assert_eq!((item.charge.dequeued, item.charge.started), (1, 1));
    assert_eq!(item.charge.source, SourceKey(3));
    assert_eq!(outbox.next_charge(), None);
}

#[test]
fn a_source_gets_its_name_before_its_charge_however_many_notes_wait() {
    let mut outbox = outbox(OutboxSettings::default());
    let note = Item::ObserveOutputs {
        user: UserKey(5),
        model: ModelKey(1),
        tokens: vec![1; 256],
    };
    while outbox.note(note.clone()) {}
    let source = UsageSource {
        key: None,
        model: "llama".to_owned(),
    };
    for _ in 0..2 {
        outbox.name_source(SourceKey(3), source.clone());
    }
    outbox.charge(Charge {
        user: UserKey(5),
        source: SourceKey(3),
        output: 1,
        ..Charge::default()
    });
    let envelope = outbox.cut(Instant::now(), 5).unwrap();
    let Command::Batch { items, .. } = &envelope.command else {
        panic!("{envelope:?}");
    };
    assert_eq!(items[0], Item::DefineSource(source));
    assert!(matches!(&items[1], Item::Charge(_)), "{:?}", items[1]);
}
