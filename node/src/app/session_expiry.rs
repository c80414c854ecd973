//! Session expiry: the leader closes what vanished replicas left open in their sessions, so that
//! their leases and requests do not count forever.
//!
//! If a host refuses connections to a replica's address, the replica's process counts as gone, and
//! its session ends almost at once. Silence may be a network fault, so it has to last longer.
//!
//! A replica that was killed and has restarted is heard again, and its first proposal ends its
//! former session. A replica without requests proposes nothing, so it ends its former session with
//! a command of its own.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use api::ports::Cluster;
use state::command::Command;
use state::ids::{ReplicaId, SessionId};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::intervals::every;

/// Silence after which everything open in a replica's session is closed. If the replica is gone,
/// its requests are over. If it was only cut off, it continues in the same session when it returns.
pub(super) const ABSENT_AFTER: Duration = Duration::from_secs(10);

/// Time for which a replica's address must have refused connections before its session ends. A
/// single refusal may come from a name that briefly resolves to another host.
pub(super) const GONE_AFTER: Duration = Duration::from_millis(200);

/// Interval at which the presence of replicas is checked.
const INTERVAL: Duration = Duration::from_millis(100);

/// Presence of a replica, as the leader observes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Presence {
    Connected,
    /// The replica is neither connected nor refusing connections, or it is no longer a member.
    Silent,
    /// The replica's host refuses connections at its address.
    Gone,
}

/// Times since which each replica with an open session has been silent or gone. Pure: times and
/// observations are arguments.
#[derive(Debug, Default)]
pub(super) struct SessionExpiry {
    since: BTreeMap<ReplicaId, Instant>,
    gone_since: BTreeMap<ReplicaId, Instant>,
    /// Expired sessions whose replica has not returned.
    ended: BTreeMap<ReplicaId, SessionId>,
}

impl SessionExpiry {
    /// Records one observation and returns the sessions to expire. A replica's session expires if
    /// no observation for [`ABSENT_AFTER`] found it connected, or all for [`GONE_AFTER`] found it
    /// gone. Sessions passed to [`SessionExpiry::ended`] since are excluded.
    pub(super) fn observe(
        &mut self,
        now: Instant,
        sessions: &[(ReplicaId, SessionId)],
        presence: impl Fn(ReplicaId) -> Presence,
    ) -> Vec<(ReplicaId, SessionId)> {
        let is_absent = |id: &ReplicaId| presence(*id) != Presence::Connected;
        let is_gone = |id: &ReplicaId| presence(*id) == Presence::Gone;
        self.since.retain(|id, _| is_absent(id));
        self.ended.retain(|id, _| is_absent(id));
        self.gone_since.retain(|id, _| is_gone(id));
        let mut expired = Vec::new();
        for &(replica, session) in sessions.iter().filter(|(replica, _)| is_absent(replica)) {
            let lasts = |since: &mut BTreeMap<ReplicaId, Instant>, least: Duration| {
                now.duration_since(*since.entry(replica).or_insert(now)) >= least
            };
            let is_over = lasts(&mut self.since, ABSENT_AFTER)
                || is_gone(&replica) && lasts(&mut self.gone_since, GONE_AFTER);
            if is_over && self.ended.get(&replica) != Some(&session) {
                expired.push((replica, session));
            }
        }
        expired
    }

    /// Records that a session was expired, so that it is not expired again.
    pub(super) fn ended(&mut self, replica: ReplicaId, session: SessionId) {
        self.ended.insert(replica, session);
    }

    /// Forgets all observations, since those from before this replica led are worthless.
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
        let presence = |id: ReplicaId| match status.members.get(&id) {
            _ if id == status.id => Presence::Connected,
            Some(member) if member.is_connected => Presence::Connected,
            Some(member) if member.is_refusing => Presence::Gone,
            Some(_) | None => Presence::Silent,
        };
        for (replica, session) in absences.observe(Instant::now(), &sessions, presence) {
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

/// Returns the session that the cluster considers current for this replica's id, if it is not
/// `session`.
fn former_run(
    (id, session): (ReplicaId, SessionId),
    sessions: &[(ReplicaId, SessionId)],
) -> Option<SessionId> {
    sessions
        .iter()
        .find(|(replica, known)| *replica == id && *known != session)
        .map(|(_, known)| *known)
}

/// Ends the former session of this replica. Any proposal under the new session does so; this
/// command changes nothing else.
async fn end_former_run(cluster: &dyn Cluster, replica: ReplicaId, session: SessionId) {
    let command = Command::ExpireSession { replica, session };
    match cluster.submit(command).await {
        Ok(_) => {
            tracing::info!("closed the requests that this replica's previous session left open");
        }
        Err(error) => tracing::debug!(%error, "could not end the former run yet"),
    }
}

/// Returns all sessions, or none if nothing is open in any of them.
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
    fn a_new_run_ends_the_previous_session() {
        let own = |session| (ReplicaId(2), SessionId(session));
        assert_eq!(former_run(own(20), &SESSIONS), None);
        assert_eq!(former_run(own(21), &SESSIONS), Some(SessionId(20)));
        assert_eq!(former_run((ReplicaId(3), SessionId(1)), &SESSIONS), None);
    }

    #[test]
    fn a_session_ends_after_the_silence_period() {
        let mut absences = SessionExpiry::default();
        let start = Instant::now();
        let only_one = only_one(Presence::Silent);
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
    fn a_sign_of_life_restarts_the_silence_period() {
        let mut absences = SessionExpiry::default();
        let start = Instant::now();
        let only_one = only_one(Presence::Silent);
        absences.observe(start, &SESSIONS, only_one);
        absences.observe(start + ABSENT_AFTER / 2, &SESSIONS, |_| Presence::Connected);
        assert_eq!(
            absences.observe(start + ABSENT_AFTER, &SESSIONS, only_one),
            []
        );
    }

    #[test]
    fn the_session_of_a_gone_process_ends_at_once() {
        let mut absences = SessionExpiry::default();
        let start = Instant::now();
        let gone = only_one(Presence::Gone);
        assert_eq!(absences.observe(start, &SESSIONS, gone), []);
        let expired = absences.observe(start + GONE_AFTER, &SESSIONS, gone);
        assert_eq!(expired, [(ReplicaId(2), SessionId(20))]);
    }

    #[test]
    fn a_single_refused_connection_ends_no_session() {
        let mut absences = SessionExpiry::default();
        let start = Instant::now();
        absences.observe(start, &SESSIONS, only_one(Presence::Gone));
        let soon = start + GONE_AFTER;
        absences.observe(soon, &SESSIONS, only_one(Presence::Silent));
        let gone = only_one(Presence::Gone);
        let later = soon + Duration::from_millis(1);
        assert_eq!(absences.observe(later, &SESSIONS, gone), []);
    }

    /// Returns the presence of replica 1, which leads, and of all `others`.
    fn only_one(others: Presence) -> impl Fn(ReplicaId) -> Presence + Copy {
        move |id| match id {
            ReplicaId(1) => Presence::Connected,
            _ => others,
        }
    }
}
