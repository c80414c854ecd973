//! The model's sessions: runs of replicas and their sequence numbers.

use std::collections::{BTreeMap, BTreeSet};

use state::command::{Envelope, Lane, Origin};
use state::ids::{LogIndex, ReplicaId, SessionId};

/// Maximum time by which the stamp of a late command may precede the current session's first stamp,
/// in milliseconds. Any other command of an unknown session begins a new session.
const LATE_MS: u64 = 60_000;
/// Maximum number of former sessions that are remembered per replica.
const FORMER_MAX: usize = 8;

/// Sessions of all replicas, with the effects of their commands.
#[derive(Debug, Clone, Default)]
pub struct ModelSessions {
    runs: BTreeMap<ReplicaId, SessionRuns>,
    /// Index at which the command of each origin took effect.
    pub effects: BTreeMap<Origin, u64>,
}

#[derive(Debug, Clone)]
struct SessionRuns {
    /// Remembered sessions. The last one is the current session.
    sessions: Vec<SessionId>,
    begun_at_ms: u64,
    outbox: BTreeSet<u64>,
    admin: BTreeSet<u64>,
}

/// Verdict on whether a command takes effect.
pub(super) enum Dedup {
    Fresh,
    /// The command takes effect, after the former session is closed.
    NewRun,
    Repeat,
    Stale,
}

impl ModelSessions {
    pub(super) fn admit(&mut self, envelope: &Envelope) -> Dedup {
        let origin = &envelope.origin;
        let stamp_ms = envelope.proposed_at_ms;
        if origin.seq == 0 {
            return Dedup::Stale;
        }
        let Some(runs) = self.runs.get_mut(&origin.replica) else {
            let begun = SessionRuns::begin(vec![origin.session], stamp_ms);
            self.runs.insert(origin.replica, begun);
            return Dedup::NewRun;
        };
        if runs.present() != origin.session {
            let age_ms = runs.begun_at_ms.saturating_sub(stamp_ms);
            if runs.sessions.contains(&origin.session) || (1..=LATE_MS).contains(&age_ms) {
                return Dedup::Stale;
            }
            let mut sessions = std::mem::take(&mut runs.sessions);
            sessions.push(origin.session);
            let forgotten = sessions.len().saturating_sub(FORMER_MAX + 1);
            sessions.drain(..forgotten);
            *runs = SessionRuns::begin(sessions, stamp_ms);
            return Dedup::NewRun;
        }
        let last = runs.lane(origin.lane).last();
        if last.is_some_and(|last| origin.seq <= *last) {
            Dedup::Repeat
        } else {
            Dedup::Fresh
        }
    }

    /// Records that the command of `origin` took effect at `index`.
    pub(super) fn took(&mut self, origin: &Origin, index: LogIndex) {
        if let Some(runs) = self.runs.get_mut(&origin.replica) {
            runs.lane(origin.lane).insert(origin.seq);
        }
        self.effects.insert(*origin, index.0);
    }

    pub(super) fn is_current(&self, replica: ReplicaId, session: SessionId) -> bool {
        let runs = self.runs.get(&replica);
        runs.is_some_and(|runs| runs.present() == session)
    }

    /// Returns each replica's id, current session, and last sequence number per lane, 0 before the
    /// first.
    pub fn iter(&self) -> impl Iterator<Item = (ReplicaId, SessionId, [u64; 2])> {
        let last = |seqs: &BTreeSet<u64>| seqs.last().copied().unwrap_or(0);
        self.runs.iter().map(move |(replica, runs)| {
            let seqs = [last(&runs.outbox), last(&runs.admin)];
            (*replica, runs.present(), seqs)
        })
    }
}

impl SessionRuns {
    fn begin(sessions: Vec<SessionId>, begun_at_ms: u64) -> Self {
        Self {
            sessions,
            begun_at_ms,
            outbox: BTreeSet::new(),
            admin: BTreeSet::new(),
        }
    }

    fn present(&self) -> SessionId {
        self.sessions.last().copied().unwrap_or_default()
    }

    fn lane(&mut self, lane: Lane) -> &mut BTreeSet<u64> {
        match lane {
            Lane::Outbox => &mut self.outbox,
            Lane::Admin => &mut self.admin,
        }
    }
}
