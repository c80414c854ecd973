//! [`TreesView`]: sessions and trees as requests read them, from any thread.

use super::map::{SessionMap, TreeMap, root_of};
use super::{AgentSession, SessionTree};
use crate::ids::AgentSessionKey;

/// Frozen image of all sessions and trees as of one applied index.
pub struct TreesView {
    pub(super) sessions: SessionMap,
    pub(super) trees: TreeMap,
}

impl Default for TreesView {
    fn default() -> Self {
        Self {
            sessions: SessionMap::new(),
            trees: TreeMap::new(),
        }
    }
}

impl TreesView {
    /// Returns a session; `None` if it is unknown or has ended.
    #[must_use]
    pub fn session(&self, key: AgentSessionKey) -> Option<&AgentSession> {
        self.sessions.get(&key)
    }

    /// Returns the root of a session's tree. `parent` is the session that started it, `None` for a
    /// root; it counts only while the session is unknown.
    #[must_use]
    pub fn root_of(
        &self,
        key: AgentSessionKey,
        parent: Option<AgentSessionKey>,
    ) -> AgentSessionKey {
        root_of(&self.sessions, key, parent)
    }

    /// Returns the tree with the root `root`; `None` if all its sessions have ended.
    #[must_use]
    pub fn tree(&self, root: AgentSessionKey) -> Option<&SessionTree> {
        self.trees.get(&root)
    }

    /// Iterates over all trees in ascending order of their roots.
    pub fn trees(&self) -> impl Iterator<Item = (AgentSessionKey, &SessionTree)> {
        self.trees.iter().map(|(root, tree)| (*root, tree))
    }

    /// Iterates over all sessions in ascending order of key.
    pub fn sessions(&self) -> impl Iterator<Item = (AgentSessionKey, &AgentSession)> {
        self.sessions.iter().map(|(key, session)| (*key, session))
    }

    /// Returns the number of sessions and of trees.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        (self.sessions.len(), self.trees.len())
    }
}
