//! Tests the order in which a user's charges are written, whichever sources they have.

use std::collections::BTreeMap;

use proptest::prelude::*;
use state::command::{Charge, Item};
use state::ids::{SourceKey, UserKey};

use super::{OutboxSettings, outbox};

/// What happens to a request, or that a charge is written.
#[derive(Debug, Clone, Copy)]
enum Step {
    Waits,
    Leaves,
    /// A waiting request starts.
    Starts {
        source: u64,
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
        3 => (1_u64..4).prop_map(|source| Step::Starts { source }),
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
        let Item::Charge(charge) = item else {
            return Err(TestCaseError::fail("not a charge"));
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
        let (mut waiting, mut running, mut output) = (0, Vec::new(), 0);
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
                Step::Starts { source } if waiting > 0 => {
                    let source = SourceKey(source);
                    outbox.charge(Charge { dequeued: 1, ..charge });
                    outbox.charge(Charge { source, started: 1, ..charge });
                    waiting -= 1;
                    running.push(source);
                }
                Step::Ends { at, tokens } if !running.is_empty() => {
                    let source = running.remove(at % running.len());
                    outbox.charge(Charge { source, ended: 1, output: tokens, ..charge });
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
