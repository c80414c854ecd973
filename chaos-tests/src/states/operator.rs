//! Commands of operators and of the leader, and barrier reads.

use std::collections::BTreeMap;

use rand::Rng;
use state::command::{BackendSpec, Command, Committed, UserSpec};
use state::ids::LogIndex;
use state::policy::PolicyConfig;
use state::quotas::UserLimits;
use state::users::FairnessSettings;

use super::proposer::{HASH_SEED, name};
use super::{StateCluster, StateReplica};
use crate::invariants::PropertyError;
use crate::oracle::history::{Action, OperationResult};
use crate::oracle::register::RegisterKey;

/// Backends that come and go.
const BACKENDS: u32 = 4;

impl StateCluster {
    /// The first command, and a fleet.
    pub(super) fn found(&mut self) -> Result<(), PropertyError> {
        // Nobody asks for it: it comes with the cluster.
        let envelope = self.envelope(
            0,
            Command::InitCluster {
                hash_seed: HASH_SEED,
                policy: PolicyConfig::LeastRequest,
                fairness: FairnessSettings::default(),
            },
        );
        self.propose(0, &envelope)?;
        self.now_us += 100;
        let envelope = self.envelope(0, Command::PaceTime);
        self.propose(0, &envelope)?;
        self.now_us += 100;
        for number in 0..BACKENDS {
            self.put_backend(0, number)?;
        }
        Ok(())
    }

    /// An administrative write.
    pub(super) fn operate(&mut self, who: usize) -> Result<(), PropertyError> {
        let number = self.rng.random_range(0..BACKENDS);
        let user = name(self.rng.random_range(0..5));
        let command = match self.rng.random_range(0..12) {
            0..4 => return self.put_backend(who, number),
            4..6 => Command::DeleteBackend {
                name: backend(number),
            },
            6..8 => Command::SetDraining {
                name: backend(number),
                draining: self.rng.random(),
            },
            8 => Command::PutPolicy(PolicyConfig::LeastRequest),
            9 => Command::PutPolicy(PolicyConfig::Random),
            10 => {
                let limits = UserLimits {
                    concurrent: Some(self.rng.random_range(1..9)),
                    ..UserLimits::default()
                };
                limit(user, limits)
            }
            _ => Command::PutUser(UserSpec {
                name: user,
                weight_milli: self.rng.random_range(1..6) * 500,
            }),
        };
        self.write(who, command)
    }

    /// Adds a backend, gives it another capacity, or moves it.
    fn put_backend(&mut self, who: usize, number: u32) -> Result<(), PropertyError> {
        let port = 8000 + 10 * number + self.rng.random_range(0..3) / 2;
        let is_followed = number == 0;
        let spec = BackendSpec {
            id: backend(number),
            url: format!("http://10.0.0.1:{port}"),
            models: vec!["*".to_owned()],
            labels: BTreeMap::new(),
            capacity_blocks: Some(self.rng.random_range(8..30)),
            kv_events: is_followed.then(|| "tcp://10.0.0.1:5557".to_owned()),
            kv_replay: None,
        };
        self.write(who, Command::PutBackend(spec))
    }

    /// The session of a replica that is thought gone ends; the replica may be there all the same.
    pub(super) fn expire(&mut self, who: usize) -> Result<(), PropertyError> {
        let whom = self.rng.random_range(0..self.proposers.len());
        let command = Command::ExpireSession {
            replica: self.replicas[whom].run.replica,
            session: self.proposers[whom].session,
        };
        self.write(who, command)
    }

    fn write(&mut self, who: usize, command: Command) -> Result<(), PropertyError> {
        self.keys.extend(RegisterKey::all_of(&command));
        let run = self.replicas[who].run;
        let client = u32::from(run.replica.0);
        let action = Action::Write(command.clone());
        let ticket = self.record.history.call(client, run, self.now_us, action);
        let envelope = self.envelope(who, command);
        let (index, reply) = self.propose(who, &envelope)?;
        self.now_us += 100;
        let outcome = OperationResult::Written(Committed { index, reply });
        self.record.history.answer(ticket, self.now_us, outcome);
        Ok(())
    }

    /// Reads what was written, all of the log applied.
    pub(super) fn read(&mut self, who: usize) -> Result<(), PropertyError> {
        let at = self.rng.random_range(0..self.keys.len());
        let key = self.keys.iter().nth(at).cloned();
        let key = key.expect("a place below the length is there");
        self.catch_up(who)?;
        let StateReplica { run, state } = &self.replicas[who];
        let client = u32::from(run.replica.0);
        let action = Action::Read(key.clone());
        let history = &mut self.record.history;
        let ticket = history.call(client, *run, self.now_us, action);
        let outcome = OperationResult::Read {
            index: LogIndex(state.applied().0),
            value: key.value_in(state),
        };
        self.now_us += 100;
        history.answer(ticket, self.now_us, outcome);
        Ok(())
    }
}

/// A backend's name.
pub(super) fn backend(number: u32) -> String {
    format!("gpu-{number}")
}

/// Half of the limits come with a weight.
fn limit(name: String, limits: UserLimits) -> Command {
    if limits.concurrent.is_some_and(|concurrent| concurrent > 4) {
        let weight_milli = 1500;
        let user = UserSpec { name, weight_milli };
        return Command::SetUser { user, limits };
    }
    Command::PutUserLimits { name, limits }
}
