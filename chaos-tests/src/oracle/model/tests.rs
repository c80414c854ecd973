//! The naive model against the product, over random logs.

#[path = "../../../../state/tests/common/commands.rs"]
mod commands;

use std::collections::{BTreeMap, BTreeSet};

use commands::Step;
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use state::RouterState;
use state::codec::encode_envelope;
use state::command::{Command, Envelope, Item, Lane};
use state::ids::LogIndex;

use crate::fuzzing::fixtures as common;
use crate::invariants::fixture::run;
use crate::oracle::RunRecord;
use crate::oracle::comparison::StatePart;
use crate::oracle::image::StateImage;
use crate::oracle::register::RegisterKey;

/// Entries from one image of the state to the next.
const IMAGE_EVERY: u64 = 17;

/// A state that follows a log, and the record of it.
#[derive(Default)]
struct RecordedLog {
    state: RouterState,
    record: RunRecord,
    keys: BTreeSet<RegisterKey>,
    /// The last command of each sequence, to be able to repeat it.
    sent: BTreeMap<(u8, u64, u8), Envelope>,
}

/// Whether the settings in a command are valid: the model does not judge them.
fn is_valid(command: &Command) -> bool {
    match command {
        Command::PutUser(user) => user.weight_milli > 0,
        Command::PutUserLimits { limits, .. } => limits.validate().is_ok(),
        Command::SetUser { user, limits } => user.weight_milli > 0 && limits.validate().is_ok(),
        Command::PutAdmission(settings) => settings.validate().is_ok(),
        _ => true,
    }
}

fn leave_events_out(step: &mut Step) {
    if let Step::Apply {
        command: Command::Batch { items, .. },
        ..
    } = step
    {
        items.retain(|item| !matches!(item, Item::KvEvents(_)));
    }
}

impl RecordedLog {
    fn step(&mut self, step: Step) {
        match step {
            Step::Apply { command, .. } if !is_valid(&command) => {}
            Step::Apply {
                replica,
                session,
                lane,
                is_repeat,
                command,
            } => {
                let key = (replica, session, lane as u8);
                let last = self.sent.get(&key);
                let seq = last.map_or(0, |last| last.origin.seq) + 1;
                let repeated = last.filter(|_| is_repeat).cloned();
                let next = || common::envelope(replica, session, lane, seq, command);
                let envelope = repeated.unwrap_or_else(next);
                self.sent.insert(key, envelope.clone());
                self.apply(envelope);
            }
            Step::Skip => {
                let index = self.next_index();
                self.observe(index, None);
                self.state.skip(index);
            }
            // What comes of a snapshot or a backup is not in the log.
            Step::Rebuild | Step::Backup | Step::Restore { .. } => {}
        }
    }

    fn apply(&mut self, envelope: Envelope) {
        let index = self.next_index();
        self.observe(index, Some(&encode_envelope(&envelope)));
        self.keys.extend(RegisterKey::all_of(&envelope.command));
        self.state.apply(index, envelope);
        if index.0.is_multiple_of(IMAGE_EVERY) {
            let image = StateImage::of(&self.state, &self.keys);
            self.record.observation.image(index.0, run(1, 1), image);
        }
    }

    fn next_index(&self) -> LogIndex {
        LogIndex(self.state.applied().0 + 1)
    }

    fn observe(&mut self, index: LogIndex, command: Option<&[u8]>) {
        let seen = &mut self.record.observation;
        seen.applied(index.0, run(1, 1), index.0, command, None);
    }
}

#[test]
fn random_logs_are_followed() {
    let mut runner = TestRunner::deterministic();
    let logs = prop::collection::vec(commands::step(), 170);
    let mut compared = BTreeMap::new();
    for number in 0..50 {
        let mut log = RecordedLog::default();
        let backend = Command::PutBackend(common::spec("0", 1, Some(8)));
        for (command, seq) in [common::init(), backend].into_iter().zip(1..) {
            log.apply(common::envelope(4, 1, Lane::Admin, seq, command));
        }
        let steps = logs.new_tree(&mut runner).expect("nothing is rejected");
        for mut step in steps.current() {
            // Of a backend whose KV events are read, leases and blocks are not followed.
            if number % 5 > 0 {
                leave_events_out(&mut step);
            }
            log.step(step);
        }
        let comparison = log.record.comparison();
        assert_eq!(comparison.differences, [], "log {number}");
        for (part, count) in &comparison.compared {
            *compared.entry(*part).or_insert(0) += count;
        }
    }
    for part in [
        StatePart::Time,
        StatePart::Sessions,
        StatePart::Settings,
        StatePart::Users,
        StatePart::Leases,
        StatePart::Blocks,
    ] {
        assert!(compared[&part] > 100, "{part:?}: {compared:?}");
    }
}
