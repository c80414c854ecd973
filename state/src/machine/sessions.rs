//! Sessions of replicas, which deduplicate commands: a repeated command is applied once.
//!
//! A session is one run of a replica. An unknown session id starts a new session and ends the
//! previous one. The ids of the last few ended sessions are remembered, so that their commands
//! still in flight are rejected. The first command of a session may arrive after a later session
//! has started. Its stamp then shows that the command is late: it lies shortly before the start of
//! the current session.

use std::collections::BTreeMap;

use bincode::{Decode, Encode};

use crate::command::{Lane, Origin, Reply};
use crate::ids::{ReplicaId, SessionId};

/// Maximum number of ended sessions that are remembered per replica.
const FORMER_SESSIONS_MAX: usize = 8;

/// Maximum time by which the stamp of an unknown session may precede the first command of the
/// current session and count as late, in milliseconds. An older stamp comes from a clock that was
/// set back, which must not lock the replica out.
const LATE_COMMAND_MS: u64 = 60_000;

/// Verdict on a command by its origin.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Dedup {
    /// The command is new.
    Fresh,
    /// The command is new and starts a session; the previous session must be closed first.
    FreshRun,
    /// The command was applied before, with this reply.
    Repeated(Reply),
    /// The command belongs to an ended session.
    Stale,
}

#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
struct Session {
    current: SessionId,
    /// Stamp of the session's first command, from the replica's own clock.
    begun_at_ms: u64,
    /// Ids of ended sessions, oldest first.
    former: Vec<SessionId>,
    outbox: Option<LastReply>,
    admin: Option<LastReply>,
}

#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
struct LastReply {
    seq: u64,
    reply: Reply,
}

/// Current and ended sessions of all replicas.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub(super) struct Sessions(BTreeMap<ReplicaId, Session>);

impl Sessions {
    pub(super) fn dedup(&mut self, origin: &Origin, proposed_at_ms: u64) -> Dedup {
        let begun = Session {
            current: origin.session,
            begun_at_ms: proposed_at_ms,
            former: Vec::new(),
            outbox: None,
            admin: None,
        };
        let Some(session) = self.0.get_mut(&origin.replica) else {
            self.0.insert(origin.replica, begun);
            return Dedup::FreshRun;
        };
        if session.former.contains(&origin.session) {
            return Dedup::Stale;
        }
        if session.current != origin.session {
            if session.would_be_late(proposed_at_ms) {
                return Dedup::Stale;
            }
            session.former.push(session.current);
            if session.former.len() > FORMER_SESSIONS_MAX {
                session.former.remove(0);
            }
            let former = std::mem::take(&mut session.former);
            *session = Session { former, ..begun };
            return Dedup::FreshRun;
        }
        match session.lane(origin.lane) {
            Some(last) if origin.seq == last.seq => Dedup::Repeated(last.reply.clone()),
            Some(last) if origin.seq < last.seq => Dedup::Repeated(Reply::Applied),
            Some(_) | None => Dedup::Fresh,
        }
    }

    /// Records the reply to an admitted command, for repeats of the command.
    pub(super) fn answer(&mut self, origin: &Origin, reply: Reply) {
        if let Some(session) = self.0.get_mut(&origin.replica) {
            *session.lane(origin.lane) = Some(LastReply {
                seq: origin.seq,
                reply,
            });
        }
    }

    /// Returns a stamp for a command, as [`RouterState::stamp_ms`](super::RouterState::stamp_ms)
    /// does.
    pub(super) fn stamp_ms(&self, replica: ReplicaId, session: SessionId, clock_ms: u64) -> u64 {
        match self.0.get(&replica) {
            Some(known) if known.current != session && known.would_be_late(clock_ms) => {
                known.begun_at_ms
            }
            Some(_) | None => clock_ms,
        }
    }

    pub(super) fn is_current(&self, replica: ReplicaId, session: SessionId) -> bool {
        self.0
            .get(&replica)
            .is_some_and(|known| known.current == session)
    }

    pub(super) fn contains(&self, replica: ReplicaId) -> bool {
        self.0.contains_key(&replica)
    }

    /// Iterates over the replicas with their current session and the last sequence numbers of the
    /// outbox and admin lanes.
    pub(super) fn iter(&self) -> impl Iterator<Item = (ReplicaId, SessionId, [u64; 2])> {
        let seq = |lane: &Option<LastReply>| lane.as_ref().map_or(0, |last| last.seq);
        self.0.iter().map(move |(replica, session)| {
            (
                *replica,
                session.current,
                [seq(&session.outbox), seq(&session.admin)],
            )
        })
    }
}

impl Session {
    /// Whether the stamp `proposed_at_ms` marks the first command of another session as late.
    fn would_be_late(&self, proposed_at_ms: u64) -> bool {
        let age_ms = self.begun_at_ms.saturating_sub(proposed_at_ms);
        (1..=LATE_COMMAND_MS).contains(&age_ms)
    }

    fn lane(&mut self, lane: Lane) -> &mut Option<LastReply> {
        match lane {
            Lane::Outbox => &mut self.outbox,
            Lane::Admin => &mut self.admin,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(session: u64, lane: Lane, seq: u64) -> Origin {
        Origin {
            replica: ReplicaId(1),
            session: SessionId(session),
            lane,
            seq,
        }
    }

    /// Admits a command with a stamp that never counts as late.
    fn admit(sessions: &mut Sessions, origin: &Origin) -> Dedup {
        sessions.dedup(origin, 0)
    }

    #[test]
    fn a_repeated_command_gets_its_original_reply() {
        let mut sessions = Sessions::default();
        let first = origin(5, Lane::Outbox, 1);
        assert_eq!(admit(&mut sessions, &first), Dedup::FreshRun);
        let reply = Reply::Batch(crate::command::BatchReply {
            dropped: 3,
            ..Default::default()
        });
        sessions.answer(&first, reply.clone());
        assert_eq!(admit(&mut sessions, &first), Dedup::Repeated(reply));

        let third = origin(5, Lane::Outbox, 3);
        assert_eq!(admit(&mut sessions, &third), Dedup::Fresh);
        sessions.answer(&third, Reply::Applied);
        assert_eq!(
            admit(&mut sessions, &first),
            Dedup::Repeated(Reply::Applied)
        );
        assert_eq!(
            admit(&mut sessions, &origin(5, Lane::Admin, 1)),
            Dedup::Fresh
        );
    }

    #[test]
    fn an_ended_session_stays_ended() {
        let mut sessions = Sessions::default();
        for session in 1..=20 {
            assert_eq!(
                admit(&mut sessions, &origin(session, Lane::Admin, 1)),
                Dedup::FreshRun
            );
            assert!(sessions.is_current(ReplicaId(1), SessionId(session)));
        }
        for session in 12..20 {
            assert_eq!(
                admit(&mut sessions, &origin(session, Lane::Admin, 9)),
                Dedup::Stale
            );
        }
        assert_eq!(
            admit(&mut sessions, &origin(20, Lane::Admin, 2)),
            Dedup::Fresh
        );
    }

    #[test]
    fn a_late_first_command_does_not_reopen_a_session() {
        let mut sessions = Sessions::default();
        let first = |session| origin(session, Lane::Outbox, 1);
        assert_eq!(sessions.dedup(&first(2), 100_000), Dedup::FreshRun);
        assert_eq!(sessions.dedup(&first(1), 99_999), Dedup::Stale);
        assert_eq!(sessions.dedup(&first(1), 40_000), Dedup::Stale);
        assert!(sessions.is_current(ReplicaId(1), SessionId(2)));
        // The adjusted stamp does not count as late.
        assert_eq!(
            [100_000, 99_999, 40_000, 39_999, 100_001]
                .map(|clock_ms| { sessions.stamp_ms(ReplicaId(1), SessionId(3), clock_ms) }),
            [100_000, 100_000, 100_000, 39_999, 100_001]
        );
        assert_eq!(sessions.stamp_ms(ReplicaId(1), SessionId(2), 5), 5);
        // A clock that was set back does not make a command late.
        assert_eq!(sessions.dedup(&first(3), 39_999), Dedup::FreshRun);
        assert_eq!(sessions.dedup(&first(4), 39_999), Dedup::FreshRun);
    }
}
