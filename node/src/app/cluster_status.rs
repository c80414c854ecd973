//! The status of the Raft replica in the words of the admin API.

use api::ports::{ClusterStatus, MemberStatus, PeerFinding};
use raft::Role;
use state::ids::{ReplicaId, SessionId};

/// Converts the status of the Raft replica for the admin API.
pub(super) fn cluster_status(status: &raft::Status, session: SessionId) -> ClusterStatus {
    let member = |(id, member): (&u8, &raft::Member)| {
        let status = MemberStatus {
            peer: member.address.clone(),
            labels: member.labels.clone(),
            is_voter: member.is_voter,
            is_connected: member.is_connected,
            silent_ms: member
                .silent_since
                .map(|since| u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)),
            is_refusing: member.is_refusing,
            lag: member.lag,
            clock_skew_ms: None,
        };
        (ReplicaId(*id), status)
    };
    // Only a leader that a quorum answers leads: without one, nobody commits anything.
    let role = match status.role {
        Role::Leader if !status.has_quorum => Role::Candidate,
        role => role,
    };
    ClusterStatus {
        id: ReplicaId(status.id),
        session,
        cluster_id: status.cluster_id.map(|id| format!("{id:032x}")),
        role: match role {
            Role::Leader => "leader",
            Role::Follower => "follower",
            Role::Candidate => "candidate",
            Role::Learner => "learner",
            Role::Forming => "forming",
            Role::Removed => "removed",
            Role::Stopped => "stopped",
        },
        term: status.term,
        leader: status.leader.filter(|_| status.has_quorum).map(ReplicaId),
        has_quorum: status.has_quorum,
        committed_index: status.committed,
        applied_index: status.applied,
        snapshot_index: status.snapshot,
        caught_up: status.caught_up,
        is_removed: status.is_removed,
        fault: status.fault.clone(),
        unjoined: status.unjoined.clone(),
        peers: status.peers.iter().map(peer_finding).collect(),
        waiting: status.waiting.clone(),
        scaling: None,
        version: env!("CARGO_PKG_VERSION"),
        members: status.members.iter().map(member).collect(),
    }
}

fn peer_finding(peer: &raft::PeerFinding) -> PeerFinding {
    PeerFinding {
        address: peer.address.clone(),
        state: peer.state.name(),
        is_hindrance: !peer.state.is_fine(),
        detail: peer.detail.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leader_without_a_quorum_is_not_shown_as_one() {
        let with = |has_quorum| {
            let status = raft::Status {
                id: 1,
                role: Role::Leader,
                leader: Some(1),
                has_quorum,
                ..raft::Status::default()
            };
            let shown = cluster_status(&status, SessionId(1));
            (shown.leader, shown.role)
        };
        assert_eq!(with(true), (Some(ReplicaId(1)), "leader"));
        assert_eq!(with(false), (None, "candidate"));
    }
}
