//! Maps of sessions and trees, which the table changes and readers share.

use super::{AgentSession, SessionTree};
use crate::cow::{CowMap, PathKey};
use crate::ids::AgentSessionKey;

pub(super) type SessionMap = CowMap<AgentSessionKey, AgentSession>;
pub(super) type TreeMap = CowMap<AgentSessionKey, SessionTree>;

/// Returns the root of a session's tree: as it began, else that of its parent.
pub(super) fn root_of(
    sessions: &SessionMap,
    key: AgentSessionKey,
    parent: Option<AgentSessionKey>,
) -> AgentSessionKey {
    let known = |key| sessions.get(&key).map(|it| it.root);
    let by_parent = || parent.map(|parent| known(parent).unwrap_or(parent));
    known(key).or_else(by_parent).unwrap_or(key)
}

impl PathKey for AgentSessionKey {
    // Keys are hashes, hence uniform.
    fn path(&self) -> u64 {
        self.0
    }
}
