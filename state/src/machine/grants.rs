//! Application of items on grants, and the publication of what admission reads.

use super::RouterState;
use crate::charge::Charge;
use crate::grants::Wait;
use crate::ids::{ModelKey, ReplicaId, Ticket};

impl RouterState {
    pub(super) fn wait_for_grant(&mut self, replica: ReplicaId, wait: Wait) -> bool {
        self.is_waiting_changed = true;
        self.waiting.wait(replica, wait)
    }

    pub(super) fn leave(&mut self, replica: ReplicaId, ticket: Ticket) -> bool {
        self.is_waiting_changed = true;
        self.waiting.leave(replica, ticket)
    }

    pub(super) fn grant(&mut self, model: ModelKey, count: u32) -> bool {
        self.is_waiting_changed = true;
        let terms = self.terms();
        for _ in 0..count {
            let users = &self.users;
            let granted = self
                .waiting
                .grant(model, |user| users.counter(user).unwrap_or_default());
            let Some((replica, wait)) = granted else {
                break;
            };
            let price = Charge {
                user: wait.user,
                advance: u64::from(wait.tokens),
                ..Charge::default()
            };
            self.users.charge(replica, &price, &terms, self.time.now_ms);
        }
        true
    }

    /// Removes a lost replica from the waiting list. Passes its open grants on to waiting requests.
    pub(super) fn close_waiting(&mut self, replica: ReplicaId) {
        for model in self.waiting.close_replica(replica) {
            self.grant(model, 1);
        }
        self.is_waiting_changed = true;
    }

    /// Publishes grants and users if they changed, or unconditionally if `is_anew`. Users are
    /// published only if a reader wants them.
    pub(super) fn publish_for_admission(&mut self, is_anew: bool) {
        if std::mem::take(&mut self.is_waiting_changed) || is_anew {
            self.view.publish_grants(&self.waiting);
        }
        if !self.view.wants_users() {
            return;
        }
        let is_anew = is_anew || !self.view.publishes_users();
        let limits = self.terms().limits;
        if let Some(users) = self.users.publish(self.time.now_ms, limits, is_anew) {
            self.view.publish_users(users);
        }
    }
}
