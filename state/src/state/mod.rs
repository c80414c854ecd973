//! [`RouterState`]: everything replicated, and `apply`.

use std::io::{Read, Write};
use std::sync::Arc;

use crate::command::{BackendSpec, EngineFacts, Envelope, Reply};
use crate::ids::{BackendRef, LogIndex};
use crate::policy::PolicyConfig;
use crate::view::BlockView;

/// The whole replicated state of a replica.
pub struct RouterState {}

/// A log entry that is not a command this build knows.
#[derive(Debug, thiserror::Error)]
#[error("decode log entry: {0}")]
pub struct Undecodable(pub String);

/// A snapshot that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("corrupt snapshot at byte {offset}: {what}")]
pub struct CorruptSnapshot {
    /// Where in the stream.
    pub offset: u64,
    /// What was wrong and what was expected.
    pub what: String,
}

/// An invariant of docs/ARCHITECTURE.md that does not hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invariant {number} broken: {detail}")]
pub struct Broken {
    /// Number as in docs/ARCHITECTURE.md, `"I4"`.
    pub number: &'static str,
    /// With the values that break it.
    pub detail: String,
}

/// What the hot path reads of the state, from any thread, without waiting for `apply`.
pub struct View {
    /// Which backend holds which blocks.
    pub blocks: BlockView,
}

impl View {
    /// Backends and replicated config, as of the last change to either.
    #[must_use]
    pub fn registry(&self) -> Arc<Registry> {
        unimplemented!("state helper")
    }

    /// Index up to which the state is applied.
    #[must_use]
    pub fn applied(&self) -> LogIndex {
        unimplemented!("state helper")
    }
}

/// An immutable image of the small part of the state.
#[derive(Debug, Clone, PartialEq)]
pub struct Registry {
    /// Whether `InitCluster` was applied.
    pub initialised: bool,
    /// Seed of block and user hashes.
    pub hash_seed: u64,
    /// The live policy.
    pub policy: PolicyConfig,
    /// By slot, ascending; free slots are absent.
    pub backends: Vec<Backend>,
}

/// A registered backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backend {
    /// How commands name it.
    pub handle: BackendRef,
    /// As the operator described it.
    pub spec: BackendSpec,
    /// Whether it takes no new requests.
    pub draining: bool,
    /// What the engine said of itself.
    pub facts: EngineFacts,
}

/// A frozen image of a state, ready to be written.
pub struct Frozen {}

impl Frozen {
    /// Writes the snapshot: header with format version, sections with length and checksum each.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write_to(&self, out: &mut dyn Write) -> std::io::Result<()> {
        let _ = out;
        unimplemented!("state helper")
    }
}

impl RouterState {
    /// An empty state at index 0.
    #[must_use]
    pub fn new() -> Self {
        unimplemented!("state helper")
    }

    /// Applies one command. Total: any command is answered, none panics.
    pub fn apply(&mut self, index: LogIndex, envelope: Envelope) -> Reply {
        let _ = (index, envelope);
        unimplemented!("state helper")
    }

    /// Moves to `index` without a change: for log entries that carry no command.
    pub fn skip(&mut self, index: LogIndex) {
        let _ = index;
        unimplemented!("state helper")
    }

    /// What readers on other threads hold: always the same handle, also after a restore.
    #[must_use]
    pub fn view(&self) -> Arc<View> {
        unimplemented!("state helper")
    }

    /// A frozen image of the state as it is, taken in microseconds; writing it out happens
    /// elsewhere while `apply` goes on.
    #[must_use]
    pub fn freeze(&self) -> Frozen {
        unimplemented!("state helper")
    }

    /// Replaces the whole state by a snapshot that [`Frozen::write_to`] wrote.
    ///
    /// # Errors
    /// With the offset of the fault; the state is then as it was.
    pub fn restore(&mut self, snapshot: &mut dyn Read) -> Result<(), CorruptSnapshot> {
        let _ = snapshot;
        unimplemented!("state helper")
    }

    /// The digest at the applied index.
    #[must_use]
    pub fn digest(&self) -> u128 {
        unimplemented!("state helper")
    }

    /// Checks every invariant; for tests and `debug_assert`, slow on a large state.
    ///
    /// # Errors
    /// The first broken one.
    pub fn check(&self) -> Result<(), Broken> {
        unimplemented!("state helper")
    }
}
