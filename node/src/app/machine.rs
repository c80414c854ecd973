//! Where the log meets the router: decode, apply, encode.

use std::io::{Read, Write};
use std::sync::{Arc, Mutex, MutexGuard};

use api::admin::Digests;
use raft::{CorruptSnapshot, FrozenMachine, Machine, StopReplica};
use state::RouterState;
use state::ids::LogIndex;

/// The replicated state and the digests of its past, shared between the log that changes it and the
/// admin API that reads it.
#[derive(Default)]
pub(super) struct Shared {
    state: Mutex<RouterState>,
    /// Digests by index.
    pub(super) digests: Arc<Digests>,
}

impl Shared {
    /// The state between two applies. Hold it shortly: `apply` waits meanwhile.
    pub(super) fn state(&self) -> MutexGuard<'_, RouterState> {
        self.state
            .lock()
            .expect("apply is total and readers only read: no holder panics")
    }
}

/// Drives the shared state from the log.
pub(super) struct RouterMachine {
    shared: Arc<Shared>,
}

impl RouterMachine {
    /// A machine over `shared`; nothing else may apply to it.
    #[must_use]
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }
}

impl Machine for RouterMachine {
    fn apply(&mut self, index: u64, command: &[u8]) -> Result<Vec<u8>, StopReplica> {
        let envelope = state::codec::decode_envelope(command)
            .map_err(|error| StopReplica(format!("log index {index}: {error}")))?;
        let mut state = self.shared.state();
        let reply = state.apply(LogIndex(index), envelope);
        self.shared.digests.applied(index, || state.digest());
        drop(state);
        Ok(state::codec::encode_reply(&reply))
    }

    fn skip(&mut self, index: u64) {
        let mut state = self.shared.state();
        state.skip(LogIndex(index));
        self.shared.digests.applied(index, || state.digest());
    }

    fn freeze(&self) -> Box<dyn FrozenMachine> {
        Box::new(Frozen(self.shared.state().freeze()))
    }

    fn restore(&mut self, snapshot: &mut dyn Read) -> Result<(), CorruptSnapshot> {
        let restored = self.shared.state().restore(snapshot);
        restored.map_err(|error| CorruptSnapshot(error.to_string()))
    }
}

struct Frozen(state::Frozen);

impl FrozenMachine for Frozen {
    fn write_to(&self, out: &mut dyn Write) -> std::io::Result<()> {
        self.0.write_to(out)
    }
}
