//! Taking over the state of another replica's machine, when this one's cannot be trusted.
//!
//! Raft keeps logs equal, not machines: a fault of memory or of the program may leave a machine
//! wrong over a right log. Its log, its votes and its membership were never in doubt, so only the
//! machine is replaced, beside Raft. Until it is, no further entry is applied here: the other
//! replica's state may take minutes to come, and one that reaches less far than this machine could
//! not be followed by the entries that Raft hands over next.

use std::time::Duration;

use super::ReplicaInner;
use crate::adapter::InstallError;
use crate::error::ChangeError;
use crate::net::Peer;
use crate::net::snapshot_stream::fetch_state;
use crate::status::Role;

/// Tries to get a state that reaches as far as this machine, and the pause between them.
const TRIES_MAX: u32 = 20;
const PAUSE: Duration = Duration::from_millis(50);

impl ReplicaInner {
    pub(super) async fn rebuild(&self, from: u8) -> Result<u64, ChangeError> {
        let refused = |why: String| ChangeError::Refused(why);
        if self.status.borrow().role == Role::Leader {
            return Err(refused("a leader's state cannot be replaced".to_owned()));
        }
        let peer = self.links.peer(from.into());
        let peer = peer.ok_or_else(|| refused(format!("no replica has the id {from}")))?;
        let paused = self.machine.pause();
        let mut tries = 1;
        let index = loop {
            match self.fetch(&peer).await? {
                Ok(index) => break index,
                // It applies what this replica has a moment later.
                Err(InstallError::Behind { .. }) if tries < TRIES_MAX => {
                    tries += 1;
                    tokio::time::sleep(PAUSE).await;
                }
                Err(error) => return Err(refused(error.to_string())),
            }
        };
        drop(paused);
        tracing::info!(from, log_index = index, "state taken over");
        Ok(index)
    }

    async fn fetch(&self, peer: &Peer) -> Result<Result<u64, InstallError>, ChangeError> {
        let file = self.machine.unfinished_snapshot();
        fetch_state(peer, &file, self.blocking)
            .await
            .map_err(|error| ChangeError::Refused(format!("fetch a state: {error}")))?;
        let host = self.machine.clone();
        let taken = self.blocking.run(move || {
            let taken = host.take_over(&file);
            // It has another name by now unless it was not taken.
            file.remove();
            taken
        });
        taken
            .await
            .map_err(|panic| ChangeError::Unknown(panic.to_string()))
    }
}
