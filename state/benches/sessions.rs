//! Benchmark of agents' sessions: time to apply their turns in a full table, and the longest command
//! while a tree or a user with all sessions of the table ends.

// A benchmark reads the clock; the crate it measures must not.
#![allow(clippy::disallowed_types)]
#![allow(missing_docs)]

use std::hint::black_box;
use std::io::{self, Write};
use std::time::{Duration, Instant};

use state::RouterState;
use state::command::{Command, Envelope, Founding, Item, Lane, Origin};
use state::ids::{
    AgentSessionKey, AttemptId, BackendRef, Incarnation, LogIndex, ModelKey, ReplicaId, SessionId,
    Slot,
};
use state::policy::{CostSettings, PolicyConfig};
use state::prefix::user_key;
use state::trees::{NewSession, SESSIONS_MAX, SessionRef, SessionTurn, TurnUsage};

const PER_BATCH: u64 = 100;
const SESSIONS: u64 = SESSIONS_MAX as u64;
const USER: &str = "ada";

struct Driver {
    state: RouterState,
    seq: u64,
}

/// Returns the key of the session with this number, as uniform as a hash.
fn key(number: u64) -> AgentSessionKey {
    AgentSessionKey(number.wrapping_mul(0x9E37_79B9_7F4A_7C15))
}

impl Driver {
    /// Creates a state with sessions of one user, which are of as many trees.
    fn new(sessions: u64, trees: u64) -> Self {
        let mut driver = Self {
            state: RouterState::new(),
            seq: 0,
        };
        let policy = PolicyConfig::Cost(CostSettings::default());
        driver.apply(Command::from(Founding::of_seed(1, policy)));
        driver.batch(vec![Item::DefineUser {
            key: user_key(1, USER),
            name: USER.to_owned(),
        }]);
        for first in (0..sessions).step_by(PER_BATCH as usize) {
            let begin = |number: u64| {
                Item::BeginSession(NewSession {
                    key: key(number),
                    parent: (number >= trees).then(|| key(number % trees)),
                    user: user_key(1, USER),
                    model: ModelKey(1),
                    home: BackendRef {
                        slot: Slot(0),
                        incarnation: Incarnation(1),
                    },
                })
            };
            driver.batch(
                (first..sessions.min(first + PER_BATCH))
                    .map(begin)
                    .collect(),
            );
        }
        assert_eq!(driver.sessions() as u64, sessions);
        driver
    }

    fn sessions(&self) -> usize {
        self.state.view().trees().counts().0
    }

    fn apply(&mut self, command: Command) -> Duration {
        self.seq += 1;
        let origin = Origin {
            replica: ReplicaId(1),
            session: SessionId(1),
            lane: Lane::Admin,
            seq: self.seq,
        };
        let envelope = Envelope {
            origin,
            proposed_at_ms: self.seq,
            command,
        };
        let start = Instant::now();
        black_box(self.state.apply(LogIndex(self.seq), envelope));
        start.elapsed()
    }

    fn batch(&mut self, items: Vec<Item>) -> Duration {
        self.apply(Command::Batch {
            base_attempt: AttemptId(0),
            items,
        })
    }
}

fn turn(number: u64) -> Item {
    Item::EndTurn(SessionTurn {
        session: SessionRef::Key(key(number)),
        usage: TurnUsage {
            input_uncached: 700,
            input_cached: 16_000,
            output: 444,
        },
    })
}

fn turns(out: &mut impl Write) -> io::Result<()> {
    const BATCHES: u64 = 2_000;
    let mut driver = Driver::new(SESSIONS, SESSIONS);
    let mut sum = Duration::ZERO;
    for batch in 0..BATCHES {
        let numbers = batch * PER_BATCH..(batch + 1) * PER_BATCH;
        sum += driver.batch(numbers.map(|it| turn(it * 7919 % SESSIONS)).collect());
    }
    let each = sum.as_nanos() / u128::from(BATCHES * PER_BATCH);
    writeln!(out, "turn in a full table: {each} ns")
}

#[inline(never)]
/// Measures commands with one turn of a few sessions, and without: the requests of a calm cluster.
fn single_turns(out: &mut impl Write) -> io::Result<()> {
    const COMMANDS: u64 = 20_000;
    const FEW: u64 = 16;
    let mut driver = Driver::new(FEW, FEW);
    let (mut with, mut without) = (Duration::ZERO, Duration::ZERO);
    for number in 0..COMMANDS {
        without += driver.batch(Vec::new());
        with += driver.batch(vec![turn(number % FEW)]);
    }
    let [with, without] = [with, without].map(|it| it.as_nanos() / u128::from(COMMANDS));
    writeln!(
        out,
        "command with one turn: {with} ns, without: {without} ns"
    )
}

fn ending(out: &mut impl Write, trees: u64, command: Command) -> io::Result<()> {
    let mut driver = Driver::new(SESSIONS, trees);
    let name = format!("{command:?}");
    let mut times = vec![driver.apply(command)];
    while driver.sessions() > 0 {
        times.push(driver.batch(Vec::new()));
    }
    let longest = times.iter().max().copied().unwrap_or_default();
    let (sum, commands): (Duration, usize) = (times.iter().sum(), times.len());
    writeln!(
        out,
        "{name} of {SESSIONS} sessions: {commands} commands, the longest {longest:.1?}, {sum:.1?} in all"
    )
}

fn main() -> io::Result<()> {
    let out = &mut io::stdout().lock();
    single_turns(out)?;
    turns(out)?;
    ending(out, 1, Command::EndTree { root: key(0) })?;
    let name = USER.to_owned();
    ending(out, SESSIONS, Command::DeleteUser { name })
}
