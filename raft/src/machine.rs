//! The traits that a user of this crate implements: the state machine, and the receiver of messages
//! outside the log.

use std::io::{Read, Write};
use std::sync::Arc;

use crate::status::Status;

/// Checks, before a command is proposed, that every member's machine can apply its bytes; says what
/// is wrong if not. The status is fetched only if the members matter.
pub type CheckCommand = Arc<dyn Fn(&[u8], &dyn Fn() -> Status) -> Result<(), String> + Send + Sync>;

/// A machine driven by a replicated log. Commands are opaque to this crate on purpose.
pub trait StateMachine: Send + 'static {
    /// The check that a command must pass before it is proposed, since a committed command that
    /// cannot be decoded stops every replica. Called once, before the machine runs.
    fn check(&self) -> CheckCommand;

    /// Applies a committed command and returns the reply. Called in log order, once per index.
    /// Entries without a command (memberships, a leader's blank) are passed to
    /// [`StateMachine::skip`].
    ///
    /// # Errors
    /// Only if the command cannot be decoded, which [`StateMachine::check`] should have prevented.
    /// The replica then stops.
    fn apply(&mut self, index: u64, command: &[u8]) -> Result<Vec<u8>, StopReplicaError>;

    /// Takes note of an index without a command.
    fn skip(&mut self, index: u64);

    /// A frozen image of the present state. Must be quick.
    fn freeze(&self) -> Box<dyn FrozenMachine>;

    /// Replaces the state by a snapshot that [`FrozenMachine::write_to`] wrote.
    ///
    /// # Errors
    /// Says what is wrong with the snapshot; the state is then unchanged.
    fn restore(&mut self, snapshot: &mut dyn Read) -> Result<(), SnapshotError>;
}

/// A frozen state, which is written while the machine goes on.
pub trait FrozenMachine: Send + 'static {
    /// Writes the snapshot.
    ///
    /// # Errors
    /// Those of `out`.
    fn write_to(&self, out: &mut dyn Write) -> std::io::Result<()>;
}

/// Why a replica cannot go on.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct StopReplicaError(pub String);

/// The bytes of a snapshot are not a valid state.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct SnapshotError(pub String);

/// Receives the messages that peers send outside the log.
pub trait PeerHandler: Send + Sync + 'static {
    /// A message of `from`. A peer's messages arrive in order and complete, but some may be lost.
    fn message(&self, from: u8, bytes: &[u8]);

    /// This host's wall clock in Unix milliseconds, sent with every message; 0 to send none.
    fn unix_ms(&self) -> u64 {
        0
    }

    /// The peer's clock when it sent the message that is delivered next.
    fn clock(&self, _from: u8, _unix_ms: u64) {}
}
