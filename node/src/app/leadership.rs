//! Leadership transfer by a replica that leaves or whose state has diverged.

use std::time::Duration;

use raft::{Member, Replica, Role};

/// Maximum time to wait until another replica takes over when the leader leaves.
const HANDOVER_DEADLINE: Duration = Duration::from_secs(3);

/// Transfers leadership to another voter, if this replica leads and another voter exists.
pub(super) async fn hand_over(replica: &Replica) {
    let status = replica.status();
    let is_other_voter = |(id, member): (&u8, &Member)| *id != status.id && member.is_voter;
    if status.role != Role::Leader || !status.members.iter().any(is_other_voter) {
        return;
    }
    match tokio::time::timeout(HANDOVER_DEADLINE, replica.transfer_leader(None)).await {
        Ok(Ok(leader)) => tracing::info!(leader, "transferred leadership"),
        Ok(Err(error)) => tracing::warn!(%error, "could not transfer leadership"),
        Err(_) => tracing::warn!("could not transfer leadership in time"),
    }
}
