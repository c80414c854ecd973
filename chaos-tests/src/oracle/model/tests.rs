//! The naive model and the invariants over random logs. Three states apply each log: one
//! immediately, one that is rebuilt from snapshots of the first, and one that lags.

#[path = "../../../../state/tests/common/commands.rs"]
mod commands;

use std::collections::{BTreeMap, BTreeSet};

use commands::Step;
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use state::RouterState;
use state::codec::{decode_envelope, encode_envelope};
use state::command::{Command, Envelope, Item, Lane};
use state::ids::LogIndex;

use crate::fuzzing::fixtures as common;
use crate::invariants::fixture::run;
use crate::invariants::{
    applied_in_order, blocks_as_leased, counters_as_charged, leases_as_logged, same_digest,
    same_log, settings_as_written, sound_state, time_as_stamped,
};
use crate::oracle::RunRecord;
use crate::oracle::comparison::StatePart;
use crate::oracle::image::StateImage;
use crate::oracle::register::RegisterKey;

/// Number of entries between two images of a state.
const IMAGE_EVERY: u64 = 17;
/// States that apply the log, named by how they differ.
const FIRST: usize = 0;
const REBUILT: usize = 1;
const LATE: usize = 2;

/// A log, the states that apply it, and their record.
#[derive(Default)]
struct RecordedLog {
    entries: Vec<Option<Vec<u8>>>,
    states: [RouterState; 3],
    record: RunRecord,
    keys: BTreeSet<RegisterKey>,
    /// Last command of each sequence, from which repeats are made.
    sent: BTreeMap<(u8, u64, u8), Envelope>,
}

/// Returns whether a command is in the model's scope: valid settings, which the model does not
/// judge, and engines of one rank. `state/tests/ranks.rs` covers the others.
fn is_valid(command: &Command) -> bool {
    match command {
        Command::SetRanks { .. } => false,
        Command::PutAdmission(settings) => settings.validate().is_ok(),
        Command::ConfigureUser { settings, .. } => settings.validate().is_ok(),
        Command::PutUserDefaults(defaults) => defaults.validate().is_ok(),
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
    /// Creates a cluster with one backend.
    fn founded() -> Self {
        let mut log = Self::default();
        let backend = Command::PutBackend(common::spec("0", 1, Some(8)));
        for (command, seq) in [common::init(), backend].into_iter().zip(1..) {
            log.propose(&common::envelope(4, 1, Lane::Admin, seq, command));
        }
        log
    }

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
                self.propose(&envelope);
                self.sent.insert(key, envelope);
            }
            Step::Skip => self.append(None),
            Step::Rebuild => self.rebuild(),
            Step::Backup => self.catch_up(LATE),
            // The contents of a backup are not in the log.
            Step::Restore { .. } => {}
        }
    }

    fn propose(&mut self, envelope: &Envelope) {
        self.keys.extend(RegisterKey::all_of(&envelope.command));
        self.append(Some(encode_envelope(envelope)));
    }

    fn append(&mut self, entry: Option<Vec<u8>>) {
        self.entries.push(entry);
        self.catch_up(FIRST);
        self.catch_up(REBUILT);
    }

    fn catch_up(&mut self, at: usize) {
        let state = &mut self.states[at];
        let run = run(at as u8 + 1, 1);
        for entry in &self.entries[state.applied().0 as usize..] {
            let index = LogIndex(state.applied().0 + 1);
            match entry {
                Some(bytes) => {
                    let envelope = decode_envelope(bytes).expect("it was encoded here");
                    state.apply(index, envelope);
                }
                None => state.skip(index),
            }
            let seen = &mut self.record.observation;
            let digest = Some(state.digest());
            seen.applied(index.0, run, index.0, entry.as_deref(), digest);
            if index.0.is_multiple_of(IMAGE_EVERY) {
                assert_eq!(sound_state::check(run, state), Ok(()));
                seen.image(index.0, run, StateImage::of(state, &self.keys));
            }
        }
    }

    fn rebuild(&mut self) {
        let rebuilt = common::restored(&common::snapshot(&self.states[FIRST]));
        let (index, digest) = (rebuilt.applied().0, Some(rebuilt.digest()));
        self.states[REBUILT] = rebuilt;
        let seen = &mut self.record.observation;
        seen.restored(index, run(REBUILT as u8 + 1, 1), index, digest);
    }
}

#[test]
fn the_model_follows_random_logs() {
    let checks = [
        same_log::check,
        same_digest::check,
        applied_in_order::check,
        settings_as_written::check,
        counters_as_charged::check,
        leases_as_logged::check,
        blocks_as_leased::check,
        time_as_stamped::check,
    ];
    let mut runner = TestRunner::deterministic();
    let steps = prop::collection::vec(commands::step(), 170);
    let mut compared = BTreeMap::new();
    for number in 0..40 {
        let mut log = RecordedLog::founded();
        let steps = steps.new_tree(&mut runner).expect("nothing is rejected");
        for mut step in steps.current() {
            // Leases and blocks of a backend with KV events are not followed.
            if number % 5 > 0 {
                leave_events_out(&mut step);
            }
            log.step(step);
        }
        log.catch_up(LATE);
        for check in checks {
            let verdict = check(&log.record);
            assert!(verdict.is_ok(), "log {number}: {verdict:?}");
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
        StatePart::Learnt,
    ] {
        assert!(compared[&part] > 200, "{part:?}: {compared:?}");
    }
}
