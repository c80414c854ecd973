//! Tells the log about the turns of agents' sessions: one item when a session begins or changes its
//! home, and one when a turn ends.

use state::command::Item;
use state::ids::{BackendRef, ModelKey, UserKey};
use state::streams::CarriedStream;
use state::trees::{
    AgentSession, NewSession, SESSION_IDLE_MS, SessionRef, SessionTurn, TreesView, TurnUsage,
};

use super::Dispatcher;
use crate::routing::outbox::Outbox;
use crate::sessions::NamedSession;

impl Dispatcher {
    /// Queues what the state does not show yet of a turn of `session`, if any, that goes to `home`.
    /// Until it is applied, further turns queue it again, which is harmless.
    pub(super) fn begin_turn(
        &self,
        outbox: &mut Outbox,
        session: Option<NamedSession>,
        (user, model): (UserKey, ModelKey),
        home: BackendRef,
    ) {
        let Some(session) = session else { return };
        let trees = self.view.trees();
        let item = match trees.session(session.key) {
            Some(known) if known.home == home && !self.is_stale(known) => return,
            Some(known) => Item::MoveSession {
                session: SessionRef::Place(known.place(session.key)),
                home,
            },
            None => Item::BeginSession(NewSession {
                key: session.key,
                parent: session.parent,
                user,
                model,
                home,
            }),
        };
        outbox.note(item);
    }

    /// Whether a session was used so long ago that it might end during a turn that the log does not
    /// hear of.
    fn is_stale(&self, session: &AgentSession) -> bool {
        let idle_ms = self.view.now_ms().saturating_sub(session.used_ms);
        idle_ms >= SESSION_IDLE_MS / 6
    }

    /// Queues the end of a turn of `session` with this `usage`. If the turn is a resumable stream of
    /// the user, it ends with the stream's charge, so that it counts once.
    pub(super) fn end_turn(
        &self,
        outbox: &mut Outbox,
        session: NamedSession,
        usage: TurnUsage,
        (user, carried): (UserKey, Option<CarriedStream>),
    ) {
        let named = session_ref(&self.view.trees(), session);
        let turn = SessionTurn {
            session: named,
            usage,
        };
        match carried {
            Some(carried) => outbox.end_stream_turn(user, carried, turn),
            None => drop(outbox.note(Item::EndTurn(turn))),
        }
        if session.is_final {
            outbox.note(Item::EndSession(named));
        }
    }
}

fn session_ref(trees: &TreesView, session: NamedSession) -> SessionRef {
    trees
        .session(session.key)
        .map_or(SessionRef::Key(session.key), |it| {
            SessionRef::Place(it.place(session.key))
        })
}
