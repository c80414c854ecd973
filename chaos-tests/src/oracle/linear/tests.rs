//! Tests of both checkers on random histories: correct ones pass, broken ones fail.

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use state::RouterState;
use state::codec::encode_envelope;
use state::command::{Command, Committed, Envelope, Founding, Lane, Origin, UserSettings};
use state::ids::{LogIndex, ReplicaId, SessionId};
use state::policy::{CostSettings, PolicyConfig};

use crate::invariants::fixture::{drain, put, run};
use crate::invariants::{linearizable, linearizable_by_search};
use crate::oracle::RunRecord;
use crate::oracle::history::{Action, OperationResult};
use crate::oracle::register::{self, RegisterKey};

const CLIENTS: u32 = 4;

/// Generator of a linearizable history, in which every operation takes effect at one moment between
/// call and return.
struct LinearizableRun {
    rng: StdRng,
    state: RouterState,
    record: RunRecord,
    seq: u64,
}

impl LinearizableRun {
    /// Creates a cluster with initial settings.
    fn founded(seed: u64) -> Self {
        let mut history = Self {
            rng: StdRng::seed_from_u64(seed),
            state: RouterState::new(),
            record: RunRecord::default(),
            seq: 0,
        };
        let policy = PolicyConfig::Cost(CostSettings::default());
        history.commit(1, Command::from(Founding::of_seed(1, policy)));
        history
    }

    fn history(seed: u64, operations: u32) -> RunRecord {
        let mut history = Self::founded(seed);
        let mut free_at_us = [100; CLIENTS as usize];
        let mut plan: Vec<(u64, u64, u64, u32)> = (0..operations)
            .map(|_| {
                let client = history.rng.random_range(0..CLIENTS);
                let free = &mut free_at_us[client as usize];
                let called = *free + history.rng.random_range(1..40);
                let effect = called + history.rng.random_range(1..60);
                let returned = effect + history.rng.random_range(1..60);
                *free = returned;
                (effect, called, returned, client)
            })
            .collect();
        plan.sort_unstable();
        for (effect_us, called_us, returned_us, client) in plan {
            history.operate(effect_us, called_us, returned_us, client);
        }
        history.record
    }

    fn commit(&mut self, at_us: u64, command: Command) -> Committed {
        self.seq += 1;
        let envelope = Envelope {
            origin: Origin {
                replica: ReplicaId(1),
                session: SessionId(1),
                lane: Lane::Admin,
                seq: self.seq,
            },
            proposed_at_ms: at_us,
            command,
        };
        let index = LogIndex(self.state.applied().0 + 1);
        let bytes = encode_envelope(&envelope);
        let seen = &mut self.record.observation;
        seen.applied(at_us, run(1, 1), index.0, Some(&bytes), None);
        let reply = self.state.apply(index, envelope);
        Committed { index, reply }
    }

    fn operate(&mut self, effect_us: u64, called_us: u64, returned_us: u64, client: u32) {
        let (action, key) = self.draw();
        let outcome = match &action {
            Action::Write(_) if self.rng.random_range(0..20) == 0 => OperationResult::Refused,
            Action::Write(command) => {
                let is_lost = self.rng.random_range(0..12) == 0;
                let happens = !is_lost || self.rng.random();
                let command = command.clone();
                let committed = happens.then(|| self.commit(effect_us, command));
                match committed {
                    Some(committed) if !is_lost => OperationResult::Written(committed),
                    _ => OperationResult::Unknown,
                }
            }
            Action::Read(_) => OperationResult::Read {
                index: self.state.applied(),
                value: key.value_in(&self.state),
            },
        };
        let history = &mut self.record.history;
        let is_answered = outcome != OperationResult::Unknown || self.rng.random();
        let ticket = history.call(client, run(1, 1), called_us, action);
        if is_answered {
            history.answer(ticket, returned_us, outcome);
        }
    }

    fn draw(&mut self) -> (Action, RegisterKey) {
        let name = ["a", "b"][self.rng.random_range(0..2)];
        let text = name.to_owned();
        let (command, key) = match self.rng.random_range(0..4) {
            0 => {
                let weight_milli = self.rng.random_range(1..4);
                (weigh(name, weight_milli), RegisterKey::User(text))
            }
            1 => {
                let port = self.rng.random_range(1..4);
                (put(name, port), RegisterKey::Backend(text))
            }
            2 => (drain(name, self.rng.random()), RegisterKey::Backend(text)),
            _ => {
                let name = text.clone();
                (Command::DeleteBackend { name }, RegisterKey::Backend(text))
            }
        };
        if self.rng.random() {
            (Action::Read(key.clone()), key)
        } else {
            (Action::Write(command), key)
        }
    }
}

#[test]
fn linearizable_histories_are_accepted() {
    let mut explained = 0;
    for seed in 0..40 {
        let record = LinearizableRun::history(seed, 80);
        let told = linearizable::check(&record);
        assert!(told.is_ok(), "seed {seed}: {told:?}");
        let tally = linearizable_by_search::examine(&record).unwrap();
        explained += tally.explained;
    }
    assert!(explained > 40 * 40, "{explained}");
}

/// Breaks a linearizable history in one place; `None` if it has no such place.
fn broken(seed: u64, by: &str) -> Option<RunRecord> {
    let mut record = LinearizableRun::history(seed, 80);
    let operations = &mut record.history.operations;
    let reads = (0..operations.len())
        .filter(|at| matches!(operations[*at].outcome, OperationResult::Read { .. }))
        .collect::<Vec<_>>();
    let of = |at: &usize| match &operations[*at].action {
        Action::Read(RegisterKey::User(name)) => Some(name.clone()),
        _ => None,
    };
    let reads: Vec<usize> = reads.into_iter().filter(|at| of(at).is_some()).collect();
    let saw = |at: usize| match &operations[at].outcome {
        OperationResult::Read { value, .. } => value.clone(),
        _ => None,
    };
    let span = |at: usize| {
        let it = &operations[at];
        (it.called_at_us, it.returned_at_us.unwrap_or(u64::MAX))
    };
    // Two consecutive reads of a user's weight that saw different values.
    let pair = reads.iter().find_map(|first| {
        let later = |second: &&usize| {
            of(second) == of(first)
                && saw(**second) != saw(*first)
                && span(**second).0 > span(*first).1
        };
        Some((*first, *reads.iter().find(later)?))
    });
    match by {
        "a value that nobody wrote" => {
            let at = *reads.first()?;
            let OperationResult::Read { value, .. } = &mut operations[at].outcome else {
                return None;
            };
            *value = Some("77".to_owned());
        }
        "a stale read" => {
            // Right after the second read, another read returns the first one's value.
            let (first, second) = pair?;
            let mut stale = operations[first].clone();
            let OperationResult::Read { index, .. } = &operations[second].outcome else {
                return None;
            };
            let (index, (_, after_us)) = (*index, span(second));
            let value = saw(first);
            stale.client = 99;
            (stale.called_at_us, stale.returned_at_us) = (after_us + 1, Some(after_us + 2));
            stale.outcome = OperationResult::Read { index, value };
            let is_written_again = operations.iter().any(|it| {
                matches!(&it.action, Action::Write(Command::ConfigureUser { name, .. })
                    if Some(name) == of(&second).as_ref() && it.called_at_us < after_us + 2
                        && (it.outcome == OperationResult::Unknown
                            || it.returned_at_us.is_none_or(|at_us| at_us > span(second).0)))
            });
            if is_written_again {
                return None;
            }
            operations.push(stale);
        }
        _ => return None,
    }
    Some(record)
}

#[test]
fn broken_reads_are_refused_by_both() {
    for by in ["a value that nobody wrote", "a stale read"] {
        let mut refused = 0;
        for (seed, record) in (0..60).filter_map(|seed| Some((seed, broken(seed, by)?))) {
            assert!(linearizable::check(&record).is_err(), "{by}, seed {seed}");
            let told = linearizable_by_search::check(&record);
            assert!(told.is_err(), "{by}, seed {seed}: {told:?}");
            refused += 1;
        }
        assert!(refused > 5, "{by}: {refused}");
    }
}

fn weigh(name: &str, weight_milli: u32) -> Command {
    Command::configure_user(name, UserSettings::of_weight(weight_milli))
}

/// Returns the record of writes and reads of one user's weight in turn: `(weight, is_read)`.
fn one_after_the_other(steps: &[(u32, bool)]) -> RunRecord {
    let mut history = LinearizableRun::founded(1);
    for (step, (weight_milli, is_read)) in (1_u64..).zip(steps.iter().copied()) {
        let name = "a".to_owned();
        let (action, outcome) = if is_read {
            let index = history.state.applied();
            let value = register::user(&UserSettings::of_weight(weight_milli));
            (
                Action::Read(RegisterKey::User(name)),
                OperationResult::Read { index, value },
            )
        } else {
            let command = weigh(&name, weight_milli);
            let committed = history.commit(step * 100 + 5, command.clone());
            (Action::Write(command), OperationResult::Written(committed))
        };
        let ticket = history
            .record
            .history
            .call(1, run(1, 1), step * 100, action);
        history
            .record
            .history
            .answer(ticket, step * 100 + 10, outcome);
    }
    history.record
}

#[test]
fn a_lost_write_is_refused_by_both() {
    let kept = one_after_the_other(&[(1, false), (2, false), (2, true)]);
    assert_eq!(linearizable::check(&kept), Ok(3));
    assert_eq!(linearizable_by_search::check(&kept), Ok(3));
    let lost = one_after_the_other(&[(1, false), (2, false), (1, true)]);
    assert!(linearizable::check(&lost).is_err());
    assert!(linearizable_by_search::check(&lost).is_err());
}

#[test]
fn reordered_writes_are_refused_by_both() {
    let mut record = one_after_the_other(&[(1, false), (2, false), (2, true)]);
    // The log has them in the opposite order of the clients.
    let operations = &mut record.history.operations;
    let (first, second) = (operations[0].clone(), operations[1].clone());
    operations[0].action = second.action;
    operations[0].outcome = second.outcome;
    operations[1].action = first.action;
    operations[1].outcome = first.outcome;
    assert!(linearizable::check(&record).is_err());
    assert!(linearizable_by_search::check(&record).is_err());
}

#[test]
fn an_unknown_write_may_apply_late_or_never_but_not_vanish() {
    let unknown = |reads: &[u32]| {
        let mut steps = vec![(1, false)];
        steps.extend(reads.iter().map(|weight| (*weight, true)));
        let mut record = one_after_the_other(&steps);
        let action = Action::Write(weigh("a", 9));
        record.history.call(2, run(1, 1), 150, action);
        linearizable_by_search::check(&record)
    };
    assert!(unknown(&[1, 1]).is_ok());
    assert!(unknown(&[1, 9]).is_ok());
    assert!(unknown(&[9, 9]).is_ok());
    assert!(unknown(&[8]).is_err());
}

#[test]
fn an_expensive_search_is_left_undecided() {
    let mut record = one_after_the_other(&[(1, false)]);
    for weight_milli in 10..20 {
        let action = Action::Write(weigh("a", weight_milli));
        let history = &mut record.history;
        history.call(weight_milli, run(1, 1), 150, action);
        let read = history.call(50, run(1, 1), u64::from(weight_milli) * 1000, {
            Action::Read(RegisterKey::User("a".to_owned()))
        });
        let index = LogIndex(2);
        let value = register::user(&UserSettings::of_weight(weight_milli));
        let at_us = 100_000;
        let outcome = OperationResult::Read { index, value };
        history.operations.last_mut().unwrap().client = weight_milli + 100;
        history.answer(read, at_us, outcome);
    }
    let tally = linearizable_by_search::examine(&record).unwrap();
    assert_eq!((tally.pieces, tally.undecided), (0, 1));
}
