//! What the tests of the whole state share: building commands, and a state in and out of a snapshot.

#![allow(dead_code, reason = "every test file takes what it needs")]

use std::collections::BTreeMap;

use state::RouterState;
use state::command::{BackendSpec, Charge, Command, Envelope, Item, Lane, Origin, Reply, UserSpec};
use state::ids::{
    AttemptId, BackendRef, BlockHash, Incarnation, LogIndex, ReplicaId, SessionId, Slot,
};
use state::policy::{CostSettings, PolicyConfig};
use state::prefix::user_key;
use state::users::FairnessSettings;

/// Seed of all hashes in these tests.
pub(crate) const HASH_SEED: u64 = 42;

/// The command that begins a cluster.
pub(crate) fn init() -> Command {
    Command::InitCluster {
        hash_seed: HASH_SEED,
        policy: PolicyConfig::Cost(CostSettings::default()),
        fairness: FairnessSettings::default(),
    }
}

/// A backend on a port of this machine.
pub(crate) fn spec(id: &str, port: u16, capacity_blocks: Option<u32>) -> BackendSpec {
    BackendSpec {
        id: id.to_owned(),
        url: format!("http://127.0.0.1:{port}"),
        models: vec!["*".to_owned()],
        labels: BTreeMap::new(),
        capacity_blocks,
        kv_events: None,
        kv_replay: None,
    }
}

/// A batch from attempt 0.
pub(crate) fn batch(items: Vec<Item>) -> Command {
    Command::Batch {
        base_attempt: AttemptId(0),
        items,
    }
}

/// The hash of the block that `path` leads to: one small number per block from the first.
pub(crate) fn block(path: &[u8]) -> BlockHash {
    let step = |hash: u64, number: &u8| {
        (hash ^ u64::from(*number))
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(29)
    };
    BlockHash(path.iter().fold(0x1234_5678, step))
}

/// The chain of all blocks on `path`.
pub(crate) fn chain(path: &[u8]) -> Vec<BlockHash> {
    (1..=path.len())
        .map(|length| block(&path[..length]))
        .collect()
}

/// A command of a replica's run.
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

/// A state that numbers log indexes and sequences by itself.
pub(crate) struct Driver {
    pub(crate) state: RouterState,
    seq: u64,
}

impl Driver {
    /// An initialised cluster.
    pub(crate) fn new() -> Self {
        let mut driver = Self {
            state: RouterState::new(),
            seq: 0,
        };
        assert_eq!(driver.apply(1, init()), Reply::Applied);
        driver
    }

    /// Applies the next command of replica `replica`'s first run.
    pub(crate) fn apply(&mut self, replica: u8, command: Command) -> Reply {
        self.apply_in(replica, 1, command)
    }

    /// Applies the next command of a run.
    pub(crate) fn apply_in(&mut self, replica: u8, session: u64, command: Command) -> Reply {
        self.seq += 1;
        let index = LogIndex(self.state.applied().0 + 1);
        self.state.apply(
            index,
            envelope(replica, session, Lane::Admin, self.seq, command),
        )
    }
}

/// The state's snapshot.
pub(crate) fn snapshot(state: &RouterState) -> Vec<u8> {
    let mut bytes = Vec::new();
    state
        .freeze()
        .write_to(&mut bytes)
        .expect("writing into memory cannot fail");
    bytes
}

/// A state made of a snapshot.
pub(crate) fn restored(snapshot: &[u8]) -> RouterState {
    let mut state = RouterState::new();
    state
        .restore(&mut &*snapshot)
        .expect("a snapshot just written can be read");
    state
}

/// A state with something of everything.
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
        Command::PutUser(UserSpec {
            name: "bob".to_owned(),
            weight_milli: 2000,
        }),
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
