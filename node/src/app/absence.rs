//! Session expiry: the leader closes what replicas that have been silent for long left open in
//! their sessions, so that their leases and requests do not count forever.
//!
//! A replica that was killed and has restarted is heard again, and its first proposal ends its
//! former session. A replica without requests proposes nothing, so it ends that session here.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use api::ports::Cluster;
use state::command::Command;
use state::ids::{ReplicaId, SessionId};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::ticks::every;

/// Silence after which everything open in a replica's session is closed. If the replica is gone,
/// its requests are over. If it was only cut off, it continues in the same session when it returns.
pub(super) const ABSENT_AFTER: Duration = Duration::from_secs(10);

/// Interval at which presence is checked.
const INTERVAL: Duration = Duration::from_secs(1);

/// Since when each replica with an open session has been silent. Pure: time and observations are
/// arguments.
#[derive(Debug, Default)]
pub(super) struct SessionExpiry {
    since: BTreeMap<ReplicaId, Instant>,
    /// Expired sessions whose replica has not returned.
    ended: BTreeMap<ReplicaId, SessionId>,
}

impl SessionExpiry {
    /// Records one observation and returns the sessions to expire: those of replicas that
    /// `is_present` has denied at every observation for [`ABSENT_AFTER`], except those
    /// [`SessionExpiry::ended`] since.
    pub(super) fn observe(
        &mut self,
        now: Instant,
        sessions: &[(ReplicaId, SessionId)],
        is_present: impl Fn(ReplicaId) -> bool,
    ) -> Vec<(ReplicaId, SessionId)> {
        self.since.retain(|id, _| !is_present(*id));
        self.ended.retain(|id, _| !is_present(*id));
        let mut gone = Vec::new();
        for &(replica, session) in sessions.iter().filter(|(replica, _)| !is_present(*replica)) {
            let since = *self.since.entry(replica).or_insert(now);
            let is_ended = self.ended.get(&replica) == Some(&session);
            if !is_ended && now.duration_since(since) >= ABSENT_AFTER {
                gone.push((replica, session));
            }
        }
        gone
    }

    /// Records that a session was expired, which is needed only once.
    pub(super) fn ended(&mut self, replica: ReplicaId, session: SessionId) {
        self.ended.insert(replica, session);
    }

    /// Forgets everything: observations from before this replica led say nothing.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

/// Expires the sessions of replicas that are gone, while this replica leads, until `stop`. A
/// removed member counts as silent.
pub(super) async fn watch(cluster: Arc<dyn Cluster>, stop: CancellationToken) {
    let mut absences = SessionExpiry::default();
    let mut ticks = every(INTERVAL);
    while stop.run_until_cancelled(ticks.tick()).await.is_some() {
        let status = cluster.status();
        let sessions = open_sessions(&*cluster);
        if status.caught_up && status.has_quorum {
            let own = (status.id, status.session);
            if let Some(former) = former_run(own, &sessions) {
                end_former_run(&*cluster, status.id, former).await;
            }
        }
        if status.leader != Some(status.id) {
            absences.clear();
            continue;
        }
        let is_present = |id: ReplicaId| {
            id == status.id
                || status
                    .members
                    .get(&id)
                    .is_some_and(|member| member.is_connected)
        };
        for (replica, session) in absences.observe(Instant::now(), &sessions, is_present) {
            let command = Command::ExpireSession { replica, session };
            match cluster.submit(command).await {
                Ok(committed) => {
                    absences.ended(replica, session);
                    let log_index = committed.index.0;
                    tracing::info!(
                        replica = replica.0,
                        log_index,
                        "ended the session of an absent replica"
                    );
                }
                Err(error) => {
                    tracing::debug!(replica = replica.0, %error, "could not end session yet");
                }
            }
        }
    }
}

/// Returns the session of this replica's id that the cluster takes for the current one, if it is
/// another.
fn former_run(
    (id, session): (ReplicaId, SessionId),
    sessions: &[(ReplicaId, SessionId)],
) -> Option<SessionId> {
    sessions
        .iter()
        .find(|(replica, known)| *replica == id && *known != session)
        .map(|(_, known)| *known)
}

/// Ends the former session. Any proposal under the new session does so; this command changes
/// nothing else.
async fn end_former_run(cluster: &dyn Cluster, replica: ReplicaId, session: SessionId) {
    let command = Command::ExpireSession { replica, session };
    match cluster.submit(command).await {
        Ok(_) => tracing::info!("closed what the former run of this replica left open"),
        Err(error) => tracing::debug!(%error, "could not end the former run yet"),
    }
}

/// Returns all sessions, or none if nothing is open anywhere.
fn open_sessions(cluster: &dyn Cluster) -> Vec<(ReplicaId, SessionId)> {
    let mut open = Vec::new();
    cluster.with_state(&mut |state| {
        if state.open_leases() > 0 || state.users_backlogged() > 0 || state.users_waiting() > 0 {
            let sessions = state.sessions();
            open.extend(
                sessions
                    .iter()
                    .map(|session| (session.replica, session.session)),
            );
        }
    });
    open
}

#[cfg(test)]
mod tests {
    use super::*;

    const SESSIONS: [(ReplicaId, SessionId); 2] =
        [(ReplicaId(1), SessionId(10)), (ReplicaId(2), SessionId(20))];

    #[test]
    fn a_run_that_the_cluster_does_not_know_yet_ends_the_one_before() {
        let own = |session| (ReplicaId(2), SessionId(session));
        assert_eq!(former_run(own(20), &SESSIONS), None);
        assert_eq!(former_run(own(21), &SESSIONS), Some(SessionId(20)));
        assert_eq!(former_run((ReplicaId(3), SessionId(1)), &SESSIONS), None);
    }

    #[test]
    fn a_session_ends_after_enough_silence() {
        let mut absences = SessionExpiry::default();
        let start = Instant::now();
        let only_one = |id: ReplicaId| id == ReplicaId(1);
        assert_eq!(absences.observe(start, &SESSIONS, only_one), []);
        assert_eq!(
            absences.observe(start + ABSENT_AFTER / 2, &SESSIONS, only_one),
            []
        );
        let gone = absences.observe(start + ABSENT_AFTER, &SESSIONS, only_one);
        assert_eq!(gone, [(ReplicaId(2), SessionId(20))]);
        absences.ended(ReplicaId(2), SessionId(20));
        assert_eq!(
            absences.observe(start + 2 * ABSENT_AFTER, &SESSIONS, only_one),
            []
        );
    }

    #[test]
    fn a_sign_of_life_starts_the_silence_anew() {
        let mut absences = SessionExpiry::default();
        let start = Instant::now();
        let only_one = |id: ReplicaId| id == ReplicaId(1);
        absences.observe(start, &SESSIONS, only_one);
        absences.observe(start + ABSENT_AFTER / 2, &SESSIONS, |_| true);
        assert_eq!(
            absences.observe(start + ABSENT_AFTER, &SESSIONS, only_one),
            []
        );
    }
}
