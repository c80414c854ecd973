//! Tells the log about the turns of agents' sessions: one item when a session begins or changes its
//! home, and one when a turn ends.

use state::command::Item;
use state::ids::{BackendRef, ModelKey, UserKey};
use state::trees::{NewSession, SessionRef, SessionTurn, TreesView, TurnUsage};

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
            Some(known) if known.home == home => return,
            Some(known) => Item::MoveSession {
                session: SessionRef::Place(known.place()),
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

    /// Queues the end of a turn of `session` with this `usage`.
    pub(super) fn end_turn(&self, outbox: &mut Outbox, session: NamedSession, usage: TurnUsage) {
        let named = session_ref(&self.view.trees(), session);
        outbox.note(Item::EndTurn(SessionTurn {
            session: named,
            usage,
        }));
        if session.is_final {
            outbox.note(Item::EndSession(named));
        }
    }
}

fn session_ref(trees: &TreesView, session: NamedSession) -> SessionRef {
    trees
        .session(session.key)
        .map_or(SessionRef::Key(session.key), |it| {
            SessionRef::Place(it.place())
        })
}
