//! Fixtures for tests of invariants: small correct runs of a cluster, for a test to break.

use std::collections::{BTreeMap, BTreeSet};

use state::RouterState;
use state::codec::{decode_envelope, encode_envelope};
use state::command::{
    BackendSpec, Charge, Command, Committed, Envelope, Founding, Item, Lane,
    LeaseOutcome as Ending, Origin, Reply, UserSettings,
};
use state::ids::{AttemptId, BackendRef, BlockHash, LogIndex, ReplicaId, SessionId};
use state::kv_events::{KvMode, KvPosition};
use state::policy::{CostSettings, PolicyConfig};
use state::prefix::user_key;

use crate::oracle::RunRecord;
use crate::oracle::history::{Action, OperationResult};
use crate::oracle::image::{KvImage, StateImage};
use crate::oracle::observation::{AtRest, ReplicaRun};
use crate::oracle::register::RegisterKey;

const HASH_SEED: u64 = 5;

/// Returns the run with the number `number` of a replica.
pub(crate) fn run(replica: u8, number: u32) -> ReplicaRun {
    let replica = ReplicaId(replica);
    ReplicaRun { replica, number }
}

/// Returns a command that registers a backend, or moves it to another port.
pub(crate) fn put(name: &str, port: u16) -> Command {
    Command::PutBackend(BackendSpec {
        id: name.to_owned(),
        url: format!("http://127.0.0.1:{port}"),
        models: vec!["*".to_owned()],
        labels: BTreeMap::new(),
        capacity_blocks: Some(8),
        kv_events: None,
        kv_replay: None,
        role: state::command::BackendRole::Both,
    })
}

/// Returns a command that starts or stops draining a backend.
pub(crate) fn drain(name: &str, draining: bool) -> Command {
    let name = name.to_owned();
    Command::SetDraining {
        name,
        draining,
        moves_streams: false,
    }
}

/// Makes the backend `a` of an image follow its KV events, up to message `seq` of a publisher.
pub(crate) fn following(image: &mut StateImage, mode: KvMode, publisher: u64, seq: Option<u64>) {
    let backend = image.backends.get_mut("a").expect("the story has it");
    backend.kv = Some(KvImage {
        mode,
        positions: vec![KvPosition {
            rank: 0,
            publisher,
            last: seq.map(|seq| (seq, 0)),
        }],
        with_cpu: BTreeSet::new(),
    });
}

/// Builder of a cluster together with the record of its run.
pub(crate) struct RecordBuilder {
    /// The record that the invariants check.
    pub(crate) record: RunRecord,
    state: RouterState,
    seq: u64,
    now_us: u64,
}

impl RecordBuilder {
    /// Creates a cluster with initial settings.
    pub(crate) fn begun() -> Self {
        let mut story = Self {
            record: RunRecord::default(),
            state: RouterState::new(),
            seq: 0,
            now_us: 10,
        };
        let policy = PolicyConfig::Cost(CostSettings::default());
        story.write(1, Command::from(Founding::of_seed(HASH_SEED, policy)));
        story
    }

    /// Creates a cluster with a backend `a`, blocks, an open lease and a charged user.
    pub(crate) fn lively() -> Self {
        let mut story = Self::begun();
        story.write(1, put("a", 1));
        let settings = UserSettings::of_weight(500);
        story.write(1, Command::configure_user("ann", settings));
        let backend = story.backend("a");
        let acquire = |attempt: u32, blocks: &[u64]| Item::Acquire {
            attempt,
            backend,
            tip: None,
            new: blocks.iter().copied().map(BlockHash).collect(),
        };
        let release = Item::Release {
            attempt: 2,
            outcome: Ending::Kept,
        };
        let charge = Item::Charge(Charge {
            user: user_key(HASH_SEED, "ann"),
            output: 7,
            started: 1,
            ..Charge::default()
        });
        let items = vec![
            acquire(1, &[1, 2, 3]),
            acquire(2, &[10, 11]),
            release,
            charge,
        ];
        let base_attempt = AttemptId(0);
        story.write(
            1,
            Command::Batch {
                base_attempt,
                items,
            },
        );
        story
    }

    /// Returns the current simulated time, which advances with every step.
    pub(crate) fn now_us(&self) -> u64 {
        self.now_us
    }

    /// Applies a command that a replica proposed, and returns its index.
    pub(crate) fn write(&mut self, replica: u8, command: Command) -> u64 {
        self.seq += 1;
        let envelope = Envelope {
            origin: Origin {
                replica: ReplicaId(replica),
                session: SessionId(u64::from(replica)),
                lane: Lane::Admin,
                seq: self.seq,
            },
            proposed_at_ms: 1000 + self.now_us,
            command,
        };
        self.apply(envelope)
    }

    /// Applies the command at `index` again, and returns the index of the repeat.
    pub(crate) fn write_again(&mut self, index: u64) -> u64 {
        let command = self.record.observation.log[&index].command.clone();
        let envelope = decode_envelope(&command.expect("a command stands there"));
        self.apply(envelope.expect("it was encoded here"))
    }

    /// Charges `user` for `output` output tokens, and returns the index of the charge.
    pub(crate) fn charge(&mut self, replica: u8, user: &str, output: u64) -> u64 {
        let charge = Charge {
            user: user_key(HASH_SEED, user),
            output,
            started: 1,
            ended: 1,
            ..Charge::default()
        };
        self.tell(replica, Item::Charge(charge))
    }

    /// Charges `user` for `advance` priced tokens in advance and settles `settled` of them.
    pub(crate) fn charge_ahead(&mut self, replica: u8, user: &str, advance: u64, settled: u64) {
        let charge = Charge {
            user: user_key(HASH_SEED, user),
            advance,
            settled,
            ..Charge::default()
        };
        self.tell(replica, Item::Charge(charge));
    }

    fn tell(&mut self, replica: u8, item: Item) -> u64 {
        let items = vec![item];
        let base_attempt = AttemptId(0);
        self.write(
            replica,
            Command::Batch {
                base_attempt,
                items,
            },
        )
    }

    fn apply(&mut self, envelope: Envelope) -> u64 {
        self.now_us += 10;
        let index = self.state.applied().0 + 1;
        let bytes = encode_envelope(&envelope);
        self.state.apply(LogIndex(index), envelope);
        let digest = Some(self.state.digest());
        let seen = &mut self.record.observation;
        seen.applied(self.now_us, run(1, 1), index, Some(&bytes), digest);
        index
    }

    /// Records an operation of a client, which began just before the last step and ends now.
    pub(crate) fn asked(&mut self, replica: u8, action: Action, outcome: OperationResult) {
        self.now_us += 10;
        let history = &mut self.record.history;
        let ticket = history.call(1, run(replica, 1), self.now_us - 15, action);
        history.answer(ticket, self.now_us, outcome);
    }

    /// Records that a client's write was acknowledged at `index`.
    pub(crate) fn acknowledged(&mut self, replica: u8, command: Command, index: u64) {
        let committed = Committed {
            index: LogIndex(index),
            reply: Reply::Applied,
        };
        self.asked(
            replica,
            Action::Write(command),
            OperationResult::Written(committed),
        );
    }

    /// Returns the current slot and incarnation of a backend.
    pub(crate) fn backend(&self, name: &str) -> BackendRef {
        self.state.backend(name).expect("it is there").handle
    }

    fn taken(&self) -> StateImage {
        let keys = [
            RegisterKey::Backend("a".to_owned()),
            RegisterKey::Policy,
            RegisterKey::User("ann".to_owned()),
        ];
        StateImage::of(&self.state, &keys)
    }

    /// Records an image of the current state, after `change` has modified it.
    pub(crate) fn image(&mut self, change: impl FnOnce(&mut StateImage)) {
        let mut image = self.taken();
        change(&mut image);
        let at_us = self.now_us;
        self.record.observation.image(at_us, run(1, 1), image);
    }

    /// Records the replica as at rest, with an empty outbox and overlay.
    pub(crate) fn rest(&mut self) {
        let at_rest = AtRest {
            run: run(1, 1),
            image: std::sync::Arc::new(self.taken()),
            outbox_items: 0,
            overlay_blocks: 0,
            in_flight: 0,
            agent_sessions: (self.state.view().trees().sessions())
                .map(|(key, session)| (key, *session))
                .collect(),
            answers: Vec::new(),
        };
        let seen = &mut self.record.observation;
        seen.at_rest.insert(ReplicaId(1), at_rest);
    }
}
