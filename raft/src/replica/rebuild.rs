//! Replaces the state of a machine in doubt with that of another replica.
//!
//! Raft keeps logs equal, not machines: a fault of memory or of the program may leave a machine
//! wrong although its log is correct. Log, votes and membership were never in doubt, so only the
//! machine is replaced, outside Raft. Applying is paused meanwhile: fetching a state may take
//! minutes, and after a state older than this machine, the next entries from Raft would leave a
//! gap.

use std::io;
use std::time::Duration;

use super::Replica;
use crate::adapter::InstallError;
use crate::error::ChangeError;
use crate::net::snapshot_stream::fetch_state;
use crate::net::{CallError, Peer};
use crate::status::Role;

/// Maximum number of attempts to fetch a state that reaches as far as this machine.
const TRIES_MAX: u32 = 20;
const PAUSE: Duration = Duration::from_millis(50);

/// Reason why an attempt to install another replica's state failed.
#[derive(Debug, thiserror::Error)]
enum TakeOverError {
    #[error("fetch a state: {0}")]
    Fetch(CallError),
    #[error(transparent)]
    Install(InstallError),
    /// The installation panicked, and may or may not have replaced the state.
    #[error(transparent)]
    Panicked(io::Error),
}

impl Replica {
    /// Replaces the state of a machine in doubt with that of the replica `from`. The log is
    /// unaffected. Returns the index that the state reaches.
    ///
    /// # Errors
    /// Fails if this replica leads, if `from` does not respond, or if the received state is damaged
    /// or keeps being older than this machine. The current state is then kept. Also fails if the
    /// received state cannot be kept on disk: memory then has it, and the disk the replaced one. The
    /// call may be repeated in any case.
    pub async fn rebuild(&self, from: u8) -> Result<u64, ChangeError> {
        let refused = |why: String| ChangeError::Refused(why);
        if self.status().role == Role::Leader {
            return Err(refused("a leader's state cannot be replaced".to_owned()));
        }
        let peer = self.inner.links.peer(from.into());
        let peer = peer.ok_or_else(|| refused(format!("no replica has the id {from}")))?;
        let paused = self.inner.machine.pause();
        let mut tries = 1;
        let index = loop {
            match self.take_over(&peer).await {
                Ok(index) => break index,
                // The other replica will shortly have applied what this one has.
                Err(TakeOverError::Install(InstallError::Behind { .. })) if tries < TRIES_MAX => {
                    tries += 1;
                    tokio::time::sleep(PAUSE).await;
                }
                Err(TakeOverError::Panicked(panic)) => {
                    return Err(ChangeError::Unknown(panic.to_string()));
                }
                Err(error) => return Err(refused(error.to_string())),
            }
        };
        drop(paused);
        tracing::info!(from, log_index = index, "restored the state from a peer");
        Ok(index)
    }

    async fn take_over(&self, peer: &Peer) -> Result<u64, TakeOverError> {
        let (machine, blocking) = (self.inner.machine.clone(), self.inner.blocking);
        let file = machine.unfinished_snapshot();
        let fetched = fetch_state(peer, &file, blocking).await;
        fetched.map_err(TakeOverError::Fetch)?;
        let taken = blocking.run(move || {
            let taken = machine.install_state(&file);
            // If it was installed, the file has another name by now.
            file.remove();
            taken
        });
        let taken = taken.await.map_err(TakeOverError::Panicked)?;
        taken.map_err(TakeOverError::Install)
    }
}
