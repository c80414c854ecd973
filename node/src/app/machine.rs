//! The state machine that the log drives: decodes commands, applies them and encodes replies.
//! Nothing else applies commands to the state of a replica.

use std::io::{Read, Write};
use std::sync::{Arc, Mutex, MutexGuard};

use api::cluster::divergence::Digests;
use raft::{
    CheckCommand, CommandSource, FrozenMachine, SnapshotError, StateMachine, StopReplicaError,
};
use state::codec::{FORMAT_VERSION, encoded_format};
use state::command::{Command, Envelope};
use state::ids::LogIndex;
use state::{RouterState, StagedBackup};
use tokio::runtime::{Handle, RuntimeFlavor};

use super::log_format;

/// The replicated state and its past digests. The log changes them, and the admin API reads them.
#[derive(Default)]
pub(super) struct SharedState {
    state: Mutex<RouterState>,
    /// State digests by log index.
    pub(super) digests: Arc<Digests>,
}

impl SharedState {
    /// Locks the state between two applies. The lock must be held only briefly, because it blocks
    /// `apply`.
    pub(super) fn state(&self) -> MutexGuard<'_, RouterState> {
        self.state
            .lock()
            .expect("apply is total and readers only read: no holder panics")
    }
}

/// Observer that is called after every change of a replica's state, for simulations that check
/// invariants. It blocks `apply` meanwhile.
pub trait ApplyObserver: Send + Sync + 'static {
    /// Called after the entry at `index` was applied; `command` is `None` if the entry contains
    /// none.
    fn applied(&self, state: &RouterState, index: u64, command: Option<&[u8]>);

    /// Called after the state was replaced by that of a snapshot.
    fn restored(&self, state: &RouterState);

    /// Called when a message of peer `from` could not be decoded.
    fn message_unreadable(&self, from: u8);
}

/// State machine that applies the log's commands to the shared state.
pub(super) struct RouterMachine {
    shared: Arc<SharedState>,
    observer: Option<Arc<dyn ApplyObserver>>,
    /// Newest log format that the machine reads.
    format: u8,
}

impl RouterMachine {
    /// Creates a machine that applies the log to `shared`, and notifies `observer` if there is one.
    /// Nothing else may apply commands to `shared`.
    #[must_use]
    pub(super) fn new(shared: Arc<SharedState>, observer: Option<Arc<dyn ApplyObserver>>) -> Self {
        Self {
            shared,
            observer,
            format: FORMAT_VERSION,
        }
    }

    /// Limits the machine to log formats up to `format`, so that it acts like an earlier build.
    #[must_use]
    pub(super) fn with_format(self, format: u8) -> Self {
        Self { format, ..self }
    }

    /// Decodes the backup that `command` switches to, if any. It may contain millions of blocks, so
    /// decoding must block neither users of the state nor other tasks on this thread.
    fn read_ahead(&self, command: &Command) {
        if !matches!(command, Command::FinishRestore { .. }) {
            return;
        }
        let Some(staged) = self.staged(command) else {
            return;
        };
        let is_shared = Handle::try_current()
            .is_ok_and(|runtime| runtime.runtime_flavor() == RuntimeFlavor::MultiThread);
        let backup = if is_shared {
            tokio::task::block_in_place(|| staged.read())
        } else {
            staged.read()
        };
        self.shared.state().prepare(backup);
    }

    fn staged(&self, command: &Command) -> Option<StagedBackup> {
        self.shared.state().staged_backup(command)
    }
}

impl StateMachine for RouterMachine {
    fn check(&self) -> CheckCommand {
        let own = self.format;
        Arc::new(move |command, source, status| {
            let needed = encoded_format(command).map_err(|error| error.to_string())?;
            log_format::check(needed, own, status)?;
            match source {
                CommandSource::Own => Ok(()),
                CommandSource::Peer => read(own, command).map(drop),
            }
        })
    }

    fn apply(&mut self, index: u64, command: &[u8]) -> Result<Vec<u8>, StopReplicaError> {
        let envelope = read(self.format, command)
            .map_err(|error| StopReplicaError(format!("log index {index}: {error}")))?;
        self.read_ahead(&envelope.command);
        let mut state = self.shared.state();
        let reply = state.apply(LogIndex(index), envelope);
        self.shared.digests.applied(index, || state.digest());
        if let Some(observer) = &self.observer {
            observer.applied(&state, index, Some(command));
        }
        drop(state);
        Ok(state::codec::encode_reply(&reply))
    }

    fn skip(&mut self, index: u64) {
        let mut state = self.shared.state();
        state.skip(LogIndex(index));
        self.shared.digests.applied(index, || state.digest());
        if let Some(observer) = &self.observer {
            observer.applied(&state, index, None);
        }
    }

    fn freeze(&self) -> Box<dyn FrozenMachine> {
        Box::new(FrozenSnapshot(self.shared.state().freeze()))
    }

    fn restore(&mut self, snapshot: &mut dyn Read) -> Result<(), SnapshotError> {
        let mut state = self.shared.state();
        let restored = state.restore(snapshot);
        restored.map_err(|error| SnapshotError(error.to_string()))?;
        if let Some(observer) = &self.observer {
            observer.restored(&state);
        }
        Ok(())
    }
}

/// Decodes a command like a build that knows `format`.
fn read(format: u8, command: &[u8]) -> Result<Envelope, String> {
    let needed = encoded_format(command).map_err(|error| error.to_string())?;
    if needed > format {
        return Err(format!(
            "log format {needed}, {format} or an earlier one expected"
        ));
    }
    state::codec::decode_envelope(command).map_err(|error| error.to_string())
}

struct FrozenSnapshot(state::FrozenState);

impl FrozenMachine for FrozenSnapshot {
    fn write_to(&self, out: &mut dyn Write) -> std::io::Result<()> {
        self.0.write_to(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_of_unknown_formats_are_neither_proposed_nor_applied() {
        let mut machine = RouterMachine::new(Arc::default(), None).with_format(1);
        let check = StateMachine::check(&machine);
        let alone = raft::Status::default;
        for bytes in [&b""[..], b"\x00", b"\x02", b"\xff\x67\x61rbage!"] {
            let refused = check(bytes, CommandSource::Own, &alone);
            assert!(refused.is_err(), "{bytes:?}");
            assert!(machine.apply(1, bytes).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn bytes_of_a_peer_that_are_no_command_are_refused_before_proposal() {
        let machine = RouterMachine::new(Arc::default(), None);
        let check = StateMachine::check(&machine);
        for bytes in [&b""[..], b"\xff\x67\x61rbage!", b"\x01", b"\x01\x02\x00"] {
            let refused = check(bytes, CommandSource::Peer, &raft::Status::default);
            assert!(refused.is_err(), "{bytes:?}");
        }
    }
}
