//! Application of the command on trees of sessions.

use super::{AuditAction, RouterState};
use crate::command::Origin;
use crate::ids::AgentSessionKey;
use crate::reject::Rejection;

impl RouterState {
    /// Ends all sessions of a tree.
    pub(super) fn end_tree(
        &mut self,
        origin: &Origin,
        root: AgentSessionKey,
    ) -> Result<(), Rejection> {
        if !self.trees.end_tree(root) {
            return Err(Rejection::UnknownSession { session: root });
        }
        self.note(origin, AuditAction::EndTree, root.to_string());
        Ok(())
    }

    /// Publishes sessions and trees if they changed.
    pub(super) fn publish_trees(&mut self) {
        if let Some(trees) = self.trees.publish() {
            self.view.publish_trees(trees);
        }
    }
}
