//! Traits that a user of this crate implements: the state machine, and the receiver of messages
//! outside the log.

use std::io::{Read, Write};
use std::sync::Arc;

use crate::status::Status;

/// Checks, before a command is proposed, that every member's machine can apply its bytes; returns
/// the reason if not. It fetches the status only if the members matter.
pub type CheckCommand = Arc<dyn Fn(&[u8], &dyn Fn() -> Status) -> Result<(), String> + Send + Sync>;

/// A machine driven by a replicated log. Commands are deliberately opaque to this crate.
pub trait StateMachine: Send + 'static {
    /// Returns the check that a command must pass before it is proposed, since a committed command
    /// that cannot be decoded stops every replica. Called once, before the machine runs.
    fn check(&self) -> CheckCommand;

    /// Applies a committed command and returns the reply. Called in log order, once per index.
    /// Entries without a command (memberships, a leader's blank entry) go to
    /// [`StateMachine::skip`].
    ///
    /// # Errors
    /// Only if the command cannot be decoded, which [`StateMachine::check`] should have prevented.
    /// The replica then stops.
    fn apply(&mut self, index: u64, command: &[u8]) -> Result<Vec<u8>, StopReplicaError>;

    /// Records an index without a command.
    fn skip(&mut self, index: u64);

    /// Returns a frozen image of the current state. Must be quick.
    fn freeze(&self) -> Box<dyn FrozenMachine>;

    /// Replaces the state with a snapshot that [`FrozenMachine::write_to`] wrote.
    ///
    /// # Errors
    /// Returns what is wrong with the snapshot; the state is then unchanged.
    fn restore(&mut self, snapshot: &mut dyn Read) -> Result<(), SnapshotError>;
}

/// A frozen state, which can be written while the machine continues.
pub trait FrozenMachine: Send + 'static {
    /// Writes the snapshot.
    ///
    /// # Errors
    /// Fails if `out` does.
    fn write_to(&self, out: &mut dyn Write) -> std::io::Result<()>;
}

/// Reason why a replica cannot continue.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct StopReplicaError(pub String);

/// Error for bytes that are not a valid snapshot.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct SnapshotError(pub String);

/// Receives the messages that peers send outside the log.
pub trait PeerHandler: Send + Sync + 'static {
    /// Handles a message from `from`. Messages arrive in order and intact, but some may be lost.
    fn message(&self, from: u8, bytes: &[u8]);

    /// Returns this host's Unix time in milliseconds, sent with every message; 0 to send none.
    fn unix_ms(&self) -> u64 {
        0
    }

    /// Records the peer's clock as of the message that is delivered next.
    fn clock(&self, _from: u8, _unix_ms: u64) {}
}
