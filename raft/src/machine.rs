//! Traits that a user of this crate implements: the state machine, and the receiver of messages
//! outside the log.

use std::io::{Read, Write};
use std::sync::Arc;

use crate::status::Status;

/// Function that checks, before a command is proposed, that every member's machine can apply its
/// bytes. Returns the reason if not. Calls its last argument only if it needs the status.
pub type CheckCommand =
    Arc<dyn Fn(&[u8], CommandSource, &dyn Fn() -> Status) -> Result<(), String> + Send + Sync>;

/// Source of the bytes of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandSource {
    /// This replica, which encoded the command.
    Own,
    /// Another member, whose bytes need not be a command.
    Peer,
}

/// State machine driven by a replicated log. Commands are deliberately opaque to this crate.
pub trait StateMachine: Send + 'static {
    /// Returns the check that a command must pass before it is proposed, since a committed command
    /// that cannot be decoded stops every replica. Called once, before the machine runs.
    fn check(&self) -> CheckCommand;

    /// Applies a committed command and returns the reply. Called in log order, once per index. For
    /// entries without a command (memberships, a leader's blank entry), [`StateMachine::skip`] is
    /// called instead.
    ///
    /// # Errors
    /// Only if the command cannot be decoded, which [`StateMachine::check`] should have prevented.
    /// The replica then stops.
    fn apply(&mut self, index: u64, command: &[u8]) -> Result<Vec<u8>, StopReplicaError>;

    /// Notes that the entry at `index` has no command. Called in log order.
    fn skip(&mut self, index: u64);

    /// Returns a frozen image of the current state. Must be quick, because applying waits for it.
    fn freeze(&self) -> Box<dyn FrozenMachine>;

    /// Replaces the state with a snapshot that [`FrozenMachine::write_to`] wrote.
    ///
    /// # Errors
    /// Describes what is wrong with the snapshot; the state is then unchanged.
    fn restore(&mut self, snapshot: &mut dyn Read) -> Result<(), SnapshotError>;
}

/// Frozen state, which can be written while the machine continues.
pub trait FrozenMachine: Send + 'static {
    /// Writes the state as a snapshot to `out`.
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

/// Handler of the messages that peers send outside the log.
pub trait PeerHandler: Send + Sync + 'static {
    /// Handles a message from the replica `from`. Messages arrive in order and intact, but some may
    /// be lost.
    fn message(&self, from: u8, bytes: &[u8]);

    /// Returns the answer to a question from the replica `from`; `None` if it cannot be answered.
    /// May block.
    fn answer(&self, _from: u8, _question: &[u8]) -> Option<Vec<u8>> {
        None
    }

    /// Returns this host's Unix time in milliseconds, sent with every message; 0 to send none.
    fn unix_ms(&self) -> u64 {
        0
    }

    /// Records the Unix time of the peer `from`, in milliseconds. It belongs to the next message.
    fn clock(&self, _from: u8, _unix_ms: u64) {}
}
