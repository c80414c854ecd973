//! Traits that the user of this crate implements: the state machine, and the receiver of messages
//! outside the log.

use std::io::{Read, Write};
use std::sync::Arc;

use crate::status::Status;

/// Says of a command's bytes, before they are proposed, whether every member's machine can apply
/// them, or else what is wrong. The status is asked for only where the members matter.
pub type CheckCommand = Arc<dyn Fn(&[u8], &dyn Fn() -> Status) -> Result<(), String> + Send + Sync>;

/// What a replicated log drives. The bytes are opaque on purpose.
pub trait StateMachine: Send + 'static {
    /// What a command must pass before it is proposed: a committed one that cannot be decoded stops
    /// every replica. Called once, before the machine runs.
    fn check(&self) -> CheckCommand;

    /// Applies one committed command and answers it. Called in log order, once per index; entries
    /// without a command (membership, leader's blank) arrive through [`StateMachine::skip`].
    ///
    /// # Errors
    /// Only when the command cannot be decoded, which [`StateMachine::check`] is to say before: the
    /// replica then stops.
    fn apply(&mut self, index: u64, command: &[u8]) -> Result<Vec<u8>, StopReplicaError>;

    /// Notes an index that carries no command.
    fn skip(&mut self, index: u64);

    /// A frozen image of the state at this point, taken without delay.
    fn freeze(&self) -> Box<dyn FrozenMachine>;

    /// Replaces the state by a snapshot that [`FrozenMachine::write_to`] wrote.
    ///
    /// # Errors
    /// Says what is wrong with the snapshot and where; the state is then as it was.
    fn restore(&mut self, snapshot: &mut dyn Read) -> Result<(), SnapshotError>;
}

/// A state frozen for a snapshot, written out beside the running machine.
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

/// A snapshot's bytes are not a state.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct SnapshotError(pub String);

/// Receives what peers send outside the log.
pub trait PeerHandler: Send + Sync + 'static {
    /// One message of `from`, in order of sending per peer; messages may be lost, never torn.
    fn message(&self, from: u8, bytes: &[u8]);

    /// What this machine's wall clock shows, Unix milliseconds: told with every message. 0: it is not.
    fn unix_ms(&self) -> u64 {
        0
    }

    /// The peer's clock showed so when it sent the message that comes next.
    fn clock(&self, _from: u8, _unix_ms: u64) {}
}
