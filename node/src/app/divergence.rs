//! Compares this replica's digest with its peers', and replaces its state if the majority
//! disagrees.
//!
//! Replicas that applied the same log must hold the same state. If one differs from most voters, a
//! fault of memory or of the program has corrupted it, and it cannot tell where. It then hands over
//! leadership and is not elected, because others might take its snapshots. It reports not ready
//! until it has taken over the state of a replica in the majority.

use std::sync::Arc;
use std::time::Duration;

use raft::{ChangeError, Replica};
use state::ids::{LogIndex, ReplicaId};
use tokio_util::sync::CancellationToken;

use super::intervals::every;
use super::leadership::hand_over;
use super::machine::SharedState;

/// Interval of checks, and of attempts to replace the state. A difference is handled at once.
const INTERVAL: Duration = Duration::from_secs(1);

/// Checks for divergence until `stop`, and replaces a state that most voters disagree with.
pub(super) async fn watch(replica: Replica, shared: Arc<SharedState>, stop: CancellationToken) {
    let digests = Arc::clone(&shared.digests);
    let mut last_seen = LogIndex(0);
    let mut ticks = every(INTERVAL);
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            _ = ticks.tick() => last_seen = note_pace(&shared, last_seen),
            () = digests.differs() => {}
        }
        let status = replica.status();
        let voters = status.members.iter().filter(|(_, member)| member.is_voter);
        let voters: Vec<ReplicaId> = voters.map(|(id, _)| ReplicaId(*id)).collect();
        if let Some(minority) = digests.judge(&voters) {
            tracing::error!(
                log_index = minority.index,
                ours = api::cluster::divergence::hex(minority.ours),
                theirs = api::cluster::divergence::hex(minority.theirs),
                replicas = minority.holders.len(),
                "this replica's state differs from the majority's and is being replaced"
            );
        }
        let Some(minority) = digests.minority() else {
            continue;
        };
        replica.set_state_suspect(true);
        hand_over(&replica).await;
        let rebuilt = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            rebuilt = rebuild(&replica, &minority.holders) => rebuilt,
        };
        match rebuilt {
            Ok(log_index) => {
                digests.forget();
                replica.set_state_suspect(false);
                tracing::warn!(
                    log_index,
                    "this replica's state agrees with the majority's again"
                );
            }
            Err(error) => tracing::error!(%error, "could not replace state yet"),
        }
    }
}

/// Takes over the state of the first of `holders` that provides it, because some may be down.
async fn rebuild(replica: &Replica, holders: &[ReplicaId]) -> Result<u64, ChangeError> {
    let mut rebuilt = Err(ChangeError::Refused(
        "no connected member holds the majority's state".to_owned(),
    ));
    for holder in holders {
        rebuilt = replica.rebuild(holder.0).await;
        if rebuilt.is_ok() {
            break;
        }
    }
    rebuilt
}

/// Compares digests more often when the log is slow, and at the current index if it has not moved
/// since `last_seen`: in a quiet cluster, the next index to compare may be far away. Returns the
/// applied index.
fn note_pace(shared: &SharedState, last_seen: LogIndex) -> LogIndex {
    let state = shared.state();
    let applied = state.applied();
    shared.digests.grew(applied.0.saturating_sub(last_seen.0));
    if applied == last_seen && applied > LogIndex(0) {
        shared.digests.rest(applied.0, state.digest());
    }
    applied
}
