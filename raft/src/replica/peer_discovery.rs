//! Findings of a replica without a quorum at its peers' addresses, and when to log them. The
//! addresses are those in the config while it is in no cluster, afterwards those of the members.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;
use tonic::Code;

use crate::identity::{ClusterBinding, ReplicaIdentity};
use crate::net::{CallOnceError, ConnectFailure};
use crate::status::{PeerFinding, PeerState};
use crate::wire::{self, proto};

/// Time until the first log line about a search, and minimum time between two.
const SAY_FIRST: Duration = Duration::from_secs(1);
/// Maximum time between two log lines about a search while nothing changes.
const SAY_RARELY: Duration = Duration::from_secs(60);
/// Time for which a finding replaces later timeouts of the same peer.
const SEEN_FOR: Duration = Duration::from_secs(10);

/// Result of one search for a cluster or its other members.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct PeerDiscovery {
    /// Reason why this replica is in no cluster yet; `None` for a member, even without a quorum,
    /// and if this replica has just founded or joined a cluster.
    pub(super) problem: Option<String>,
    /// Findings at each address that was searched.
    pub(super) peers: Vec<PeerFinding>,
}

impl PeerDiscovery {
    /// Formats the addresses with their findings as one line.
    pub(super) fn shown(&self) -> String {
        let shown = self
            .peers
            .iter()
            .map(|peer| format!("{}: {}", peer.address, peer.detail));
        shown.collect::<Vec<_>>().join("; ")
    }
}

/// Reason why a peer did not introduce itself.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{why}")]
pub(super) struct AskError {
    pub(super) state: PeerState,
    pub(super) why: String,
}

impl From<CallOnceError> for AskError {
    fn from(error: CallOnceError) -> Self {
        let state = match &error {
            CallOnceError::NotConnected(error) => match error.kind {
                ConnectFailure::Refused => PeerState::Refused,
                ConnectFailure::UnknownName => PeerState::UnknownName,
                ConnectFailure::TimedOut => PeerState::TimedOut,
                ConnectFailure::Secret => PeerState::WrongSecret,
                ConnectFailure::Certificate => PeerState::WrongCertificate,
                ConnectFailure::OtherCluster => PeerState::OtherCluster,
                ConnectFailure::Other => PeerState::Failed,
            },
            CallOnceError::TimedOut => PeerState::TimedOut,
            CallOnceError::Failed(status) => match status.code() {
                Code::FailedPrecondition => PeerState::OtherCluster,
                Code::Unauthenticated => PeerState::WrongSecret,
                Code::PermissionDenied => PeerState::WrongCertificate,
                _ => PeerState::Failed,
            },
        };
        let why = error.to_string();
        Self { state, why }
    }
}

/// Returns the finding at `address`, given the peer's introduction or the reason for its absence.
pub(super) fn report(
    address: &str,
    answer: &Result<proto::InfoResponse, AskError>,
    own: &ReplicaIdentity,
) -> PeerFinding {
    let (state, detail) = match answer {
        Err(error) => (error.state, error.why.clone()),
        Ok(info) if info.store == own.store => (PeerState::Own, "this replica".to_owned()),
        Ok(info) if info.id == own.id => (
            PeerState::SameId,
            format!("another replica with node.id {}, as this one", info.id),
        ),
        Ok(info) if info.is_member && is_other_cluster(info, own.binding()) => {
            (PeerState::OtherCluster, two_clusters(info, own.cluster()))
        }
        Ok(info) if info.is_member => (
            PeerState::Member,
            format!("replica {}, in a cluster", info.id),
        ),
        Ok(info) => (
            PeerState::Free,
            format!("replica {}, in no cluster yet", info.id),
        ),
    };
    PeerFinding {
        address: address.to_owned(),
        state,
        detail,
    }
}

/// Whether a member that introduced itself is in another cluster than this replica. A replica that
/// is merely claimed may still join any cluster.
pub(super) fn is_other_cluster(info: &proto::InfoResponse, binding: ClusterBinding) -> bool {
    let ClusterBinding::Member(ours) = binding else {
        return false;
    };
    wire::join_optional(info.cluster_high, info.cluster_low) != Some(ours)
}

/// Describes a member of another cluster by the ids of both clusters, because the names are equal.
/// `ours` is the id of this replica's cluster, or `None` if it is in none.
pub(super) fn two_clusters(info: &proto::InfoResponse, ours: Option<u128>) -> String {
    format!(
        "replica {} is in another cluster of the same name: its id is {}, this replica's {}",
        info.id,
        wire::shown_first(wire::announced_cluster_prefix(info)),
        ours.map_or("none".to_owned(), wire::shown_id)
    )
}

/// Returns the finding at the address of member `id` of this replica's cluster. `cluster` is the id
/// in this replica's identity, if there is one.
pub(super) fn report_member(
    (id, address): (u64, &str),
    answer: &Result<proto::InfoResponse, AskError>,
    cluster: Option<u128>,
) -> PeerFinding {
    let (state, detail) = match answer {
        Err(error) => (error.state, error.why.clone()),
        Ok(info) if info.id != id => (
            PeerState::OtherReplica,
            format!("replica {} responds, expected replica {id}", info.id),
        ),
        Ok(info) if !info.is_member => (
            PeerState::OtherReplica,
            format!("replica {id} is in no cluster: it lost its store"),
        ),
        Ok(info) if wire::join_optional(info.cluster_high, info.cluster_low) != cluster => {
            (PeerState::OtherCluster, two_clusters(info, cluster))
        }
        Ok(_) => (PeerState::Member, format!("replica {id} responds")),
    };
    PeerFinding {
        address: address.to_owned(),
        state,
        detail,
    }
}

/// Marks the findings of peers with the same id: only one of them can be in a cluster.
pub(super) fn mark_doubles(
    reports: &mut [PeerFinding],
    answers: &[Result<proto::InfoResponse, AskError>],
) {
    let mut first: BTreeMap<u64, (u64, usize)> = BTreeMap::new();
    for (nth, info) in answers.iter().enumerate() {
        let Ok(info) = info else { continue };
        let (store, other) = *first.entry(info.id).or_insert((info.store, nth));
        let is_peer = matches!(reports[nth].state, PeerState::Free | PeerState::Member);
        if is_peer && store != info.store {
            let other = &reports[other].address;
            let detail = format!("replica {}, as the one at {other}", info.id);
            reports[nth].state = PeerState::SameId;
            reports[nth].detail = detail;
        }
    }
}

/// Recent findings at each address, so that one slow response changes nothing.
#[derive(Debug, Default)]
pub(super) struct LastSeen(BTreeMap<String, (Instant, PeerFinding)>);

impl LastSeen {
    /// Replaces each timeout in `reports` with the last other finding at the same address, if that
    /// was made within [`SEEN_FOR`].
    pub(super) fn replace_timeouts(&mut self, now: Instant, reports: &mut [PeerFinding]) {
        for report in reports {
            let seen = self.0.get(&report.address);
            match seen.filter(|(at, _)| now.duration_since(*at) < SEEN_FOR) {
                Some((_, seen)) if report.state == PeerState::TimedOut => *report = seen.clone(),
                _ if report.state == PeerState::TimedOut => {}
                _ => drop(self.0.insert(report.address.clone(), (now, report.clone()))),
            }
        }
    }
}

/// Schedule of log lines on why a replica is in no cluster yet or has no quorum: after a second,
/// then at growing intervals, and again when the reason changes.
#[derive(Debug)]
pub(super) struct SearchLog {
    began: Instant,
    last: Instant,
    gap: Duration,
    said: Option<PeerDiscovery>,
}

impl SearchLog {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            began: now,
            last: now,
            gap: SAY_FIRST,
            said: None,
        }
    }

    /// Logs the result of a search for a cluster, if a line is due.
    pub(super) fn say(&mut self, now: Instant, search: &PeerDiscovery) {
        let Some(problem) = &search.problem else {
            return;
        };
        if self.is_due(now, search) {
            let waited_s = now.duration_since(self.began).as_secs();
            let peers = search.shown();
            tracing::warn!(problem, peers, waited_s, "not in a cluster yet");
        }
    }

    /// Logs that this member hears no quorum and what it found of its peers, if a message is due.
    pub(super) fn say_lost(&mut self, now: Instant, search: &PeerDiscovery) {
        if self.is_due(now, search) {
            let waited_s = now.duration_since(self.began).as_secs();
            let peers = search.shown();
            tracing::warn!(peers, waited_s, "no quorum");
        }
    }

    fn is_due(&mut self, now: Instant, search: &PeerDiscovery) -> bool {
        let is_news = self.said.as_ref().is_some_and(|said| said != search);
        let gap = if is_news { SAY_FIRST } else { self.gap };
        if now.duration_since(self.last) < gap {
            return false;
        }
        self.gap = (gap * 2).min(SAY_RARELY);
        self.last = now;
        self.said = Some(search.clone());
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(problem: &str) -> PeerDiscovery {
        PeerDiscovery {
            problem: Some(problem.to_owned()),
            peers: Vec::new(),
        }
    }

    #[test]
    fn a_single_timeout_does_not_change_a_peers_state() {
        let report = |state, detail: &str| PeerFinding {
            address: "a:1".to_owned(),
            state,
            detail: detail.to_owned(),
        };
        let refused = report(PeerState::Refused, "connection refused");
        let silent = report(PeerState::TimedOut, "no response in time");
        let start = Instant::now();
        let mut seen = LastSeen::default();
        let mut steady = |after: Duration, report: &PeerFinding| {
            let mut reports = [report.clone()];
            seen.replace_timeouts(start + after, &mut reports);
            reports[0].state
        };
        assert_eq!(steady(Duration::ZERO, &silent), PeerState::TimedOut);
        assert_eq!(steady(Duration::ZERO, &refused), PeerState::Refused);
        assert_eq!(steady(SEEN_FOR / 2, &silent), PeerState::Refused);
        assert_eq!(steady(SEEN_FOR, &silent), PeerState::TimedOut);
    }

    #[test]
    fn a_repeated_reason_is_logged_rarely_and_a_new_one_at_once() {
        let start = Instant::now();
        let mut log = SearchLog::new(start);
        let mut logged = Vec::new();
        let at = |tenths: u64| start + Duration::from_millis(100 * tenths);
        for tenths in 0..2500 {
            if log.is_due(at(tenths), &found("a")) {
                logged.push(tenths / 10);
            }
        }
        assert_eq!(logged, [1, 3, 7, 15, 31, 63, 123, 183, 243]);
        assert!(log.is_due(at(2500), &found("b")));
        assert!(
            !log.is_due(at(2505), &found("a")),
            "one line a second at most"
        );
        assert!(log.is_due(at(2510), &found("a")));
        assert!(!log.is_due(at(2529), &found("a")));
        assert!(log.is_due(at(2530), &found("a")));
    }
}
