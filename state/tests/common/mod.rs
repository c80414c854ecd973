//! Helpers for tests of the whole state: building commands, and taking a state through a snapshot.

#![allow(dead_code, reason = "chaos-tests takes what it needs")]

use std::collections::BTreeMap;

use state::RouterState;
use state::admission::AdmissionSettings;
use state::capacity::{DemandReport, ModelDemand};
use state::command::{
    BackendSpec, Charge, Command, Envelope, Founding, Item, Lane, Origin, Reply, UserSettings,
};
use state::ids::{
    ApiKeyId, AttemptId, BackendRef, BlockHash, EngineHash, Incarnation, LogIndex, ModelKey,
    ReplicaId, SessionId, Slot,
};
use state::keys::{ApiKeySpec, SecretHash};
use state::kv_events::{KvBatch, KvEvent, KvMessage, KvUpdate};
use state::policy::{CostSettings, PolicyConfig};
use state::prefix::{HashSecret, user_key};
use state::quotas::UserLimits;
use state::service::ServiceSample;

/// Seed of all hashes in these tests.
pub(crate) const HASH_SEED: u64 = 42;

/// Returns the command that founds a cluster.
pub(crate) fn init() -> Command {
    Command::from(Founding::of_seed(
        HASH_SEED,
        PolicyConfig::Cost(CostSettings::default()),
    ))
}

/// Returns the hash secret that [`init`] gives the cluster.
pub(crate) fn secret() -> HashSecret {
    HashSecret::of_number(HASH_SEED)
}

/// Returns the command that gives the user `name` limits, and no other settings.
pub(crate) fn limit(name: &str, limits: UserLimits) -> Command {
    let settings = UserSettings {
        limits: Some(limits),
        ..UserSettings::default()
    };
    Command::configure_user(name, settings)
}

/// Returns the description of a backend on a loopback port.
pub(crate) fn spec(id: &str, port: u16, capacity_blocks: Option<u32>) -> BackendSpec {
    BackendSpec {
        id: id.to_owned(),
        url: format!("http://127.0.0.1:{port}"),
        models: vec!["*".to_owned()],
        labels: BTreeMap::new(),
        capacity_blocks,
        kv_events: None,
        kv_replay: None,
        role: state::command::BackendRole::Both,
    }
}

/// Returns the description of an API key of the user `ada`, whose id and secret follow from
/// `number`.
pub(crate) fn key_spec(number: u8) -> ApiKeySpec {
    ApiKeySpec {
        id: ApiKeyId(u64::from(number) << 50),
        secret: SecretHash([number; 32]),
        name: format!("key {number}"),
        user: "ada".to_owned(),
        expires_at_ms: None,
        models: vec!["m*".to_owned()],
        scopes: vec!["/v1/chat/completions".to_owned()],
    }
}

/// Returns a batch of `items` with the base attempt 0.
pub(crate) fn batch(items: Vec<Item>) -> Command {
    Command::Batch {
        base_attempt: AttemptId(0),
        items,
    }
}

/// Returns the hash of the block at the end of `path`, which has one small number per block.
pub(crate) fn block(path: &[u8]) -> BlockHash {
    let step = |hash: u64, number: &u8| {
        (hash ^ u64::from(*number))
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(29)
    };
    BlockHash(path.iter().fold(0x1234_5678, step))
}

/// Returns the chain of all blocks on `path`.
pub(crate) fn chain(path: &[u8]) -> Vec<BlockHash> {
    (1..=path.len())
        .map(|length| block(&path[..length]))
        .collect()
}

/// Wraps a command of a session of a replica in an envelope.
pub(crate) fn envelope(
    replica: u8,
    session: u64,
    lane: Lane,
    seq: u64,
    command: Command,
) -> Envelope {
    let (replica, session) = (ReplicaId(replica), SessionId(session));
    Envelope {
        origin: Origin {
            replica,
            session,
            lane,
            seq,
        },
        proposed_at_ms: seq * 1000,
        command,
    }
}

/// A state that numbers log indexes and sequences itself.
pub(crate) struct Driver {
    pub(crate) state: RouterState,
    seq: u64,
}

impl Driver {
    /// Creates a cluster with [`init`].
    pub(crate) fn new() -> Self {
        Self::founded(init())
    }

    /// Creates a cluster whose first command is `first`.
    pub(crate) fn founded(first: Command) -> Self {
        let mut driver = Self {
            state: RouterState::new(),
            seq: 0,
        };
        assert_eq!(driver.apply(1, first), Reply::Applied);
        driver
    }

    /// Creates another replica, with the state `state`, of the cluster of `log` at the same index.
    pub(crate) fn over(state: RouterState, log: &Self) -> Self {
        let seq = log.seq;
        Self { state, seq }
    }

    /// Applies the next command of replica `replica`'s first session.
    pub(crate) fn apply(&mut self, replica: u8, command: Command) -> Reply {
        self.apply_in(replica, 1, command)
    }

    /// Applies the next command of a session.
    pub(crate) fn apply_in(&mut self, replica: u8, session: u64, command: Command) -> Reply {
        self.seq += 1;
        let index = LogIndex(self.state.applied().0 + 1);
        self.state.apply(
            index,
            envelope(replica, session, Lane::Admin, self.seq, command),
        )
    }
}

/// Returns a snapshot of the state.
pub(crate) fn snapshot(state: &RouterState) -> Vec<u8> {
    let mut bytes = Vec::new();
    state
        .freeze()
        .write_to(&mut bytes)
        .expect("writing into memory cannot fail");
    bytes
}

/// Restores a state from a snapshot.
pub(crate) fn restored(snapshot: &[u8]) -> RouterState {
    let mut state = RouterState::new();
    state
        .restore(&mut &*snapshot)
        .expect("a snapshot just written can be read");
    state
}

/// Returns a sample of a backend on which 20 requests of 400 tokens ended, with 16 tokens per
/// block. It generated `gaps` tokens at `inter_token_us` each while 30 requests ran and it was at
/// its limit.
pub(crate) fn service(backend: BackendRef, gaps: u64, inter_token_us: u64) -> ServiceSample {
    ServiceSample {
        ended: 20,
        added_tokens: 20 * 400,
        added_squared: 20 * 400 * 400,
        block_tokens: 16,
        gaps,
        gap_us: gaps * inter_token_us,
        gap_running: gaps * 30,
        gaps_at_limit: gaps,
        ..ServiceSample::empty(backend)
    }
}

/// Returns a report of demand for `model`.
pub(crate) fn demand(model: &str, waiting: u32, running: u32) -> Item {
    let demand = ModelDemand {
        waiting,
        running,
        waiting_tokens: 0,
    };
    Item::ObserveDemand(Box::new(DemandReport {
        model: model.to_owned(),
        demand,
        started: 0,
    }))
}

/// Returns a batch with measurements of `backend` and output lengths of `model`.
pub(crate) fn measured(backend: BackendRef, model: ModelKey) -> Command {
    let user = user_key(HASH_SEED, "alice");
    let outputs = Item::ObserveOutputs {
        user,
        model,
        tokens: (0..100).collect(),
    };
    let sample = service(backend, 90, 40_000);
    batch(vec![Item::ObserveService(Box::new(sample)), outputs])
}

/// Returns settings with four bins and a service level.
pub(crate) fn admission() -> AdmissionSettings {
    AdmissionSettings {
        // Spelled out because the golden snapshot contains them, independent of the defaults.
        max_queue: 10_000,
        max_wait_ms: 60_000,
        bins: 4,
        inter_token_us: 50_000,
        ..AdmissionSettings::default()
    }
}

/// Returns a batch of reports from the readers of two ranks of `backend`, up to the first message
/// `seq`: blocks with copies, a stranded block and a foreign one.
pub(crate) fn heard(backend: BackendRef, publisher: u64, seq: u64) -> Command {
    let engine = |path: &[u8]| EngineHash(block(path).0 ^ 0xff);
    let stored = |paths: &[&[u8]]| KvEvent::Stored {
        parent: paths[0]
            .split_last()
            .and_then(|(_, before)| (!before.is_empty()).then(|| engine(before))),
        blocks: paths
            .iter()
            .map(|path| (engine(path), block(path)))
            .collect(),
    };
    let look_alike = KvEvent::Stored {
        parent: None,
        blocks: vec![(EngineHash(7), block(&[1]))],
    };
    let first = vec![
        stored(&[&[1], &[1, 1], &[1, 1, 3], &[1, 1, 3, 4]]),
        look_alike,
        stored(&[&[1, 1, 3, 4]]),
        KvEvent::Removed {
            blocks: vec![engine(&[1, 1, 3])],
        },
    ];
    let second = vec![stored(&[&[1], &[1, 2]])];
    let messages = [first, second].into_iter().zip(0..).map(|(events, rank)| {
        let news = KvUpdate::Message(KvMessage {
            seq,
            mark: 9,
            part: 0,
            is_last: true,
            is_after_loss: false,
            events,
        });
        (rank, news)
    });
    let current = KvUpdate::Current { seq: Some(seq) };
    let items = messages.chain([(0, current)]).map(|(rank, news)| {
        Item::KvEvents(KvBatch {
            backend,
            rank,
            publisher,
            news,
        })
    });
    batch(items.collect())
}

/// Returns a state like [`sample`], with limits, output lengths and KV events as well.
pub(crate) fn measured_sample() -> RouterState {
    let mut state = sample();
    let handle = state.backends().next().expect("there are some").handle;
    let commands = [
        Command::PutAdmission(admission()),
        measured(handle, ModelKey(1)),
        measured(handle, ModelKey(2)),
        heard(handle, 1, 0),
    ];
    for (command, seq) in commands.into_iter().zip(1000..) {
        let index = LogIndex(state.applied().0 + 1);
        state.apply(index, envelope(1, 1, Lane::Admin, seq, command));
    }
    assert_eq!(state.check(), Ok(()));
    state
}

/// Returns a state with backends, users, leases and blocks.
pub(crate) fn sample() -> RouterState {
    let mut driver = Driver::new();
    driver.apply(1, Command::PutBackend(spec("a", 1, Some(100))));
    driver.apply(1, Command::PutBackend(spec("b", 2, None)));
    driver.apply(
        1,
        Command::DeleteBackend {
            name: "a".to_owned(),
        },
    );
    driver.apply(1, Command::PutBackend(spec("c", 3, Some(5))));
    driver.apply(
        1,
        Command::configure_user("bob", UserSettings::of_weight(2000)),
    );
    for replica in 1..=2 {
        let backend = BackendRef {
            slot: Slot(0),
            incarnation: Incarnation(2),
        };
        let new = chain(&[1, replica, 3]);
        let user = user_key(HASH_SEED, "alice");
        let charge = Charge {
            user,
            output: 7,
            started: 1,
            ..Charge::default()
        };
        let items = vec![
            Item::DefineUser {
                key: user,
                name: "alice".to_owned(),
            },
            Item::Acquire {
                attempt: 1,
                backend,
                tip: None,
                new,
            },
            Item::Charge(charge),
        ];
        driver.apply(replica, batch(items));
    }
    assert_eq!(driver.state.check(), Ok(()));
    driver.state
}
