//! Orders of all sessions. Everything here follows from the sessions, so snapshots leave it out.

use std::collections::BTreeSet;

use super::AgentSession;
use crate::held::HeldCounts;
use crate::ids::{AgentSessionKey, UserKey};

/// Length of the periods to which orders round the last use of sessions, in milliseconds. Most turns
/// leave their session in its period, and so in its place.
const PERIOD_MS: u64 = 60_000;

/// The sessions in the orders in which they are searched.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct SessionOrders {
    /// All sessions by the period of their last use, then by key.
    by_use: BTreeSet<(u64, AgentSessionKey)>,
    /// Those of each user in the same order.
    by_user: BTreeSet<(UserKey, u64, AgentSessionKey)>,
    /// Those of each tree by key.
    by_tree: BTreeSet<(AgentSessionKey, AgentSessionKey)>,
    held: HeldCounts,
}

impl SessionOrders {
    pub(super) fn insert(&mut self, key: AgentSessionKey, session: &AgentSession) {
        self.by_tree.insert((session.root, key));
        self.used(key, session);
        self.held.add(session.user);
    }

    pub(super) fn remove(&mut self, key: AgentSessionKey, session: &AgentSession) {
        self.by_tree.remove(&(session.root, key));
        self.unused(key, session);
        self.held.remove(session.user);
    }

    /// Moves a session that was used.
    pub(super) fn replace(
        &mut self,
        key: AgentSessionKey,
        before: &AgentSession,
        after: &AgentSession,
    ) {
        if period(before) != period(after) {
            self.unused(key, before);
            self.used(key, after);
        }
    }

    /// Returns the session that was idle for longest, to the period. Its last use lies before the
    /// returned time.
    pub(super) fn idlest(&self) -> Option<(u64, AgentSessionKey)> {
        let (period, key) = self.by_use.first()?;
        Some((period.saturating_add(1).saturating_mul(PERIOD_MS), *key))
    }

    /// Returns the user with the most sessions if they are at least `share`.
    pub(super) fn holds_most(&self, share: usize) -> Option<UserKey> {
        self.held.most(share)
    }

    /// Iterates over the sessions of a user, the one that was idle for longest first, to the
    /// period.
    pub(super) fn of_user(&self, user: UserKey) -> impl Iterator<Item = AgentSessionKey> {
        let from = self.by_user.range((user, 0, AgentSessionKey(0))..);
        from.take_while(move |it| it.0 == user).map(|it| it.2)
    }

    /// Iterates over the sessions of the tree with the root `root`, by key.
    pub(super) fn of_tree(&self, root: AgentSessionKey) -> impl Iterator<Item = AgentSessionKey> {
        let from = self.by_tree.range((root, AgentSessionKey(0))..);
        from.take_while(move |it| it.0 == root).map(|it| it.1)
    }

    fn used(&mut self, key: AgentSessionKey, session: &AgentSession) {
        self.by_use.insert((period(session), key));
        self.by_user.insert((session.user, period(session), key));
    }

    fn unused(&mut self, key: AgentSessionKey, session: &AgentSession) {
        self.by_use.remove(&(period(session), key));
        self.by_user.remove(&(session.user, period(session), key));
    }
}

fn period(session: &AgentSession) -> u64 {
    session.used_ms / PERIOD_MS
}
